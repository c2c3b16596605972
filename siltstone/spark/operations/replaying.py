"""Rebuild a checkpoint's state from the logged input, and compare it with the recorded digests on the way."""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from siltstone.catalog.records.steps import StepKind, StepRecord, with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.replay import ReplayPlan, check_replayed, plan_replay, replay_tasks, resolve_range, restore_points
from siltstone.errors import InputChanged, SiltstoneError, StateError, UsageError
from siltstone.result import Result
from siltstone.retention.leases import hold_lease
from siltstone.run.definition import check_run, check_source_shapes, recorded_options
from siltstone.run.step_digests import OperatorDigests, check_repeated
from siltstone.run.step_reports import StepReports
from siltstone.run.task import RestorePoint, StepTask
from siltstone.settings import Settings
from siltstone.spark.failures import explain
from siltstone.spark.logged import rerun_batch
from siltstone.spark.placement import Placement, placement_of
from siltstone.spark.queries import source_log
from siltstone.spark.session import needs_spark, spark_session
from siltstone.spark.source_log import SourceLog
from siltstone.spark.sources import open_input
from siltstone.spark.step import own_session, run_step
from siltstone.store.open import Warehouse
from siltstone.store.paths import LocalLayout
from siltstone.stream import Stream
from siltstone.time.clock_rules import StepClock, decode_clock


@dataclass(frozen=True)
class ReplayResult(Result):
    """The outcome of a replay.

    Attributes:
        checkpoint: the checkpoint whose state was rebuilt, from that of checkpoint `since` (0: the start) and `steps`
            logged steps of `rows` rows.
        why: why it could not begin earlier; empty if it began at the start or where the caller said.
        proven: whether the digests at all `compared` checkpoints were the recorded ones.
    """

    stream: str
    checkpoint: int
    since: int
    why: str
    steps: int
    rows: int
    seconds: float
    digest: str
    proven: bool
    compared: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with `since` named `from`."""
        return {"from" if name == "since" else name: value for name, value in super().to_dict().items()}


@needs_spark
def replay(
    settings: Settings,
    stream: Stream,
    *,
    to: str = "latest",
    since: str | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> ReplayResult:
    """Run the logged steps again, with working state in a temporary directory (`StreamClient.replay`)."""
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        last, first = resolve_range(place.catalog, stream.name, to, since)
        with hold_lease(place.catalog, stream.name, [c for c in (first, last) if c], what="replays"):
            plan = plan_replay(place, stream, last, first)
            spark = spark_session(settings.master, settings.spark, steps=True)
            # Subtasks drain and prepare, each for its own key groups.
            parallelism = settings.parallelism or plan.recorded.parallelism
            check_run(stream, {}, parallelism)
            recorded = place.catalog.streams.get(stream.name).definition
            source = open_input(spark, stream, place.warehouse, recorded_options(stream, recorded))
            check_source_shapes(stream.name, recorded, source.shapes)
            with tempfile.TemporaryDirectory(prefix="siltstone-replay-") as scratch:
                points = restore_points(place, stream, plan.since)
                log = source_log(spark, Path(scratch) / "spark", place.warehouse.local.root, source.names)
                run = _LoggedReplay(
                    settings, stream, place.warehouse, Path(scratch), plan, log, points, parallelism, on_step
                )
                return run.all(spark, source.rows)


class _LoggedReplay:
    """One replay, with working state of its own that it advances by the logged steps."""

    def __init__(
        self,
        settings: Settings,
        stream: Stream,
        warehouse: Warehouse,
        scratch: Path,
        plan: ReplayPlan,
        log: SourceLog,
        points: Mapping[str, RestorePoint],
        parallelism: int,
        on_step: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.stream = stream
        self.warehouse = replace(warehouse, local=LocalLayout(scratch / "state"))
        self.plan = plan
        self.parallelism = parallelism
        self.on_step = on_step
        self.compared = 0
        self._gathered = StepReports()
        self._log = log
        self._points = points
        self._placement: Placement | None = None
        self._schema: T.StructType | None = None
        """of micro-batches"""
        self._version = max(point.step for point in points.values())
        self._compares_prepared = True
        """whether the state has what the run's subtasks prepared: restored, or of subtasks with the same key groups"""

    @property
    def rows(self) -> int:
        """Number of rows that the sources have given."""
        return self._gathered.source_rows(self.stream)

    def all(self, spark: SparkSession, source: DataFrame) -> ReplayResult:
        """Run every step, and compare at every recorded checkpoint."""
        start = time.perf_counter()
        # Its state is in no checkpoint, so it must not move; a run of the stream may place its own at the same time.
        self._placement = placement_of(spark, self.warehouse, f"replay/{self.stream.name}", self.settings.placement)
        plan, spark, self._schema = self.plan, own_session(spark), source.schema
        if plan.since or not plan.steps:
            self._run(spark, None)
        self._compare(0)
        self._log.prepare(plan.position)
        for done, (step, ends) in enumerate(with_ends(plan.steps), 1):
            drains = ends and step.kind is not StepKind.CHANGE
            self._step(spark, source, step, ends=ends, drains=drains)
            if drains:
                self._compares_prepared = any(one.parallelism == self.parallelism for one in plan.compared[done])
            compared = self._compare(done)
            self.on_step(f"step {done} of {len(plan.steps)}, {self.rows:,} rows{compared}")
        seconds = round(time.perf_counter() - start, 3)
        return ReplayResult(
            plan.stream,
            plan.to,
            plan.since,
            plan.why,
            len(plan.steps),
            self.rows,
            seconds,
            plan.recorded.digest,
            True,
            self.compared,
        )

    def _step(self, spark: SparkSession, source: DataFrame, step: StepRecord, *, ends: bool, drains: bool) -> None:
        work = partial(self._run, spark, logged=step, checkpoint=step.checkpoint, ends=ends, drains=drains)
        where = f"step {step.step} of {self.plan.stream}, part of checkpoint {step.checkpoint},"
        try:
            if step.batch_id is None:
                work(None)
            else:
                rerun_batch(source, self._log, step, work)
        except UsageError as error:
            raise UsageError(f"{where} cannot be replayed: {error}, or replay --from a later checkpoint") from error
        except InputChanged as error:
            raise InputChanged(
                f"{self.plan.stream} cannot be replayed: {error.message}",
                advice="bring the source's data and the operators' code back as they were, or replay --from a later "
                "checkpoint",
            ) from error
        except SiltstoneError:
            raise
        except Exception as error:
            raise StateError(f"{where} stopped the replay: {explain(error)}", advice="replay it again") from error

    def _run(
        self, spark: SparkSession, rows: DataFrame | None, *, logged: StepRecord | None = None, **as_logged: Any
    ) -> None:
        fires = logged is not None and logged.kind is not StepKind.CHANGE
        clock = decode_clock(logged.clock) if logged is not None and fires else None
        done = run_step(spark, rows, self._tasks(clock, **as_logged), self._placement, self._schema)
        for name, received in done.received.items():
            if logged is not None:
                check_repeated(logged, name, OperatorDigests.of(received))
            self._gathered.add(name, received)
        done.unpersist()
        self._version += 1
        # From now on only the working state is used: it is not restored again and needs no older version.
        self._points = dict.fromkeys(self._points, RestorePoint(step=self._version - 1))

    def _compare(self, steps: int) -> str:
        """Compare with what was recorded after this number of steps; return text that names the checkpoints."""
        recorded = self.plan.compared[steps]
        for one in recorded:
            found = self._gathered.digests(self.stream.max_parallelism)
            check_replayed(self.plan.stream, one, found, prepared=self._compares_prepared)
        self.compared += len(recorded)
        return "".join(f", as checkpoint {one.checkpoint}" for one in recorded)

    def _tasks(
        self, clock: StepClock | None, checkpoint: int = 0, *, ends: bool = False, drains: bool = False
    ) -> dict[str, StepTask]:
        """Return the tasks of the next step, in the interval of a checkpoint, of which they store nothing."""
        return replay_tasks(
            self.stream,
            self.warehouse,
            self._points,
            self._gathered.digests(self.stream.max_parallelism),
            clock,
            version=self._version,
            parallelism=self.parallelism,
            backend=self.settings.backend,
            upload=self.settings.upload,
            interval=checkpoint,
            ends=ends,
            drains=drains,
        )
