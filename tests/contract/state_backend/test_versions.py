"""Every state backend under the steps of a run: working state whose version is ahead of the one that a step needs is
rolled back, older one is rolled forward by the log, and what is of no use is restored; wherever a process dies."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.model import KeyGroupRange
from siltstone.restore.restore import digests_of
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import StepTask
from siltstone.run.working_state import working_state
from siltstone.state.backends.named import BACKENDS, backend
from tests.examples import is_thorough
from tests.region_run import RegionRun, run_tasks, shuffled
from tests.sums import Counted, Sums, rows, stream_of

pytestmark = pytest.mark.slow

STREAM = stream_of(Counted(name="counted"))
POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=30, size_ratio_max=None, space_amplification_max=None))
PER_CHECKPOINT = 3
LAST = 10
"""steps; they are in checkpoints at 3, a base, and at 6 and 9, deltas"""
NEXT = 8
"""the step that is to be done: it needs version 7"""
KILLED = 12 if is_thorough() else 2
"""times that each kind of write is killed"""
CODE = os.sep + os.path.join("siltstone", "state", "backends") + os.sep
Contents = tuple[dict[str, list[int]], dict[str, list[tuple[int, ...]]], dict[str, dict[int, bytes]]]
"""digests, rows of tables, and opaque values"""


def _given(step: int) -> pa.Table:
    return rows(step, changed=40)


class Recorded(RegionRun):
    """A run that keeps the task of each step, and a copy of the working state after it."""

    tasks: dict[int, StepTask]
    copies: Path

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        found = run_tasks(task, rows)
        self.tasks[task.step] = task
        shutil.copytree(_directory(task), self.copies / str(task.step))
        return found


def _directory(task: StepTask) -> Path:
    return task.warehouse.local.state(task.stream, task.epoch, task.operator.name, 0)


def _contents(task: StepTask) -> tuple[Contents, set[str]]:
    """All of the state that a step finds, and by which ways it got it; the state is as it was found afterwards."""
    clock = PhaseTimer()
    with working_state(task, 0, clock) as state:
        assert state.version == task.base_step
        tables = {
            name: sorted(tuple(row.values()) for part, _ in table.scan(state.groups) for row in part.to_pylist())
            for name, table in state.tables.items()
        }
        digests = {name: of.tolist() for name, of in digests_of(state).items()}
        return (digests, tables, {name: dict(of) for name, of in state.opaque.items()}), set(clock.seconds)


class History:
    """The steps of a run, its working state at each version, and what it holds."""

    def __init__(self, place: OpenWarehouse, kind: str, copies: Path) -> None:
        self.copies = copies
        run = Recorded(place, STREAM, POLICY, checkpoint_steps=PER_CHECKPOINT, backend=kind)
        run.tasks, run.copies = {}, copies
        for step in range(1, LAST + 1):
            run.step(_given(step))
        self.before, self.task, self.after = (run.tasks[step] for step in (NEXT - 1, NEXT, NEXT + 1))
        self.wanted, ways = self.find(NEXT - 1)
        assert not ways

    def put_back(self, version: int | None) -> None:
        """Let the working state be that of a version; None for nothing."""
        directory = _directory(self.task)
        shutil.rmtree(directory, ignore_errors=True)
        if version is not None:
            shutil.copytree(self.copies / str(version), directory)

    def find(self, version: int | None) -> tuple[Contents, set[str]]:
        """What the step finds where the working state is that of a version."""
        self.put_back(version)
        return _contents(self.task)

    def check_next(self) -> None:
        """Do the step: its state must be the one that the step after it found."""
        _work(self.task)
        found, ways = _contents(self.after)
        self.put_back(NEXT)
        assert (found, ways) == _contents(self.after)


def _work(task: StepTask) -> None:
    run_tasks(task, shuffled(task, _given(task.step)))


@pytest.fixture(scope="module", params=BACKENDS)
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    root = tmp_path_factory.mktemp(f"versions-{request.param}")
    with OpenWarehouse.open_writable(str(root / "w")) as place:
        yield History(place, request.param, root / "copies")


@pytest.mark.parametrize("version", [NEXT, NEXT + 1])
def test_state_that_is_ahead_is_rolled_back(history: History, version: int) -> None:
    """Also behind a checkpoint that is complete meanwhile, while its steps' before-images are kept."""
    assert history.find(version) == (history.wanted, set())
    history.check_next()


@pytest.mark.parametrize("version", [3, 4, 5, 6])
def test_state_that_is_behind_is_rolled_forward_by_the_log(history: History, version: int) -> None:
    """By the steps of the interval, and by checkpoints before it."""
    assert history.find(version) == (history.wanted, {"forward"})
    history.check_next()


@pytest.mark.parametrize("version", [None, 1, 2, LAST])
def test_state_that_can_be_taken_neither_back_nor_forward_is_restored(history: History, version: int | None) -> None:
    """There is none; it is older than a base; or the before-images of its steps are gone."""
    found, ways = history.find(version)
    assert (found, ways) == (history.wanted, {"restore", "forward"})
    history.check_next()


def test_a_version_of_an_attempt_that_was_not_accepted_is_taken_back(history: History) -> None:
    history.put_back(NEXT - 2)
    run_tasks(history.before, shuffled(history.before, _given(LAST)))
    assert _contents(history.task) == (history.wanted, {"forward"})
    history.check_next()


def _cut(directory: Path, _: str) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)


def _empty(directory: Path, _: str) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def _clear(directory: Path, _: str) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def _of_another_shape(directory: Path, kind: str) -> None:
    shutil.rmtree(directory)
    groups = KeyGroupRange(0, STREAM.max_parallelism)
    backend(kind).open(directory, Sums().tables(), (), groups, STREAM.max_parallelism).close()


def _of_another_backend(directory: Path, kind: str) -> None:
    shutil.rmtree(directory)
    operator, groups = STREAM.operators[0], KeyGroupRange(0, STREAM.max_parallelism)
    [other] = set(BACKENDS) - {kind}
    backend(other).open(
        directory, operator.tables(), operator.opaque_variables(), groups, STREAM.max_parallelism
    ).close()


@pytest.mark.parametrize("spoil", [_cut, _empty, _clear, _of_another_shape, _of_another_backend])
def test_state_that_cannot_be_used_is_restored(history: History, spoil: Callable[[Path, str], None]) -> None:
    history.put_back(NEXT - 1)
    spoil(_directory(history.task), history.task.backend)
    assert _contents(history.task) == (history.wanted, {"restore", "forward"})
    history.check_next()


# RocksDB's threads do not survive a fork: what is killed is forked by a process that has opened none.


def _fork_workers(asked: Connection) -> None:
    """For each task and number of a line that come: do the step in a child that dies there, at none for 0; answer with
    how many lines of the backends' code it had, or None."""
    while True:
        task, line = asked.recv()
        backend(task.backend)  # imported here, not by each child
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _die_at(task, line, write)
        os.close(write)
        told = os.read(read, 100)
        os.close(read)
        os.waitpid(child, 0)
        asked.send(int(told) if told else None)


def _die_at(task: StepTask, last: int, write: int) -> None:
    lines = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if CODE not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return count

    try:
        sys.settrace(count)
        _work(task)
        sys.settrace(None)
        os.write(write, str(lines).encode())
    finally:
        os._exit(0)


@pytest.fixture(scope="module")
def forker() -> Iterator[Callable[[StepTask, int], int | None]]:
    mine, its = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_fork_workers, args=(its,), daemon=True)
    process.start()

    def work(task: StepTask, line: int) -> int | None:
        mine.send((task, line))
        assert mine.poll(60)
        return mine.recv()

    yield work
    process.kill()
    process.join()


@pytest.mark.parametrize("version", [None, 4, 6, NEXT - 1, NEXT, NEXT + 1])
def test_killed_in_the_middle_of_a_write(
    history: History, forker: Callable[[StepTask, int], int | None], version: int | None
) -> None:
    """While it restores, rolls forward or back, or does the step: what is found next is the version that was wanted."""
    history.put_back(version)
    lines = forker(history.task, 0)
    assert lines
    assert _contents(history.after)[1] == set()
    draw = np.random.default_rng(NEXT if version is None else version)
    for part in range(KILLED):  # one of each part, so that no phase is left out by chance
        history.put_back(version)
        assert forker(history.task, 1 + int((part + draw.random()) * lines / KILLED)) is None
        assert _contents(history.task)[0] == history.wanted
        history.check_next()
