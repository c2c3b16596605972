"""A few of the fault campaign's rounds and kills (`make fault` does many): see `campaign`.

What needs but one kind of store happens on a file system; all shapes on all of them are for `make fault`, and processes
of Spark for tests/system/test_killed_runs.py.
"""

from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.fault.commands import NAME
from tests.fault.disk import small_disk
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
    "s3": [("kill", "run"), ("kill", "materialize"), ("lose", "run")],
    "redis": [("kill", "run"), ("zombie", "truncate"), ("lose", "run")],
    "rocksdb": [("kill", "run"), ("two", "sweep")],
}
CATALOGS = {"s3": "postgresql", "redis": "postgresql"}
"""store -> the catalog beside it; SQLite beside others"""


def hurt(rounds: Rounds, shape: str, kind: str) -> Round:
    """A round of that shape; a kill that came too late is tried again."""
    while True:
        played = play(rounds, shape, kind)
        assert not played.violations, played
        if shape not in ("kill", "zombie") or played.kills[kind] or played.zombies[kind]:
            return played


@pytest.mark.parametrize(
    "store", [pytest.param(store, marks=pytest.mark.smoke if store == "s3" else ()) for store in WAREHOUSES]
)
def test_processes_of_every_kind_are_hurt_and_every_promise_holds(store: str, tmp_path: Path) -> None:
    chance = Random(f"a few on {store}")
    with (
        small_disk(tmp_path / "disk") as disk,
        closing(Rounds(disk, chance, store, {}, CATALOGS.get(store, "sqlite"))) as rounds,
    ):
        begun = Round("start", store, ("run",))
        rounds.strict(begun, "run", NAME, ("--batches", "3", "--parallelism", "2"))
        for shape, kind in PLAN[store]:
            hurt(rounds, shape, kind)
        rounds.settle(begun)
        assert not begun.violations
