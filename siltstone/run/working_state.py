"""Find a subtask's working state at the version that a step needs: as it is, taken over, rolled back or forward, or
restored. If the parallelism has changed, key groups are moved from the working state that other subtasks left on this
machine (DBSP: partitions may move between workers), and only the others restored.

A version is identified by its number and by the identity of the accepted attempt (`task.identity`). Working state may
vanish or be damaged at any time; it is restored from the newest checkpoint and the steps logged since. Each subtask's
directory has a lock file next to it, so two attempts never share a directory. Each writer epoch has directories of its
own, so that a writer of an older epoch that wakes up can change only what the newer one did not take over.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from siltstone.errors import CorruptObject, LostWorkingState, StateError, Unreachable, summarize
from siltstone.log import get_logger
from siltstone.model import KeyGroupRange
from siltstone.restore.local_files import LocalFiles
from siltstone.restore.restore import digests_of, load_state
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.roll_forward import is_logged, roll_forward
from siltstone.run.task import StepTask, identity
from siltstone.state.backend import LOCAL_SETS, SubtaskState
from siltstone.state.backends.named import backend
from siltstone.store.paths import LocalLayout
from siltstone.store.private import make_private_directory, open_private
from siltstone.store.scratch import SCRATCH, remove_abandoned

LOCK_WAIT_S = 60.0
FORMER_WAIT_S = 30.0
"""for the states of all former subtasks together"""
LOCK_POLL_S = 0.02
_LOG = get_logger(__name__)


@contextmanager
def working_state(task: StepTask, subtask: int, clock: PhaseTimer) -> Iterator[SubtaskState]:
    """Open the state of one subtask at version `task.base_step`, with exclusive use of its directory.

    A restore from the changelog is counted in `clock`, as phase "restore" and in bytes; rolling forward is phase
    "forward".

    Raises:
        TimeoutError: another attempt uses the directory. It may succeed, so the task must not fail with a
            `SiltstoneError`.
        LostWorkingState: steps after the last checkpoint are lost: the stream must resume from that checkpoint.
        CorruptObject: the state had to be restored, and an object of the chain is damaged.
    """
    directory = task.warehouse.local.state(task.stream, task.epoch, task.operator.name, subtask)
    with lock_directory(directory, LOCK_WAIT_S):
        is_new, state = not directory.exists(), _at_base(task, subtask, directory, clock)
        # Within an interval whose steps are not logged, that of another epoch has changes since a mark of its own.
        if is_new and not _is_rescaled(task) and (task.logs or task.base_step == task.begins_after):
            state = _take_over(task, subtask, directory, clock)
        state = state or _restore(task, subtask, directory, clock)
        try:
            state.release(task.restore.step)
            yield state
        finally:
            state.close()


@contextmanager
def working_copy(task: StepTask, subtask: int, clock: PhaseTimer) -> Iterator[SubtaskState]:
    """Open a temporary copy of what `working_state` opens; the state itself is only read.

    Raises:
        TimeoutError, LostWorkingState, CorruptObject: see `working_state`.
    """
    directory = task.warehouse.local.state(task.stream, task.epoch, task.operator.name, subtask)
    make_private_directory(directory.parent)
    with tempfile.TemporaryDirectory(prefix=f"{directory.name}.copy-", dir=directory.parent) as scratch:
        copy = Path(scratch) / "state"
        with lock_directory(directory, LOCK_WAIT_S):
            if directory.exists():
                shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("pins", LOCAL_SETS))
        state = _at_base(task, subtask, copy, clock) or _restore(task, subtask, copy, clock)
        try:
            yield state
        finally:
            state.close()


def _at_base(task: StepTask, subtask: int, directory: Path, clock: PhaseTimer) -> SubtaskState | None:
    """Open the working state on this machine and bring it to the base version; None if that is not possible."""
    if not (directory.exists() and task.base):
        return None
    try:
        state = _open(task, directory, task.groups(subtask))
    except StateError:
        return None
    try:
        # Steps of an earlier attempt or epoch are rolled back, as far as their before-images are kept: it may have gone
        # further, or have taken other steps, after the newest checkpoint or in the last step before it.
        for newest in dict.fromkeys((task.base_step, task.restore.step, task.restore.step - 1)):
            while state.version > newest:
                state.rollback()
            if not _is_forward(task, subtask, state, clock):
                continue
            if _is_accepted(task, subtask, state) and _is_known(task, state):
                return state
    except StateError:
        pass
    except BaseException:
        state.close()
        raise
    state.close()
    return None


def _is_forward(task: StepTask, subtask: int, state: SubtaskState, clock: PhaseTimer) -> bool:
    """Roll older state forward to the base version; return whether it is there."""
    if state.version == task.base_step:
        return True
    with clock.phase("forward"):
        return roll_forward(state, task, subtask)


def _is_accepted(task: StepTask, subtask: int, state: SubtaskState) -> bool:
    """Whether the accepted attempt made this version. An attempt whose acknowledgement was lost may have left a version
    with the same number, while another host's attempt counts."""
    return identity(task.operator.name, digests_of(state, held=True)) == task.base[subtask]


def _is_known(task: StepTask, state: SubtaskState) -> bool:
    """Whether the changes that the next step tracks can be told from earlier ones: not if an epoch without tracking
    changed this state."""
    try:
        tables = (table for name, table in state.tables.items() if name in task.tracked)
        return all(table.count_changed() is not None for table in tables)
    except StateError:
        return False


def _restore(task: StepTask, subtask: int, directory: Path, clock: PhaseTimer) -> SubtaskState:
    """Restore the newest checkpoint's state (empty before the first), and roll it forward to the base version."""
    if not is_logged(task, task.restore.step):
        raise _lost_error(task, subtask, "were not logged")
    kept = _keep_files(directory)
    state = _move(task, subtask, directory, kept, clock) if _is_rescaled(task) else None
    state = state or _load(task, subtask, directory, kept, clock)
    with _removing_on_error(state, directory):
        if task.base_step != task.restore.step:
            _roll_forward_or_raise(task, subtask, state, clock)
    shutil.rmtree(kept, ignore_errors=True)
    return state


def _move(task: StepTask, subtask: int, directory: Path, kept: Path, clock: PhaseTimer) -> SubtaskState | None:
    """Make new working state of the newest checkpoint from what is on this machine, and the store; None if what is here
    is damaged."""
    with closing(_former_states(task, subtask)) as former:
        try:
            return _load(task, subtask, directory, kept, clock, former)
        except Unreachable:
            raise
        except Exception as error:  # damaged files may fail in any way
            _LOG.warning(
                "state of another parallelism cannot be used",
                stream=task.stream,
                operator=task.operator.name,
                error=summarize(error),
            )
            return None


def _load(
    task: StepTask,
    subtask: int,
    directory: Path,
    kept: Path,
    clock: PhaseTimer,
    former: Iterable[tuple[SubtaskState, KeyGroupRange]] | None = None,
) -> SubtaskState:
    """Make new working state of the newest checkpoint, in place of what is in the directory."""
    shutil.rmtree(directory, ignore_errors=True)
    make_private_directory(directory.parent)
    state, restore = _open(task, directory, task.groups(subtask)), task.restore
    with _removing_on_error(state, directory):
        if restore.checkpoint:
            with clock.phase("restore"):
                clock.restored_bytes += load_state(
                    state,
                    task.warehouse.store,
                    restore.manifests,
                    task.operator.name,
                    restore.step,
                    task.stream,
                    scratch=directory.parent,
                    local=LocalFiles(kept),
                    trusted=restore.files,
                    former=former,
                )
    return state


@contextmanager
def _removing_on_error(state: SubtaskState, directory: Path) -> Iterator[None]:
    """Close state and remove its directory if the block fails."""
    try:
        yield
    except BaseException:
        state.close()
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _is_rescaled(task: StepTask) -> bool:
    """Whether the newest checkpoint's subtasks had other key groups."""
    return task.former_parallelism not in (0, task.parallelism)


def _former_states(task: StepTask, subtask: int) -> Generator[tuple[SubtaskState, KeyGroupRange]]:
    """Yield what subtasks of the newest checkpoint's epoch left on this machine at its version: one state after the
    other, each with those of its key groups that this subtask has now."""
    until_s = time.monotonic() + FORMER_WAIT_S
    for number, groups in enumerate(KeyGroupRange(0, task.max_parallelism).split(task.former_parallelism)):
        if not len(wanted := groups.intersect(task.groups(subtask))):
            continue
        for epoch in range(task.epoch - 1, task.oldest_epoch - 1, -1):
            directory = task.warehouse.local.state(task.stream, epoch, task.operator.name, number)
            if not directory.exists():
                continue
            # Other subtasks that have some of its key groups read it, too; a process that hangs may have it for ever.
            with suppress(TimeoutError), lock_directory(directory, max(0.0, until_s - time.monotonic())):
                state = _open_former(task, directory, groups)
                if state is None:
                    continue
                try:
                    yield state, wanted
                finally:
                    state.close()
                break


def _open_former(task: StepTask, directory: Path, groups: KeyGroupRange) -> SubtaskState | None:
    """Open state at the newest checkpoint's version; None if it is of another shape or version, or damaged."""
    with suppress(Exception):  # damaged files may fail in any way
        state = _open(task, directory, groups)
        try:
            while state.version > task.restore.step:
                state.rollback()
            if state.version == task.restore.step:
                return state
        except BaseException:
            state.close()
            raise
        state.close()
    return None


def _keep_files(directory: Path) -> Path:
    """Move the files of checkpoints out of state that is going to be removed, and return where they are: a restore need
    not fetch them. They stay there until one succeeds."""
    kept = directory.with_name(f"{directory.name}.{LOCAL_SETS}")
    if (directory / LOCAL_SETS).exists():
        shutil.rmtree(kept, ignore_errors=True)
        with suppress(OSError):
            os.rename(directory / LOCAL_SETS, kept)
    return kept


def _roll_forward_or_raise(task: StepTask, subtask: int, state: SubtaskState, clock: PhaseTimer) -> None:
    try:
        if not _is_forward(task, subtask, state, clock):
            raise _lost_error(task, subtask, "were not logged")
    except CorruptObject as error:
        raise _lost_error(task, subtask, f"are damaged in the log ({error})") from error
    if not _is_accepted(task, subtask, state):
        raise _lost_error(task, subtask, "have another digest when they are rolled forward by the log")


def _lost_error(task: StepTask, subtask: int, why: str) -> LostWorkingState:
    return LostWorkingState(
        f"steps {task.restore.step + 1} to {task.base_step} of {task.stream}/{task.operator.name} subtask {subtask} "
        f"are in no checkpoint, no longer on this machine, and {why}: they have to be processed again"
    )


def _open(task: StepTask, directory: Path, groups: KeyGroupRange) -> SubtaskState:
    operator = task.operator
    return backend(task.backend).open(
        directory, operator.tables(), operator.opaque_variables(), groups, task.max_parallelism
    )


def _take_over(task: StepTask, subtask: int, directory: Path, clock: PhaseTimer) -> SubtaskState | None:
    """Move an earlier epoch's directory here, the newest that can be brought to the base version; None if none can.

    One whose writer is still at work on it is left alone, and so are those before it.
    """
    if not task.oldest_epoch:
        return None
    for epoch in range(task.epoch - 1, task.oldest_epoch - 1, -1):
        old = task.warehouse.local.state(task.stream, epoch, task.operator.name, subtask)
        if not old.exists():
            continue
        try:
            with lock_directory(old, wait_s=0):
                make_private_directory(directory.parent)
                shutil.rmtree(directory, ignore_errors=True)
                with suppress(FileNotFoundError):
                    os.rename(old, directory)
        except TimeoutError:
            return None
        if (state := _at_base(task, subtask, directory, clock)) is not None:
            return state
    return None


def remove_older_epochs(local: LocalLayout, stream: str, oldest: int) -> None:
    """Remove the working files, on this machine, of a stream's epochs before `oldest`, and of processes that ended.

    No run goes on from them. A process of such an epoch that still runs has been fenced, and loses nothing that counts.
    """
    for directory in local.work(stream, oldest).parent.glob("*"):
        if directory.name.isdigit() and int(directory.name) < oldest:
            shutil.rmtree(directory, ignore_errors=True)
    remove_abandoned(local.scratch(), SCRATCH)


@contextmanager
def lock_directory(directory: Path, wait_s: float) -> Iterator[None]:
    """Lock `directory` against other processes of this machine; the lock file stays if the directory is removed."""
    path = directory.with_name(directory.name + ".lock")
    make_private_directory(path.parent)
    handle = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"another process has used {directory} for {wait_s:.0f} s: stop it, or run the stream again"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(handle)
