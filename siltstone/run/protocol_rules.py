"""The protocol of a consistent region: the moves that its steps and checkpoints may make. Pure functions over values.

    step         running -> logged                        once every operator has acknowledged it
    checkpoint   prepared -> pending -> complete -> delivered
                     \\----------\\---> failed              with the region, which is then reset
    region       open -> resetting -> open again, as a value of a new epoch
                     \\-> ended                            at the end of the run, or fenced

Each function takes the region as it is and returns the region after one event, or raises `StateError` if the protocol
does not allow the event. `Coordinator` acts by them, and the simulation checks them. docs/protocol.md explains them and
says what each crash leaves.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from siltstone.errors import StateError


class Phase(StrEnum):
    """What a region may do under its epoch."""

    OPEN = "open"
    """take steps and complete checkpoints"""
    RESETTING = "resetting"
    """nothing: a step or a checkpoint failed, and only a new epoch, which reads the catalog, may go on"""
    ENDED = "ended"
    """nothing: the run has ended, or a newer epoch has fenced it"""


class CheckpointState(StrEnum):
    """How far a checkpoint is."""

    PREPARED = "prepared"
    """its steps are logged, and every task has handed over its changes"""
    PENDING = "pending"
    """its bytes are on their way to the store, its outputs are being staged"""
    COMPLETE = "complete"
    """the catalog has it"""
    DELIVERED = "delivered"
    """its outputs have left"""
    FAILED = "failed"
    """it will not complete under this epoch; its steps come again under the next"""


@dataclass(frozen=True, slots=True)
class Interval:
    """When an interval ends in a checkpoint.

    Attributes:
        steps: steps per checkpoint, unless `seconds` is set.
        seconds: seconds between checkpoints, from the beginning of one's last step to that of the next one's.
        idle_s: seconds without a step after which an interval with fewer than `steps` is completed.
    """

    steps: int = 1
    seconds: float | None = None
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The step that tasks are running; `awaited` are the operators that have not acknowledged it."""

    number: int
    awaited: frozenset[str]
    ends: bool
    """whether a checkpoint names it and the logged steps before it"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is not complete. Its id only ever completes with these steps.

    Attributes:
        durable: whether everything that its manifest names, its outputs and the manifest are in the store.
        in_doubt: whether the catalog may have it, since its commit has begun and got no answer.
    """

    id: int
    steps: tuple[int, ...]
    state: CheckpointState = CheckpointState.PREPARED
    durable: bool = False
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """A region under one epoch.

    Attributes:
        step: number of the newest step that has begun.
        logged: steps that are logged and in no checkpoint.
        pending: checkpoints that are not complete, oldest first.
        completed: the newest complete checkpoint, 0 before the first; `completed_step` is its last step.
        delivered: the newest checkpoint up to which this run has delivered all outputs, 0 if it has delivered none.
        max_pending: how many checkpoints may be on their way at a time; further ones wait (back-pressure).
    """

    epoch: int
    operators: frozenset[str]
    phase: Phase = Phase.OPEN
    step: int = 0
    running: RunningStep | None = None
    logged: tuple[int, ...] = ()
    pending: tuple[Checkpoint, ...] = ()
    completed: int = 0
    completed_step: int = 0
    delivered: int = 0
    max_pending: int = 1

    @property
    def next_checkpoint(self) -> int:
        """The id that the running step, or the next one, is logged for."""
        return self.completed + len(self.pending) + 1

    @property
    def has_room(self) -> bool:
        """Whether one more checkpoint may be prepared."""
        return len(self.pending) < self.max_pending


def open_region(
    epoch: int, operators: Collection[str], completed: int = 0, step: int = 0, max_pending: int = 1
) -> Region:
    """Begin an epoch at the newest checkpoint that the catalog has, and its last step.

    The first epoch of a run and each reset begin so. Under a newer epoch the catalog's answer is final: an older epoch
    can complete nothing any more. So a commit that was in doubt is settled by it.
    """
    return Region(
        epoch,
        frozenset(operators),
        step=step,
        completed=completed,
        completed_step=step,
        max_pending=max_pending,
    )


def begin_step(region: Region, *, ends: bool) -> Region:
    """Begin the next step; if it `ends` the interval, a checkpoint names it and all logged steps before it."""
    _check(region, region.running is None, "a step is running")
    _check(region, region.has_room or not ends, f"{len(region.pending)} checkpoints are pending")
    step = region.step + 1
    return replace(region, step=step, running=RunningStep(step, region.operators, ends))


def acknowledge(region: Region, operator: str) -> Region:
    """Take an operator's acknowledgements of the running step. The last one logs the step, or prepares a checkpoint."""
    running = region.running
    if running is None or operator not in running.awaited:
        raise _not_allowed_error(region, f"operator {operator} has nothing to acknowledge")
    _check_open(region)
    if awaited := running.awaited - {operator}:
        return replace(region, running=replace(running, awaited=awaited))
    logged = (*region.logged, running.number)
    if not running.ends:
        return replace(region, running=None, logged=logged)
    prepared = Checkpoint(region.next_checkpoint, logged)
    return replace(region, running=None, logged=(), pending=(*region.pending, prepared))


def begin_storing(region: Region, checkpoint: int) -> Region:
    """Begin to store a prepared checkpoint, whatever the others are: prepared -> pending."""
    _check_open(region)
    return _with_pending(region, _find(region, checkpoint, CheckpointState.PREPARED), state=CheckpointState.PENDING)


def find_unstored(region: Region) -> Checkpoint:
    """Return the checkpoint whose manifest is the next to be stored: that tells when the one before was committed."""
    waiting = next((c for c in region.pending if not c.durable), None)
    if waiting is None:
        raise _not_allowed_error(region, "no checkpoint is prepared")
    before = waiting.id - 1
    _check(region, region.completed == before, f"checkpoint {before} is not complete, which {waiting.id} follows")
    return waiting


def note_durable(region: Region, checkpoint: int) -> Region:
    """Note that a pending checkpoint's objects are in the store, its manifest last."""
    _check_open(region)
    return _with_pending(region, _find(region, checkpoint, CheckpointState.PENDING), durable=True)


def may_commit(region: Region, checkpoint: int) -> bool:
    """Whether a checkpoint may be committed: it is durable, and the one before it is complete."""
    return region.phase is Phase.OPEN and bool(region.pending) and _is_next(region, checkpoint)


def begin_commit(region: Region) -> Region:
    """Begin to commit the oldest pending checkpoint, between two steps.

    Until the catalog answers, only the catalog knows whether it is complete, whatever else fails meanwhile.
    """
    _check(region, region.running is None, "a step is running")
    _check(region, bool(region.pending) and may_commit(region, region.completed + 1), "no checkpoint is durable")
    return _with_pending(region, 0, in_doubt=True)


def note_committed(region: Region, checkpoint: int) -> Region:
    """Note the catalog's answer that it has the checkpoint: pending -> complete."""
    done, *rest = _check_committing(region, checkpoint)
    return replace(region, pending=tuple(rest), completed=done.id, completed_step=done.steps[-1])


def note_refused(region: Region, checkpoint: int) -> Region:
    """Note the catalog's answer that it does not have the checkpoint: pending -> failed."""
    _check_committing(region, checkpoint)
    return note_failed(_with_pending(region, 0, in_doubt=False, state=CheckpointState.FAILED))


def note_fenced(region: Region) -> Region:
    """Note that a newer epoch has the stream: nothing completes any more, and nothing is reset."""
    return replace(note_failed(region), phase=Phase.ENDED)


def note_failed(region: Region) -> Region:
    """Note that a step or a checkpoint failed: pending checkpoints fail, except one whose commit is in doubt."""
    if region.phase is not Phase.OPEN:
        return region
    pending = tuple(c if c.in_doubt else replace(c, state=CheckpointState.FAILED) for c in region.pending)
    return replace(region, phase=Phase.RESETTING, pending=pending)


def note_delivered(region: Region, checkpoint: int) -> Region:
    """Note that the outputs of all checkpoints up to a complete one have left."""
    return replace(region, delivered=max(checkpoint, region.delivered))


def end_region(region: Region) -> Region:
    """End the run under this epoch."""
    return replace(region, phase=Phase.ENDED)


def ends_interval(region: Region, interval: Interval, waited_s: float) -> bool:
    """Decide whether the next step ends in a checkpoint.

    Args:
        waited_s: seconds since the last step of the newest checkpoint began, or since the region was opened.
    """
    if interval.seconds is not None:
        return waited_s >= interval.seconds
    return len(region.logged) + 1 >= interval.steps


def is_overdue(region: Region, interval: Interval, waited_s: float, idle_s: float) -> bool:
    """Decide, when the timer fires, whether a step without rows is to end the interval.

    Only between two steps, and only if a logged step is in no checkpoint: otherwise nothing would be new in it.

    Args:
        waited_s: seconds since the last step of the newest checkpoint began, or since the region was opened.
        idle_s: seconds since the newest step.
    """
    if region.phase is not Phase.OPEN or region.running is not None or not region.logged or not region.has_room:
        return False
    if interval.seconds is not None:
        return waited_s >= interval.seconds
    return idle_s >= interval.idle_s


def state_of(region: Region, checkpoint: int) -> CheckpointState | None:
    """Return the state of a checkpoint; None if it has not been prepared under this epoch."""
    if checkpoint <= region.completed:
        return CheckpointState.DELIVERED if checkpoint <= region.delivered else CheckpointState.COMPLETE
    return next((c.state for c in region.pending if c.id == checkpoint), None)


def _find(region: Region, checkpoint: int, state: CheckpointState) -> int:
    for at, each in enumerate(region.pending):
        if each.id == checkpoint and each.state is state:
            return at
    raise _not_allowed_error(region, f"checkpoint {checkpoint} is not {state}")


def _check_committing(region: Region, checkpoint: int) -> tuple[Checkpoint, ...]:
    if not region.pending or region.pending[0].id != checkpoint or not region.pending[0].in_doubt:
        raise _not_allowed_error(region, f"checkpoint {checkpoint} is not being committed")
    return region.pending


def _is_next(region: Region, checkpoint: int) -> bool:
    first = region.pending[0]
    return first.id == checkpoint == region.completed + 1 and first.durable


def _with_pending(region: Region, at: int, **changes: object) -> Region:
    pending = list(region.pending)
    pending[at] = replace(pending[at], **changes)  # pyright: ignore[reportArgumentType]
    return replace(region, pending=tuple(pending))


def _check_open(region: Region) -> None:
    if region.phase is not Phase.OPEN:
        raise _not_allowed_error(region, f"the region is {region.phase}")


def _check(region: Region, allowed: bool, reason: str) -> None:
    _check_open(region)
    if not allowed:
        raise _not_allowed_error(region, reason)


def _not_allowed_error(region: Region, reason: str) -> StateError:
    return StateError(
        f"epoch {region.epoch} in step {region.step}, checkpoint {region.next_checkpoint}: {reason}",
        advice="run the stream again to resume",
    )
