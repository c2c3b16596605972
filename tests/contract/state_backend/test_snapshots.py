"""Every state backend with snapshots: a version stays readable while later steps change the state."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from siltstone.errors import StateError
from siltstone.model import KeyGroupRange
from siltstone.state.backend import Backend, StateSnapshot, SubtaskState, TableSnapshot
from siltstone.state.backends.heap import HeapState
from siltstone.state.backends.heap.snapshot import HeapSnapshot
from siltstone.state.backends.heap.table import COMPACT_ROWS
from siltstone.state.backends.named import backend
from tests.state_model import ALL, MAX_PARALLELISM, batch_of
from tests.state_tables import LONG, TEXT, Open, longs, now, put, values

COUNT = 20_000
"""rows of a state whose readers and writers are killed"""


def rows(table: TableSnapshot, groups: KeyGroupRange = ALL) -> dict[int, int | None]:
    return {row["k"]: row["v"] for part, _ in table.scan(groups) for row in part.to_pylist()}


def snapshot(state: SubtaskState, version: int | None = None) -> StateSnapshot:
    return state.snapshot(version)


def step(state: SubtaskState, number: int, **changed: int | None) -> None:
    state.begin(number, tracking=True)
    put(state, **changed)
    state.commit()


def test_a_snapshot_stays_while_later_steps_change_the_state(reopen: Open):
    state = reopen()
    step(state, 1, k1=1, k2=2)
    state.begin(2, tracking=True)
    put(state, k1=11, k3=3)
    state.tables["t"].delete(longs(2))
    state.set_opaque("model", {3: b"two"})
    first = snapshot(state)  # of the newest committed version, also within a step
    put(state, k3=33)
    state.commit()
    second = snapshot(state)
    state.release(2)
    state.begin(3, tracking=True)
    state.set_opaque("model", {3: b"three"})
    put(state, k1=111, k2=22, k4=4)
    state.commit()
    state.release(3)
    state = reopen()
    step(state, 4, k1=1111)
    assert (first.version, rows(first.tables["t"]), first.opaque) == (1, {1: 1, 2: 2}, {"model": {}})
    assert (second.version, rows(second.tables["t"])) == (2, {1: 11, 3: 33})
    assert second.opaque == {"model": {3: b"two"}}
    assert first.tables["t"].rows == second.tables["t"].rows == 2
    first.release()
    first.release()
    step(state, 5, k3=5)
    assert rows(second.tables["t"]) == {1: 11, 3: 33}
    assert now(state.tables["t"]) == {1: 1111, 2: 22, 3: 5, 4: 4}
    second.release()


def test_an_older_version_can_be_had_until_a_later_step_is_released(reopen: Open):
    state = reopen()
    for number in (1, 2, 4):
        step(state, number, k1=number)
    held = snapshot(state, 2)
    assert rows(held.tables["t"]) == {1: 2}
    with pytest.raises(StateError, match="version 3 no more"):
        snapshot(state, 3)
    state.release(2)
    again = snapshot(state, 2)
    state.release(4)
    assert rows(again.tables["t"]) == rows(held.tables["t"]) == {1: 2}
    with pytest.raises(StateError, match="version 2 no more"):
        snapshot(state, 2)


def test_a_step_that_is_undone_and_done_otherwise_leaves_an_earlier_snapshot_as_it_was(reopen: Open):
    state = reopen()
    step(state, 1, k1=1, k2=2)
    held = snapshot(state)
    step(state, 2, k1=5, k3=3)
    state.rollback()
    step(state, 2, k1=6, k2=7, k4=4)
    assert rows(held.tables["t"]) == {1: 1, 2: 2}


@pytest.mark.parametrize("kind", ["heap"], indirect=True)  # another's snapshot may outlast it
def test_a_rollback_behind_a_snapshot_ends_it(reopen: Open):
    state = reopen()
    step(state, 1, k1=1)
    step(state, 2, k1=2)
    held, older = snapshot(state), snapshot(state, 1)
    state.rollback()
    with pytest.raises(StateError, match="is gone"):
        rows(held.tables["t"])
    assert rows(older.tables["t"]) == {1: 1}


def test_compaction_leaves_a_snapshot_as_it_was(reopen: Open):
    state = reopen()
    count = 3 * COMPACT_ROWS
    keys = longs(*range(count))
    state.begin(1, tracking=False)
    state.tables["t"].put(keys, values(*range(count)))
    state.commit()
    held = snapshot(state)
    state.begin(2, tracking=False)
    state.tables["t"].delete(longs(*range(10, count)))
    state.commit()
    state.release(2)
    step(state, 3, k1=-1)
    step(state, 4, k2=-2)
    digests = held.tables["t"].digests
    seen = [part for part, _ in held.tables["t"].scan(ALL)]
    assert sum(part.num_rows for part in seen) == count
    assert np.array_equal(np.sort(np.concatenate([part["v"].to_numpy() for part in seen])), np.arange(count))
    assert np.array_equal(digests, held.tables["t"].digests)


def test_strings_of_a_snapshot_stay(reopen: Open):
    state = reopen(schema=TEXT)
    table = state.tables["t"]
    keys = [{"k": f"key {i}", "year": i, "position": i} for i in range(50)]
    batch = batch_of(TEXT, pa.Table.from_pylist(keys, schema=pa.schema(TEXT.primary_key)))

    def put_notes(note: str) -> None:
        notes = [{"note": f"{note} {i}", "blob": b"x" * i, "flag": i % 2 == 0} for i in range(50)]
        table.put(batch, pa.Table.from_pylist(notes, schema=TEXT.value))

    state.begin(1, tracking=True)
    put_notes("first")
    state.commit()
    held = snapshot(state)
    for number in (2, 3):
        state.begin(number, tracking=True)
        put_notes("later and longer")
        state.commit()
    notes = {row["position"]: row["note"] for part, _ in held.tables["t"].scan(ALL) for row in part.to_pylist()}
    assert notes == {i: f"first {i}" for i in range(50)}


def test_slides_worked_example_of_versions_of_map_entry_and_state(reopen: Open):
    """Flink's CopyOnWriteStateMap copies an entry if its entry version is below the newest snapshot's, and a state
    object if its state version is. Here a row's before-image is the copy of both, made once per step; each snapshot
    sees its own version of the map, whatever the order in which snapshots are released.
    """
    state = reopen()
    step(state, 1, k1=10, k2=20)
    first = snapshot(state)
    step(state, 2, k1=11)  # the entry of k1 is copied; k2 is shared by map and snapshot
    second = snapshot(state)
    step(state, 3, k1=12, k2=22, k3=30)  # both are copied again, k3 is new to all snapshots
    assert rows(first.tables["t"]) == {1: 10, 2: 20}
    assert rows(second.tables["t"]) == {1: 11, 2: 20}
    first.release()
    step(state, 4, k1=13)
    assert rows(second.tables["t"]) == {1: 11, 2: 20}
    assert now(state.tables["t"]) == {1: 13, 2: 22, 3: 30}


def rewrite(state: SubtaskState, keys: np.ndarray) -> int:
    """A step that puts other values to some keys; its number."""
    number = state.version + 1
    state.begin(number, tracking=True)
    state.tables["t"].put(longs(*keys.tolist()), values(*([-number] * len(keys))))
    state.commit()
    state.release(number - 1)
    return number


def heap(reopen: Open) -> HeapState:
    state = reopen()
    assert isinstance(state, HeapState)
    return state


@pytest.mark.parametrize("kind", ["heap"], indirect=True)
def test_the_pin_of_a_reader_that_was_killed_is_removed_by_the_next_step(reopen: Open):
    state = heap(reopen)
    step(state, 1, k1=1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        state.snapshot()
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    pins = state.directory / "pins"
    step(state, 2, k1=2)
    assert len(list(pins.iterdir())) == 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    step(state, 3, k1=3)
    assert not list(pins.iterdir())
    state.release(3)
    assert (state.directory / "undo" / "spare").exists()


@pytest.mark.parametrize("kind", ["heap"], indirect=True)
def test_a_reader_sees_its_version_while_writers_are_killed_at_any_time(reopen: Open):
    count, draw = 20_000, np.random.default_rng(1)
    state = heap(reopen)
    state.begin(1, tracking=True)
    state.tables["t"].put(longs(*range(count)), values(*range(count)))
    state.commit()
    held, (told, tell) = state.snapshot(), os.pipe()
    for number in range(5):
        child = os.fork()
        if child == 0:
            state = heap(reopen)
            while True:
                rewrite(state, draw.permutation(2 * count)[:5_000])
                os.write(tell, b"x")
        if number == 0:
            os.read(told, 1)  # one writer at least gets as far as a step, however busy the machine is
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            assert rows(held.tables["t"]) == {i: i for i in range(count)}
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        other = HeapSnapshot(held.path)  # as another process opens it
        assert rows(other.tables["t"]) == {i: i for i in range(count)}
    state = heap(reopen)
    assert state.version > 1
    held.release()
    assert not list((state.directory / "pins").iterdir())


# RocksDB's threads do not survive a fork, so its readers and writers are killed in processes that begin anew.


def write_on(directory: Path, told: Connection) -> None:
    state = open_rocksdb(directory)
    draw = np.random.default_rng(os.getpid())
    while True:
        told.send(rewrite(state, draw.permutation(2 * COUNT)[:5_000]))


def hold(directory: Path, told: Connection) -> None:
    state = open_rocksdb(directory)
    held = snapshot(state)
    state.close()
    told.send(held.version)
    while True:
        rows(held.tables["t"])


def pin_on(directory: Path, told: Connection) -> None:
    state = open_rocksdb(directory)
    while True:
        held = snapshot(state)
        told.send(held.version)
        held.release()


def open_rocksdb(directory: Path) -> SubtaskState:
    return backend("rocksdb").open(directory, {"t": LONG}, ("model",), ALL, MAX_PARALLELISM)


@contextmanager
def killed(work: Callable[[Path, Connection], None], directory: Path) -> Iterator[Connection]:
    """Let another process work on a state until the block ends, where it is killed."""
    mine, its = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=work, args=(directory, its), daemon=True)
    child.start()
    its.close()
    try:
        mine.recv()
        yield mine
    finally:
        child.kill()
        child.join()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rocksdb"], indirect=True)
def test_readers_and_writers_of_rocksdb_are_killed_at_any_time(reopen: Open, tmp_path: Path):
    directory, first = tmp_path / "state", {i: i for i in range(COUNT)}
    pins = directory / "pins"
    state = reopen()
    state.begin(1, tracking=True)
    state.tables["t"].put(longs(*first), values(*first.values()))
    state.commit()
    held = snapshot(state)
    state.close()
    with killed(write_on, directory) as told:
        for _ in range(5):
            assert rows(held.tables["t"]) == first
            told.recv()
    other = backend("rocksdb").open_snapshot(held.path)  # as another process opens it
    assert rows(other.tables["t"]) == first and other.version == 1
    other.release()
    assert held.path.exists()
    with killed(hold, directory):
        state = reopen()
        assert state.version > 5
        version = state.version
        step(state, version + 1, k1=-1)
        assert len(list(pins.iterdir())) == 2
    step(state, version + 2, k1=-2)
    assert list(pins.iterdir()) == [held.path]
    state.close()
    with killed(pin_on, directory) as told:
        told.recv()
    state = reopen()
    assert state.version == version + 2 and now(state.tables["t"])[1] == -2
    step(state, version + 3, k1=-3)
    assert list(pins.iterdir()) == [held.path] and rows(held.tables["t"]) == first
    held.release()
    assert not list(pins.iterdir())


def test_a_snapshot_that_was_released_cannot_be_opened(reopen: Open, kind: Backend):
    state = reopen()
    step(state, 1, k1=1)
    held = snapshot(state)
    held.release()
    with pytest.raises(StateError, match="is gone"):
        kind.open_snapshot(held.path)
