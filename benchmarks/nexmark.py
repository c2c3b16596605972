"""Run NEXMark's queries (`streams.nexmark`) beside Spark's own: events per second, and per CPU second of all processes.

    python -m benchmarks nexmark [--quick] [--queries N ...] [--rounds N]
    python -m benchmarks.nexmark SYSTEM INPUT WORK RESULT     one system, in a process of its own

All read the same Parquet files, some of each kind of event per micro-batch, in alternating rounds
(`benchmarks.rounds`):

    siltstone   the stream of the query, each micro-batch a checkpoint: digest, fsync and catalog commit on
    seldom      the same with a checkpoint every ten seconds
    spark       the same question as a query of Spark's, with RocksDB and changelog checkpointing where it has state
    flink       Flink's own SQL, state in its hash table with a changelog, a checkpoint per second (`make nexmark`)
    flink-rocksdb   the same with RocksDB and incremental checkpoints
    feldera     circuits of DBSP, Feldera's engine, with two workers; all in memory, no checkpoints (`make feldera`)

No query of Spark's is here for q4, q6, q9 (an aggregate over a join), q10, q13, q15, q16 (exact numbers of distinct
values) and q19 (the first rows of a group), and q12, which goes by the time of day, is left out. In q7 Spark answers
with one bid per window, and in q5 with the windows' counts alone. Rows are made and go no further. RESULT is that of
`benchmarks.systems`; its last step also has how long the slowest of the tasks takes that read the newest checkpoint's
chain, merge it, and compare the digests (`restore_s`). Spark's and Flink's restores are not timed.

Flink has no steps. It runs two jobs in one JVM: over the files of the warm-up, and then over those of the measured
steps, whose time is divided by their number, from when it runs. The second begins without state, which is to Flink's
advantage. It reads files in any order. So for queries with windows (q5, q7, q8, q11), which drop what is late, the same
rows are written to one file per core before the clock runs. Flink has no query here for q6, q10, q12, q13, q14 and q21.
In q15 and q16 it has a new row with each bid, where Siltstone answers when a day is over.

DBSP runs fourteen queries, with one transaction per step. Nothing of it is durable: it writes no state and takes no
digest, and would begin with the first event after a failure, which is to its advantage. Its rows are dropped in its
workers. `feldera/src/queries.rs` says in what its queries differ. Only the time of all measured steps is known.

The answers are not compared here. Siltstone's are, by tests, with DuckDB's. They differ in what they keep: `JoinUnique`
(q3, q20) relies on unique ids, and q4 and q9 give up an auction once it has expired, where a join in SQL keeps all
rows; and a stream without a sink makes its rows and drops them in the Python worker.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from rich.console import Console
from rich.table import Table

from benchmarks import flink, nexmark_feldera, recorded
from benchmarks.goals import Goal, Report, spread_of, table_of
from benchmarks.nexmark_flink import QUERIES as FLINK_QUERIES
from benchmarks.nexmark_flink import WINDOWED as FLINK_WINDOWED
from benchmarks.rounds import MB, Rounds, Run, Side, run_rounds
from benchmarks.systems import CORES, ROCKSDB, run_stream, to_end
from benchmarks.systems import main as run_system
from benchmarks.workload import FILES_A_STEP, Workload, short
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.settings import Settings
from siltstone.spark.operations import verify
from streams.nexmark import QUERIES
from streams.nexmark.events import EPOCH, KINDS, PER_EPOCH, SLOTS, Events

EVENTS = Events()
EVERY = [number for number in range(len(QUERIES)) if number != 12]
QUERY = "query"
"""the file that holds the number of the query"""
STEPS = "steps"
"""that with the numbers of steps of the warm-up and of those that are measured"""
STATELESS = (0, 1, 2, 14, 21, 22)
LARGE = (18, 20)
"""queries whose state grows with their input"""
SECONDS = 10
OURS, SELDOM, PEER, FELDERA = "siltstone", "seldom", "spark", "feldera"
FLINK = {"flink": "hashmap", "flink-rocksdb": "rocksdb"}
TITLES = {
    OURS: "Siltstone, heap",
    SELDOM: f"Siltstone, a checkpoint per {SECONDS} s",
    PEER: "Spark, RocksDB",
    "flink": "Flink, hash table",
    "flink-rocksdb": "Flink, RocksDB",
    FELDERA: "Feldera's DBSP, in memory",
}
PER_CPU_SECOND, PER_SECOND = "events per CPU second", "events per second"
AT_LEAST = {"stateless": 0.8, "small": 1.0, "large": 3.0, "flink": 1.0}
"""goals of events per CPU second, as multiples of Spark's; and of Flink's"""


@dataclass(frozen=True)
class Query(Workload):
    """Steps of `step_rows` events of all kinds; those that the query reads are written."""

    number: int = 0

    @property
    def name(self) -> str:
        return f"q{self.number}, {short(self.step_rows)}"

    @property
    def load_steps(self) -> int:
        return 0

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / QUERY).write_text(str(self.number))
        (directory / STEPS).write_text(json.dumps([self.warm_up, self.measured]))
        for kind in QUERIES[self.number].source_names:
            (directory / kind).mkdir()
            for number, places in enumerate(self._places(kind)):
                path = directory / kind / f"{number:06d}.parquet"
                pq.write_table(EVENTS.make(kind, places), path)
                os.utime(path, (number, number))  # in the order of which Spark reads files

    def _places(self, kind: str) -> Iterator[np.ndarray]:
        count = SLOTS if kind == "side" else self.step_rows // EPOCH * PER_EPOCH[kind]
        for step in range(self.batches):
            yield from np.array_split(np.arange(step * count, (step + 1) * count), FILES_A_STEP)


def main(arguments: list[str]) -> int:
    """Measure and print; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks nexmark", description="NEXMark beside Spark's queries.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the events, and fewer steps")
    parser.add_argument(
        "--queries", type=int, nargs="+", default=EVERY, metavar="N", help="their numbers (default: all but 12)"
    )
    there = [name for name in TITLES if name != FELDERA or nexmark_feldera.is_built()]
    parser.add_argument(
        "--systems", nargs="+", choices=TITLES, default=there, help="default: all, feldera only if it is built"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the comparison (default: 3)")
    parser.add_argument("--directory", type=Path, help="temporary files (default: the system's)")
    parser.add_argument("--json", type=Path, default=Path("bench-nexmark.json"), help="file for the numbers")
    parser.add_argument("--record", action="store_true", help="keep the ratios in the repository (benchmarks.recorded)")
    options = parser.parse_args(arguments)
    if FLINK.keys() & set(options.systems) and not flink.jars():
        parser.error(f"Flink is not in {flink.ENVIRONMENT}: `make nexmark` installs it, or leave it out (--systems)")
    if FELDERA in options.systems and not nexmark_feldera.is_built():
        parser.error("DBSP is not built: `make feldera` builds it with Rust's cargo, or leave it out (--systems)")
    with tempfile.TemporaryDirectory(prefix="siltstone-nexmark-", dir=options.directory) as scratch:
        report = run(Path(scratch), options.queries, options.systems, options.rounds, quick=options.quick)
    report.show("nexmark: ratios", options.json)
    recorded.compare(Console(), {"nexmark": report.goals}, quick=options.quick, record=options.record)
    return int(any(goal.is_kept is False for goal in report.goals))


def run(scratch: Path, numbers: Sequence[int], systems: Collection[str], count: int, *, quick: bool) -> Report:
    """Measure each query on the systems that have it, and compare ours with each of the others."""
    sizes = (50_000, 2, 3) if quick else (500_000, 3, 10)
    report = Report([])
    found: list[Any] = []
    for number in numbers:
        titles = {name: TITLES[name] for name in systems if _has(name, number)}
        query = Query(0, *sizes, number=number)
        rounds = run_rounds(titles, [query], count, scratch, "benchmarks.nexmark")
        report.tables += [rounds.steps_table("NEXMark"), _restores_table(rounds)]
        found += rounds.runs
        for name, title in titles.items():
            report.goals += events_of(f"q{number}, of {title}", rounds.of(name, query))
        for peer in [name for name in titles if OURS in titles and name not in (OURS, SELDOM)]:
            sides: tuple[Side, Side] = (OURS, query), (peer, query)
            least = None if quick else _goal(peer, number)
            what = f"q{number}, beside {TITLES[peer]}"
            compare = partial(rounds.compare, ours=sides[0], theirs=sides[1], less_is_better=False)
            report.goals += compare(f"{PER_CPU_SECOND}, {what}", per_cpu_second, at_least=least)
            report.goals += compare(f"{PER_SECOND}, {what}", per_second)
    report.numbers = {"runs": [each.to_json() for each in found]}
    return report


def events_of(whose: str, runs: Sequence[Run]) -> Iterator[Goal]:
    """Yield what one system takes, without a goal: events per CPU second of all processes, and per second."""
    for what, rate in {PER_CPU_SECOND: per_cpu_second, PER_SECOND: per_second}.items():
        if found := [each for each in map(rate, runs) if each]:
            yield Goal.of_rounds(f"{what}, {whose}", found)


def _restores_table(rounds: Rounds) -> Table:
    """Make the table of what a run of ours leaves, and what restoring it takes."""
    heads = ("MB a checkpoint", "restore s")
    table = table_of("NEXMark: checkpoints, medians and ranges of rounds", "query, step", "system", *heads, left=2)
    for workload, name, runs in rounds.sides():
        if runs and runs[0].system in (OURS, SELDOM):
            stored = [median(step["bytes"] for step in run.measured if step["bytes"]) / MB for run in runs]
            table.add_row(workload.name, name, spread_of(stored), spread_of([r.steps[-1]["restore_s"] for r in runs]))
    return table


def _goal(peer: str, number: int) -> float | None:
    """Return the goal of events per CPU second, as a multiple of a peer's; None if there is none."""
    if peer == FELDERA:
        return None
    if peer in FLINK:
        return None if number in STATELESS else AT_LEAST["flink"]
    return AT_LEAST["stateless" if number in STATELESS else "large" if number in LARGE else "small"]


def _has(system: str, number: int) -> bool:
    """Whether a system has a query."""
    if system in FLINK:
        return number in FLINK_QUERIES
    if system == FELDERA:
        return number in nexmark_feldera.QUERIES
    return system != PEER or number in SPARK_QUERIES


def per_cpu_second(run: Run) -> float | None:
    """Return the events of all kinds per CPU second of all processes."""
    return run.workload.step_rows / run.cpu_s if run.cpu_s else None


def per_second(run: Run) -> float:
    """Return the events of all kinds per second, until the last checkpoint is complete."""
    return run.workload.step_rows / run.wall_s


def read(number: int, spark: SparkSession, directory: str) -> dict[str, DataFrame]:
    """Read the files of each kind of event, those of one step per micro-batch."""
    return {
        kind: spark.readStream.schema(from_arrow_schema(KINDS[kind]))
        .option("maxFilesPerTrigger", FILES_A_STEP)
        .parquet(f"{directory}/{kind}")
        for kind in QUERIES[number].source_names
    }


def run_siltstone(spark: SparkSession, inputs: Path, work: Path, **given: Any) -> list[dict[str, Any]]:
    """Run a query's stream without its sink."""
    number = int((inputs / QUERY).read_text())
    stream = replace(QUERIES[number], name="bench", sources=dict.fromkeys(QUERIES[number].source_names), sinks={})
    steps = run_stream(stream, spark, inputs, work, partial(read, number), **given)
    settings = Settings(warehouse=str(work / "warehouse"))
    if not verify(settings, stream.name).proven:
        raise AssertionError("the newest checkpoint has another digest")
    with OpenWarehouse.open_existing(settings.warehouse) as warehouse:
        steps[-1]["restore_s"] = warehouse.catalog.checkpoints.get_latest(stream.name).restore_s
    return steps


def run_spark(spark: SparkSession, inputs: Path, work: Path) -> list[dict[str, Any]]:
    """Run Spark's own query."""
    number = int((inputs / QUERY).read_text())
    for key, value in ROCKSDB.items():
        spark.conf.set(key, value)
    mode, query = SPARK_QUERIES[number]
    writer = query(read(number, spark, str(inputs))).writeStream.format("noop").outputMode(mode)
    writer = writer.option("checkpointLocation", str(work / "checkpoint")).trigger(availableNow=True)
    return [step | {"bytes": 0, "base": False} for step in to_end(writer.start())]


def run_flink(system: str, inputs: Path, work: Path, result: Path, answers: Path | None = None) -> None:
    """Run Flink's query, in its own environment, over the files of the warm-up and then over the others."""
    warm_up, measured = json.loads((inputs / STEPS).read_text())
    number = int((inputs / QUERY).read_text())
    for kind in QUERIES[number].source_names:
        paths, first = sorted((inputs / kind).iterdir()), warm_up * FILES_A_STEP
        for part, some in {"warm_up": paths[:first], "measured": paths[first:]}.items():
            lay_out(some, work / part / kind, in_order=number in FLINK_WINDOWED)
    task = {
        "number": number,
        "backend": FLINK[system],
        "work": str(work / "state"),
        "jars": flink.jars(),
        "cores": CORES,
        "answers": answers and str(answers),
    }
    task |= {name: str(work / name) for name in ("warm_up", "measured")}
    (work / "task.json").write_text(json.dumps(task))
    script = Path(__file__).with_name("nexmark_flink.py")
    # -P: benchmarks/profile.py would stand in for the `profile` of the standard library.
    said = subprocess.run(
        [flink.PYTHON, "-P", script, work / "task.json"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    began_s, ended_s = json.loads(said.splitlines()[-1])
    write_steps(result, warm_up, measured, began_s, ended_s)


def lay_out(paths: Sequence[Path], directory: Path, *, in_order: bool) -> None:
    """Link files into a directory; or, since Flink reads files in any order, one per core, with their rows in turn.

    All cores begin with a file each, and so go through the events side by side.
    """
    directory.mkdir(parents=True)
    if not in_order:
        for path in paths:
            os.link(path, directory / path.name)
        return
    with ExitStack() as stack:
        schema = pq.read_schema(paths[0])
        writers = [stack.enter_context(pq.ParquetWriter(directory / f"{n}.parquet", schema)) for n in range(CORES)]
        for path in paths:
            table = pq.read_table(path)
            for number, writer in enumerate(writers):
                writer.write_table(table.take(pa.array(np.arange(number, len(table), CORES))))


def run_feldera(inputs: Path, _work: Path, result: Path) -> None:
    """Run DBSP's query over all files, a step at a time."""
    warm_up, measured = json.loads((inputs / STEPS).read_text())
    write_steps(result, warm_up, measured, *nexmark_feldera.run(inputs))


def write_steps(result: Path, warm_up: int, measured: int, began_s: float, ended_s: float) -> None:
    """Write the steps of a run of which only the time of all measured steps is known: to each its part of it."""
    step = {"began_s": began_s, "completed_s": ended_s, "trigger_ms": (ended_s - began_s) / measured * 1000}
    step |= {"bytes": 0, "base": False, "durations_ms": {}}
    steps = [step | {"batch": warm_up + each} for each in range(measured)]
    result.write_text(json.dumps({"steps": steps, "live_heap_bytes": 0}))


SYSTEMS = {
    OURS: run_siltstone,
    SELDOM: partial(run_siltstone, checkpoint_s=SECONDS),
    PEER: run_spark,
}

# Spark's queries: the mode of output, and a function of the sources.

_BID = ("auction", "bidder", "price", "date_time", "extra")


def _timed(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("date_time", "1 second")


def _in_euros(s: dict[str, DataFrame]) -> DataFrame:
    return s["bids"].select(*(c for c in _BID if c != "price"), (F.col("price") * F.lit(0.908)).alias("price"))


def _calculated(s: dict[str, DataFrame]) -> DataFrame:
    hour = F.hour("date_time")
    when = F.when(hour.between(8, 18), "dayTime").when((hour <= 6) | (hour >= 20), "nightTime").otherwise("otherTime")
    letters = F.length("extra") - F.length(F.replace("extra", F.lit("c"), F.lit("")))
    rows = _in_euros(s).where("price > 1000000 and price < 50000000")
    return rows.withColumns({"time_of_day": when, "letters": letters})


def _channels(s: dict[str, DataFrame]) -> DataFrame:
    case = "case lower(channel) when 'apple' then '0' when 'google' then '1' when 'facebook' then '2' when 'baidu' "
    case += "then '3' else regexp_extract(url, '(&|^|\\\\?)channel_id=([^&]*)', 2) end as channel_id"
    return s["bids"].selectExpr("auction", "bidder", "price", "channel", case)


def _directories(s: dict[str, DataFrame]) -> DataFrame:
    parts = [F.split_part("url", F.lit("/"), F.lit(n)).alias(f"dir{n - 3}") for n in (4, 5, 6)]
    return s["bids"].select("auction", "bidder", "price", "channel", *parts)


def _local(s: dict[str, DataFrame]) -> DataFrame:
    auctions = s["auctions"].where("category = 10").selectExpr("seller", "id as auction", "category")
    persons = s["persons"].select("id", "name", "city", "state").where("state in ('OR', 'ID', 'CA')")
    return auctions.join(persons, F.expr("seller = id"))


def _hot(s: dict[str, DataFrame]) -> DataFrame:
    return _timed(s["bids"]).groupBy("auction", F.window("date_time", "10 seconds", "2 seconds")).count()


def _highest(s: dict[str, DataFrame]) -> DataFrame:
    best = F.max_by(F.struct("auction", "bidder", "price", "date_time"), "price")
    return _timed(s["bids"]).groupBy(F.window("date_time", "10 seconds")).agg(best)


def _newcomers(s: dict[str, DataFrame]) -> DataFrame:
    window = F.window("date_time", "10 seconds").alias("window")
    persons = _timed(s["persons"]).groupBy("id", "name", window).count().alias("p")
    auctions = _timed(s["auctions"]).groupBy("seller", window).count().alias("a")
    return persons.join(auctions, F.expr("p.id = a.seller and p.window = a.window"))


def _sessions(s: dict[str, DataFrame]) -> DataFrame:
    return _timed(s["bids"]).groupBy("bidder", F.session_window("date_time", "10 seconds")).count()


def _days(s: dict[str, DataFrame]) -> DataFrame:
    price = F.col("price")
    ranks = [price < 10_000, (price >= 10_000) & (price < 1_000_000), price >= 1_000_000]
    counts = [F.count_if(rank).alias(f"rank{n}") for n, rank in enumerate(ranks, 1)]
    rest = [F.count("*"), *counts, F.min("price"), F.max("price"), F.avg("price"), F.sum("price")]
    return _timed(s["bids"]).groupBy("auction", F.window("date_time", "1 day")).agg(*rest)


def _newest(s: dict[str, DataFrame]) -> DataFrame:
    row = F.max_by(F.struct("price", "channel", "url", "date_time"), "date_time")
    return s["bids"].groupBy("bidder", "auction").agg(row)


def _expanded(s: dict[str, DataFrame]) -> DataFrame:
    auctions = s["auctions"].select("id", "item", "initial_bid", "expires", "seller", "category").where("category = 10")
    return s["bids"].select("auction", "bidder", "price", "date_time", "url").join(auctions, F.expr("auction = id"))


SPARK_QUERIES: dict[int, tuple[str, Callable[[dict[str, DataFrame]], DataFrame]]] = {
    0: ("append", lambda s: s["bids"].select(*_BID)),
    1: ("append", _in_euros),
    2: ("append", lambda s: s["bids"].where("auction % 123 = 0").select("auction", "price")),
    3: ("append", _local),
    5: ("append", _hot),
    7: ("append", _highest),
    8: ("append", _newcomers),
    11: ("append", _sessions),
    14: ("append", _calculated),
    17: ("update", _days),
    18: ("update", _newest),
    20: ("append", _expanded),
    21: ("append", _channels),
    22: ("append", _directories),
}

if __name__ == "__main__":
    if sys.argv[1] in FLINK:
        run_flink(sys.argv[1], *map(Path, sys.argv[2:]))
    elif sys.argv[1] == FELDERA:
        run_feldera(*map(Path, sys.argv[2:]))
    else:
        sys.exit(run_system(SYSTEMS))
