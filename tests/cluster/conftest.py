"""One cluster of two workers for all its tests, and a stream with a warehouse of its own for each."""

import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from sqlalchemy import URL

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.run.region import ConsistentRegion
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, RunResult, run, write_stream
from siltstone.spark.runner import UNTIL_PROCESSED
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
def cluster_spark(cluster: Cluster) -> Iterator[SparkSession]:
    """The session of all tests on the cluster, with the driver in this process."""
    session = spark_session(cluster.master, cluster.settings(), steps=True)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@dataclass
class ClusterRun:
    """A stream with a warehouse of its own, run on the cluster and compared with an undisturbed run on one machine.

    Attributes:
        tables: its input, a micro-batch each; further empty ones change nothing.
        sink: what its sink was handed.
        received: per step and operator, the acknowledgements, in order.
    """

    cluster: Cluster
    spark: SparkSession
    settings: Settings
    shared: Path
    tables: Sequence[pa.Table] = field(default_factory=purchases)
    sink: Delivered = field(default_factory=Delivered)
    received: list[tuple[str, Sequence[Acknowledgement]]] = field(default_factory=list)

    @property
    def stream(self) -> Stream:
        """The stream: `small`, over files that all machines see."""
        return cluster_stream(self.shared, self.cluster.private, self.sink, self.tables)

    def run(self, batches: int, **options: Any) -> RunResult:
        """Run some micro-batches; `options` are further settings."""
        return run(self.settings.model_copy(update=options), self.stream, RunRequest(batches))

    @contextmanager
    def held_run(self, batches: int, file: int, **options: Any) -> Iterator[None]:
        """Run some micro-batches; the block begins when two subtasks of `accounts` are in the middle of the step with
        this input file, they go on after it, and then the run is awaited."""
        settings = self.settings.model_copy(update=options)
        hold(self.shared, file).touch()
        rows = read_shared(self.spark, {}, self.shared, self.tables)
        running = write_stream(settings, self.stream, rows, RunRequest(batches), UNTIL_PROCESSED)
        try:
            wait_until(lambda: sum(call["file"] == file for call in read_calls(self.shared)) == 2, "two subtasks")
            yield
        finally:
            release_all(self.shared)
            running.await_termination()

    def check(self, steps: int) -> None:
        """Compare digests and the sink's rows with those of the undisturbed run after some steps."""
        with OpenWarehouse.existing(self.settings.warehouse, self.settings.catalog) as place:
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

    @property
    def restores(self) -> int:
        """How often a subtask restored its whole state from the store."""
        return sum(ack.restored_bytes > 0 for _, received in self.received for ack in received)

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
    """A stream with a new warehouse, on a cluster of two living workers."""
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
        made.await_executors(HOSTS)
        acknowledge = ConsistentRegion.acknowledge

        def observed(region: ConsistentRegion, operator: str, received: Sequence[Acknowledgement]) -> None:
            made.received.append((operator, received))
            acknowledge(region, operator, received)

        monkeypatch.setattr(ConsistentRegion, "acknowledge", observed)
        yield made
