"""Measure what each further operator that reads the source adds to a step.

Streams of one, two and four operators take the same input in alternating rounds of whole runs (`benchmarks.rounds`),
each in a process of its own: `python -m benchmarks.operators OPERATORS INPUT WORK RESULT`. Each operator keeps the four
aggregates of `benchmarks.systems`, by a key of its own. The state of the first has S keys, that of the others fewer.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from benchmarks.goals import Report
from benchmarks.rounds import run_rounds
from benchmarks.systems import OPERATOR, System, main, run_stream, source, totals_stream
from benchmarks.workload import KEY, VALUE, Workload
from siltstone.aggregates.operator import Aggregate, Count, Max, Min, Sum

KEYS = {OPERATOR: KEY, "thousands": "key div 1000", "rests": "pmod(key, 1000)", "digits": "pmod(key, 10)"}
"""operator -> its key, as SQL"""
COUNTS = {"one": 1, "two": 2, "four": 4}
FULL = Workload(300_000, 10_000, warm_up=5, measured=20)
QUICK = Workload(30_000, 3_000, warm_up=2, measured=5)


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each number of operators."""
    titles = {name: f"{name} operator{'s' if count > 1 else ''}" for name, count in COUNTS.items()}
    workload = QUICK if quick else FULL
    rounds = run_rounds(titles, [workload], 1 if quick else 3, scratch, "benchmarks.operators")
    report = Report([rounds.steps_table("operators that read the source")], numbers=rounds.to_json())
    for several in ("two", "four"):
        report.goals += rounds.compare_step(workload, several, "one")
    return report


def _source(spark: SparkSession, directory: str) -> DataFrame:
    """The workload's rows, with a column for the key of each operator."""
    keys = [f"{key} AS {name}_key" for name, key in KEYS.items()]
    return source(spark, directory).selectExpr(VALUE, *keys)


def _run_operators(count: int) -> System:
    functions = [Count("rows"), Sum("total", of=VALUE), Min("least", of=VALUE), Max("most", of=VALUE)]
    operators = [Aggregate(name, {f"{name}_key": pa.int64()}, functions, output=False) for name in [*KEYS][:count]]

    def run(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
        return run_stream(replace(totals_stream("bench"), operators=operators), spark, inputs, work, read=_source)

    return run


SYSTEMS = {name: _run_operators(count) for name, count in COUNTS.items()}

if __name__ == "__main__":
    sys.exit(main(SYSTEMS))
