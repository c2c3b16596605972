"""A few of the fault campaign's rounds and kills (`make fault` does many): see `campaign`.

What needs but one kind of store happens on a file system; all shapes on all of them are for `make fault`.
"""

from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.fault.disk import small_disk
from tests.fault.life import Life
from tests.fault.reference import small
from tests.fault.rounds import Round, Rounds
from tests.fault.shapes import play
from tests.fault.warehouses import WAREHOUSES

PLAN = {
    "filesystem": [
        ("kill", "run"),
        ("fault", "run"),
        ("wrong", "materialize"),
        ("two", "run"),
        ("kill", "truncate"),
        ("takeover", "run"),
        ("zombie", "materialize"),
        ("damage", "verify"),
    ],
    "s3": [("kill", "run"), ("kill", "materialize")],
    "redis": [("kill", "run"), ("zombie", "truncate")],
    "rocksdb": [("kill", "run"), ("two", "sweep")],
}


def hurt(rounds: Rounds, shape: str, kind: str) -> Round:
    """A round of that shape; a kill that came too late is tried again."""
    while True:
        played = play(rounds, shape, kind)
        assert not played.violations, played
        if shape not in ("kill", "zombie") or played.kills[kind] or played.zombies[kind]:
            return played


@pytest.mark.parametrize("store", WAREHOUSES)
def test_processes_of_every_kind_are_hurt_and_every_promise_holds(store: str, tmp_path: Path) -> None:
    chance = Random(f"a few on {store}")
    with small_disk(tmp_path / "disk") as disk, closing(Rounds(disk, chance, store, {})) as rounds:
        begun = Round("start", store, ("run",))
        rounds.strict(begun, "run", small().stream.name, ("--batches", "3", "--parallelism", "2"))
        for shape, kind in PLAN[store]:
            hurt(rounds, shape, kind)
        rounds.settle(begun)
        assert not begun.violations


def freeze_until_fenced(tmp_path: Path, *store: str, kill_first: bool = False) -> None:
    """Freeze a run under Spark amid its work, and let another take over; one that is through before is begun anew."""
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


def test_a_run_under_spark_is_frozen_and_fenced(tmp_path: Path) -> None:
    """A killed one goes on in tests/spark/test_background_spark.py."""
    freeze_until_fenced(tmp_path)


@pytest.mark.thorough
def test_a_driver_under_spark_is_killed_and_another_frozen_and_fenced(tmp_path: Path) -> None:
    freeze_until_fenced(tmp_path, "s3", kill_first=True)
