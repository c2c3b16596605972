"""Runs of the assets and the check, in this process, on the tests' own Spark."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from orchestration.definitions import definitions_of
from siltstone.catalog.place import Place
from siltstone.catalog.records import ObjectKind
from tests.fault.small_stream import SMALL

CHECKPOINTS = dg.AssetKey(["small", "checkpoints"])
RESTORED = dg.AssetKey(["small", "restored_state"])
BATCHES = 3

pytestmark = pytest.mark.usefixtures("spark", "_small_is_registered")


@pytest.fixture
def _small_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_STREAMS", '["tests.fault.small_stream"]')


@pytest.fixture
def warehouse(tmp_path: Path) -> str:
    return str(tmp_path / "warehouse")


def execute(warehouse: str, *selected: dg.AssetKey, **config: Mapping[str, Any]) -> dg.ExecuteInProcessResult:
    """Run the stream's job, or some assets of it, each with its checks; `config` is by step."""
    job = definitions_of({SMALL.name: SMALL}, {}).resolve_job_def(SMALL.name)
    return job.execute_in_process(
        run_config={
            "ops": {step: {"config": given} for step, given in config.items()},
            "resources": {"warehouse": {"config": {"url": warehouse}}},
        },
        asset_selection=selected or None,
        raise_on_error=False,
    )


def made(result: dg.ExecuteInProcessResult, asset: dg.AssetKey) -> tuple[dict[str, Any], str]:
    """The metadata and the data version of the one event of an asset."""
    (event,) = [e for e in result.get_asset_materialization_events() if e.asset_key == asset]
    materialization = event.step_materialization_data.materialization
    version = (materialization.tags or {})["dagster/data_version"]
    return plain(materialization.metadata), version


def plain(metadata: Mapping[str, dg.MetadataValue]) -> dict[str, Any]:
    """Values without their types; a table is a list of rows."""
    return {
        name: [dict(row.data) for row in value.records] if isinstance(value, dg.TableMetadataValue) else value.value
        for name, value in metadata.items()
    }


def failure(result: dg.ExecuteInProcessResult) -> tuple[str, dict[str, Any]]:
    """What the failed step says, and the metadata with it."""
    assert not result.success
    (event,) = [e for e in result.all_events if e.is_step_failure]
    said = event.step_failure_data.user_failure_data
    assert said is not None
    return said.description or "", plain(said.metadata)


def test_a_run_checkpoints_proves_and_restores(warehouse: str, spark: SparkSession) -> None:
    result = execute(warehouse, small__checkpoints={"batches": BATCHES, "parallelism": 2})
    assert result.success
    with Place.existing(warehouse) as place:
        records = place.catalog.checkpoints(SMALL.name)
    newest = records[-1]
    assert [r.id for r in records] == [1, 2, 3]
    assert all(r.proven for r in records)

    checkpoints, version = made(result, CHECKPOINTS)
    assert version == checkpoints["digest"] == newest.digest
    assert (checkpoints["checkpoints_made"], checkpoints["checkpoint"]) == (BATCHES, 3)
    assert checkpoints["rows"] == BATCHES * 300
    assert checkpoints["bytes"] == sum(r.bytes for r in records)
    assert checkpoints["chain_length"] >= 1
    assert checkpoints["forms"].count("base") + checkpoints["forms"].count("delta") == len(SMALL.operators)
    assert [row["checkpoint"] for row in checkpoints["newest_checkpoints"]] == [3, 2, 1]
    assert checkpoints["chain_picture"].startswith("![chain of small](data:image/svg+xml;base64,")

    (check,) = result.get_asset_check_evaluations()
    assert check.passed and check.blocking
    assert plain(check.metadata)["proven"] == BATCHES

    restored, version = made(result, RESTORED)
    assert version == restored["digest"] == newest.digest
    assert restored["proven"] is True
    path = Path(restored["path"])
    assert path == Path(warehouse) / "restored" / "small" / "000000000003"
    tables = [p for p in path.glob("*/*") if p.name != "amounts"]  # that one is opaque: bytes, not rows
    assert sum(pq.read_table(table).num_rows for table in tables) == newest.rows == restored["dagster/row_count"]
    assert spark.range(3).count() == 3, "a session that ran before the run must outlive it"


def test_a_second_run_goes_on_and_a_second_restore_keeps_what_is_there(warehouse: str) -> None:
    assert execute(warehouse, small__checkpoints={"batches": 2}).success
    first = Path(warehouse) / "restored" / "small" / "000000000002"
    before = {p: os.stat(p).st_mtime_ns for p in first.rglob("*")}

    result = execute(warehouse, small__checkpoints={"batches": 1}, small__restored_state={"at": "2"})
    assert result.success
    assert made(result, CHECKPOINTS)[0]["checkpoint"] == 3
    restored, _ = made(result, RESTORED)
    assert (restored["checkpoint"], restored["proven"], restored["path"]) == (2, True, str(first))
    assert {p: os.stat(p).st_mtime_ns for p in first.rglob("*")} == before
    assert [p.name for p in first.parent.iterdir()] == [first.name]


def test_damage_fails_the_check_by_name_and_blocks_the_restore(warehouse: str) -> None:
    assert execute(warehouse, small__checkpoints={"batches": 2}).success
    with Place.existing(warehouse) as place:
        (*_, damaged) = (o for o in place.catalog.objects(SMALL.name) if o.kind is ObjectKind.SEGMENT)
        path = place.warehouse.local.objects / damaged.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)

    result = execute(warehouse, small__checkpoints={"batches": 1})
    assert not result.success
    (check,) = result.get_asset_check_evaluations()
    assert not check.passed
    assert damaged.name in (check.description or "")
    said = plain(check.metadata)
    assert said["failed"] == len(said["failures"]) >= 1
    assert (damaged.checkpoint, damaged.name) in {(row["checkpoint"], row["object"]) for row in said["failures"]}
    assert [e.asset_key for e in result.get_asset_materialization_events()] == [CHECKPOINTS]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"at": "99"}, "99"),
        ({"at": "yesterday"}, "yesterday"),
        ({"as_of": "1999-01-01"}, "1999"),
    ],
)
def test_an_unknown_checkpoint_is_one_clear_line(
    warehouse: str, tmp_path: Path, config: dict[str, str], says: str
) -> None:
    execute(warehouse, CHECKPOINTS, small__checkpoints={"batches": 1})
    line, metadata = failure(execute(warehouse, RESTORED, small__restored_state=config))
    assert says in line and "\n" not in line
    assert (metadata["exit_code"], metadata["error"]) in [(2, "UnknownCheckpoint"), (2, "UsageError")]
    assert not (Path(warehouse) / "restored").exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"batches": 0}, "batches is 0"),
        ({"policy": "guess"}, "guess"),
        ({"parallelism": 0}, "option parallelism"),
        ({"options": {"colour": "red"}}, "colour"),
    ],
)
def test_bad_config_is_one_clear_line_and_makes_no_checkpoint(
    warehouse: str, config: dict[str, Any], says: str
) -> None:
    line, metadata = failure(execute(warehouse, CHECKPOINTS, small__checkpoints=config))
    assert says in line and "\n" not in line
    assert metadata["exit_code"] == 2


def test_a_step_of_an_unknown_stream_or_a_wrong_type_is_refused_before_anything_runs(warehouse: str) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError, match="nosuch__checkpoints"):
        execute(warehouse, nosuch__checkpoints={"batches": 1})
    with pytest.raises(dg.DagsterInvalidConfigError, match="batches"):
        execute(warehouse, small__checkpoints={"batches": "many"})
    assert not Path(warehouse).exists()


def test_a_stream_that_is_gone_and_a_warehouse_that_is_missing(warehouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, metadata = failure(execute(warehouse, RESTORED))
    assert f"no warehouse at {warehouse}" in line
    assert metadata["error"] == "UsageError"
    monkeypatch.setenv("SILTSTONE_STREAMS", "[]")
    line, metadata = failure(execute(warehouse, CHECKPOINTS))
    assert line.startswith("no stream 'small' is defined")
    assert metadata["error"] == "UnknownStream"
