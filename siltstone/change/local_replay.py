"""Take the steps of a `siltstone.testing.StreamTester` again, and compare what they come to."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.compare_digests import Digests, list_differing
from siltstone.change.replay import name_groups, replay_tasks, restore_points
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import ProofFailed
from siltstone.run.local_step import run_step
from siltstone.run.step_digests import OperatorDigests
from siltstone.run.step_reports import StepReports
from siltstone.run.task import RestorePoint, StepTask
from siltstone.state.rows_digest import DigestedRows
from siltstone.state_handler import PREPARED
from siltstone.store.paths import LocalLayout
from siltstone.stream import DEAD_LETTERS, Stream
from siltstone.time.clock_rules import decode_clock


@dataclass(frozen=True, eq=False)
class TakenStep:
    """A step that was taken: what it was given, and what it came to.

    Attributes:
        rows: source -> its rows; None for a step without rows.
        checkpoint: the checkpoint that includes it.
        ends: whether it ended in that checkpoint.
        parallelism: how many subtasks each operator had.
        digests: of the state after it.
        made: operator, or `OPERATOR.dead_letters` -> the rows that it made.
        clock: its clock, as it is recorded.
        finishes: whether the source had ended.
        late: operator -> late rows, if it had any.
    """

    rows: Mapping[str, pa.Table] | None
    checkpoint: int
    ends: bool
    parallelism: int
    digests: Digests
    made: Mapping[str, DigestedRows]
    clock: str
    finishes: bool = False
    late: Mapping[str, int] = field(default_factory=dict)


def digest_made(
    outputs: Mapping[str, pa.Table], received: Mapping[str, Sequence[Acknowledgement]]
) -> dict[str, DigestedRows]:
    """Return operator, or `OPERATOR.dead_letters` -> the digest of the rows that it made in a step."""
    made = {name: DigestedRows.of(output) for name, output in outputs.items()}
    for name, acknowledgements in received.items():
        letters = OperatorDigests.of(acknowledgements).made.get(DEAD_LETTERS, DigestedRows())
        made[f"{name}.{DEAD_LETTERS}"] = letters
    return made


def check_same(where: str, before: TakenStep, now: TakenStep) -> None:
    """Compare what a step came to with what it came to when it was taken first.

    What operators prepared is left out if there are other subtasks.

    Raises:
        ProofFailed: state or output differs; the message names the operator, its table and the key groups.
    """
    left_out = () if before.parallelism == now.parallelism else (PREPARED,)
    found = []
    for name, groups in list_differing(_leave_out(before.digests, left_out), _leave_out(now.digests, left_out)):
        found.append(f"state in {name_groups(name, groups)}")
    for name, rows in before.made.items():
        if rows.differs(now.made[name]):
            found.append(f"rows of {name} ({rows.rows} rows before, {now.made[name].rows} now)")
    if found:
        raise ProofFailed(
            f"{where} was taken again and gave other {'; '.join(found)}",
            advice="let process depend on rows, state and state.clock alone: not on the time of day, random numbers or "
            "attributes, and on the order of rows only with order_by",
        )


def _leave_out(digests: Digests, names: Collection[str]) -> Digests:
    return {op: {name: each for name, each in of.items() if name not in names} for op, of in digests.items()}


class LocalReplay:
    """Takes steps again, with working state of its own; stores nothing.

    Args:
        scratch: a directory for the working state.
        since: the checkpoint to begin with, 0 for the start.
        parallelism: None for that of each step.
    """

    def __init__(
        self, place: OpenWarehouse, stream: Stream, backend: str, scratch: Path, since: int, parallelism: int | None
    ) -> None:
        self._place, self._stream, self._backend, self._scratch = place, stream, backend, scratch
        self._fixed, self._parallelism = parallelism, 0
        self._begin(since)

    def _begin(self, checkpoint: int) -> None:
        """Begin with the state of a checkpoint."""
        self._points, self._reports = restore_points(self._place, self._stream, checkpoint), StepReports()
        self.step = max(point.step for point in self._points.values())
        """the newest"""
        local = LocalLayout(self._scratch / f"{checkpoint}")
        self._warehouse = replace(self._place.warehouse, local=local)

    def take(self, step: TakenStep) -> TakenStep:
        """Take the next step."""
        parallelism = self._fixed or step.parallelism
        if self._parallelism not in (0, parallelism):  # it changes only after a checkpoint, which was compared
            self._begin(step.checkpoint - 1)
        self._parallelism = parallelism
        outputs, received = run_step(self._stream, self._make_tasks(step), step.rows)
        for name, acknowledgements in received.items():
            self._reports.add(name, acknowledgements)
        # From now on only the working state is used: it is not restored again and needs no older version.
        self._points = dict.fromkeys(self._points, RestorePoint(step=self.step))
        self.step += 1
        made = digest_made(outputs, received)
        return replace(step, parallelism=self._parallelism, digests=self._find_digests(), made=made)

    def _find_digests(self) -> Digests:
        return self._reports.digests(self._stream.max_parallelism)

    def _make_tasks(self, step: TakenStep) -> dict[str, StepTask]:
        return replay_tasks(
            self._stream,
            self._warehouse,
            self._points,
            self._find_digests(),
            decode_clock(step.clock),
            version=self.step,
            parallelism=self._parallelism,
            backend=self._backend,
            upload=UploadOptions(),
            interval=step.checkpoint,
            ends=step.ends,
            drains=step.ends,
        )
