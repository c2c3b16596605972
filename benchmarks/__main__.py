"""Run the benchmarks, part by part: `make bench`; three of them at small sizes: `make bench-quick`.

    python -m benchmarks [PART ...] [--quick] [--directory DIR] [--json PATH] [--picture PATH]

    step        a durable step beside Spark's RocksDB state store and beside no state, the floor (`benchmarks.step`)
    stores      large values through each store, compared with its raw client (`benchmarks.stores`)
    changelog   batching, checkpoints of many writers, restoring one variable, the index (`benchmarks.changelog`)
    hedging     uploads with and without hedging on a slow store (`benchmarks.hedging`)
    lifecycle   materialization, restores, sweeps, ways to resume, space (`benchmarks.lifecycle`)
    sensors     Dagster's sensors at fifty streams of ten thousand checkpoints each (`benchmarks.sensors`)
    startup     starting with 100 and with 1,000,000 recorded steps (`benchmarks.startup`)
    outputs     a step of a stream with a sink, compared with one without (`benchmarks.outputs`)
    checksums   a step with each checksum algorithm, compared with xxh3-128 (`benchmarks.checksums`)
    input       checks of values and digests of rows: a step with and without them (`benchmarks.input`)
    operators   a step of two and of four operators that read the source, compared with one (`benchmarks.operators`)
    keyed       a step of a `KeyedProcessor`, compared with the same of an `Operator` (`benchmarks.keyed`)
    timers      a step in which timers fire, compared with one that touches as many keys (`benchmarks.timers`)
    ttl         a step with a TTL by which nothing expires, compared with one without (`benchmarks.ttl`)
    joins       a step of a join of two streams, compared with Spark's own (`benchmarks.joins`)
    windows     a step in which windows open and close, compared with Spark's own (`benchmarks.windows`)
    rolling     rolling working state forward by ten steps, compared with restoring it (`benchmarks.rolling`)
    backends    a step with working state in the heap, in RocksDB, and in Spark's store (`benchmarks.backends`)
    heap        the heap backend alone: look-ups, updates, memory, growth, snapshots (`benchmarks.heap`)
    rocksdb     the RocksDB backend beside rocksdict's own batch calls (`benchmarks.rocksdb`)
    files       checkpoints as files of RocksDB, compared with bases and deltas (`benchmarks.files`)
    pending     waiting for checkpoints on a slow store, blocking and with two of them pending (`benchmarks.pending`)
    uploads     shared objects, waiting for others, sizes of chunks, on slow stores (`benchmarks.uploads`)
    throughput  a checkpoint in every micro-batch, compared with one in a hundred (`benchmarks.throughput`)
    python      a Python operator, compared with Spark's `transformWithState` (`benchmarks.python_operators`)
    latency     from a row's arrival to a durable sink, compared with Spark's RocksDB state store (`benchmarks.latency`)

Without a part, all run one after the other. Numbers depend on the machine; compare only the ratios of one run. Sides
take turns, and a goal is missed if every round is beyond its bound. The stores are real servers, the same as in the
tests. The exit code is 1 if a goal is missed.

    python -m benchmarks side-by-side [--minutes M] ...
    python -m benchmarks cluster [--rounds N] ...
    python -m benchmarks kafka [--quick] [--rounds N] ...
    python -m benchmarks nexmark [--quick] [--queries N ...] ...
    python -m benchmarks profile [--rows S] [--step-rows K] ...

are separate: the first runs a stream alone, then together with the commands of its life cycle
(`benchmarks.side_by_side`). The second compares a cluster with one machine and kills workers (`benchmarks.cluster`).
The third goes from Kafka to Kafka, beside Spark's own source, state and sink (`benchmarks.kafka`). The fourth runs
NEXMark's queries beside Spark's own (`benchmarks.nexmark`), and the fifth shows where a step's time goes
(`benchmarks.profile`).
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rich.console import Console

from benchmarks import recorded
from benchmarks.goals import Goal, Report, goals_table

Part = Callable[[Path, argparse.Namespace], Report]


def step(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.step`."""
    from benchmarks import step

    return step.run(scratch, options.picture, quick=options.quick)


def stores(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.stores`."""
    from benchmarks import stores

    return stores.run(scratch, quick=options.quick)


def changelog(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.changelog`."""
    from benchmarks import changelog

    return changelog.run(scratch, quick=options.quick)


def hedging(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.hedging`, which prints its own table."""
    from benchmarks import hedging

    path = scratch / "hedging.json"
    hedging.main(["--json", str(path), *(["--requests", "2000"] if options.quick else [])])
    return hedging_report(json.loads(path.read_text()))


def hedging_report(numbers: dict[str, dict[str, float]]) -> Report:
    """Make the report of the runs `without` and `with` hedging, with its goals."""
    change = {name: numbers["with"][name] / numbers["without"][name] - 1 for name in ("p99.9_s", "p50_s", "requests")}
    goals = [
        Goal("hedging: change of p99.9", change["p99.9_s"], at_most=-0.47),
        Goal("hedging: change of p50", change["p50_s"], at_most=0.03),
        Goal("hedging: change of requests", change["requests"], at_most=0.05),
    ]
    return Report([], goals, numbers)


def lifecycle(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.lifecycle`; its picture is next to that of the step."""
    from benchmarks import lifecycle

    picture = options.picture.with_stem(f"{options.picture.stem}-lifecycle")
    return lifecycle.run(scratch, picture, quick=options.quick)


def sensors(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.sensors`."""
    from benchmarks import sensors

    return sensors.run(scratch, quick=options.quick)


def startup(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.startup`."""
    from benchmarks import startup

    return startup.run(scratch, quick=options.quick)


def outputs(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.outputs`."""
    from benchmarks import outputs

    return outputs.run(scratch, quick=options.quick)


def checksums(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.checksums`."""
    from benchmarks import checksums

    return checksums.run(scratch, quick=options.quick)


def input_(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.input`."""
    from benchmarks import input as part

    return part.run(scratch, quick=options.quick)


def operators(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.operators`."""
    from benchmarks import operators

    return operators.run(scratch, quick=options.quick)


def timers(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.timers`."""
    from benchmarks import timers

    return timers.run(scratch, quick=options.quick)


def ttl(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.ttl`."""
    from benchmarks import ttl

    return ttl.run(scratch, quick=options.quick)


def joins(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.joins`."""
    from benchmarks import joins

    return joins.run(scratch, quick=options.quick)


def windows(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.windows`."""
    from benchmarks import windows

    return windows.run(scratch, quick=options.quick)


def keyed(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.keyed`."""
    from benchmarks import keyed

    return keyed.run(scratch, quick=options.quick)


def rolling(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.rolling`."""
    from benchmarks import rolling

    return rolling.run(scratch, quick=options.quick)


def backends(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.backends`."""
    from benchmarks import backends

    return backends.run(scratch, quick=options.quick)


def heap(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.heap`."""
    from benchmarks import heap

    return heap.run(scratch, quick=options.quick)


def files(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.files`."""
    from benchmarks import files

    return files.run(scratch, quick=options.quick)


def rocksdb(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.rocksdb`."""
    from benchmarks import rocksdb

    return rocksdb.run(scratch, quick=options.quick)


def pending(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.pending`."""
    from benchmarks import pending

    return pending.run(scratch, quick=options.quick)


def uploads(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.uploads`."""
    from benchmarks import uploads

    return uploads.run(scratch, quick=options.quick)


def throughput(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.throughput`."""
    from benchmarks import throughput

    return throughput.run(scratch, quick=options.quick)


def python(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.python_operators`."""
    from benchmarks import python_operators

    return python_operators.run(scratch, quick=options.quick)


def latency(scratch: Path, options: argparse.Namespace) -> Report:
    """See `benchmarks.latency`."""
    from benchmarks import latency

    return latency.run(scratch, quick=options.quick)


PARTS: dict[str, Part] = {
    "step": step,
    "stores": stores,
    "changelog": changelog,
    "hedging": hedging,
    "lifecycle": lifecycle,
    "sensors": sensors,
    "startup": startup,
    "outputs": outputs,
    "checksums": checksums,
    "input": input_,
    "operators": operators,
    "keyed": keyed,
    "timers": timers,
    "ttl": ttl,
    "joins": joins,
    "windows": windows,
    "rolling": rolling,
    "backends": backends,
    "heap": heap,
    "rocksdb": rocksdb,
    "files": files,
    "pending": pending,
    "uploads": uploads,
    "throughput": throughput,
    "python": python,
    "latency": latency,
}
SEPARATE = ("side-by-side", "cluster", "kafka", "nexmark", "profile")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and draw; return 1 if a goal is missed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in SEPARATE:
        return import_module(f"benchmarks.{arguments[0].replace('-', '_')}").main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run the benchmarks. Exits with 1 if a goal is missed.",
        epilog=f"{', '.join(SEPARATE)} are separate: the first runs a stream alone, then "
        "together with the commands of its life cycle; the second compares a cluster with one machine and kills "
        "workers; the third goes from Kafka to Kafka; the fourth runs NEXMark; the last shows where a step's time "
        "goes. See "
        f"`python -m benchmarks {SEPARATE[0]} --help`, and so on.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--directory", type=Path, help="temporary files: a disk, not memory (default: the system's)")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="file for the numbers")
    parser.add_argument("--record", action="store_true", help="keep the ratios in the repository (benchmarks.recorded)")
    parser.add_argument(
        "--picture", type=Path, default=Path("bench.png"), help="PNG file of the step; other pictures are next to it"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {min(unknown)}: use {', '.join(PARTS)}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    reports: dict[str, Report] = {}
    seconds: dict[str, float] = {}
    for name in [name for name in PARTS if name in options.parts or not options.parts]:
        Console(stderr=True).print(f"{name} ...")
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="siltstone-bench-", dir=options.directory) as scratch:
            reports[name] = PARTS[name](Path(scratch), options)
        seconds[name] = time.perf_counter() - began
        for table in reports[name].tables:
            console.print(table)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    found = {
        name: {"seconds": seconds[name], "goals": [vars(goal) for goal in report.goals], **report.numbers}
        for name, report in reports.items()
    }
    options.json.write_text(json.dumps({"machine": machine, "quick": options.quick, "parts": found}, indent=1))
    for name, report in reports.items():
        console.print(goals_table(report.goals, f"{name}: goals ({seconds[name]:.0f} s)"))
    console.print(f"numbers: {options.json}" + (f", picture: {options.picture}" if "step" in reports else ""))
    goals = {name: report.goals for name, report in reports.items()}
    recorded.compare(console, goals, quick=options.quick, record=options.record)
    missed = [goal.what for report in reports.values() for goal in report.goals if goal.is_kept is False]
    for what in missed:
        console.print(f"missed: {what}", markup=False, highlight=False, soft_wrap=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
