"""One kill -9 of a driver for every kind of store elsewhere, and the loss of a machine; `make fault` does more."""

import shutil
import signal
import time
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.place import Place
from tests.fault.life import ORPHANS_S, STEP_S, Life
from tests.fault.processes import send
from tests.fault.reference import small
from tests.fault.small_stream import SMALL
from tests.fault.warehouses import WAREHOUSES
from tests.spark.test_cli import siltstone

ELSEWHERE = [kind for kind in WAREHOUSES if kind != "filesystem"]

MORE = 4
"""steps after the kill: a base or a delta of each operator, and a restore of all that was there"""


@pytest.fixture(autouse=True)
def project(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not to be killed runs in this process, on its one JVM; nothing lands in the user's home."""
    (tmp_path / "siltstone.toml").write_text('streams = ["tests.fault.small_stream"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_killed_driver_is_resumed_and_all_is_as_on_a_filesystem(kind: str, tmp_path: Path) -> None:
    reference, chance = small(), Random(f"killed {kind}")
    life = Life(reference, tmp_path, chance, kind)
    run = life.start(parallelism=chance.choice([1, 2, 3]))
    enough = chance.randint(2, 5)
    try:
        assert run.until(lambda: life.completed >= enough), run.wait(1).said
        time.sleep(chance.random() * STEP_S / 2)
        send([run.process.pid], signal.SIGKILL)
        went_on(life)
        assert run.gone(ORPHANS_S)
    finally:
        run.kill_all()


def went_on(life: Life) -> None:
    """The next run, and every proof, in this process."""
    reference = life.reference
    assert life.step < reference.steps and life.look() == []
    completed = range(1, life.completed + 1)
    before = siltstone("verify", SMALL.name, "--all", "--warehouse", life.url, "--json").json
    assert (before["proven"], before["failed"]) == ([*completed], [])
    rest = siltstone("run", SMALL.name, "--warehouse", life.url, "--batches", MORE, "--json").json
    assert rest["checkpoints"] == [*range(completed.stop, completed.stop + MORE)]
    assert rest["digest"] == reference.digests[life.step - 1]
    restored = siltstone("restore", SMALL.name, "--warehouse", life.url, "--to", "out", "--json").json
    assert (restored["digest"], restored["proven"]) == (rest["digest"], True)
    after = siltstone("verify", SMALL.name, "--all", "--warehouse", life.url, "--json").json
    assert (after["proven"], after["failed"]) == ([*completed, *rest["checkpoints"]], [])
    assert life.look(ended=True) == []


@pytest.mark.parametrize("kind", ["s3"])
def test_another_machine_goes_on_with_what_the_store_and_the_catalog_hold(kind: str, tmp_path: Path) -> None:
    """All that the first machine kept to itself is gone: working state, Spark's record, what the source prepared."""
    reference, url = small(), WAREHOUSES[kind](tmp_path / "machine")
    where = ["--warehouse", url, "--catalog", f"sqlite:///{tmp_path}/catalog.db"]
    for machine, batches in enumerate((5, 4)):
        done = siltstone("run", SMALL.name, *where, "--batches", batches, "--parallelism", 2, "--json").json
        assert len(done["checkpoints"]) == batches
        assert done["digest"] == reference.digests[done["checkpoints"][-1] - 1]
        assert (tmp_path / "machine" / "work").is_dir() and not (tmp_path / "machine" / "catalog.db").exists()
        if machine == 0:
            shutil.rmtree(tmp_path / "machine")
    with Place.existing(url, where[-1]) as place:
        assert [c.digest for c in place.catalog.checkpoints(SMALL.name)] == list(reference.digests[:9])
    shutil.rmtree(tmp_path / "machine")
    proven = siltstone("verify", SMALL.name, *where, "--all", "--json").json
    assert (proven["proven"], proven["failed"]) == ([*range(1, 10)], [])
    assert siltstone("restore", SMALL.name, *where, "--at", 7, "--json").json["digest"] == reference.digests[6]
