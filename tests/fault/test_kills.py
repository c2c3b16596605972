"""A handful of the fault campaign's kills and one take-over (`make fault` does many); see `campaign`."""

from pathlib import Path
from random import Random

from tests.fault.life import Life
from tests.fault.reference import flights, small


def test_a_small_stream_killed_and_taken_over_ends_as_if_undisturbed(tmp_path: Path) -> None:
    life = Life(small(), tmp_path, Random(5))
    for kind in ("jvm", "worker"):  # drivers are killed on other kinds of warehouses (test_store_kills)
        while (hurt := life.kill(kind)) is None:
            continue  # the run was through before the kill came
        assert not hurt.violations, hurt
    fenced = life.zombie(stopped=True)
    assert not fenced.violations, fenced
    assert fenced.outcome == "fenced"
    assert not life.finish()


def test_flights_killed_end_as_pandas_says(tmp_path: Path) -> None:
    life = Life(flights(), tmp_path, Random(6))
    hurt = life.kill("tree")
    assert hurt is not None and not hurt.violations, hurt
    assert not life.finish()
