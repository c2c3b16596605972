"""A timed stream through many runs, without Spark: with pending checkpoints, edits and rollbacks, by its own clock."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import Policy, PolicyOptions, policy_by_name
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.format.manifests import read_manifests
from siltstone.format.output import read_output, staged_schema
from siltstone.operator import SOURCE
from siltstone.restore.scan import Selection, TableShape, plan_scan, scan
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.run.take_over import take_over
from siltstone.run.task import StepTask
from siltstone.stream import Stream
from siltstone.time.clock_rules import SourceClock, decode_clock
from siltstone.times import to_us
from tests.region_run import RegionSteps, run_tasks

DELTAS = policy_by_name("marginal-cost", PolicyOptions(d_max=3, size_ratio_max=None))


class TimedRun(RegionSteps):
    """One run, whose steps are timed by the driver's clock."""

    def __init__(self, region: ConsistentRegion, deliver: Callable[[], None]) -> None:
        super().__init__(region)
        self.deliver = deliver
        self.received: dict[str, Sequence[Acknowledgement]] = {}
        """operator -> what its subtasks said of the newest step"""

    def _clock(self) -> str:
        return ""  # the region decides it

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        output, received = run_tasks(task, rows)
        self.received[task.operator.name] = received
        return output, received

    def _tidy(self) -> None:
        self.deliver()


class TimedLife:
    """A stream, what it was given, and what its sinks have of it, run after run.

    Args:
        now: the driver's time of day.
    """

    def __init__(
        self,
        place: OpenWarehouse,
        stream: Stream,
        now: datetime,
        *,
        parallelism: int = 2,
        backend: str = "heap",
        policy: Policy = DELTAS,
        pending: int = 0,
        every: int = 1,
    ) -> None:
        self.place, self.stream, self.now_us = place, stream, to_us(now)
        self.options: dict[str, Any] = {
            "parallelism": parallelism, "backend": backend, "max_pending": pending, "checkpoint_steps": every,
        }  # fmt: skip
        self.policy = policy
        self.given: list[pa.Table] = []
        self.clocks: dict[int, SourceClock | None] = {}
        """batch -> the source's clock in its step"""
        self.counts: dict[int, dict[str, tuple[int, ...]]] = {}
        """batch -> operator -> rows read, late, and dead letters"""
        self.collected: dict[str, dict[tuple[str, int], pa.Table]] = {}
        """output -> (stream, the sink's id) -> rows"""
        self.digests: dict[tuple[str, int], str] = {}
        """(stream, checkpoint) -> digest"""
        self.begin()

    # Runs

    def begin(self, **changes: Any) -> None:
        """Begin a run: what is logged comes again, then what its source was asked for and no checkpoint has."""
        self.options |= changes
        options = RegionOptions(**self.options, time_us=lambda: self.now_us)
        warehouse, catalog = self.place.warehouse, self.place.catalog
        opened = ConsistentRegion.open(self.stream, warehouse, catalog, self.policy, options, "a test")
        self.run = TimedRun(opened, self._deliver)
        opened.deliver(self._sinks)
        self.run.follow(lambda offsets: self.given[int(offsets)])
        for number in range(self.run.batches, len(self.given)):
            self._take(number)

    def stop(self) -> None:
        """End the run in a checkpoint."""
        self.checkpoint()
        self.run.region.close("completed")

    def checkpoint(self) -> None:
        """Complete all that was begun."""
        if self.run.region.has_steps:
            self.run.step_without_rows()
        self.run.complete_pending()

    def crash(self, *, lost: bool = False, **changes: Any) -> None:
        """Abandon the run, and begin the next one.

        Args:
            lost: whether the working state is lost.
        """
        if lost:
            shutil.rmtree(self.place.warehouse.local.root / "work" / self.stream.name, ignore_errors=True)
        self.begin(**changes)

    def restart(self, *, lost: bool = False, **changes: Any) -> None:
        """Stop, and begin the next run."""
        self.stop()
        self.crash(lost=lost, **changes)

    def move(self, place: OpenWarehouse, stream: Stream) -> None:
        """Go on elsewhere, from what is there of the stream."""
        self.place, self.stream = place, stream
        self.begin()

    def roll_back(self, checkpoint: int, elsewhere_us: int) -> None:
        """Give up all after a checkpoint, and take these steps again while the driver's clock is elsewhere."""
        self.stop()
        epoch = take_over(self.place, self.stream.name, "a test")
        self.place.catalog.rollbacks.roll_back(self.stream.name, epoch, checkpoint, "a test", "a test")
        now_us, self.now_us = self.now_us, elsewhere_us
        self.begin()
        self.now_us = now_us

    def edit(self, operator: str, variable: str, changes: pa.Table) -> None:
        """Edit state by hand between two runs."""
        self.stop()
        self.begin()
        self.run.edit(operator, variable, changes)
        self.run.region.close("completed")
        self.begin()

    # Steps

    def step(self, rows: pa.Table) -> None:
        """Take a micro-batch."""
        self.given.append(rows)
        self._take(len(self.given) - 1)

    def _take(self, number: int) -> None:
        self.run.step(self.given[number], offsets=str(number))
        self.clocks[number] = self.source_clock
        self.counts[number] = {
            name: tuple(sum(getattr(each, what) for each in received) for what in ("rows_in", "late", "dead_letters"))
            for name, received in self.run.received.items()
        }

    def advance(self, us: int = 0) -> None:
        """Let time pass; take a step without rows if something is due."""
        self.now_us += us
        if self.run.region.clock.is_due():
            self.run.step_without_rows(ends=False)

    def finish(self) -> None:
        """End the source."""
        self.run.step_without_rows(finishes=True)
        self.run.complete_pending()

    # What came of them

    @property
    def source_clock(self) -> SourceClock | None:
        """The source's clock in the newest step."""
        clock = decode_clock(self.run.region.clock.text)
        return None if clock is None else clock.sources.get(SOURCE)

    def delivered(self, output: str) -> list[dict[str, Any]]:
        """The rows that a sink has."""
        return [row for part in self.collected.get(output, {}).values() for row in part.to_pylist()]

    def rows(self, operator: str, variable: str) -> pa.Table:
        """The rows of a table in the newest checkpoint."""
        catalog, store, name = self.place.catalog, self.place.warehouse.store, self.stream.name
        checkpoint = catalog.checkpoints.last_id(name)
        schema = next(op for op in self.stream.operators if op.name == operator).tables()[variable]
        found = [schema.shown_rows.empty_table()]
        if checkpoint:
            manifests = read_manifests(store, catalog.chains.list_manifests(name, checkpoint), name)
            shape = TableShape.of(manifests[checkpoint], operator, variable)
            for task in plan_scan(manifests, shape, Selection(tuple(shape.columns.names))):
                found += [part.select(schema.shown_rows.names) for part in scan(store, task)]
        return pa.concat_tables(found)

    @property
    def _sinks(self) -> dict[str, Callable[[OutputRecord], None]]:
        return dict.fromkeys(self.stream.sinks, self._collect)

    def _collect(self, output: OutputRecord) -> None:
        store, schema = self.place.warehouse.store, staged_schema(output.arrow_schema)
        batches = [batch for each in output.objects for batch in read_output(store, each, output.arrow_schema)]
        made = pa.Table.from_batches(batches, schema)
        held = self.collected.setdefault(output.name, {})
        before = held.setdefault((self.stream.name, output.sink_id), made)
        assert _in_order(before) == _in_order(made), "an id always brings the same rows"

    def _deliver(self) -> None:
        region = self.run.region
        region.deliver(self._sinks, checked=True)
        key = self.stream.name, region.completed
        assert self.digests.setdefault(key, region.digest or "") == region.digest, "a step again has the same state"


def _in_order(rows: pa.Table) -> list[Any]:
    return sorted(rows.to_pylist(), key=str)
