"""Measure what Dagster's sensors cost at fifty streams of ten thousand checkpoints each.

The catalog is made: each stream runs for real for a few checkpoints, the last of which is copied. The ticks are those
of the daemon, one after the other in this process, with an instance in files that takes what they report; time between
them does not pass. Counted is the CPU time of this process, without what the daemon needs to call a code location.

First start: an instance that knows nothing, until all streams are reported. Steady: each stream makes a checkpoint a
minute, and all sensors tick at their intervals. Then a run fails among two thousand of others, which begin and end.
"""

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dagster as dg
import pyarrow as pa
from sqlalchemy import create_engine, insert, select

from benchmarks.goals import Goal, Report, table_of
from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.catalog.database import tables as t
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.upload_options import UploadOptions
from siltstone.dagster import LogNotifier, SparkResource, WarehouseResource, stream_definitions
from siltstone.dagster.names import run_tags
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.stream import Stream
from tests.region_run import RegionSteps

STREAMS, CHECKPOINTS = 50, 10_000
CHAIN = 20
"""checkpoints that are made for real, and whose chains the newest ones of each stream have"""
MINUTES = 10
TICK_S = 10
CPU_PER_S, CATCH_UP_S, SEEN_S = 0.1, 300.0, 15.0
FOREIGN = 2_000


def _stream(n: int) -> Stream:
    operators = [
        Aggregate("counts", {"k": pa.int64()}, [Count("n")]),
        Aggregate("sums", {"k": pa.int64()}, [Sum("total", "v")]),
    ]
    return Stream(f"s{n:02}", lambda spark, options: spark.sql(""), operators, sinks={}, max_parallelism=4)


@dataclass
class Daemon:
    """What Dagster's daemon does with the sensors of one code location.

    Attributes:
        now: seconds that have passed for it.
        cpu: sensor -> CPU seconds of each tick.
    """

    instance: dg.DagsterInstance
    repository: dg.RepositoryDefinition
    resources: Mapping[str, Any]
    now: float = 0.0
    cursors: dict[str, str | None] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)

    def tick(self) -> list[dg.RunRequest]:
        """Evaluate all sensors that are due, and write what they report; return the runs they request."""
        requests: list[dg.RunRequest] = []
        for sensor in self.repository.sensor_defs:
            name = sensor.name
            if (
                isinstance(sensor, dg.RunStatusSensorDefinition)
                or name.startswith("default_")
                or self.now < self.due.get(name, 0.0)
            ):
                continue
            began, used = time.perf_counter(), time.process_time()
            requests += self._evaluate(sensor)
            self.cpu.setdefault(name, []).append(time.process_time() - used)
            self.wall.setdefault(name, []).append(time.perf_counter() - began)
            self.due[name] = self.now + (sensor.minimum_interval_seconds or 30)
        return requests

    def _evaluate(self, sensor: dg.SensorDefinition) -> list[dg.RunRequest]:
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursors.get(sensor.name),
            resources=dict(self.resources),
            repository_def=self.repository,
        )
        with context:
            told = sensor.evaluate_tick(context)
        for event in told.asset_events:
            self.instance.report_runless_asset_event(event)
        for request in told.dynamic_partitions_requests or ():
            self.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        self.cursors[sensor.name] = told.cursor
        return list(told.run_requests or ())


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure the first start, the steady state and a failure."""
    streams, checkpoints = (
        [_stream(n) for n in range(5 if quick else STREAMS)],
        CHECKPOINTS // 10 if quick else CHECKPOINTS,
    )
    url = str(scratch / "warehouse")
    catalog = MadeCatalog(url, streams, checkpoints)
    definitions = dg.Definitions.merge(*map(stream_definitions, streams))
    repository = definitions.get_repository_def()
    assert isinstance(repository, dg.RepositoryDefinition)
    resources = {
        "siltstone_warehouse": WarehouseResource(),
        "siltstone_spark": SparkResource(),
        "siltstone_notifier": LogNotifier(),
    }
    (scratch / "home").mkdir()
    with (
        patch.dict("os.environ", SILTSTONE_WAREHOUSE=url),
        dg.DagsterInstance.local_temp(str(scratch / "home")) as instance,
    ):
        daemon = Daemon(instance, repository, resources)
        caught_up_s = _catch_up(daemon, catalog)
        daemon.cpu, daemon.wall = {}, {}
        steady_s = _steady(daemon, catalog)
        cpu, wall = daemon.cpu, daemon.wall
        daemon.cpu, daemon.wall = {}, {}
        seen_s = _fail(daemon, streams[0].name)
    return _report(len(streams), repository, caught_up_s, steady_s, cpu, wall, seen_s)


def _catch_up(daemon: Daemon, catalog: "MadeCatalog") -> float:
    """Tick until every stream's newest checkpoint is reported; return the seconds until then."""
    while True:
        began = time.perf_counter()
        daemon.tick()
        daemon.now += max(TICK_S, time.perf_counter() - began)
        seen = json.loads(daemon.cursors["siltstone__new_checkpoints"] or "{}")["checkpoints"]
        if {name: id for name, (id, *_) in seen.items()} == catalog.newest:
            return daemon.now


def _steady(daemon: Daemon, catalog: "MadeCatalog") -> float:
    """Tick for some minutes in which each stream makes a checkpoint a minute; return how many seconds that is."""
    turns = range(MINUTES * 60 // TICK_S)
    for turn in turns:
        catalog.add([name for n, name in enumerate(catalog.newest) if n % (60 // TICK_S) == turn % (60 // TICK_S)])
        daemon.tick()
        daemon.now += TICK_S
    return len(turns) * TICK_S


def _fail(daemon: Daemon, stream: str) -> float:
    """Let a run fail among many of others; return the seconds until its recovery is requested, beyond its delay."""
    statuses = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED)
    for n in range(FOREIGN):
        if n == FOREIGN // 2:
            failed = dg.DagsterRun(job_name=stream, status=dg.DagsterRunStatus.FAILURE, tags=run_tags(stream, "run"))
            daemon.instance.add_run(failed)
        daemon.instance.add_run(dg.DagsterRun(job_name=f"foreign_{n % 20}", status=statuses[n % 3]))
    daemon.due = {}
    began, later = time.perf_counter(), time.time() + 60
    with patch("siltstone.dagster.sensors.recovery.time.time", lambda: later):
        (request,) = daemon.tick()
    assert request.tags["siltstone/recovers"] == failed.run_id
    return TICK_S + time.perf_counter() - began


class MadeCatalog:
    """The catalog of many streams, each of which ran for real, with copies of its newest checkpoint after that.

    Attributes:
        newest: stream -> its newest checkpoint.
    """

    def __init__(self, url: str, streams: list[Stream], checkpoints: int) -> None:
        self.newest = dict.fromkeys([stream.name for stream in streams], CHAIN)
        with OpenWarehouse.open_writable(url) as place:
            for stream in streams:
                _make_chain(place, stream)
            self._engine = create_engine(f"sqlite:///{place.warehouse.local.catalog}")
        with self._engine.begin() as connection:
            query = select(t.checkpoint).where(t.checkpoint.c.id == CHAIN)
            self._rows = {row.stream: dict(row._mapping) for row in connection.execute(query)}
        self.add(list(self.newest), checkpoints - CHAIN)

    def add(self, streams: list[str], checkpoints: int = 1) -> None:
        """Make further checkpoints of some streams, one a minute until now."""
        with self._engine.begin() as connection:
            for name in streams:
                first = self.newest[name] + 1
                self.newest[name] += checkpoints
                rows = (self._copy(name, id) for id in range(first, self.newest[name] + 1))
                while batch := list(islice(rows, 1000)):
                    connection.execute(insert(t.checkpoint), batch)

    def _copy(self, stream: str, id: int) -> dict[str, Any]:
        """Copy a stream's last real checkpoint; its chain is as long."""
        row = self._rows[stream]
        said = json.loads(json.dumps(row["statistics"]))
        for operator in said["operators"].values():
            for table in operator["tables"].values():
                table["chain"]["first"] = id - CHAIN + 1
        committed_at = datetime.now(UTC) - timedelta(minutes=self.newest[stream] - id)
        return {**row, "id": id, "committed_at": committed_at, "statistics": said}


def _make_chain(place: OpenWarehouse, stream: Stream) -> None:
    """Run a stream for some checkpoints, whose run stays open: a base, and deltas on it."""
    policy = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
    options = RegionOptions(parallelism=1, checkpoint_steps=1, upload=UploadOptions())
    steps = RegionSteps(ConsistentRegion.open(stream, place.warehouse, place.catalog, policy, options, "elsewhere:1"))
    for n in range(CHAIN):
        steps.step(pa.table({"k": range(n, n + 100), "v": range(100)}))


def _report(
    streams: int,
    repository: dg.RepositoryDefinition,
    caught_up_s: float,
    steady_s: float,
    cpu: Mapping[str, list[float]],
    wall: Mapping[str, list[float]],
    seen_s: float,
) -> Report:
    table = table_of(f"sensors of {streams} streams", "sensor", "ticks", "CPU s a tick", "slowest s", "CPU s a second")
    for name, ticks in cpu.items():
        row = (statistics.median(ticks), max(wall[name]), sum(ticks) / steady_s)
        table.add_row(name, str(len(ticks)), *(f"{value:.3f}" for value in row))
    used = sum(map(sum, cpu.values())) / steady_s
    ours = [s for s in repository.sensor_defs if not s.name.startswith("default_")]
    goals = [
        Goal("CPU seconds of all sensors a second, steady", used, at_most=CPU_PER_S),
        Goal("seconds until all streams are reported, first start", caught_up_s, at_most=CATCH_UP_S),
        Goal("seconds until a failed run is seen, with its delay over", seen_s, at_most=SEEN_S),
        Goal("jobs", len(repository.job_names) - 1),
        Goal("sensors", len(ours)),
        Goal("schedules", len(repository.schedule_defs)),
    ]
    return Report([table], goals)
