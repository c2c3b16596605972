"""Why a change between two runs fails, without Spark: what is behind it, wherever it comes up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkException

from siltstone.catalog.records.runs import Runs
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, Fenced, StateError, Unreachable
from siltstone.settings import Settings
from siltstone.spark.operations import holding
from siltstone.spark.operations.changing import hold_epoch_for_change
from siltstone.spark.runner import StreamRunner
from tests.orphans import new_run, write
from tests.sums import NAME, STREAM


@pytest.fixture
def change(place: OpenWarehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A change of a stream, in which something happens before its runner is there, or after that."""
    write(place)
    monkeypatch.setattr(holding, "cores", lambda _: 2)
    spark = Mock(sparkContext=Mock(master="local[2]"))

    def perform(before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None) -> None:
        def make(*args: Any, **named: Any) -> StreamRunner:
            before()
            return StreamRunner(*args, **named)

        monkeypatch.setattr(holding, "StreamRunner", make)
        with hold_epoch_for_change(Settings(warehouse=str(tmp_path / "w")), STREAM, place, spark, {}):
            after()

    return perform


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_newer_writer_is_why_a_change_fails(place: OpenWarehouse, change: Callable[..., None], when: str) -> None:
    def fail() -> None:
        new_run(place)
        raise StateError("the sink of by_key failed", advice="run it again")

    with pytest.raises(Fenced, match="another run has taken over"):
        change(**{when: fail})


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_of_spark_is_said_to_have_changed_nothing(
    place: OpenWarehouse, change: Callable[..., None], when: str
) -> None:
    """Who edits would take it for one of the rows given."""

    def fail() -> None:
        raise PySparkException("no worker begins")

    with pytest.raises(StateError, match="stream sums: step 5 failed, nothing was changed: no worker begins"):
        change(**{when: fail})
    assert [run.outcome for run in place.catalog.runs.list(NAME)][-1] == "failed"


@pytest.mark.parametrize("when", ["before", "after"])
def test_damage_is_told_though_nobody_can_say_whether_a_newer_writer_caused_it(
    change: Callable[..., None], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise Unreachable("the catalog is away")

    def fail() -> None:
        monkeypatch.setattr(Runs, "check_epoch", away)
        raise CorruptObject("an object is damaged")

    with pytest.raises(CorruptObject, match="an object is damaged"):
        change(**{when: fail})
