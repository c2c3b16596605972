"""Run an operator that a user wrote in Python: `python -m benchmarks.python_systems SYSTEM INPUT WORK RESULT`.

All keep a count, a sum, a minimum and a maximum per key, read the same files, one step per trigger, on two cores, and
return no rows. RESULT is that of `benchmarks.systems`.

    operator    an `Operator`: all keys of a call at once
    keyed       a `KeyedProcessor`: one key at a time
    pandas      `transformWithStateInPandas` on Spark's RocksDB state store: one key at a time, its rows as data frames
    rows        `transformWithState` on the same: one key at a time
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from benchmarks.systems import OPERATOR, ROCKSDB, System, main, run_stream, source, to_end, totals_stream
from benchmarks.workload import KEY, VALUE
from siltstone.keyed import KeyedProcessor, Record
from siltstone.operator import Operator, Rows, State, ValueState

_FIELDS = ("rows", "total", "least", "most")
_KEY = {KEY: pa.int64()}
_STATE = dict.fromkeys(_FIELDS, pa.int64())
_SPARK_STATE = ", ".join(f"{name} bigint" for name in _FIELDS)
_NO_ROWS = f"{KEY} bigint"


class Totals(Operator):
    """The four aggregates of all keys of a call at once."""

    name = OPERATOR
    key = _KEY
    inputs = (VALUE,)
    totals = ValueState(_STATE)

    def process(self, rows: Rows, state: State) -> None:
        """Add the rows of every key."""
        old = state.totals.get(rows.keys)
        new = {
            "rows": rows.count(initial=old["rows"]),
            "total": rows.sum(VALUE, initial=old["total"]),
            "least": rows.min(VALUE, initial=old["least"]),
            "most": rows.max(VALUE, initial=old["most"]),
        }
        state.totals.put(rows.keys, new)


class KeyedTotals(KeyedProcessor):
    """The same, one key at a time."""

    name = OPERATOR
    key = _KEY
    inputs = (VALUE,)
    totals = ValueState(_STATE)

    def handle_input(self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any) -> Iterable[Record] | None:
        """Add the rows of a key."""
        values, old = [row[VALUE] for row in rows], state.totals.get()
        new = (len(values), sum(values), min(values), max(values))
        if old:
            new = merge(tuple(old.values()), new)
        state.totals.put(dict(zip(_FIELDS, new, strict=True)))
        return None


class SparkTotals(StatefulProcessor):
    """The same as Spark's processor; a subclass says how it gets its rows."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._totals = handle.getValueState("totals", _SPARK_STATE)

    def add(self, new: tuple[int, ...]) -> None:
        """Add the aggregates of a key's rows."""
        old = self._totals.get()
        self._totals.update(new if old is None else merge(tuple(old), new))

    def close(self) -> None:
        """Nothing is held."""


class PandasTotals(SparkTotals):
    """The rows of a key as data frames."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        """Add the rows of a key."""
        for frame in rows:
            values = frame[VALUE]
            self.add((len(values), int(values.sum()), int(values.min()), int(values.max())))
        return iter(())


class RowTotals(SparkTotals):
    """The rows of a key as rows."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        """Add the rows of a key."""
        values = [row[VALUE] for row in rows]
        self.add((len(values), sum(values), min(values), max(values)))
        return iter(())


def merge(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Merge two counts, sums, minimums and maximums."""
    return old[0] + new[0], old[1] + new[1], min(old[2], new[2]), max(old[3], new[3])


def _run_operator(operator: Operator) -> System:
    def run(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
        return run_stream(replace(totals_stream("bench"), operators=[operator]), spark, inputs, work)

    return run


def _run_processor(transform: Callable[[Any], DataFrame]) -> System:
    def run(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
        for name, value in ROCKSDB.items():
            spark.conf.set(name, value)
        totals = transform(source(spark, str(inputs)).groupBy(KEY))
        writer = totals.writeStream.format("noop").outputMode("update")
        writer = writer.option("checkpointLocation", str(work / "checkpoint")).trigger(availableNow=True)
        return [step | {"bytes": 0, "base": False} for step in to_end(writer.start())]

    return run


SYSTEMS = {
    "operator": _run_operator(Totals()),
    "keyed": _run_operator(KeyedTotals()),
    "pandas": _run_processor(lambda g: g.transformWithStateInPandas(PandasTotals(), _NO_ROWS, "update", "none")),
    "rows": _run_processor(lambda g: g.transformWithState(RowTotals(), _NO_ROWS, "update", "none")),
}

if __name__ == "__main__":
    sys.exit(main(SYSTEMS))
