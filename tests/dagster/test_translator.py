"""A stream as a guest in another team's deployment: under its keys, beside its resources, executor and assets."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster import SparkResource, StreamAsset, StreamTranslator, WarehouseResource, stream_definitions
from siltstone.dagster.partitions import hours_of
from siltstone.dagster.runs import StreamRuns, keys_in
from tests.dagster.test_sensors import run
from tests.fault.small_stream import SMALL

RAW = dg.AssetKey(["raw", "purchases"])


class Ours(StreamTranslator):
    """Everything is below `lake`, in one group; the events are what another tool loads."""

    def get_asset_spec(self, asset: StreamAsset) -> dg.AssetSpec:
        if asset.part == "events":
            return asset.spec.replace_attributes(key=RAW)
        owners = ["team:lake"] if asset.operator == "accounts" else []
        key = asset.spec.key.with_prefix("lake")
        return asset.spec.replace_attributes(key=key, group_name="lake", tags={"domain": "sales"}, owners=owners)


@dg.asset(key=RAW, group_name="loading")
def purchases(warehouse: dg.ResourceParam[str]) -> None:
    """What the other team loads, with a resource that is called like one of ours was."""


@dg.asset(deps=[dg.AssetKey(["lake", "small", "accounts_sink"])], group_name="marts")
def spending(spark: dg.ResourceParam[str]) -> None:
    """What the other team makes of the stream's output."""


def theirs() -> dg.Definitions:
    return dg.Definitions(
        assets=[purchases, spending],
        resources={"warehouse": "snow", "spark": "glue", "notifier": "pager"},
        executor=dg.multiprocess_executor,
    )


@pytest.fixture(scope="module")
def both() -> dg.Definitions:
    merged = dg.Definitions.merge(theirs(), stream_definitions(SMALL, translator=Ours()))
    dg.Definitions.validate_loadable(merged)
    return merged


def specs(definitions: dg.Definitions) -> dict[str, dg.AssetSpec]:
    return {spec.key.to_user_string(): spec for spec in definitions.resolve_all_asset_specs()}


def test_assets_have_the_keys_and_attributes_that_they_are_given(both: dg.Definitions) -> None:
    found = specs(both)
    ours = {key: spec for key, spec in found.items() if key.startswith("lake/small/")}
    assert len(ours) == len(specs(stream_definitions(SMALL))) - 1, "all but the events, which others define"
    assert found.keys() - ours.keys() == {"raw/purchases", "spending"}
    assert {spec.group_name for spec in ours.values()} == {"lake"}
    assert all(spec.tags["domain"] == "sales" for spec in ours.values())
    assert list(ours["lake/small/accounts_sink"].owners) == ["team:lake"]
    (dep,) = ours["lake/small/accounts_base_checkpoint"].deps
    assert dep.asset_key == RAW
    graph = both.resolve_asset_graph()
    assert graph.get(dg.AssetKey("spending")).parent_keys == {dg.AssetKey(["lake", "small", "accounts_sink"])}
    assert {key.asset_key.path[0] for key in graph.asset_check_keys} == {"lake"}


def test_what_others_have_stays_theirs(both: dg.Definitions) -> None:
    assert both.executor is dg.multiprocess_executor
    assert (both.resources or {}).keys() >= {"warehouse", "spark", "notifier", "siltstone_warehouse"}
    selected = dg.AssetSelection.from_string("tag:siltstone/part=checkpoints").resolve(both.resolve_asset_graph())
    assert selected == {dg.AssetKey(["lake", "small", "checkpoints"])}


@pytest.mark.usefixtures("spark")
def test_a_run_its_checks_and_a_restore_tell_of_the_keys_given(
    both: dg.Definitions, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILTSTONE_STREAMS", '["tests.fault.small_stream"]')
    with dg.DagsterInstance.ephemeral() as instance:

        def execute(job: dg.JobDefinition, config: Mapping[str, Any] | None = None, **more: Any) -> set[str]:
            result = job.execute_in_process({"ops": config or {}}, instance=instance, raise_on_error=False, **more)
            assert result.success
            told = {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}
            return told | {each.asset_key.to_user_string() for each in result.get_asset_check_evaluations()}

        told = execute(both.resolve_job_def("small"), {"small__run": {"config": {"batches": 2, "parallelism": 1}}})
        assert {"lake/small/checkpoints", "lake/small/accounts_sink", "lake/small/daily_base_checkpoint"} <= told
        assert all(key.startswith("lake/small/") for key in told)
        assert execute(both.resolve_job_def("siltstone__verify")) == {
            "lake/small/checkpoints",
            "lake/small/materialization",
        }
        with OpenWarehouse.open_existing(url) as place:
            (hour,) = hours_of([place.catalog.checkpoints.get_latest(SMALL.name).committed_at])
        instance.add_dynamic_partitions("small__hours", [hour])
        page = both.resolve_implicit_global_asset_job_def()
        restored = dg.AssetKey(["lake", "small", "restored_state"])
        assert execute(page, asset_selection=[restored], partition_key=hour) == {"lake/small/restored_state"}
        assert instance.get_materialized_partitions(restored) == {hour}
        execute(page, {"small__run": {"config": {"batches": 1}}}, asset_selection=[*told_by_run(both)])
        (newest, *_) = instance.get_runs(limit=1)
        runs = StreamRuns(instance, keys_in(both.get_repository_def()))
        assert (runs.streams_of(newest), runs.operation_of(newest)) == ({"small"}, "run")


def told_by_run(definitions: dg.Definitions) -> set[dg.AssetKey]:
    """The assets that the step of a run makes."""
    return definitions.resolve_asset_graph().get(dg.AssetKey(["lake", "small", "checkpoints"])).execution_set_asset_keys


def test_sensors_and_schedules_use_the_keys_given(
    both: dg.Definitions, place: OpenWarehouse, url: str, instance: dg.DagsterInstance
) -> None:
    run(place, "somebody", 1)
    resources = {"siltstone_warehouse": WarehouseResource(url=url), "siltstone_spark": SparkResource()}
    repository = both.get_repository_def()
    assert isinstance(repository, dg.RepositoryDefinition)
    context = dg.build_sensor_context(instance=instance, resources=resources, repository_def=repository)
    with context:
        tick: Any = repository.get_sensor_def("siltstone__new_checkpoints").evaluate_tick(context)
    assert {event.asset_key.path[0] for event in tick.asset_events} == {"lake"}
    requests: dict[str, dg.RunRequest] = {}
    for operation in ("snapshot", "verify", "sweep"):
        with dg.build_schedule_context(instance=instance, resources=resources, repository_def=repository) as at:
            schedule = repository.get_schedule_def(f"siltstone__{operation}__schedule")
            (requests[operation],) = schedule.evaluate_tick(at).run_requests or []
    assert list(requests["snapshot"].asset_selection or ()) == [dg.AssetKey(["lake", "small", "full_snapshot"])]
    checks = requests["verify"].asset_check_keys or ()
    assert {check.asset_key.path[-1] for check in checks} == {"checkpoints", "materialization"}
    assert {check.asset_key.path[0] for check in checks} == {"lake"}
    for operation, request in requests.items():
        job = both.resolve_job_def(f"siltstone__{operation}")
        assert job.get_subset(
            asset_selection=set(request.asset_selection or ()) or None,
            asset_check_selection=set(request.asset_check_keys or ()) or None,
        )
