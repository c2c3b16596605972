"""Autonomous operators run beside their stream's region, with checkpoints, failures and resets of their own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, StateError, UsageError
from siltstone.operator import Rows, State
from siltstone.spark.operations import RunRequest, run, stream_runner, write_stream
from siltstone.spark.sources import open_input
from siltstone.store.open import Warehouse
from siltstone.stream import Autonomous
from tests.spark_runs import at, check_proven, recorded, state
from tests.spark_streams import COUNTS, DIE, STEPS, Counts

pytestmark = pytest.mark.usefixtures("spark")


class Audit(Counts):
    """Counts beside the region."""

    name = "audit"
    output = pa.schema([("key", pa.int64()), ("rows", pa.int64())])

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Count; say how often each key has come."""
        super().process(rows, state)
        return rows.keys.with_columns({"rows": state.totals.get(rows.keys)["rows"]})


class Refusing(Audit):
    """Fails at the third step, until it may go on."""

    def __init__(self, may_go_on: Path) -> None:
        super().__init__()
        self.may_go_on = may_go_on

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Count, or fail."""
        if DIE in rows.table.column("value").to_pylist() and not self.may_go_on.exists():
            raise ZeroDivisionError("not yet")
        return super().process(rows, state)


STREAM = replace(COUNTS, autonomous=[Autonomous(Audit(), checkpoint_steps=3, sink=None)])
NAME = "counts-audit"


def test_it_has_checkpoints_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    result = run(settings, STREAM, RunRequest())
    assert result.checkpoints == [1, 2, 3, 4]
    [audit] = result.autonomous
    assert (audit.stream, audit.checkpoints, audit.rows) == (NAME, [1, 2], sum(map(len, STEPS)))
    for name in ("counts", NAME):
        check_proven(settings, name)
    alone = run(at(tmp_path / "alone"), COUNTS, RunRequest())
    assert result.digest == alone.digest, "the region is as without it"
    kept = [
        state(settings, name, operator, "totals", tmp_path / name).sort_by("key")
        for name, operator in (("counts", "counts"), (NAME, "audit"))
    ]
    assert kept[0].equals(kept[1]) and len(kept[0]) == 5
    again = run(settings, STREAM, RunRequest())
    assert again.checkpoints == again.autonomous[0].checkpoints == [], "there is no more input"


def test_the_stream_goes_on_when_it_fails_and_it_resumes_from_its_own_newest_checkpoint(
    tmp_path: Path,
) -> None:
    settings = at(tmp_path / "w")
    stream = replace(COUNTS, autonomous=[Autonomous(Refusing(tmp_path / "go"), checkpoint_steps=1, sink=None)])
    with pytest.raises(StateError, match=f"{NAME}.*not yet"):
        run(settings, stream, RunRequest())
    assert recorded(settings, "counts")[2] == 4 and recorded(settings, NAME)[2] == 2
    (tmp_path / "go").touch()
    result = run(settings, stream, RunRequest())
    assert result.checkpoints == [] and result.autonomous[0].checkpoints == [3, 4]
    undisturbed = run(at(tmp_path / "undisturbed"), STREAM, RunRequest())
    assert result.autonomous[0].digest == undisturbed.autonomous[0].digest
    check_proven(settings, NAME)
    delivered = [
        pq.read_table(path)
        for path in sorted((tmp_path / "w" / "objects" / "_sinks" / NAME / "audit").rglob("*.parquet"))
    ]
    assert sum(map(len, delivered)) == 3 + 3 + 2 + 2, "a row for each key of a step, once"


def test_one_that_another_writer_takes_over_ends_alone(tmp_path: Path) -> None:
    settings = at(tmp_path / "w")

    class Overtaken(Audit):
        def region_checkpointed(self, checkpoint: int) -> None:
            with OpenWarehouse.open_existing(settings.warehouse) as place:
                place.catalog.runs.begin(NAME, "another")

    stream = replace(COUNTS, autonomous=[Autonomous(Overtaken(), checkpoint_steps=1)])
    with pytest.raises(Fenced, match=NAME):
        run(settings, stream, RunRequest())
    assert recorded(settings, "counts")[2] == 4 and recorded(settings, NAME)[2] == 1


def test_if_the_region_fails_it_ends_with_a_checkpoint(tmp_path: Path) -> None:
    settings = at(tmp_path / "w")

    class Breaking(Counts):
        def process(self, rows: Rows, state: State) -> pa.Table | None:
            raise ZeroDivisionError("at once")

    stream = replace(STREAM, operators=[Breaking()], autonomous=[Autonomous(Audit(), checkpoint_steps=100)])
    with pytest.raises(StateError, match="at once"):
        run(settings, stream, RunRequest(follow=True))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert {each.outcome for each in place.catalog.runs.list(NAME)} <= {"done", "stopped"}
    assert run(settings, STREAM, RunRequest()).autonomous[0].digest
    check_proven(settings, NAME)


def test_in_the_users_own_query_stopping_one_stops_both(spark: SparkSession, tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    rows = open_input(spark, STREAM, Warehouse.at(settings.warehouse), {}).rows
    begun = write_stream(settings, STREAM, rows, RunRequest())
    with begun:
        while not begun.last_checkpoint or begun.last_checkpoint.id < len(STEPS):
            assert begun.is_active
        begun.stop()
    assert begun.result is not None
    [audit] = begun.result.autonomous
    assert audit.stream == NAME and audit.stopped
    again = run(settings, STREAM, RunRequest())
    assert again.checkpoints == [] and again.autonomous[0].digest
    with pytest.raises(UsageError, match="autonomous operators"), stream_runner(settings, STREAM, spark):
        raise AssertionError


def test_a_source_that_fails_for_it_changes_nothing(tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    opened = []

    def once(spark: SparkSession, options: Mapping[str, str]) -> object:
        opened.append(options["directory"])
        if len(opened) > 1:
            raise ValueError("it can be read once")
        assert COUNTS.source is not None
        return COUNTS.source(spark, options)

    with pytest.raises(UsageError, match=f"source of stream {NAME} failed.*read once"):
        run(settings, replace(STREAM, source=once), RunRequest())
    assert len(set(opened)) == 1, "both read in one place"
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.streams.list() == []
