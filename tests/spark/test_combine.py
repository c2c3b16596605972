"""Rows that an operator combines before the shuffle come to the same state and output as rows that it does not."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from siltstone.aggregates.distinct import ApproxDistinct
from siltstone.aggregates.lists import CollectList, TopN
from siltstone.aggregates.operator import Aggregate
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, restore, run
from siltstone.stream import Stream
from tests.delta_run import read_sink
from tests.spark_streams import source_of


def at(path: Path) -> Settings:
    return Settings(warehouse=str(path), parallelism=2)


OPERATORS = ("plain", "combining")


class Visits(Operator):
    """Rows and minutes of each page."""

    key = {"page": pa.int64()}  # noqa: RUF012
    inputs = ("minutes",)
    output = {"page": pa.int64(), "rows": pa.int64(), "minutes": pa.int64()}  # noqa: RUF012
    totals = ValueState({"rows": pa.int64(), "minutes": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        old = state.totals.get(rows.keys)
        count = rows.count(initial=old["rows"]) if self.combined is None else rows.sum("rows", initial=old["rows"])
        totals = {"rows": count, "minutes": rows.sum("minutes", initial=old["minutes"])}
        state.totals.put(rows.keys, totals)
        return rows.keys.with_columns(totals)


class Combining(Visits):
    """Adds up the rows of each page before the shuffle; there is no column `rows` without that."""

    combined = {"page": pa.int64(), "rows": pa.int64(), "minutes": pa.int64()}  # noqa: RUF012

    def combine(self, table: pa.Table) -> pa.Table:
        assert table.column_names == ["page", "minutes"], "those that it reads"
        if table["minutes"].null_count:
            raise ValueError("minutes are null")
        added = table.group_by("page").aggregate([("minutes", "count"), ("minutes", "sum")])
        return added.rename_columns(["page", "rows", "minutes"])


def stream(*tables: pa.Table) -> Stream:
    operators = [Visits(name="plain"), Combining(name="combining"), Combining(name="behind", reads="plain")]
    return Stream("visits", source_of(list(tables)), operators, sinks=dict.fromkeys(OPERATORS), max_parallelism=8)


def visits(seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    # The source has the key in a narrower type than the operators.
    return pa.table({"page": pa.array(draw.integers(0, 9, 500), pa.int32()), "minutes": draw.integers(0, 99, 500)})


def test_combined_rows_come_to_the_same_state_and_output(spark: SparkSession, tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    run(settings, stream(*map(visits, range(3))), RunRequest())
    restore(settings, "visits", to=tmp_path / "out")
    plain, combining = (pq.read_table(tmp_path / "out" / name / "totals").sort_by("page") for name in OPERATORS)
    assert plain.num_rows == 9 and plain["rows"].to_pylist() != [1] * 9
    assert plain.equals(combining)
    delivered = [read_sink(tmp_path / "w", "visits", name).to_pylist() for name in OPERATORS]
    assert sorted(map(str, delivered[0])) == sorted(map(str, delivered[1])) and len(delivered[0]) == 27


def test_what_fails_while_rows_are_combined_names_the_operator(spark: SparkSession, tmp_path: Path) -> None:
    rows = visits(1).set_column(1, "minutes", pa.nulls(500, pa.int64()))
    with pytest.raises(Exception, match="operator combining: ValueError: minutes are null"):
        run(at(tmp_path / "w"), stream(rows), RunRequest())


TIME = pa.timestamp("us", "UTC")


def nested_of(kind: pa.DataType) -> pa.DataType:
    return pa.struct([("big", kind), ("times", pa.list_(TIME))])


def listed(seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    big = pa.array(draw.integers(0, 9, 300))
    at = pa.array(draw.integers(0, 10**15, 300), TIME)
    times = pa.ListArray.from_arrays(np.arange(301, dtype=np.int32), at)
    nested = pa.StructArray.from_arrays([big, times], fields=list(nested_of(pa.int64())))
    further = {"big": big, "at": at, "nested": nested}
    return pa.table({**dict(zip(("page", "minutes"), visits(seed)[:300].columns, strict=True)), **further})


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()], ids=str)
def test_sketches_and_lists_pass_the_shuffle_and_a_delta_table(
    kind: pa.DataType, spark: SparkSession, tmp_path: Path
) -> None:
    functions = (
        ApproxDistinct("about", of="minutes", precision=14),
        CollectList("kept", of="big", type=kind, distinct=True, limit=4),
        TopN("top", 3, by="minutes", of={"big": kind, "at": TIME, "nested": nested_of(kind)}),
    )
    shown = pa.types.is_signed_integer(kind)  # Spark has no other
    operators = [
        Aggregate(name, {"page": pa.int32()}, functions, output=shown, map_side=name == "combining")
        for name in OPERATORS
    ]
    tables = [listed(seed) for seed in range(2)]
    sinks: dict[str, Any] = dict.fromkeys(OPERATORS) if shown else {}
    run(at(tmp_path / "w"), Stream("lists", source_of(tables), operators, sinks=sinks, max_parallelism=8), RunRequest())
    restore(at(tmp_path / "w"), "lists", to=tmp_path / "out")
    plain, combining = (pq.read_table(tmp_path / "out" / name / "totals").sort_by("page") for name in OPERATORS)
    assert plain.equals(combining) and plain.num_rows == 9
    rows, wanted = [row for table in tables for row in table.to_pylist()], dict[int, Any]()
    for state in plain.to_pylist():
        own = [row for row in rows if row["page"] == state["page"]]
        assert state["kept"] == sorted({row["big"] for row in own})[:4]
        best = sorted(own, key=lambda row: (-row["minutes"], row["big"], row["at"]))[:3]
        assert state["top"] == [{name: row[name] for name in ("minutes", "big", "at", "nested")} for row in best]
        wanted[state["page"]] = {"about": len({row["minutes"] for row in own}), "top": state["top"]}
    for name in OPERATORS if shown else ():
        made = read_sink(tmp_path / "w", "lists", name).to_pylist()
        assert len(made) == 18
        for page, last in wanted.items():
            assert last in [{name: row[name] for name in last} for row in made if row["page"] == page]
