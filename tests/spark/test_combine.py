"""Rows that an operator combines before the shuffle come to the same state and output as rows that it does not."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

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
        if table["minutes"].null_count:
            raise ValueError("minutes are null")
        added = table.group_by("page").aggregate([("minutes", "count"), ("minutes", "sum")])
        return added.rename_columns(["page", "rows", "minutes"])


def stream(*tables: pa.Table) -> Stream:
    operators = [Visits(name="plain"), Combining(name="combining")]
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
