"""What a subtask has read of the source, whatever way its rows came."""

from collections.abc import Iterator
from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from siltstone.operator import SOURCE, Operator, ValueState
from siltstone.run.inputs import HASH, READ, original_column
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.read_rows import ReadRows, combine_all, combined_schema
from siltstone.state.rows_digest import DigestedRows


class Combining(Operator):
    """Leaves the large ones of the rows."""

    name = "combining"
    key = pa.schema({"k": pa.int64()})
    inputs = ("v",)
    latest = ValueState({"v": pa.int64()})
    combined = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("v", pa.int64())])

    def combine(self, table: pa.Table) -> pa.Table:
        assert table.column_names == ["k", "v"]
        return table.filter(pa.array(table["v"].to_numpy() > 5))


class Plain(Combining):
    name = "plain"
    combined = None


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12)


def batches_of(rows: list[tuple[int, int]], cuts: list[int]) -> Iterator[pa.RecordBatch]:
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for begin, end in pairwise(edges):
        part = rows[begin:end]
        if part:
            columns = [[k for k, _ in part], [v for _, v in part], [hash((k, 1)) for k, _ in part]]
            yield pa.record_batch([pa.array(c, pa.int64()) for c in columns], names=["k", "v", HASH])


def read_of(operator: Operator, batches: Iterator[pa.RecordBatch]) -> tuple[DigestedRows | None, list[tuple[int, int]]]:
    sources = [name for name in operator.input_names if name == SOURCE]
    reading, found = ReadRows(operator, sources), list[tuple[int, int]]()
    for batch in reading.watch(batches, PhaseTimer()):
        assert READ not in batch.schema.names
        found += [(row["k"], row["v"]) for row in batch.to_pylist()]
    return reading.read, found


@given(ROWS, st.lists(st.integers(0, 12), max_size=4), st.lists(st.integers(0, 12), max_size=4), st.randoms())
def test_order_batches_and_combining_do_not_matter(rows, cuts, others, random) -> None:
    shuffled = random.sample(rows, len(rows))
    plain, found = read_of(Plain(), batches_of(rows, cuts))
    combined, left = read_of(Combining(), combine_all(Combining(), batches_of(shuffled, others)))
    assert plain == combined and plain is not None and plain.rows == len(rows)
    assert found == rows and sorted(left) == sorted(row for row in rows if row[1] > 5)


def test_combined_rows_travel_with_one_digest_a_batch() -> None:
    [batch] = combine_all(Combining(), batches_of([(1, 7), (2, 8), (3, 1)], []))
    assert batch.schema == combined_schema(Combining()) and batch.column(READ).null_count == batch.num_rows - 1
    [nothing] = combine_all(Combining(), batches_of([(3, 1)], []))
    assert nothing.to_pylist()[0]["k"] is None and nothing.num_rows == 1
    assert list(combine_all(Combining(), iter(()))) == []


def test_an_operator_that_reads_another_one_digests_nothing() -> None:
    assert read_of(Plain(reads="other"), batches_of([(1, 1)], []))[0] is None


def test_which_column_of_a_key_is_null_counts() -> None:
    keys = pa.schema({"k": pa.string(), "j": pa.string()})
    operator = Plain(key=keys, nullable=("k", "j"))

    def read(k: str | None, j: str | None) -> DigestedRows | None:
        row = {
            "k": pa.array([k], pa.string()),
            "j": pa.array([j], pa.string()),
            "v": [5],
            HASH: pa.array([7], pa.int64()),
        }
        return read_of(operator, iter([pa.record_batch(row)]))[0]

    assert read("a", None) != read(None, "a") and read("a", None) == read("a", None)


def test_the_original_value_of_a_key_that_could_not_be_cast_counts() -> None:
    def batch(*rows: tuple[int | None, str]) -> pa.RecordBatch:
        columns = {"k": pa.array([k for k, _ in rows], pa.int64()), "v": pa.array([1] * len(rows), pa.int64())}
        columns |= {HASH: pa.array([k or 0 for k, _ in rows], pa.int64()), original_column("k"): [t for _, t in rows]}
        return pa.record_batch(columns)

    good, bad, other = batch((1, "1")), batch((None, "x")), batch((None, "y"))
    orders = [read_of(Plain(), iter(each))[0] for each in ([good, bad], [bad, good], [batch((1, "1"), (None, "x"))])]
    assert orders[0] == orders[1] == orders[2] != read_of(Plain(), iter([good, other]))[0]
    without = good.drop_columns([original_column("k")])  # of a stream without dead letters
    assert read_of(Plain(), iter([without]))[0] == read_of(Plain(), iter([good]))[0]
