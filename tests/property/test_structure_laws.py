"""Sketches, lists and filters depend on what was added alone, and tell what a computation by hand tells."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.aggregates.distinct import ApproxDistinct
from siltstone.aggregates.functions import Function
from siltstone.aggregates.lists import CollectList, TopN
from siltstone.bloom import Bloom
from siltstone.operator import Operator, Rows, State
from siltstone.state.hashing import normalise_keys, xxhash64
from siltstone.state.nested import encode_nested
from siltstone.state.types import is_nested
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from tests.examples import examples

NAN = float("nan")
VALUES = st.one_of(st.none(), st.sampled_from([-0.0, 0.0, NAN, 1.5, float("inf")]), st.integers(-40, 40).map(float))
ROW = st.tuples(st.integers(0, 2), VALUES, st.one_of(st.none(), st.binary(max_size=2)))
FUNCTIONS: tuple[Function, ...] = (
    ApproxDistinct("a", of="v", type=pa.float64(), precision=4),
    ApproxDistinct("b", of="v", type=pa.float64(), precision=6),
    ApproxDistinct("c", of="s", type=pa.binary(), precision=12),
    CollectList("d", of="v", type=pa.float64(), by="s", by_type=pa.binary()),
    CollectList("e", of="s", type=pa.binary(), by="v", by_type=pa.float64(), distinct=True, limit=2),
    CollectList("f", of="v", type=pa.float64(), distinct=True),
    TopN("g", 3, by="v", by_type=pa.float64(), of={"s": pa.binary()}),
)
SCHEMA = pa.schema({"k": pa.int64(), "v": pa.float64(), "s": pa.binary()})


def table_of(rows: list[Any]) -> pa.Table:
    """Rows as a table."""
    columns = zip(*rows, strict=True) if rows else [(), (), ()]
    made = pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
    return normalise_keys(made)


def lift(function: Function, table: pa.Table) -> tuple[list[pa.Array], np.ndarray]:
    """Columns of state of single rows, and the group of each."""
    columns = [table[name].combine_chunks() for name in function.inputs()]
    return function.lift(columns), table["k"].to_numpy()


def bytes_of(columns: list[pa.Array]) -> list[Any]:
    """Columns as a state table compares them."""
    return [(encode_nested(c) if is_nested(c.type) else c).to_pylist() for c in columns]


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(ROW, max_size=60),
    st.lists(st.integers(0, 59), max_size=4),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_state_is_the_same_however_rows_are_ordered_split_and_merged(
    rows: list[Any], cuts: list[int], left: bool, seed: int
) -> None:
    moved = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    ends = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for function in FUNCTIONS:
        columns, group = lift(function, table_of(rows))
        once = function.reduce(columns, group, 3)
        parts = list[list[pa.Array]]()
        for start, end in pairwise(ends):
            columns, group = lift(function, table_of(moved[start:end]))
            parts.append(function.reduce(columns, group, 3))
        while len(parts) > 1:
            one, two = (parts.pop(0), parts.pop(0)) if left else (parts.pop(), parts.pop())
            both = [pa.concat_arrays(pair) for pair in zip(one, two, strict=True)]
            merged = function.reduce(both, np.tile(np.arange(3), 2), 3)
            parts.insert(0, merged) if left else parts.append(merged)
        assert bytes_of(parts[0]) == bytes_of(once)
        assert bytes_of([function.result(parts[0])]) == bytes_of([function.result(once)])


@settings(max_examples=examples(80), deadline=None)
@given(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=80), st.integers(4, 8))
def test_a_sketch_has_the_registers_of_the_definition(values: set[int], precision: int) -> None:
    function = ApproxDistinct("a", of="v", precision=precision)
    array, count = pa.array(sorted(values), pa.int64()), 1 << precision
    registers = bytearray(count)
    for number in xxhash64([array]).tolist():
        rest, register = number >> precision, number % count
        rank = 1 + (64 - precision if not rest else (rest & -rest).bit_length() - 1)
        registers[register] = max(registers[register], rank)
    entries = [(i << 8 | rank).to_bytes(4, "little") for i, rank in enumerate(registers) if rank]
    wanted = b"".join(entries) if 4 * len(entries) < count else bytes(registers)
    [made] = function.reduce(function.lift([array]), np.zeros(len(array), np.int64), 1)
    assert made.to_pylist() == [wanted]


class Filters(Operator):
    """Adds what its rows have, and returns which of them might have been there before."""

    name = "filters"
    key = {"k": pa.int64(), "g": pa.binary()}  # noqa: RUF012
    nullable = ("g",)
    output = pa.schema([*key.items(), ("v", pa.float64()), ("before", pa.bool_())])
    seen = Bloom({"v": pa.float64(), "s": pa.binary()}, capacity=300)

    def process(self, rows: Rows, state: State) -> pa.Table:
        before = state.seen.might_contain(rows.table)
        state.seen.add(rows.table)
        assert state.seen.might_contain(rows.table).all()
        return rows.table.select(["k", "g", "v"]).append_column("before", pa.array(before))


def filter_rows(rows: list[Any]) -> pa.Table:
    """Rows for `Filters`, of which the text is also part of the key."""
    table = table_of(rows)
    return table.append_column("g", table["s"])


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.lists(ROW, max_size=12), min_size=1, max_size=4),
    st.sampled_from(["heap", "rocksdb"]),
    st.lists(st.sampled_from(["", "restart", "crash lost", "rescale"]), min_size=4, max_size=4),
)
def test_a_filter_never_misses_and_depends_on_what_was_added_alone(
    batches: list[list[Any]], backend: str, actions: list[str]
) -> None:
    added = set[Any]()
    with StreamTester(
        Stream("s", None, [Filters()], sinks={"filters": None}), parallelism=2, backend=backend
    ) as tester:
        for number, batch in enumerate(batches):
            made = tester.step(filter_rows(batch))["filters"].to_pylist()
            for row in made:
                assert row["before"] or (row["k"], str(row["v"]), row["g"]) not in added
            added |= {(row["k"], str(row["v"]), row["g"]) for row in made}
            if actions[number] == "rescale":
                tester.rescale(1 + number % 3)
            elif actions[number]:
                getattr(tester, actions[number].split()[0])(lost="lost" in actions[number])
        tester.replay()
        cut = sorted(map(repr, tester.state("filters", "seen").to_pylist()))
    with StreamTester(Stream("s", None, [Filters()], sinks={"filters": None})) as tester:
        tester.step(filter_rows([row for batch in reversed(batches) for row in batch]))
        assert sorted(map(repr, tester.state("filters", "seen").to_pylist())) == cut
