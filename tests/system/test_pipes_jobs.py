"""Every script of `jobs`, launched by Dagster Pipes: it tells the step what it made, as the catalog has it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster import WholeMessages

JOBS = Path(__file__).parents[2] / "jobs"
MADE = {
    "run_stream": ("checkpoints", ["--batches", "2"]),
    "materialize": ("materialization", []),
    "take_snapshot": ("full_snapshot", []),
}
"""script -> the asset that it makes, and its arguments"""
DONE = {
    "verify_checkpoints": ("VerifyResult", {"proven": [1, 2], "failed": []}),
    "restore_series": ("SeriesResult", {"failed": [], "kept": []}),
    "truncate": ("Truncation", {}),
    "sweep": ("SweepResult", {"deleted": 0}),
    "recover": ("Recovery", {}),
}
"""script -> the class of its result, and some of what it says"""
ARGUMENTS = {"restore_series": ["one=1", "two=2"], "truncate": ["--keep-last", "5"]}


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("pipes") / "warehouse"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SILTSTONE_STREAMS", json.dumps(["tests.fault.small_stream"]))
        patch.setenv("SILTSTONE_WAREHOUSE", str(path))
        patch.setenv("SILTSTONE_MASTER", "local[2]")
        yield path


def command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(JOBS / f"{script}.py"), "small", *arguments]


def test_every_job_is_here() -> None:
    assert {path.stem for path in JOBS.glob("[a-z]*.py")} == {*MADE, *DONE}


@pytest.mark.parametrize("script", MADE)
def test_a_job_that_makes_an_asset_materializes_it(script: str, warehouse: Path) -> None:
    part, arguments = MADE[script]

    @dg.asset(key=["small", part])
    def made(context: dg.AssetExecutionContext) -> Any:
        client = dg.PipesSubprocessClient(message_reader=WholeMessages())
        return client.run(context=context, command=command(script, *arguments)).get_materialize_result(
            implicit_materialization=False
        )

    result = dg.materialize([made])
    (event,) = result.get_asset_materialization_events()
    said = event.step_materialization_data.materialization
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        newest = place.catalog.checkpoints.get_latest("small")
    assert said.metadata["checkpoint"].value == newest.id == 2
    assert (said.tags or {})["dagster/data_version"] == said.metadata["digest"].value == newest.digest


@pytest.mark.parametrize("script", DONE)
def test_a_job_that_makes_no_asset_tells_its_result(script: str, warehouse: Path) -> None:
    told: list[Any] = []

    @dg.op
    def does(context: dg.OpExecutionContext) -> None:
        arguments = command(script, *ARGUMENTS.get(script, ()))
        told.extend(
            dg.PipesSubprocessClient(message_reader=WholeMessages())
            .run(context=context, command=arguments)
            .get_custom_messages()
        )

    @dg.job
    def operation() -> None:
        does()

    assert operation.execute_in_process().success
    name, says = DONE[script]
    assert told[0]["result"] == name
    assert {key: told[0][key] for key in says} == says
    assert len(told) == 1


def test_checks_are_check_results(warehouse: Path) -> None:
    names = ("digest", "no_gap", "nothing_missing", "no_orphan")

    @dg.multi_asset_check(specs=[dg.AssetCheckSpec(name, asset=["small", "checkpoints"]) for name in names])
    def checked(context: dg.AssetCheckExecutionContext) -> Any:
        only = [text for name in names for text in ("--only", name)]
        arguments = [sys.executable, "-m", "siltstone.dagster.checks", "small", *only]
        wants = {"siltstone": {"checks": True}}
        client = dg.PipesSubprocessClient(message_reader=WholeMessages())
        done = client.run(context=context.op_execution_context, command=arguments, extras=wants)
        yield from done.get_results(implicit_materializations=False)

    definitions = dg.Definitions(
        asset_checks=[checked],
        jobs=[dg.define_asset_job("check", selection=dg.AssetSelection.checks(checked))],
    )
    result = definitions.resolve_job_def("check").execute_in_process()
    found = {each.check_name: each for each in result.get_asset_check_evaluations()}
    assert found.keys() == set(names)
    assert all(each.passed for each in found.values())
    assert found["digest"].metadata["facts"].value == 2
