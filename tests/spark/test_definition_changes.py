"""A stream whose definition, options or source changed: its state follows, or the run is refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import SchemaConflict, UsageError
from siltstone.operator import ValueState
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, restore, run
from siltstone.stream import Stream
from tests.spark_runs import at, check_proven, recorded, state
from tests.spark_streams import COUNTS, LITTLE, Counts, Grown, source_of

pytestmark = pytest.mark.usefixtures("spark")


def test_a_new_variable_and_a_new_nullable_column(tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    run(settings, COUNTS, RunRequest(batches=2))
    grown = replace(COUNTS, operators=[Grown()])
    assert run(settings, grown, RunRequest()).checkpoints == [3, 4]
    check_proven(settings, "counts")
    totals = state(settings, "counts", "counts", "totals", tmp_path / "out").sort_by("key").to_pylist()
    assert [(r["key"], r["rows"], r["sum"], r["seen"]) for r in totals] == [
        (1, 3, 16, True),
        (2, 3, 11, True),
        (3, 1, 5, None),
        (4, 2, 1008, None),
        (9, 3, 1007, True),
    ]
    recent = pq.read_table(tmp_path / "out" / "counts" / "recent")
    assert sorted(recent.column("key").to_pylist()) == [1, 2, 9]
    assert state_rows_at(settings, 2, tmp_path / "old") == 4


class Noted(Counts):
    notes = ValueState(value={"note": pa.string()})


def test_a_variable_that_the_code_no_longer_has_is_dropped_by_saying_so(tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    run(settings, replace(COUNTS, operators=[Noted()]), RunRequest(batches=2))
    with pytest.raises(SchemaConflict, match=r"siltstone run counts --drop counts\.notes"):
        run(settings, COUNTS, RunRequest())
    assert run(settings, COUNTS, RunRequest(drop=["counts.notes"])).checkpoints == [3, 4]
    check_proven(settings, "counts")
    assert "notes" not in recorded(settings, "counts")[0].definition["operators"]["counts"]["variables"]


def state_rows_at(settings: Settings, checkpoint: int, to: Path) -> int:
    """A checkpoint from before the change still restores, as it was."""
    rows = restore(settings, "counts", at=str(checkpoint), to=to).rows
    assert pq.read_table(to / "counts" / "totals").column_names == ["key", "rows", "sum"]
    return rows


@pytest.fixture(scope="module")
def counted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """COUNTS after two batches."""
    settings = at(tmp_path_factory.mktemp("counted") / "w")
    run(settings, COUNTS, RunRequest(batches=2))
    return settings


class OtherKey(Counts):
    key = {"key": pa.string()}  # noqa: RUF012


class OtherType(Counts):
    totals = ValueState(value={"rows": pa.int64(), "sum": pa.float64()})


class OtherVariable(Counts):
    totals = None
    sums = ValueState(value={"rows": pa.int64(), "sum": pa.int64()})


@pytest.mark.parametrize(
    ("changed", "both"),
    [
        (replace(COUNTS, operators=[OtherKey()]), ("int64", "string")),
        (replace(COUNTS, operators=[OtherType()]), ("int64", "double")),
        (replace(COUNTS, operators=[OtherVariable()]), ("totals", "missing")),
        (replace(COUNTS, operators=[Aggregate("other", {"key": pa.int64()}, [Count("n")])]), ("counts", "other")),
        (replace(COUNTS, max_parallelism=16), ("8", "16")),
    ],
    ids=["key", "type", "variable", "operator", "max_parallelism"],
)
def test_a_definition_the_state_cannot_follow_is_refused(
    counted: Settings, changed: Stream, both: tuple[str, str]
) -> None:
    before = recorded(counted, "counts")
    with pytest.raises(SchemaConflict) as refused:
        run(counted, changed, RunRequest())
    message = str(refused.value)
    assert "\n" not in message and refused.value.exit_code == 2
    assert all(word in message for word in (*both, "counts")), message
    assert recorded(counted, "counts") == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"options": {"file": "3"}}, r"stream little has no source option 'file' \(it has: files\)"),
        ({"options": {"files": "3"}}, "started with other values of the source options files"),
    ],
)
def test_source_options_are_checked_before_the_stream_is_taken_over(
    changed: dict[str, dict[str, str]], said: str, little: Settings
) -> None:
    before = recorded(little, "little")
    with pytest.raises(UsageError, match=said):
        run(little, LITTLE, RunRequest(**changed))
    assert recorded(little, "little") == before


@pytest.fixture(scope="module")
def little(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """LITTLE, registered and begun."""
    settings = at(tmp_path_factory.mktemp("little") / "w")
    run(settings, LITTLE, RunRequest(batches=1))
    yield settings


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            lambda spark, _: spark.range(3),
            r"source of stream counts is not a stream: make it with spark.readStream",
        ),
        (lambda spark, _: 1 / 0, r"the source of stream counts failed: ZeroDivisionError: division by zero"),
        (
            source_of([pa.table({"key": [1], "amount": [2]})]),
            r"operator counts reads value, which source does not have",
        ),
    ],
)
def test_a_source_that_cannot_be_read_changes_nothing(
    counted: Settings, source: Callable[..., DataFrame], said: str, tmp_path: Path
) -> None:
    for settings in (counted, at(tmp_path / "new")):
        known = settings is counted
        if known and "value" in said:
            continue  # its files lie where those of the other source lie
        before = recorded(counted, "counts")
        with pytest.raises(UsageError, match=said):
            run(settings, replace(COUNTS, source=source), RunRequest())
        with OpenWarehouse.open_existing(settings.warehouse) as place:
            assert known is any(s.name == "counts" for s in place.catalog.streams.list())
        assert recorded(counted, "counts") == before
