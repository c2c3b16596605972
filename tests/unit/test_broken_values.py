"""Values that are not of their own type: what a restore would refuse is refused where it enters, or set aside."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.aggregates.operator import Aggregate, Count, Max
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.edit import cast_changes
from siltstone.errors import BadRow, UsageError
from siltstone.operator import ListState, MapState, Operator, Rows, State, ValueState, WindowState
from siltstone.run.processing import combine
from siltstone.state.columns import find_broken
from siltstone.stream import Stream
from tests.outbox_run import POLICY, Heard, Outboxed
from tests.proofs import failures
from tests.region_run import RegionRun
from tests.unit.test_dead_letters import PUTS_ASIDE, letters_of

WRONG, KIND = b"K\xf6ln", pa.decimal128(4, 2)
PLACES = pa.struct([("at", pa.list_(pa.string()))])


def text(*values: bytes | None) -> pa.Array:
    """Text of any bytes, as Spark passes it on."""
    given = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(given), given.buffers())


def numbers(*values: str) -> pa.Array:
    """Decimals of four digits, or more."""
    return pa.array([Decimal(value) for value in values], pa.decimal128(10, 2)).cast(KIND, safe=False)


def nested(*values: bytes | None) -> pa.Array:
    """A struct of a list of one text each."""
    lists = pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), text(*values))
    return pa.StructArray.from_arrays([lists], fields=list(PLACES))


class Keeps(Operator):
    """Puts the columns of its rows into one kind of state, or returns them."""

    key = pa.schema({"k": pa.int64()})
    totals = ValueState({"v": pa.string(), "d": KIND, "p": PLACES})
    entries = MapState(key={"v": pa.string()}, value={"d": KIND, "p": PLACES})
    rows = ListState({"v": pa.string(), "d": KIND, "p": PLACES})
    recent = WindowState({"v": pa.string(), "d": KIND, "p": PLACES, "at": pa.int64()}, order="at")

    def __init__(self, where: str, table: pa.Table) -> None:
        output = {"v": pa.string(), "d": KIND, "p": PLACES}
        super().__init__(name="keeps", output=output, inputs=("k",))
        self.where, self.table = where, table

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        table = self.table.append_column("k", rows.table["k"]).append_column("at", rows.table["k"])
        if self.where == "output":
            return table
        if self.where == "totals":
            state.totals.put(rows.keys, table.take(pa.array(np.argsort(rows.key_index))))
        elif self.where == "entries":
            state.entries.put(table)
        elif self.where == "rows":
            state.rows.append(rows.keys, rows.key_index, table)
        else:
            state.recent.insert(rows.keys, rows.key_index, table)
        return None


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


GOOD = {"v": text(b"a", b"b"), "d": numbers("1", "2"), "p": nested(b"a", b"b")}
BROKEN = {"v": text(b"a", WRONG), "d": numbers("1", "12345.67"), "p": nested(b"a", WRONG)}
SAID = {
    "v": r'column v has text that is not UTF-8: "K\\\\xf6ln"',
    "d": r'column d has numbers with too many digits for decimal128\(4, 2\): "12345.67"',
    "p": r'column p has values with text that is not UTF-8, or numbers .*: {"at": \["K\\\\xf6ln"\]}',
}


@pytest.mark.parametrize("where", ["totals", "entries", "rows", "recent", "output"])
@pytest.mark.parametrize("column", list(GOOD))
def test_what_process_makes_is_checked_before_it_is_kept(place: OpenWarehouse, where: str, column: str) -> None:
    table = pa.table({**GOOD, column: BROKEN[column]})
    with pytest.raises(UsageError, match=SAID[column]):
        kept(place, where, table)
    assert place.catalog.checkpoints.list("g", 1) == []
    kept(place, where, pa.table(GOOD))
    assert failures(place, "g") == []


def kept(place: OpenWarehouse, where: str, table: pa.Table) -> None:
    stream = Stream("g", lambda spark, options: spark.sql(""), [Keeps(where, table)], max_parallelism=4)
    RegionRun(place, stream, POLICY, parallelism=1).step(pa.table({"k": [1, 2]}))


ROWS = pa.table({"k": text(b"a", WRONG, b"b", b"\xff", None), "v": text(b"x", b"y", WRONG, b"z", b"w")})


@pytest.mark.parametrize("inputs", [(), ("v",)])
def test_a_row_that_breaks_its_type_is_a_bad_row(place: OpenWarehouse, inputs: tuple[str, ...]) -> None:
    tops = Aggregate("tops", {"k": pa.string()}, [Count("n"), Max("v", of="v", type=pa.string())], map_side=False)
    tops.inputs = inputs
    stream = Stream("g", lambda spark, options: spark.sql(""), [tops], max_parallelism=4)
    with pytest.raises(BadRow, match=r'operator tops: column k has text that is not UTF-8: "'):
        RegionRun(place, stream, POLICY, parallelism=2).step(ROWS)
    said = "operator tops: column {} has text that is not UTF-8".format
    assert letters_of(place, tops, ROWS) == [
        (said("k"), {"k": "K\\xf6ln", "v": "y"}),
        (said("k"), {"k": "\\xff", "v": "z"}),
        (said("v"), {"k": "b", "v": "K\\xf6ln"}),
    ]
    assert failures(place, PUTS_ASIDE.name) == []


def test_a_row_is_checked_before_it_is_combined() -> None:
    counts = Aggregate("counts", {"k": pa.string()}, [Count("n")])
    with pytest.raises(BadRow, match="column k has text that is not UTF-8"):
        combine(counts, ROWS)


def test_broken_text_stops_no_stream_that_sets_rows_aside(place: OpenWarehouse) -> None:
    """And what was set aside is the same when the step is made again."""
    counts = Aggregate("counts", {"k": pa.string()}, [Count("n")], map_side=False)
    stream = Stream("g", lambda spark, options: spark.sql(""), [counts], on_bad_row="dead-letter", max_parallelism=4)
    heard, letters = Heard(), Heard()
    run = Outboxed(place, heard, stream=stream, letters=letters)
    digests = [run.step(ROWS) for _ in range(2)]
    assert [c and c.dead_letters for c in digests] == [{"counts": 2}] * 2
    place.catalog.rollbacks.roll_back("g", place.catalog.runs.begin("g", "a test"), 1, "a test", "a test")
    again = Outboxed(place, heard, stream=stream, letters=letters).step(ROWS)
    assert (again and again.digest) == (digests[1] and digests[1].digest)
    assert [id for id, _ in letters.calls] == [1, 2] and failures(place, "g") == []


@pytest.mark.parametrize("column", ["v", "d", "p"])
@pytest.mark.parametrize("deleted", [None, False])
def test_an_edit_with_a_broken_value_is_refused(column: str, deleted: bool | None) -> None:
    schema = Keeps("totals", pa.table({})).tables()["totals"]
    rows = pa.table({"k": [1, 2], **GOOD, column: BROKEN[column]})
    if deleted is not None:
        rows = rows.append_column("__deleted", pa.array([deleted] * 2))
    with pytest.raises(UsageError, match=f"the edit: {SAID[column]}"):
        cast_changes(rows, schema, "the edit")


@given(st.lists(st.one_of(st.none(), st.binary(max_size=4)), max_size=12), st.booleans())
def test_exactly_the_broken_values_are_found(values: list[bytes | None], deep: bool) -> None:
    def is_broken(value: bytes | None) -> bool:
        try:
            return (value or b"").decode() is None
        except UnicodeDecodeError:
            return True

    column = pa.chunked_array([nested(*values) if deep else text(*values)] * 2)
    assert find_broken(column).tolist() == 2 * [is_broken(value) for value in values]
    assert find_broken(column.slice(len(values))).tolist() == [is_broken(value) for value in values]


def test_what_is_below_a_null_does_not_count() -> None:
    hidden = pa.StructArray.from_arrays([text(b"a", WRONG, WRONG)], ["t"], mask=pa.array([False, True, False]))
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 1, 3], pa.int32()), text(b"k", b"l", WRONG), text(b"a", b"b", b"c"))
    assert find_broken(hidden).tolist() == [False, False, True]
    assert find_broken(maps).tolist() == [False, False, True] and find_broken(maps[:2]).tolist() == [False, False]


def test_a_dictionary_is_looked_into() -> None:
    column: Any = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), text(b"a", WRONG))
    assert find_broken(column).tolist() == [False, True, False]
    assert find_broken(pa.StructArray.from_arrays([column], ["d"])).tolist() == [False, True, False]


def test_ascii_whose_offsets_do_not_ascend_is_broken() -> None:
    offsets, data = pa.array([0, 2, 1, 3], pa.int32()).buffers()[1], pa.py_buffer(b"abc")
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, data])
    assert find_broken(column).tolist() == [False, True, False]
