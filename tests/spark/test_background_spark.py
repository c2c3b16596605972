"""Materialization beside a run on Spark: chains shorten while it runs, state stays what it is, whoever is killed;
and what the command line says of it."""

import json
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.place import Place
from siltstone.catalog.records import MaterializationRecord
from siltstone.errors import UsageError
from siltstone.policy.adaptive import DEFAULT_POLICY, named
from tests.command_line import plain, siltstone
from tests.fault.processes import Run
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures
from tests.region_run import RegionRun

FILES = 6
MORE = 3
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


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of an undisturbed run without Spark, after each file."""
    with Place.writable(str(tmp_path_factory.mktemp("undisturbed"))) as place:
        run = RegionRun(place, SMALL, named(DEFAULT_POLICY))
        completed = [run.step(rows) for rows in purchases()]
        return [c.digest for c in completed if c is not None]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "siltstone.toml").write_text(CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def materializations(place: Place, stream: str) -> list[MaterializationRecord]:
    return [m for m in place.catalog.materializations(stream) if m.manifest is not None]


def test_chains_shorten_while_the_stream_runs(
    spark: SparkSession, project: Path, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILTSTONE_MATERIALIZATION__INTERVAL_S", "0.3")
    monkeypatch.setenv("SILTSTONE_MATERIALIZATION__STALLED_INTERVALS", "1000")
    monkeypatch.setenv("SILTSTONE_RETENTION__KEEP_LAST", "2")
    metrics = project / "metrics.txt"
    ran = siltstone("run", "little", "--set", f"files={FILES}", "--json", "--openmetrics", metrics).json
    assert ran["digest"] == digests[FILES - 1]
    with Place.existing("w") as place:
        done = materializations(place, "little")
        last = place.catalog.latest("little")
        # Beside the run, not behind it.
        assert {m.operator for m in done if m.ended_at and m.ended_at < last.committed_at} == OPERATORS
        assert min(place.catalog.firsts("little", last.id).values()) > 1
        # Retention followed, and took the bases that chains began with.
        assert place.catalog.checkpoints("little", marked=True)[0].id > 1
        assert not failures(place, "little")
        assert not [m for m in place.catalog.materializations("little") if m.error]
        assert place.catalog.live_leases("little") == []
    text = metrics.read_text()
    for operator in OPERATORS:
        assert f'siltstone_materialization_stalled{{operator="{operator}",stream="little"}} 0.0' in text
    # Who takes over afterwards restores from what was materialized.
    again = siltstone("run", "little", "--set", f"files={FILES}", "--json").json
    assert again["checkpoints"] == [] and again["digest"] == digests[FILES - 1]


def test_what_the_command_line_says(spark: SparkSession, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = siltstone("run", "little", "--materialize-every", "off", "--json").json
    with Place.existing("w") as place:
        assert place.catalog.materializations("little") == []
    siltstone("run", "little", "--materialize-every", "often").failed(2, "'often' is not a length of time", "15m")
    siltstone("materialize", "little", "--due", "--at", "2").failed(2, "--due and --at exclude each other")
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


def test_killed_in_the_middle_of_a_materialization_it_resumes(
    tmp_path: Path, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILTSTONE_MATERIALIZATION__INTERVAL_S", "0.05")
    monkeypatch.setenv("SILTSTONE_POLICY", "adjust-d")
    unbound = {"d0": 50, "size_ratio_max": 1000, "space_amplification_max": 1000}
    monkeypatch.setenv("SILTSTONE_POLICY_OPTIONS", json.dumps(unbound))
    warehouse = tmp_path / "w"
    command = ["run", "small", "--warehouse", str(warehouse), "--json"]
    run = Run([command], tmp_path, "local[2]")

    def at_work() -> bool:
        try:
            with Place.existing(str(warehouse)) as place:
                found = place.catalog.materializations("small")
        except UsageError:  # the run has not come so far
            return False
        # One has been completed before, so that a chain begins with it, and one is under way.
        return any(m.manifest for m in found) and any(m.ended_at is None for m in found)

    try:
        assert run.until(at_work), run.wait(10).said
        time.sleep(0.1)
    finally:
        run.kill_all()
    with Place.existing(str(warehouse)) as place:
        done = place.catalog.last_id("small")
        assert done + MORE <= len(digests), "it was killed in the middle"
        assert not failures(place, "small")
        # The lease of the one that was killed would hold the next one up for its time-out.
        for lease in place.catalog.live_leases("small"):
            place.catalog.release_lease(lease.id)
    again = Run([[*command, "--batches", str(MORE)]], tmp_path, "local[2]")
    try:
        end = again.wait(240)
    finally:
        again.kill_all()
    assert end.code == 0 and end.result is not None, end.said
    assert end.result["digest"] == digests[done + MORE - 1]
    with Place.existing(str(warehouse)) as place:
        assert not failures(place, "small")
        ended = place.catalog.materializations("small")
        assert any(m.manifest for m in ended if m.checkpoint > done)
        assert all(m.ended_at is not None for m in ended)
