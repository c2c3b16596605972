"""Materialization beside a run on Spark: chains shorten while it runs, state stays what it is; and what the command
line says of it. One that is killed: tests/system/test_killed_runs.py."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.records.materializations import MaterializationRecord
from siltstone.catalog.warehouse import OpenWarehouse
from tests.catalog_cases import beginnings
from tests.command_line import plain, siltstone
from tests.fault.reference import small
from tests.fault.small_stream import SMALL
from tests.proofs import failures

FILES = 6
OPERATORS = {operator.name for operator in SMALL.operators}
CONFIGURATION = """
streams = ["tests.spark_streams"]
warehouse = "w"
parallelism = 2
policy = "adjust-d"
[policy_options]
d0 = 50
size_ratio_max = 1000
space_amplification_max = 1000
"""
"""a base, and then deltas for good"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "siltstone.toml").write_text(CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def materializations(place: OpenWarehouse, stream: str) -> list[MaterializationRecord]:
    return [m for m in place.catalog.materializations.list(stream) if m.manifest is not None]


def test_chains_shorten_while_the_stream_runs(
    spark: SparkSession, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILTSTONE_MATERIALIZATION__INTERVAL_S", "0.3")
    monkeypatch.setenv("SILTSTONE_MATERIALIZATION__STALLED_INTERVALS", "1000")
    monkeypatch.setenv("SILTSTONE_RETENTION__KEEP_LAST", "2")
    metrics = project / "metrics.txt"
    ran = siltstone("run", "little", "--set", f"files={FILES}", "--json", "--openmetrics", metrics).json
    assert ran["digest"] == small().digests[FILES - 1]
    with OpenWarehouse.open_existing("w") as place:
        done = materializations(place, "little")
        last = place.catalog.checkpoints.get_latest("little")
        # Beside the run, not behind it.
        assert {m.operator for m in done if m.ended_at and m.ended_at < last.committed_at} == OPERATORS
        assert min(beginnings(place.catalog, "little", last.id).values()) > 1
        # Retention followed, and took the bases that chains began with.
        assert place.catalog.checkpoints.list("little", marked=True)[0].id > 1
        assert not failures(place, "little")
        assert not [m for m in place.catalog.materializations.list("little") if m.error]
        assert place.catalog.leases.list_live("little") == []
    text = metrics.read_text()
    for operator in OPERATORS:
        assert f'siltstone_materialization_stalled{{operator="{operator}",stream="little"}} 0.0' in text
    # Who takes over afterwards restores from what was materialized.
    again = siltstone("run", "little", "--set", f"files={FILES}", "--json").json
    assert again["checkpoints"] == [] and again["digest"] == small().digests[FILES - 1]


def test_what_the_command_line_says(spark: SparkSession, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = siltstone("run", "little", "--materialize-every", "off", "--json").json
    with OpenWarehouse.open_existing("w") as place:
        assert place.catalog.materializations.list("little") == []
    siltstone("run", "little", "--materialize-every", "often").failed(2, "'often' is not a length of time", "15m")
    siltstone("materialize", "little", "--due", "--at", "2").failed(2, "due and at exclude each other")
    siltstone("materialize", "unknown", "--due").failed(2, "unknown")
    newest = len(ran["checkpoints"])
    [line] = plain(siltstone("materialize", "little", "--due"))
    assert line == f"little: nothing is due at checkpoint {newest}"
    proven = siltstone("verify", "little", "--json").json
    assert (proven["proven"], proven["stalled"]) == ([newest], [])
    listed = siltstone("checkpoints", "little", "--json").json
    assert set(listed["materialization"]) == OPERATORS
    assert {m["state"] for m in listed["materialization"].values()} == {"fine"}
    assert {m["trigger"] for m in listed["materialization"].values()} == {None}
    assert all(ratio > 0 for ratio in listed["checkpoints"][-1]["amplification"].values())
    # Long without a success, as these settings go.
    monkeypatch.setenv("SILTSTONE_MATERIALIZATION__INTERVAL_S", "0.01")
    stalled = siltstone("verify", "little", "--json")
    assert stalled.code == 1
    said = json.loads(stalled.out)
    assert said["failed"] == [] and {(s["operator"], s["state"]) for s in said["stalled"]} == {
        (operator, "stalled") for operator in OPERATORS
    }
    lines = siltstone("verify", "little").out.splitlines()
    assert any(line.startswith("  materialization: accounts is stalled: ") for line in lines), lines
    assert plain(siltstone("checkpoints", "little"))[-1].startswith("materialization: accounts is stalled: ")
    assert "places is stalled" in siltstone("report", "little").out
    reported = siltstone("report", "little", "--json").json
    assert {m["state"] for m in reported["materialization"].values()} == {"stalled"}
    # A schedule mends it, and then has nothing more to do.
    done = siltstone("materialize", "little", "--due", "--operator", "daily", "--json").json
    assert list(done["triggers"]) == ["daily"] and "the interval is 0.01 s" in done["triggers"]["daily"]
    assert [m["operator"] for m in done["operators"]] == ["daily"]
    first, *reasons = plain(siltstone("materialize", "little", "--due"))
    assert first.startswith(f"little: checkpoint {newest} materialized: ")
    assert {reason.split(":")[0].strip() for reason in reasons} == {"accounts", "places"}
    assert plain(siltstone("materialize", "little", "--due")) == [f"little: nothing is due at checkpoint {newest}"]
    assert siltstone("verify", "little", "--all", "--json").json["stalled"] == []
