"""An operator whose output becomes wider, and what its Delta table has then."""

from dataclasses import replace
from typing import Any

import pyarrow as pa

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.operator import Rows, State
from tests.delta_run import TableRun, rows_in, sink_table
from tests.outbox_run import SINK, STREAM, Tallies, inputs

SMALL = pa.schema(
    {"k": pa.int64(), "n": pa.int32(), "f": pa.float32(), "d": pa.decimal128(6, 1), "s": pa.struct({"a": pa.int32()})}
)
LARGE = pa.schema(
    {
        "k": pa.int64(),
        "n": pa.int64(),
        "f": pa.float64(),
        "d": pa.decimal128(20, 1),
        "s": pa.struct({"a": pa.int64(), "b": pa.string()}),
        "more": pa.string(),
    }
)


class Small(Tallies):
    """Puts out numbers that are small enough."""

    output = SMALL

    def process(self, rows: Rows, state: State) -> pa.Table:
        n = rows.table["n"]
        columns = {"k": rows.table["k"], "n": n, "f": n.cast(pa.float64()), "d": n.cast(pa.decimal128(21, 1))}
        columns |= {"s": pa.array([{"a": each} for each in n.to_pylist()]), "more": pa.array(["x"] * len(n))}
        made = pa.table(columns)
        return made.set_column(4, "s", made["s"].cast(self.output.field("s").type)).select(self.output.names)


class Large(Small):
    output = LARGE


def widened(place: OpenWarehouse, *, large: bool, **options: Any) -> TableRun:
    operator = Large(name=SINK) if large else Small(name=SINK)
    return TableRun(place, stream=replace(STREAM, operators=[operator]), **options)


def check_widened(place: OpenWarehouse, checkpoints: list[int]) -> None:
    """Each row is there once, in the wide columns; rows from checkpoint 3 on are of the wide definition."""
    found = sink_table(place).open()
    assert found is not None
    table = found.to_pyarrow_table()
    assert rows_in(place) == inputs(checkpoints)
    assert {f.name: f.type for f in table.schema} == {f.name: f.type for f in LARGE}
    for row in table.to_pylist():
        assert row["f"] == row["n"] == row["d"] == row["s"]["a"] and row["s"]["b"] is None
        assert row["more"] == (None if row["n"] < 3000 else "x")
