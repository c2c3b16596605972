"""The time index against a dictionary: nothing due is missed or comes twice, whatever is lost, damaged or undone."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from siltstone.errors import Unreachable, UsageError
from siltstone.state import time_index, time_runs
from siltstone.state.backend import Keys, StateTable, SubtaskState
from siltstone.state.backends.heap.table import HeapTable
from siltstone.state.backends.named import BACKENDS, backend
from siltstone.state.protocol import key_batch
from siltstone.state.schema import TableSchema
from siltstone.state.time_index import TimedTable
from siltstone.state.time_runs import NEVER_AFTER, RunFiles
from tests.killed_child import killed_at
from tests.state_model import ALL, MAX_PARALLELISM
from tests.state_tables import LONG

ANY = 2**64


def batch(keys: list[int], buckets: int = ANY) -> Keys:
    rows = pa.table({"k": pa.array(keys, pa.int64())}, schema=LONG.key)
    return bucketed(LONG, rows, MAX_PARALLELISM, None, buckets)


def bucketed(schema: TableSchema, rows: pa.Table, parallelism: int, groups: np.ndarray | None, buckets: int) -> Keys:
    keys = key_batch(schema, rows, parallelism, groups)
    return Keys(keys.columns, keys.hashes % np.uint64(buckets) if buckets < ANY else keys.hashes, keys.key_groups)


def dues(values: list[int | None]) -> pa.Table:
    return pa.table({"v": pa.array(values, pa.int64())}, schema=LONG.value)


def taken(index: TimedTable, upto: int = NEVER_AFTER, most: int = 1000) -> list[tuple[int, ...]]:
    due = index.take(upto, most)
    assert due.values.schema.equals(index.schema.value) and len(due.values) == len(due.keys) == len(due.at)
    assert due.keys.columns.schema.equals(index.schema.primary_key)
    return list(zip(due.at.tolist(), *(column.to_pylist() for column in due.keys.columns.columns), strict=True))


class Checked:
    """A state, its index, and what both must be: rows (key -> due time) and which of them wait to be taken."""

    def __init__(self, kind: str, directory: Path, buckets: int) -> None:
        self.kind, self.directory, self.buckets = kind, directory, buckets
        self.rows: dict[int, int | None] = {}
        self.waiting: dict[int, bool] = {}
        self.versions: list[dict[int, int | None]] = [{}]
        self.last: Keys | None = None
        self.released = 0
        self.state: SubtaskState | None = None
        self.open()

    def open(self) -> None:
        if self.state is not None:
            self.state.close()
        self.state = backend(self.kind).open(self.directory / "state", {"t": LONG}, (), ALL, MAX_PARALLELISM)
        self.reopen_index()
        self.state.begin(len(self.versions), tracking=True)

    def reopen_index(self) -> None:
        assert self.state is not None
        self.index = TimedTable.open(self.directory / "index", self.state.tables["t"], "v")
        self.rows = dict(self.versions[-1])
        self.waiting = {key: True for key, due in self.rows.items() if due is not None}
        self.last = None

    def put(self, rows: dict[int, int | None], get: bool) -> None:
        self.put_batch(batch(list(rows), self.buckets), list(rows), list(rows.values()), get)

    def put_batch(self, keys: Keys, numbers: list[int], values: list[int | None], get: bool) -> None:
        if get:
            found = self.index.get(keys)
            assert found.found.tolist() == [number in self.rows for number in numbers]
            assert found.values.column("v").to_pylist() == [self.rows.get(number) for number in numbers]
        self.index.put(keys, dues(values))
        for key, due in zip(numbers, values, strict=True):
            old = self.rows.get(key)
            self.rows[key] = due
            if due is None:
                self.waiting.pop(key, None)
            elif old != due or key not in self.waiting:
                self.waiting[key] = False

    def delete(self, keys: list[int]) -> None:
        self.delete_batch(batch(keys, self.buckets), keys)

    def delete_batch(self, keys: Keys, numbers: list[int]) -> None:
        self.index.delete(keys)
        for key in numbers:
            self.rows.pop(key, None)
            self.waiting.pop(key, None)

    def begin_round(self) -> None:
        self.index.begin_round()
        self.waiting = dict.fromkeys(self.waiting, True)

    def take(self, upto: int, most: int) -> None:
        ready = [key for key, seen in self.waiting.items() if seen and (self.rows[key] or 0) <= upto]
        hashes = batch(ready, self.buckets).hashes.tolist()
        order = sorted((self.rows[key], hashed, key) for key, hashed in zip(ready, hashes, strict=True))[:most]
        due = self.index.take(upto, most)
        numbers = due.keys.columns.column("k").to_pylist()
        assert [(at, key) for at, _, key in order] == list(zip(due.at.tolist(), numbers, strict=True))
        assert due.values.column("v").to_pylist() == due.at.tolist()
        assert due.keys.hashes.tolist() == [hashed for _, hashed, _ in order]
        assert due.keys.key_groups.tolist() == batch(numbers).key_groups.tolist()
        for key in numbers:
            del self.waiting[key]
        self.last = due.keys

    def next_due(self) -> None:
        least = min((due for key in self.waiting if (due := self.rows[key]) is not None), default=None)
        assert self.index.next_due() == least

    def use_taken(self, value: int | None, deleted: bool) -> None:
        if self.last is not None:
            numbers = self.last.columns.column("k").to_pylist()
            if deleted:
                self.delete_batch(self.last, numbers)
            else:
                self.put_batch(self.last, numbers, [value] * len(numbers), False)

    def commit(self, oldest: int, reopened: bool) -> None:
        assert self.state is not None
        step = len(self.versions)
        self.index.save(step, min(oldest, step))
        self.state.commit()
        self.versions.append(dict(self.rows))
        self.waiting = {key: True for key, due in self.rows.items() if due is not None}
        self.last = None
        if reopened:
            self.open()
            assert not self.index.rebuilt_s
        else:
            self.state.begin(step + 1, tracking=True)

    def abort(self, saved: bool, committed: bool) -> None:
        assert self.state is not None
        if saved:
            self.index.save(len(self.versions), len(self.versions))
        self.state.rollback()
        if committed and len(self.versions) - 1 > self.released:
            self.state.rollback()
            self.versions.pop()
        self.reopen_index()
        self.state.begin(len(self.versions), tracking=True)

    def release(self) -> None:
        assert self.state is not None
        self.released = len(self.versions) - 1
        self.state.release(self.released)

    def lose(self) -> None:
        """Lose the index within a step that did nothing yet."""
        self.abort(False, False)
        shutil.rmtree(self.directory / "index")
        self.reopen_index()
        assert not self.rows or self.index.rebuilt_rows == len(self.rows)


KEY, DUE = st.integers(0, 4), st.integers(0, 2)
UPTO = st.sampled_from([0, 1, 2, NEVER_AFTER])
STEPS = st.one_of(
    st.tuples(st.just("put"), st.dictionaries(KEY, DUE | st.none(), min_size=1), st.booleans()),
    st.tuples(st.just("put"), st.dictionaries(KEY, DUE, min_size=1), st.booleans()),
    st.tuples(st.just("delete"), st.lists(KEY, min_size=1, unique=True)),
    st.tuples(st.just("begin_round")),
    st.tuples(st.just("take"), UPTO, st.integers(0, 4) | st.just(2**62)),
    st.tuples(st.just("take"), st.just(NEVER_AFTER), st.integers(1, 4)),
    st.tuples(st.just("use_taken"), DUE | st.none(), st.booleans()),
    st.tuples(st.just("next_due")),
    st.tuples(st.just("commit"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("abort"), st.booleans(), st.booleans()),
    st.tuples(st.just("release")),
    st.tuples(st.just("lose")),
)


@contextmanager
def small(buckets: int = ANY) -> Iterator[pytest.MonkeyPatch]:
    """Let few entries be many, and keys collide in their hashes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_index, "key_batch", lambda *given: bucketed(*given, buckets))
        patch.setattr(time_index, "MAX_RUNS", 2)
        patch.setattr(time_index, "SPARE_ENTRIES", 8)
        patch.setattr(time_index, "PEEKED", 1)
        patch.setattr(time_index, "RUN_ROWS", 3)
        patch.setattr(time_runs, "MERGE_ROWS", 2)
        yield patch


@pytest.mark.parametrize(("kind", "examples"), [("heap", 80), ("rocksdb", 30)])
def test_it_is_what_a_dictionary_says(kind: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(STEPS, min_size=20, max_size=60), st.sampled_from([ANY, 3]), st.booleans())
    def check(steps: list[tuple[Any, ...]], buckets: int, shrunk: bool) -> None:
        with TemporaryDirectory() as directory, small(buckets) as patch:
            if not shrunk:
                patch.undo()
                patch.setattr(time_index, "key_batch", lambda *given: bucketed(*given, buckets))
            checked = Checked(kind, Path(directory), buckets)
            for name, *given in steps:
                getattr(checked, name)(*given)
            checked.next_due()
            checked.commit(0, True)
            checked.next_due()
            checked.take(NEVER_AFTER, 2**62)
            assert not checked.waiting
            assert checked.state is not None
            checked.state.close()

    check()


def heap(schema: TableSchema = LONG) -> HeapTable:
    return HeapTable.in_memory(schema, MAX_PARALLELISM)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.run"))


def test_a_row_that_is_moved_and_moved_back_waits_for_the_next_round(tmp_path: Path) -> None:
    index = TimedTable.open(tmp_path, heap(), "v")
    index.put(batch([1, 2]), dues([1, 1]))
    index.begin_round()
    index.put(batch([1]), dues([5]))
    index.put(batch([1]), dues([1]))
    assert taken(index) == [(1, 2)]
    index.begin_round()
    assert taken(index) == [(1, 1)] and taken(index) == []


def test_a_row_is_taken_again_if_it_is_put_again_or_is_still_due_in_a_later_step(tmp_path: Path) -> None:
    index = TimedTable.open(tmp_path, heap(), "v")
    index.put(batch([1, 2]), dues([1, 2]))
    index.begin_round()
    assert len(taken(index)) == 2
    index.begin_round()
    assert taken(index) == [] and index.next_due() is None
    index.put(batch([1]), dues([1]))
    assert taken(index) == [] and index.next_due() == 1
    index.begin_round()
    assert taken(index) == [(1, 1)]
    index.save(1, 1)
    assert taken(index) == [(1, 1), (2, 2)]


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_entries_that_repeat_in_other_runs_come_once(tmp_path: Path, most: int) -> None:
    index = TimedTable.open(tmp_path, heap(), "v")
    for due in (1, 9, 1, 9, 1):
        index.put(batch(list(range(10))), dues([due] * 10))
        index.begin_round()
    parts = [taken(index, most=most) for _ in range(11)]
    assert [len(part) for part in parts][: 10 // most] == [most] * (10 // most)
    assert sorted(row for part in parts for row in part) == [(1, key) for key in range(10)]


def test_many_small_steps_leave_few_files(tmp_path: Path) -> None:
    index = TimedTable.open(tmp_path, heap(), "v")
    numbers = np.random.default_rng(0).permutation(3000)
    for step in range(1, 61):
        part = numbers[50 * (step - 1) : 50 * step].tolist()
        index.put(batch(part), dues(part))
        index.save(step, step)
        records = RunFiles(tmp_path, LONG.key).read_records()
        named = {run[0] for record in records for run in record["runs"]}
        assert named == {path.name for path in files(tmp_path)}
        assert len(records[-1]["runs"]) <= time_index.MAX_RUNS and len(named) <= 2 * time_index.MAX_RUNS
    again = TimedTable.open(tmp_path, index, "v")
    assert not again.rebuilt_s
    assert taken(again, most=3000) == [(n, n) for n in range(3000)]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_too_many_stale_entries_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_index, "SPARE_ENTRIES", 100)
    index, keys = TimedTable.open(tmp_path, heap(), "v"), list(range(10))
    for step in range(1, 20):
        index.put(batch(keys), dues([100 * step + key for key in keys]))
        index.save(step, step)
        runs = RunFiles(tmp_path, LONG.key).read_records()[-1]["runs"]
        assert sum(length - start for _, start, length in runs) <= 120
    assert index.rebuilt_rows in (10, 20)
    assert taken(index) == [(1900 + key, key) for key in keys]


def test_a_step_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    index = TimedTable.open(tmp_path, heap(), "v")
    index.put(batch([1, 2]), dues([5, 6]))
    index.save(1, 1)
    before = [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(tmp_path.iterdir())]
    index.put(batch([1, 2]), dues([5, 6]))
    index.begin_round()
    assert index.take(4, 10).at.tolist() == [] and index.next_due() == 5
    index.save(2, 2)
    assert before == [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(tmp_path.iterdir())]


def saved_index(directory: Path) -> TimedTable:
    index = TimedTable.open(directory, heap(), "v")
    for step in (1, 2, 3):
        index.put(batch([step, 10 + step]), dues([step, 50 - step]))
        index.save(step, 1)
    return index


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def forge(path: Path, change: dict[str, Any] | list[Any]) -> None:
    records = json.loads(path.read_bytes())
    for record in records:
        if isinstance(change, dict):
            record.update(change)
        else:
            record["runs"] = [change]
    path.write_text(json.dumps(records))


DAMAGE = {
    "all gone": shutil.rmtree,
    "no records": lambda path: (path / "runs.json").unlink(),
    "records cut": lambda path: truncate(path / "runs.json"),
    "records nested": lambda path: (path / "runs.json").write_text("[" * 100_000),
    "records binary": lambda path: (path / "runs.json").write_bytes(bytes(range(256))),
    "records null": lambda path: (path / "runs.json").write_text("null"),
    "records of numbers": lambda path: (path / "runs.json").write_text("[1, 2]"),
    "record without step": lambda path: forge(path / "runs.json", {"step": None}),
    "record without runs": lambda path: forge(path / "runs.json", {"runs": 7}),
    "run elsewhere": lambda path: forge(path / "runs.json", ["../../etc/passwd", 0, 9]),
    "run of no name": lambda path: forge(path / "runs.json", [7, 0, 9]),
    "length": lambda path: forge(path / "runs.json", [files(path)[0].name, 0, 9]),
    "start": lambda path: forge(path / "runs.json", [files(path)[0].name, -1, 2]),
    "file gone": lambda path: files(path)[0].unlink(),
    "file cut": lambda path: truncate(files(path)[0]),
    "file empty": lambda path: files(path)[0].write_bytes(b""),
    "file overwritten": lambda path: files(path)[0].write_bytes(b"ARROW1\0\0" + bytes(600) + b"ARROW1"),
    "file of others": lambda path: pa.ipc.new_file(files(path)[0], LONG.key).close(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_built_anew(tmp_path: Path, damage: str) -> None:
    index = saved_index(tmp_path / "index")
    DAMAGE[damage](tmp_path / "index")
    again = TimedTable.open(tmp_path / "index", index.table, "v")
    assert again.rebuilt_rows == 6 and again.rebuilt_s > 0
    assert taken(again) == [(1, 1), (2, 2), (3, 3), (47, 13), (48, 12), (49, 11)]
    again.delete(batch([1]))
    again.save(4, 4)
    kept = TimedTable.open(tmp_path / "index", index.table, "v")
    assert not kept.rebuilt_s and len(taken(kept)) == 5
    assert len(files(tmp_path / "index")) < 5


def test_a_record_of_another_attempt_or_definition_is_not_used(tmp_path: Path) -> None:
    index = saved_index(tmp_path)
    other = heap()
    other.put(batch([1, 2, 3]), dues([3, 2, 1]))
    again = TimedTable.open(tmp_path, other, "v")
    assert again.rebuilt_rows == 3 and taken(again) == [(1, 3), (2, 2), (3, 1)]
    assert not TimedTable.open(tmp_path, index.table, "v").rebuilt_s
    later = TimedTable.open(tmp_path, index.table, "v", 7)
    assert later.rebuilt_rows == 6 and taken(later)[0] == (8, 1)


def test_a_step_that_is_done_again_replaces_its_record(tmp_path: Path) -> None:
    index = saved_index(tmp_path)
    again = TimedTable.open(tmp_path, index.table, "v")
    again.put(batch([9]), dues([9]))
    again.save(2, 2)
    assert [record["step"] for record in RunFiles(tmp_path, LONG.key).read_records()] == [1, 2]


@pytest.mark.parametrize("plus", [-5, 0, 5, 2**62, -(2**62)])
def test_due_times_end_at_the_bounds_of_int64(tmp_path: Path, plus: int) -> None:
    ends = np.iinfo(np.int64)
    times = [int(ends.min), -1, 0, 1, int(ends.max)]
    index = TimedTable.open(tmp_path, heap(), "v", plus)
    index.put(batch(times), dues(times))
    index.begin_round()
    wanted = sorted((max(ends.min, min(ends.max, each + plus)), each) for each in times)
    assert index.next_due() == wanted[0][0]
    assert sorted(taken(index)) == wanted


SHAPES = {
    "text": (pa.schema([("a", pa.string())]), pa.schema([])),
    "two": (pa.schema([("a", pa.string()), ("b", pa.int16())]), pa.schema([])),
    "subkey": (pa.schema([("a", pa.bool_())]), pa.schema([("b", pa.binary()), ("c", pa.decimal128(22, 2))])),
    "float": (pa.schema([("a", pa.float64())]), pa.schema([("b", pa.date32())])),
    "names": (
        pa.schema([("due", pa.int32())]),
        pa.schema([("hash", pa.timestamp("us", "UTC")), ("group", pa.uint64())]),
    ),
}
VALUE = pa.schema([("t", pa.timestamp("us", "Europe/Berlin")), ("note", pa.string())])


def random_keys(schema: TableSchema, count: int, rng: np.random.Generator) -> Keys:
    """Distinct keys, with nulls."""
    columns = []
    for kind in schema.primary_key.types:
        numbers = pa.array(rng.integers(0, 50, count), mask=rng.random(count) < 0.1)
        if pa.types.is_binary(kind):
            numbers = numbers.cast(pa.string())
        elif pa.types.is_date32(kind):
            numbers = numbers.cast(pa.int32())
        elif pa.types.is_boolean(kind):
            numbers = pa.array([None if number is None else number % 2 == 1 for number in numbers.to_pylist()])
        columns.append(numbers.cast(kind))
    rows = pa.Table.from_arrays(columns, schema=schema.primary_key).group_by(schema.primary_key.names).aggregate([])
    return key_batch(schema, rows.cast(schema.primary_key), MAX_PARALLELISM)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_of_every_shape(tmp_path: Path, kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, rng = TableSchema(*SHAPES[shape], VALUE), np.random.default_rng(0)
    state = backend(kind).open(tmp_path / "state", {"t": schema}, (), ALL, MAX_PARALLELISM)
    index = TimedTable.open(tmp_path / "index", state.tables["t"], "t", 10)
    monkeypatch.setattr(time_index, "MAX_RUNS", 2)
    for step in range(1, 6):
        state.begin(step, tracking=True)
        keys = random_keys(schema, 60, rng)
        times = pa.array(rng.integers(0, 9, len(keys)), mask=rng.random(len(keys)) < 0.2).cast(VALUE.types[0])
        index.put(keys, pa.table([times, pa.array(["x"] * len(keys))], schema=VALUE))
        index.delete(random_keys(schema, 5, rng))
        index.save(step, step)
        state.commit()
    rows = pa.concat_tables(part for part, _ in state.tables["t"].scan(ALL))
    rows = rows.filter(rows.column("t").is_valid())
    found = key_batch(schema, rows, MAX_PARALLELISM)
    at = rows.column("t").cast(pa.int64()).to_numpy() + 10
    names = schema.primary_key.names
    wanted = rows.take(pa.array(np.lexsort((found.hashes, at)))).select(names).to_pylist()
    kept = TimedTable.open(tmp_path / "index", state.tables["t"], "t", 10)
    assert not kept.rebuilt_s
    shutil.rmtree(tmp_path / "index")
    for each in (index, kept, TimedTable.open(tmp_path / "index", state.tables["t"], "t", 10)):
        parts = [each.take(NEVER_AFTER, 7) for _ in range(len(wanted) // 7 + 2)]
        assert pa.concat_tables(part.keys.columns for part in parts).to_pylist() == wanted
        assert np.concatenate([part.at for part in parts]).tolist() == np.sort(at).tolist()
    state.close()


def test_a_due_time_in_the_subkey(tmp_path: Path) -> None:
    schema = TableSchema(LONG.key, pa.schema([("at", pa.timestamp("us"))]), pa.schema([]))
    index = TimedTable.open(tmp_path, heap(schema), "at")
    rows = pa.table({"k": [1, 1, 2, 2], "at": pa.array([9, 3, 5, None], pa.timestamp("us"))}, schema=schema.primary_key)
    empty = pa.table({"none": pa.nulls(4)}).select([])
    index.put(key_batch(schema, rows, MAX_PARALLELISM), empty)
    index.put(key_batch(schema, rows, MAX_PARALLELISM), empty)
    index.begin_round()
    assert index.next_due() == 3
    assert [each[0] for each in taken(index)] == [3, 5, 9]


@pytest.mark.parametrize("column", ["k2", "nothing", "d"])
def test_a_column_that_has_no_time_is_refused(tmp_path: Path, column: str) -> None:
    schema = TableSchema(pa.schema([("k2", pa.string())]), pa.schema([]), pa.schema([("d", pa.date32())]))
    with pytest.raises(UsageError, match="rows cannot be due by column"):
        TimedTable.open(tmp_path, heap(schema), column)


def test_a_put_after_a_get_reads_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = saved_index(tmp_path)
    table: StateTable = index.table
    reads: list[int] = []
    read = table.get
    monkeypatch.setattr(table, "get", lambda keys: reads.append(len(keys)) or read(keys))
    keys = batch([1, 2])
    index.get(keys)
    index.put(keys, dues([7, 8]))
    index.put(keys, dues([8, 9]))
    assert reads == [2]
    index.delete(batch([3]))
    index.put(keys, dues([8, 10]))
    assert reads == [2, 2]
    index.begin_round()
    due = index.take(10, 2)
    index.put(due.keys, dues([100, 100]))
    assert sum(reads) < 30 and isinstance(index, StateTable)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = saved_index(tmp_path)
    before = sorted(tmp_path.iterdir())

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    index.put(batch([1]), dues([7]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(Unreachable, match="No space left on device; free some space"):
            index.save(4, 4)
    assert sorted(tmp_path.iterdir()) == before


def test_a_kill_leaves_the_index_as_it_was_or_as_it_is(tmp_path: Path) -> None:
    index = saved_index(tmp_path / "index")
    table = index.table
    before = {path: path.read_bytes() for path in (tmp_path / "index").iterdir()}

    def work() -> None:
        again = TimedTable.open(tmp_path / "index", table, "v")
        again.begin_round()
        again.delete(again.take(2, 5).keys)
        again.put(batch([20, 21]), dues([4, 4]))
        again.save(4, 4)

    moment, was = 1, -9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_index, "MAX_RUNS", 2)
        while was == -9:
            shutil.rmtree(tmp_path / "index")
            (tmp_path / "index").mkdir()
            for path, content in before.items():
                path.write_bytes(content)
            was = killed_at(work, moment)
            # The child's table is its own: that of here is as before the step.
            again = TimedTable.open(tmp_path / "index", table, "v")
            assert taken(again, 3) == [(1, 1), (2, 2), (3, 3)] and len(taken(again)) == 3
            moment += 1
    assert moment > 5
