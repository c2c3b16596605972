"""Resources: what they hand to the engine, and whose session is stopped."""

from typing import Any

import dagster as dg
import pytest

from siltstone.dagster.resources import SparkResource, WarehouseResource
from siltstone.dagster.resources import spark as spark_module
from siltstone.errors import UsageError


def resolved(**config: Any) -> WarehouseResource:
    """The warehouse resource as a step gets it."""
    seen: list[WarehouseResource] = []

    @dg.op
    def look(warehouse: WarehouseResource) -> None:
        seen.append(warehouse)

    @dg.job(resource_defs={"warehouse": WarehouseResource(**config)})
    def one() -> None:
        look()

    assert one.execute_in_process().success
    return seen[0]


def test_a_launch_may_name_the_places_of_the_settings_and_those_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_MASTER", "spark://one:7077")
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", "/data")
    monkeypatch.setenv("SILTSTONE_UI__CATALOGS", '["postgresql://db/other"]')
    warehouse = resolved(url="/data", catalog="postgresql://db/other")
    settings = warehouse.settings(SparkResource(master="spark://one:7077", conf={"spark.executor.memory": "2g"}))
    assert (settings.warehouse, settings.catalog) == ("/data", "postgresql://db/other")
    assert (settings.master, settings.spark) == ("spark://one:7077", {"spark.executor.memory": "2g"})


def test_what_is_not_given_is_as_the_engine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", "/from/the/environment")
    settings = WarehouseResource().settings(SparkResource(), parallelism=None)
    assert (settings.warehouse, settings.catalog, settings.master) == ("/from/the/environment", None, "local[*]")
    assert WarehouseResource().settings(SparkResource(), parallelism=3).parallelism == 3
    with pytest.raises(UsageError, match="option policy"):
        WarehouseResource().settings(SparkResource(), policy=7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.driver.extraJavaOptions", "-XX:OnOutOfMemoryError=touch"),
        ("spark.pyspark.python", "/tmp/any"),
        ("spark.jars.packages", "any:any:1"),
        ("spark.plugins", "any.Plugin"),
        ("spark.sql.extensions", "any.Extension"),
        ("spark.driver.memory", "1g -javaagent:any.jar"),
    ],
)
def test_a_launch_cannot_bring_spark_settings_that_run_code(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"a run cannot set '?{name}"):
        WarehouseResource().settings(SparkResource(conf={name: value}))


@pytest.mark.parametrize(
    "given",
    [
        {"url": "/elsewhere"},
        {"url": "s3://bucket/state?endpoint=http://listener:9000"},
        {"url": "redis://listener/0?password_variable=AWS_SECRET_ACCESS_KEY"},
        {"catalog": "postgresql://me:pl4nted@listener/d"},
        {"catalog": "sqlite:////tmp/any.db"},
    ],
    ids=lambda given: next(iter(given.values())).partition(":")[0],
)
def test_a_launch_cannot_name_another_place(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", "s3://bucket/state")
    with pytest.raises(UsageError, match=r"a run cannot name this (warehouse|catalog): .* \[ui\] \1s") as caught:
        WarehouseResource(**given).settings(SparkResource())
    assert "pl4nted" not in str(caught.value)


@pytest.mark.parametrize("master", ["spark://elsewhere:7077", "sc://elsewhere", "local-cluster[1,1,1]", "k8s://x"])
def test_a_launch_cannot_name_another_spark(master: str) -> None:
    with pytest.raises(UsageError, match="a run cannot name the Spark master"):
        WarehouseResource().settings(SparkResource(master=master))


def test_a_launch_may_say_how_much_of_this_spark_it_takes() -> None:
    settings = WarehouseResource().settings(SparkResource(master="local[2]", conf={"spark.driver.memory": "2g"}))
    assert (settings.master, settings.spark) == ("local[2]", {"spark.driver.memory": "2g"})


class Session:
    """Stands for Spark's session: this is about whose it is."""

    stopped = False

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("ran_before", [True, False])
def test_a_run_stops_the_session_that_it_started_and_no_other(
    monkeypatch: pytest.MonkeyPatch, ran_before: bool
) -> None:
    running: list[Session] = [Session()] if ran_before else []
    monkeypatch.setattr(spark_module, "_find_session", lambda: running[0] if running else None)

    @dg.op
    def work(spark: SparkResource) -> None:
        if not running:
            running.append(Session())

    @dg.job(resource_defs={"spark": SparkResource()})
    def one() -> None:
        work()

    assert one.execute_in_process().success
    assert running[0].stopped is not ran_before
