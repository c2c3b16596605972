"""The stream runner inside Spark: runs that fail or are fenced, and what it does at a checkpoint."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.inspect import show_checkpoint
from siltstone.chains.policies import PolicyOptions
from siltstone.errors import BadRow, Fenced, StateError
from siltstone.model import Form
from siltstone.spark.operations import RunRequest, open_region, run
from siltstone.spark.runner import StreamRunner
from siltstone.spark.running_query import run_stream
from siltstone.spark.sources import open_input
from tests.spark_runs import at, check_proven, recorded
from tests.spark_streams import BREAKING, COUNTS, NOTICING, NULLS

pytestmark = pytest.mark.usefixtures("spark")


def test_a_runner_that_failed_takes_no_further_batch(spark: SparkSession, tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    with OpenWarehouse.open_writable(settings.warehouse) as place:
        runner = StreamRunner(spark, open_region(settings, BREAKING, place, {}, 2))
        rows = open_input(spark, BREAKING, place.warehouse, {}).rows
        for _ in range(2):
            with pytest.raises(StateError, match=r"in step 2: operator counts: ZeroDivisionError: a value is neg"):
                run_stream(runner, rows)
            assert (place.catalog.checkpoints.last_id("breaking"), runner.region.step) == (1, 2)


def test_a_second_writer_fences_the_first(spark: SparkSession, tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    with (
        OpenWarehouse.open_writable(settings.warehouse) as place,
        OpenWarehouse.open_writable(settings.warehouse) as other,
    ):
        rows = open_input(spark, COUNTS, place.warehouse, {}).rows
        older = StreamRunner(spark, open_region(settings, COUNTS, place, {}, 2))
        newer = StreamRunner(spark, open_region(settings, COUNTS, other, {}, 2), max_steps=2)
        with pytest.raises(Fenced, match="epoch 1 of stream counts was fenced by epoch 2"):
            run_stream(older, rows)
        assert place.catalog.checkpoints.last_id("counts") == 0
        run_stream(newer, rows)
        assert [c.epoch for c in place.catalog.checkpoints.list("counts")] == [2, 2]
    check_proven(settings, "counts")


def test_operators_hear_of_a_checkpoint_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", str(tmp_path / "w"))
    operator = NOTICING.operators[0]
    operator.seen.clear()
    run(at(tmp_path / "w"), NOTICING, RunRequest(batches=2))
    assert operator.seen == [(1, 1), (2, 2)]


def test_without_deltas_nothing_is_tracked(tmp_path: Path) -> None:
    settings = at(tmp_path / "w", policy_options=PolicyOptions(d_max=0))
    run(settings, COUNTS, RunRequest(batches=3))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert [(c.forms, c.d) for c in place.catalog.checkpoints.list("counts")] == [
            ({"counts": Form.BASE}, {"counts": 0})
        ] * 3
        handles = show_checkpoint(place.catalog, place.warehouse.store, "counts", "3")["handles"]
        assert {(h["form"], h["previous"]) for h in handles} == {("base", 0)}
        region = open_region(settings, COUNTS, place, {}, 2)
        assert region.begin_step()["counts"].tracked == frozenset()
        region.close("done")


def test_a_null_key_stops_the_stream_before_anything_of_its_batch_shows(tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    with pytest.raises(BadRow, match=r"operator counts: key column key is null in 1 of 2 rows") as stopped:
        run(settings, NULLS, RunRequest())
    assert stopped.value.exit_code == 2
    assert recorded(settings, "nulls")[2] == 1
    check_proven(settings, "nulls")
