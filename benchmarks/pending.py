"""Measure how long a micro-batch waits for a checkpoint on a slow store: blocking, and with two checkpoints pending;
and how many checkpoints complete per second if several are pending.

Each micro-batch ends in a checkpoint and comes `pace_s` seconds after the one before, so both ways complete the same
number of checkpoints. The store is a real S3 server behind a proxy that delays each request by `DELAY_S`, once the load
and the warm-up are over; the catalog is a file. A micro-batch waits as long as it does anything but run its operators,
and for its bases: for what its slowest task takes longer to write than in a step with deltas. The warm-up shows how
large bases and deltas are. By that, `restore_weight` is set so high that the policy wants a base every `CHAIN`
checkpoints. With pending checkpoints, materializations make most bases beside the stream. A step also uploads its
changes before it returns, with or without a checkpoint: that is only in the time of the whole step. The ways take turns
on the same input, in rounds (A B, B A).

For the rate, small steps of a stream with a sink follow one another without Spark, each with a checkpoint: what takes
time is the store alone.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple
from unittest.mock import patch

from pyspark.sql import DataFrame, SparkSession

from benchmarks.goals import Goal, Report, spread_of, table_of
from benchmarks.rounds import in_turn
from benchmarks.systems import CORES, OPERATOR, SPARK, source, totals_stream
from benchmarks.workload import Workload
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.costs import recorded_chains
from siltstone.chains.policies import PolicyOptions
from siltstone.model import Form
from siltstone.settings import Settings
from siltstone.spark import runner as spark_runner
from siltstone.spark.operations.holding import RunListener, RunRequest, writer_epoch
from siltstone.spark.operations.run_metrics import RunMetrics
from siltstone.spark.session import spark_session
from siltstone.spark.step import StepRun
from tests.behind_run import Run
from tests.outbox_run import STREAM
from tests.proxy import Fault, Proxy
from tests.servers import versitygw
from tests.store_cases_s3 import fresh_bucket

DELAY_S, PACE_S, QUICK_PACE_S = 0.2, 2.0, 1.0
CHAIN = 5
"""checkpoints"""
AT_MOST, GROWTH_AT_MOST = 0.1, 1.25
BLOCKING, PENDING = "blocking", "2 pending"
WAYS = {BLOCKING: 0, PENDING: 2}
RATES = (1, 2, 4)
"""checkpoints pending at most"""
RATE_AT_LEAST = 1.5
FULL = [(300_000, 10_000), (3_000_000, 10_000), (10_000_000, 10_000)]
QUICK = [(30_000, 1_000)]


class Steps(NamedTuple):
    """The steps of one way in one round."""

    waited_s: list[float]
    """for checkpoints, per step"""
    seconds: list[float]
    """from its begin to its end, per step"""
    bases: int = 0
    """how many of their checkpoints were bases"""
    materialized: int = 0
    """how many bases were made beside the stream meanwhile"""


Rounds = Mapping[str, Sequence[Steps]]
"""way -> its steps in each round"""


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure each size."""
    sizes, rounds, measured, pace_s = (QUICK, 2, 4, QUICK_PACE_S) if quick else (FULL, 3, 15, PACE_S)
    versitygw()  # before Spark's workers inherit the environment, which has its credentials
    spark = spark_session(f"local[{CORES}]", {**SPARK, "spark.local.dir": str(scratch / "spark")}, steps=True)
    found: dict[str, dict[str, list[Steps]]] = {}
    try:
        for state_rows, step_rows in sizes:
            work = Workload(state_rows, step_rows, warm_up=2, measured=measured)
            inputs = scratch / f"inputs-{state_rows}"
            work.write(inputs)
            of_size = found[work.name] = {way: [] for way in WAYS}
            for number in range(rounds):
                for way in in_turn(WAYS, number):
                    local = scratch / f"{state_rows}-{number}-{WAYS[way]}"
                    of_size[way].append(measure(spark, work, inputs, local, WAYS[way], pace_s))
    finally:
        spark.stop()
    report, rates = report_of(found, pace_s), {pending: list[float]() for pending in RATES}
    for number in range(rounds):
        for pending in in_turn(RATES, number):
            rates[pending].append(measure_rate(scratch / f"rate-{pending}-{number}", pending, 12 if quick else 48))
    report.tables.append(
        table := table_of(f"checkpoints per second, {DELAY_S * 1000:.0f} ms a request", "pending", "rounds")
    )
    for pending, of in rates.items():
        table.add_row(str(pending), spread_of(of))
    ratios = _ratios(rates[RATES[-1]], rates[RATES[0]])
    report.goals.append(Goal.of_rounds("pending: checkpoints per second, 4 / 1", ratios, at_least=RATE_AT_LEAST))
    return report


def measure_rate(local: Path, max_pending: int, steps: int) -> float:
    """Return how many checkpoints of small steps complete per second on a store that is slow."""
    with slow_place(local) as (place, slow_down):
        run = Run(place, max_pending, STREAM)
        run.step()
        run.drain()
        slow_down()
        began = time.perf_counter()
        for _ in range(steps):
            run.step()
        run.drain()
        seconds = time.perf_counter() - began
        run.behind.close()
        assert not run.errors
    return steps / seconds


@contextmanager
def slow_place(local: Path) -> Iterator[tuple[OpenWarehouse, Callable[[], None]]]:
    """A warehouse on an S3 server, and what delays each of its requests from then on."""
    _, bucket = fresh_bucket(versitygw())
    with Proxy(int(versitygw().endpoint.rsplit(":", 1)[1])) as proxy:
        url = f"s3://{bucket}/state?endpoint=http://127.0.0.1:{proxy.port}&region=us-east-1&local={local}"
        settings = Settings(warehouse=url)
        with OpenWarehouse.open_writable(settings.warehouse, settings.catalog) as place:
            yield place, lambda: proxy.next(Fault(delay_s=DELAY_S), None)


def measure(spark: SparkSession, work: Workload, inputs: Path, local: Path, max_pending: int, pace_s: float) -> Steps:
    """Load the state and warm up without delays, then run the steps with them."""
    with slow_place(local) as (warehouse, slow_down):
        settings = Settings(warehouse=warehouse.warehouse.url, parallelism=CORES, max_pending=max_pending)
        loads = settings.model_copy(update={"checkpoint_steps": work.load_steps})
        # One checkpoint: policies would expect that later deltas are as large as those of a load.
        _run(spark, loads, warehouse, inputs, work.load_steps, None)
        _run(spark, settings, warehouse, inputs, work.warm_up, None)
        chosen = settings.model_copy(update={"policy_options": policy_for_chains(warehouse.catalog)})
        slow_down()
        steps = _run(spark, chosen, warehouse, inputs, work.measured, pace_s)
        newest = warehouse.catalog.checkpoints.list("bench", work.measured)
        made = warehouse.catalog.materializations.list("bench")
    parts = [each.statistics["operators"][OPERATOR]["seconds"] for each in newest]
    usual_s = median([of.get("persist", 0.0) for of in parts if "base" not in of] or [0.0])
    longer = [of["base"] + of.get("persist", 0.0) - usual_s if "base" in of else 0.0 for of in parts]
    waited = [waited + max(0.0, more) for (waited, _), more in zip(steps, longer, strict=True)]
    bases = sum(each.forms[OPERATOR] is Form.BASE for each in newest)
    done = sum(each.outcome == "done" and each.checkpoint >= newest[0].id for each in made)
    return Steps(waited, [seconds for _, seconds in steps], bases, done)


def policy_for_chains(catalog: Catalog) -> PolicyOptions:
    """Return options by which a base and `CHAIN` - 1 deltas of the sizes recorded so far are the cheapest chain.

    A base every n checkpoints costs base / n + weight * delta * n / 2 per checkpoint: the least at n = `CHAIN`.
    """
    [newest] = catalog.checkpoints.list("bench", 1)
    [(_, state)] = recorded_chains(newest, OPERATOR).values()
    return PolicyOptions(restore_weight=2 * state.base_bytes / (state.deltas_bytes / state.deltas) / CHAIN**2)


def _run(
    spark: SparkSession, settings: Settings, warehouse: OpenWarehouse, inputs: Path, steps: int, pace_s: float | None
) -> list[tuple[float, float]]:
    """Run some steps; return how long each did not run its operators, and how long it took."""
    stream, metrics, found = totals_stream("bench"), RunMetrics(settings, "bench"), list[tuple[float, float]]()
    listener = RunListener(settings, warehouse, spark, metrics)
    run_step, ran_s = spark_runner.run_step, 0.0

    def run_timed(*arguments: Any) -> StepRun:
        nonlocal ran_s
        began = time.perf_counter()
        done = run_step(*arguments)
        ran_s = time.perf_counter() - began
        return done

    with (
        patch.object(spark_runner, "run_step", run_timed),
        writer_epoch(settings, stream, warehouse, spark, RunRequest(batches=steps), listener) as runner,
    ):

        def step(rows: DataFrame, batch: int) -> None:
            before, began = runner.region.step, time.perf_counter()
            runner(rows, batch)
            if runner.region.step > before:
                seconds = time.perf_counter() - began
                found.append((seconds - ran_s, seconds))

        rows = source(spark, str(inputs))
        writer = rows.writeStream.foreachBatch(step).option("checkpointLocation", runner.checkpoint_location)
        trigger = {"availableNow": True} if pace_s is None else {"processingTime": f"{pace_s} seconds"}
        runner.await_query(writer.trigger(**trigger).start())
        runner.finish()
    assert len(found) == steps
    return found


def report_of(found: Mapping[str, Rounds], pace_s: float = PACE_S) -> Report:
    """Compare the ways of each size, and the waits of pending checkpoints over the sizes."""
    title = f"waiting for checkpoints: {DELAY_S * 1000:.0f} ms a request, a step and a checkpoint each {pace_s:g} s"
    waits = "mean wait s, rounds", "median", "longest"
    heads = "rows, step", "checkpoints are", *waits, "whole step, mean", "bases", "beside"
    numbers = {size: {way: [of._asdict() for of in rounds] for way, rounds in of.items()} for size, of in found.items()}
    report = Report([table := table_of(title, *heads, left=2)], numbers=numbers)
    for size, ways in found.items():
        for way, rounds in ways.items():
            waits = [waited for of in rounds for waited in of.waited_s]
            whole = mean(seconds for of in rounds for seconds in of.seconds)
            bases = str(sum(of.bases for of in rounds)), str(sum(of.materialized for of in rounds))
            cells = [f"{s:.3f}" for s in (median(waits), max(waits), whole)]
            table.add_row(size, way, spread_of(mean_waits(rounds)), *cells, *bases)
        ratios = _ratios(mean_waits(ways[PENDING]), mean_waits(ways[BLOCKING]))
        what = f"pending: wait / blocking wait, {size}"
        report.goals.append(Goal.of_rounds(what, ratios, at_most=AT_MOST))
    small, great = next(iter(found)), list(found)[-1]
    if small != great:
        ratios = _ratios(*(mean_waits(found[size][PENDING]) for size in (great, small)))
        what = f"pending: growth of the wait, {small} to {great}"
        report.goals.append(Goal.of_rounds(what, ratios, at_most=GROWTH_AT_MOST))
    return report


def mean_waits(rounds: Sequence[Steps]) -> list[float]:
    """Return the mean seconds that a step waited in each round."""
    return [mean(steps.waited_s) for steps in rounds]


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]
