"""One cluster of two workers for all its tests, and a stream with a warehouse of its own for each."""

import os
import urllib.request
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark import SparkContext
from pyspark.sql import SparkSession
from sqlalchemy import URL

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.run.region import ConsistentRegion
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, RunResult, StreamRun, run, write_stream
from siltstone.spark.running_query import UNTIL_PROCESSED
from siltstone.spark.session import spark_session
from siltstone.stream import Stream
from tests.cluster.cluster import Cluster, find_obstacle, wait_until
from tests.cluster.executors import executor_hosts
from tests.cluster.streams import Delivered, cluster_stream, hold, read_calls, read_shared, release_all
from tests.contract.conftest import postgres
from tests.fault.reference import small
from tests.fault.small_stream import purchases
from tests.fault.warehouses import WAREHOUSES
from tests.postgres_server import new_schema
from tests.servers import use_test_credentials

__all__ = ["postgres"]

HOSTS = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers. Where this machine cannot have them, CI fails, and others pass over."""
    if obstacle := find_obstacle():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(obstacle)
    use_test_credentials()
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        for host in HOSTS:
            cluster.add_worker(host)
        yield cluster


@pytest.fixture(scope="session")
def cluster_spark(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The session of all tests on the cluster, with the driver in this process.

    Tests with settings of their own, which Spark takes only when it starts, are parametrized with these.
    """
    settings = cluster.settings() | {"spark.decommission.enabled": "true"} | getattr(request, "param", {})
    session = spark_session(cluster.master, settings, steps=True)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    _end_jvm()


def _end_jvm() -> None:
    """End the driver's JVM, which would keep the settings of its first session."""
    gateway: Any = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    gateway.proc.communicate()  # it ends with its input


@dataclass
class ClusterRun:
    """A stream with a warehouse of its own, run on the cluster and compared with an undisturbed run on one machine.

    Attributes:
        tables: its input, a micro-batch each; further empty ones change nothing.
        sink: what its sink was handed.
        received: per step and operator, the acknowledgements, in order.
        metrics: what a watched run served after its newest checkpoint: name -> number, all operators together.
    """

    cluster: Cluster
    spark: SparkSession
    settings: Settings
    shared: Path
    tables: Sequence[pa.Table] = field(default_factory=purchases)
    sink: Delivered = field(default_factory=Delivered)
    received: list[tuple[str, Sequence[Acknowledgement]]] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)

    @property
    def stream(self) -> Stream:
        """The stream: `small`, over files that all machines see."""
        return cluster_stream(self.shared, self.cluster.private, self.sink, self.tables)

    def run(self, batches: int, **options: Any) -> RunResult:
        """Run some micro-batches; `options` are further settings."""
        return run(self.settings.model_copy(update=options), self.stream, RunRequest(batches))

    @contextmanager
    def watched_run(self, batches: int, **options: Any) -> Iterator[StreamRun]:
        """Run some micro-batches beside the block, which may change the cluster; then the run is awaited."""
        settings = self.settings.model_copy(update={**options, "metrics_port": "0"})
        rows = read_shared(self.spark, {}, self.shared, self.tables)
        begun: list[StreamRun] = []

        def scrape(_: object) -> None:
            if begun and begun[0].metrics_url:
                with urllib.request.urlopen(begun[0].metrics_url, timeout=30) as answer:
                    families = [*text_string_to_metric_families(answer.read().decode())]
                self.metrics = Counter[str]()
                for sample in (sample for family in families for sample in family.samples):
                    self.metrics[sample.name] += int(sample.value)

        begun.append(write_stream(settings, self.stream, rows, RunRequest(batches), UNTIL_PROCESSED, scrape))
        try:
            yield begun[0]
        finally:
            begun[0].await_termination()

    @contextmanager
    def held_run(self, batches: int, file: int, **options: Any) -> Iterator[StreamRun]:
        """A watched run whose block begins when two subtasks of `accounts` are in the middle of the step with this
        input file. They go on after it."""
        hold(self.shared, file).touch()
        with self.watched_run(batches, **options) as running:
            try:
                wait_until(lambda: sum(call["file"] == file for call in read_calls(self.shared)) == 2, "two subtasks")
                yield running
            finally:
                release_all(self.shared)

    def check(self, steps: int) -> None:
        """Compare digests and the sink's rows with those of the undisturbed run after some steps."""
        with OpenWarehouse.open_existing(self.settings.warehouse, self.settings.catalog) as place:
            catalog = place.catalog
            found = catalog.checkpoints.list(self.stream.name)
            step_of = {s.checkpoint: s.step for s in catalog.input_log.list(self.stream.name, found[-1].id)}
        files = [sum(len(table) > 0 for table in self.tables[: step_of[c.id]]) for c in found]
        assert [c.digest for c in found] == [small().digests[n - 1] for n in files]
        assert step_of[found[-1].id] == steps
        rows = [table.sort_by("sequence") for table in small().written[: files[-1]]]
        assert self.sink.all().equals(pa.concat_tables(rows))

    def await_executors(self, hosts: Collection[str]) -> None:
        """Wait until the session has an executor on each of these hosts and no other."""
        wait_until(lambda: executor_hosts(self.spark) == sorted(hosts), f"executors on {hosts}")

    def find(self, phase: str) -> Counter[tuple[str, int]]:
        """Count per operator and subtask how often its state was restored from the store ("restore") or rolled forward
        by the log ("forward")."""
        found = ((operator, ack.subtask) for operator, each in self.received for ack in each if phase in ack.seconds)
        return Counter(found)

    @property
    def restores(self) -> int:
        """How often a subtask restored its whole state from the store."""
        return self.find("restore").total()

    @property
    def roll_forwards(self) -> int:
        """How often a subtask applied logged changes to the state that it had or restored."""
        return self.find("forward").total()

    def outcomes(self) -> list[str | None]:
        """List how each epoch of the stream ended."""
        with OpenWarehouse.open_existing(self.settings.warehouse, self.settings.catalog) as place:
            return [record.outcome for record in place.catalog.runs.list(self.stream.name)]

    def moves(self) -> int:
        """Count how often a subtask of the first operator ran on another machine than in the step before."""
        last: dict[int, int] = {}
        moves = 0
        for call in read_calls(self.shared):
            subtask = call["key_group"] * 2 // self.stream.max_parallelism
            moves += last.get(subtask, call["machine"]) != call["machine"]
            last[subtask] = call["machine"]
        return moves


@pytest.fixture
def cluster_run(
    cluster: Cluster, cluster_spark: SparkSession, postgres: URL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClusterRun]:
    """A stream with a new warehouse, on a cluster of two living workers, each with an executor unless these vary."""
    for host in {*HOSTS} - {worker.host for worker in cluster.workers}:
        cluster.add_worker(host)
    monkeypatch.setenv("XDG_STATE_HOME", str(cluster.private / "home" / "state"))
    shared = cluster.shared / uuid.uuid4().hex
    shared.mkdir()
    with new_schema(postgres) as catalog:
        settings = Settings(
            warehouse=WAREHOUSES["s3"](cluster.private / "warehouse"),
            catalog=catalog,
            master=cluster.master,
            parallelism=2,
        )
        made = ClusterRun(cluster, cluster_spark, settings, shared)
        if cluster_spark.conf.get("spark.dynamicAllocation.enabled", "false") == "false":
            made.await_executors(HOSTS)
        acknowledge = ConsistentRegion.acknowledge

        def observed(region: ConsistentRegion, operator: str, received: Sequence[Acknowledgement]) -> None:
            made.received.append((operator, received))
            acknowledge(region, operator, received)

        monkeypatch.setattr(ConsistentRegion, "acknowledge", observed)
        yield made
