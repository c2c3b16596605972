"""Runs under Spark that are killed or frozen amid their work, with whatever they do beside it, and the runs that go on
where they ended; `make fault` does many."""

import json
import shutil
import time
from pathlib import Path
from random import Random

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.model import Form
from tests.fault.life import Life
from tests.fault.processes import Run
from tests.fault.reference import small
from tests.proofs import failures

MORE = 3


def test_killed_in_the_middle_of_a_materialization_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_MATERIALIZATION__INTERVAL_S", "0.05")
    monkeypatch.setenv("SILTSTONE_POLICY", "adjust-d")
    unbound = {"d0": 50, "size_ratio_max": 1000, "space_amplification_max": 1000}
    monkeypatch.setenv("SILTSTONE_POLICY_OPTIONS", json.dumps(unbound))
    warehouse = tmp_path / "w"
    digests = small().digests
    command = ["run", "small", "--warehouse", str(warehouse), "--json"]
    run = Run([command], tmp_path, "local[2]")

    def at_work() -> bool:
        try:
            with OpenWarehouse.open_existing(str(warehouse)) as place:
                found = place.catalog.materializations.list("small")
        except UsageError:  # the run has not come so far
            return False
        # One has been completed before, so that a chain begins with it, and one is under way.
        return any(m.manifest for m in found) and any(m.ended_at is None for m in found)

    try:
        assert run.until(at_work), run.wait(10).said
        time.sleep(0.1)
    finally:
        run.kill_all()
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        done = place.catalog.checkpoints.last_id("small")
        assert done + MORE <= len(digests), "it was killed in the middle"
        assert not failures(place, "small")
        # The lease of the one that was killed would hold the next one up for its time-out.
        for lease in place.catalog.leases.list_live("small"):
            place.catalog.leases.release(lease.id)
    again = Run([[*command, "--batches", str(MORE)]], tmp_path, "local[2]")
    try:
        end = again.wait(240)
    finally:
        again.kill_all()
    assert end.code == 0 and end.result is not None, end.said
    assert end.result["digest"] == digests[done + MORE - 1]
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        assert not failures(place, "small")
        ended = place.catalog.materializations.list("small")
        assert any(m.manifest for m in ended if m.checkpoint > done)
        assert all(m.ended_at is not None for m in ended)


def test_killed_while_files_are_stored_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more after its machine was lost, with another parallelism."""
    monkeypatch.setenv("SILTSTONE_POLICY", "files")
    monkeypatch.setenv("SILTSTONE_BACKEND", "rocksdb")
    warehouse, digests = tmp_path / "w", small().digests
    command = ["run", "small", "--warehouse", str(warehouse), "--json", "--parallelism"]
    run = Run([[*command, "2"]], tmp_path, "local[2]")

    def at_work() -> bool:
        """Whether files of a checkpoint are stored whose manifest is not."""
        files = {path.parent for path in warehouse.glob("objects/small/*/*/*.sst")}
        return len(files) >= 3 and not all((path / "manifest.arrow").exists() for path in files)

    try:
        assert run.until(at_work), run.wait(10).said
    finally:
        run.kill_all()
    for parallelism in ("2", "3"):
        with OpenWarehouse.open_existing(str(warehouse)) as place:
            done = place.catalog.checkpoints.last_id("small")
            assert done + MORE <= len(digests), "it was killed in the middle"
            assert not failures(place, "small")
        again = Run([[*command, parallelism, "--batches", str(MORE)]], tmp_path, "local[2]")
        try:
            end = again.wait(240)
        finally:
            again.kill_all()
        assert end.code == 0 and end.result is not None, end.said
        assert end.result["digest"] == digests[done + MORE - 1]
        shutil.rmtree(warehouse / "work")
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        assert not failures(place, "small")
        newest = place.catalog.checkpoints.get_latest("small")
        assert set(newest.forms.values()) == {Form.FILES}


def freeze_until_fenced(tmp_path: Path, *store: str, kill_first: bool = False) -> None:
    """Freeze a run amid its work, and let another take over; one that is through before is begun anew."""
    outcome = ""
    for seed in range(5, 9):
        directory = tmp_path / str(seed)
        directory.mkdir()
        life = Life(small(), directory, Random(seed), *store)
        if kill_first:
            while (killed := life.kill("driver")) is None:
                continue  # it was through before the kill came
            assert not killed.violations, killed
        fenced = life.zombie(stopped=True)
        assert not fenced.violations, fenced
        if (outcome := fenced.outcome) == "fenced":  # or it was through before it was frozen
            assert not life.look(ended=True, proven=True)
            break
    assert outcome == "fenced"


@pytest.mark.smoke
def test_a_run_is_frozen_and_fenced(tmp_path: Path) -> None:
    freeze_until_fenced(tmp_path)


@pytest.mark.thorough
def test_a_driver_is_killed_and_another_frozen_and_fenced(tmp_path: Path) -> None:
    freeze_until_fenced(tmp_path, "s3", kill_first=True)
