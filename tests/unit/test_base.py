"""A base is plain typed Parquet: sorted, prunable, bounded in memory, and readable by a later schema."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.format.base import KEY_GROUP, READ_ROWS, ROW_GROUP_ROWS, read_base, write_base
from siltstone.model import KeyGroupRange
from siltstone.state.schema import TableSchema
from siltstone.store.filesystem import FilesystemStore

TOTALS = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("n", pa.int64()), ("s", pa.string())]))


class Sink:
    """An `ObjectWriter` in memory."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False
        self.stored = None

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)

    def flush(self) -> None:
        pass


def _written(schema: TableSchema, batches: list[tuple[pa.Table, np.ndarray]]) -> bytes:
    sink = Sink()
    assert write_base(sink, schema, batches) == sum(len(table) for table, _ in batches)
    return bytes(sink.data)


def _totals(rows: int, groups: int, batch: int) -> tuple[pa.Table, np.ndarray, list[tuple[pa.Table, np.ndarray]]]:
    """Rows ordered by key group alone, whole and in batches."""
    rng = np.random.default_rng(3)
    keys = rng.permutation(rows)
    owners = np.sort(rng.integers(0, groups, rows)).astype(np.uint16)
    table = pa.table([keys, keys % 7, pa.array([f"s{k % 5}" for k in keys])], schema=TOTALS.rows)
    return table, owners, [(table.slice(i, batch), owners[i : i + batch]) for i in range(0, rows, batch)]


def _all(pieces: Iterator[tuple[pa.Table, np.ndarray]]) -> tuple[pa.Table, np.ndarray]:
    tables, owners = zip(*pieces, strict=True)
    return pa.concat_tables(tables), np.concatenate(owners)


def _expected(table: pa.Table, owners: np.ndarray) -> tuple[pa.Table, np.ndarray]:
    order = np.lexsort((table.column("k").to_numpy(), owners))
    return table.take(pa.array(order)), owners[order]


@pytest.mark.parametrize("batch", [777, 50_000, 400_000])
def test_round_trip_is_sorted_by_key_group_and_key(batch: int) -> None:
    table, owners, batches = _totals(300_000, 16, batch)
    data = _written(TOTALS, batches)
    expected, expected_owners = _expected(table, owners)
    got, got_owners = _all(read_base(data, TOTALS))
    assert got.equals(expected)
    assert got_owners.dtype == np.uint16 and np.array_equal(got_owners, expected_owners)
    file = pq.ParquetFile(pa.BufferReader(data))
    assert file.schema_arrow.names == [KEY_GROUP, "k", "n", "s"]
    assert max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)) <= ROW_GROUP_ROWS


def test_any_parquet_reader_sees_a_plain_table() -> None:
    table, owners, batches = _totals(1000, 4, 1000)
    expected, expected_owners = _expected(table, owners)
    read = pq.read_table(pa.BufferReader(_written(TOTALS, batches)))
    assert read.drop([KEY_GROUP]).equals(expected)
    assert read.column(KEY_GROUP).to_numpy().tolist() == expected_owners.tolist()


@pytest.mark.slow
def test_only_the_wanted_key_groups_and_columns_are_read() -> None:
    table, owners, batches = _totals(500_000, 32, 60_000)
    data = _written(TOTALS, batches)
    expected, expected_owners = _expected(table, owners)
    for groups in (KeyGroupRange(0, 5), KeyGroupRange(7, 8), KeyGroupRange(20, 99)):
        inside = (expected_owners >= groups.start) & (expected_owners < groups.end)
        got, got_owners = _all(read_base(data, TOTALS, groups, ["n", "k"]))
        assert got.equals(expected.filter(pa.array(inside)).select(["k", "n"]))
        assert np.array_equal(got_owners, expected_owners[inside])
    assert list(read_base(data, TOTALS, KeyGroupRange(40, 50))) == []
    assert all(len(piece) <= READ_ROWS for piece, _ in read_base(data, TOTALS))
    assert sum(len(owners) for _, owners in read_base(data, TOTALS, columns=[])) == 500_000


def test_row_groups_that_hold_nothing_wanted_are_not_touched() -> None:
    _, _, batches = _totals(500_000, 32, 60_000)
    data = bytearray(_written(TOTALS, batches))
    last = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(3)
    start = min(last.column(i).dictionary_page_offset or last.column(i).data_page_offset for i in range(4))
    data[start : start + last.total_byte_size // 4] = bytes(last.total_byte_size // 4)
    first = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0).column(0).statistics
    assert len(_all(read_base(bytes(data), TOTALS, KeyGroupRange(first.min, first.max + 1)))[0]) > 0
    with pytest.raises(CorruptObject):
        list(read_base(bytes(data), TOTALS))


def test_one_key_group_larger_than_a_row_group() -> None:
    table, _, _ = _totals(300_000, 1, 300_000)
    owners = np.full(300_000, 5, np.uint16)
    data = _written(TOTALS, [(table.slice(i, 70_000), owners[i : i + 70_000]) for i in range(0, 300_000, 70_000)])
    got, _ = _all(read_base(data, TOTALS))
    assert got.column("k").to_pylist() == list(range(300_000))


def test_an_empty_base() -> None:
    data = _written(TOTALS, [])
    assert list(read_base(data, TOTALS)) == []
    assert pq.read_schema(pa.BufferReader(data)).names == [KEY_GROUP, "k", "n", "s"]
    assert list(read_base(_written(TOTALS, [(TOTALS.rows.empty_table(), np.zeros(0, np.uint16))]), TOTALS)) == []


def test_every_type_comes_back_exactly() -> None:
    kinds = {
        "i8": (pa.int8(), [-128, 127, None]),
        "u64": (pa.uint64(), [2**64 - 1, 0, None]),
        "u16": (pa.uint16(), [65535, 0, None]),
        "f32": (pa.float32(), [1.5, -0.0, None]),
        "f64": (pa.float64(), [float("inf"), 0.1, None]),
        "dec": (pa.decimal128(38, 3), [Decimal("-1.234"), Decimal("9" * 35), None]),
        "bool": (pa.bool_(), [True, False, None]),
        "bin": (pa.binary(), [b"\0\xff", b"", None]),
        "date": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31), None]),
        "ts": (pa.timestamp("us"), [datetime(1, 1, 1), datetime(9999, 1, 1), None]),
        "tz": (pa.timestamp("us", tz="America/New_York"), [datetime(2013, 1, 1, tzinfo=UTC), None, None]),
    }
    schema = TableSchema(
        pa.schema([("k", pa.string()), ("day", pa.date32())]),
        pa.schema([("position", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))]),
        pa.schema([(name, kind) for name, (kind, _) in kinds.items()]),
    )
    keys = [["b", "a", "b"], [date(2013, 1, 2)] * 3, [2, 0, 1], [datetime(2013, 1, 1, tzinfo=UTC)] * 3]
    table = pa.table([*keys, *(values for _, values in kinds.values())], schema=schema.rows)
    got, _ = _all(read_base(_written(schema, [(table, np.zeros(3, np.uint16))]), schema))
    assert got.equals(table.take([1, 2, 0]))
    assert got.schema == schema.rows


def test_an_added_value_column_is_null() -> None:
    table, owners, batches = _totals(10, 2, 10)
    later = TableSchema(
        TOTALS.key, TOTALS.subkey, pa.schema([("new", pa.float64()), *TOTALS.value, ("late", pa.string())])
    )
    got, _ = _all(read_base(_written(TOTALS, batches), later))
    assert got.schema == later.rows
    assert got.column("new").null_count == got.column("late").null_count == 10
    assert got.select(["k", "n", "s"]).equals(_expected(table, owners)[0])
    only, _ = _all(read_base(_written(TOTALS, batches), later, columns=["late"]))
    assert only.column_names == ["late"] and only.column("late").null_count == 10


def test_what_is_no_base_is_named() -> None:
    _, _, batches = _totals(10, 2, 10)
    data = _written(TOTALS, batches)
    wider = TableSchema(TOTALS.key, TOTALS.subkey, pa.schema([("n", pa.float64())]))
    other = TableSchema(pa.schema([("id", pa.int64())]), TOTALS.subkey, TOTALS.value)
    for bad, schema, reason in (
        (data[: len(data) // 2], TOTALS, "Parquet"),
        (b"", TOTALS, "Parquet"),
        (data, wider, "column n is int64, not double"),
        (data, other, "lacks column id"),
    ):
        with pytest.raises(CorruptObject, match=f"flights/x.*{reason}") as caught:
            list(read_base(bad, schema, name="flights/x"))
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="column q does not exist"):
        list(read_base(data, TOTALS, columns=["q"]))


def test_rows_out_of_order_are_refused() -> None:
    table, _, _ = _totals(4, 2, 4)
    up, down = np.array([0, 1], np.uint16), np.array([1, 0], np.uint16)
    for batches in ([(table.slice(0, 2), down)], [(table.slice(0, 2), up), (table.slice(2), up)]):
        with pytest.raises(UsageError, match="order of their key groups"):
            write_base(Sink(), TOTALS, batches)


def test_what_the_store_says_gets_through_and_nothing_is_stored(tmp_path: Path) -> None:
    class Full(Sink):
        def write(self, data: bytes) -> int:
            raise Unreachable("cannot write: No space left on device; free some space")

    _, _, batches = _totals(10, 2, 10)
    with pytest.raises(Unreachable, match="No space left"):
        write_base(Full(), TOTALS, batches)

    def failing() -> Iterator[tuple[pa.Table, np.ndarray]]:
        yield batches[0]
        raise KeyError("scan failed")

    store = FilesystemStore(tmp_path)
    with pytest.raises(KeyError), store.create("s/a.base.parquet") as writer:
        write_base(writer, TOTALS, failing())
    assert list(store.list("")) == []


STREAMED = """
    import resource, sys
    import numpy as np, pyarrow as pa
    from pathlib import Path
    from siltstone.format.base import read_base, write_base
    from siltstone.state.schema import TableSchema
    from siltstone.store.filesystem import FilesystemStore
    from siltstone.store.ranged import read_verified
    schema = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]),
                         pa.schema([(f"v{i}", pa.int64()) for i in range(7)]))
    def batches(count):
        rng = np.random.default_rng(1)
        for i in range(count):
            columns = [rng.integers(0, 2**62, 20_000) for _ in range(8)]
            yield pa.table(columns, schema=schema.rows), np.full(20_000, i, np.uint16)
    store = FilesystemStore(Path(sys.argv[1]))
    def write(count):
        with store.create(f"{count}.base.parquet") as writer:
            write_base(writer, schema, batches(count))
        return writer.stored
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write(20)
    before = peak()
    stored = write(100)
    print(stored.bytes, peak() - before)
    for table, _ in read_base(read_verified(store, stored), schema):
        pass
    print(pa.default_memory_pool().max_memory())
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(STREAMED), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stored, grown, most = map(int, said.split())
    assert stored > 100_000_000
    assert grown < 50_000_000
    assert most < 80_000_000
