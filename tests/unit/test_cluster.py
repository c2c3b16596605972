"""What loses rows or state on a cluster is refused, with the way out."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.sinks.parquet import ParquetSink
from siltstone.spark.cluster import check_cluster
from siltstone.spark.masters import is_local
from tests.outbox_run import SINK, STREAM

FUNCTION = replace(STREAM, sinks={SINK: lambda rows, checkpoint: None})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


def session(master: str, **settings: str) -> Any:
    return SimpleNamespace(sparkContext=SimpleNamespace(master=master), conf=settings)


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local[2,4]"])
def test_a_local_master_may_have_all(place: OpenWarehouse, master: str) -> None:
    assert is_local(master)
    check_cluster(session(master), STREAM, place)


@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "spark://one:7077", "yarn", "k8s://https://one"])
@pytest.mark.parametrize("path", [None, "/tmp/out"])
def test_a_sink_of_one_machine_is_refused_on_a_cluster(place: OpenWarehouse, master: str, path: str | None) -> None:
    """Seen: two workers, eight checkpoints committed, and the sink held `_SUCCESS` and no rows."""
    stream = replace(STREAM, sinks={SINK: ParquetSink(path)})
    with pytest.raises(
        UsageError, match=r"ParquetSink of by_key .* a DeltaSink\(\) or a function .* or run on a local master"
    ):
        check_cluster(session(master), stream, place)


def test_a_sqlite_catalog_is_refused_on_a_cluster(place: OpenWarehouse) -> None:
    with pytest.raises(UsageError, match=r"Name a database \(--catalog postgresql://"):
        check_cluster(session("spark://one:7077"), FUNCTION, place)


def test_speculation_is_refused_on_a_cluster_and_the_rest_is_not(place: OpenWarehouse) -> None:
    shared: Any = SimpleNamespace(catalog=SimpleNamespace(url="postgresql://db/s"))
    check_cluster(session("yarn"), FUNCTION, shared)
    with pytest.raises(UsageError, match=r"set spark\.speculation to false"):
        check_cluster(session("yarn", **{"spark.speculation": "true"}), FUNCTION, shared)


def test_dynamic_allocation_may_not_remove_executors_that_have_state() -> None:
    shared: Any = SimpleNamespace(catalog=SimpleNamespace(url="postgresql://db/s"))
    dynamic = {"spark.dynamicAllocation.enabled": "true"}
    check_cluster(session("yarn", **dynamic), FUNCTION, shared)
    idle = {"spark.dynamicAllocation.cachedExecutorIdleTimeout": "60s"}
    check_cluster(session("yarn", **idle), FUNCTION, shared)
    with pytest.raises(UsageError, match=r"leave spark\.dynamicAllocation\.cachedExecutorIdleTimeout unset"):
        check_cluster(session("yarn", **dynamic, **idle), FUNCTION, shared)
