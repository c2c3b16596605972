"""Where a stream begins does not depend on when it is stopped: sources that begin at "latest" are asked once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, StateError
from siltstone.format.manifests import read_manifests
from siltstone.restore.table import read_table
from siltstone.run.region import ConsistentRegion
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, open_region, replay, run, stream_runner
from siltstone.spark.runner import StreamRunner
from siltstone.spark.running_query import run_stream
from siltstone.spark.sources import open_input
from siltstone.stream import Stream
from tests.spark.arriving import MESSAGES, RATE
from tests.spark.latest_source import arrive, calls

pytestmark = pytest.mark.usefixtures("spark")


@contextmanager
def stopping() -> Iterator[None]:
    """Streams stop in a step before anything of it is processed, after Spark has planned its batch."""

    def stop(*_: object, **__: object) -> None:
        raise StateError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsistentRegion, "begin_step", stop)
        yield


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(warehouse=str(tmp_path / "w"), parallelism=1)


@pytest.fixture
def source(settings: Settings) -> Path:
    directory = Path(settings.warehouse) / "source" / "messages"
    arrive(directory, 5)
    return directory


def stopped(settings: Settings, stream: Stream) -> None:
    with stopping(), pytest.raises(StateError, match="stopped"):
        run(settings, stream, RunRequest())


def totals_of(settings: Settings, stream: str) -> list[tuple[int, int, int]]:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        newest, store = place.catalog.checkpoints.last_id(stream), place.warehouse.store
        manifests = read_manifests(store, place.catalog.chains.list_manifests(stream, newest), stream)
        rows = read_table(store, manifests, "totals", "totals").to_table().sort_by("key").to_pylist()
    return [(row["key"], row["n"], row["sum"]) for row in rows]


def counted(*numbers: int) -> list[tuple[int, int, int]]:
    """What `totals` has of these messages."""
    of = [[n for n in numbers if n % 2 == key] for key in (0, 1)]
    return [(key, len(part), sum(part)) for key, part in enumerate(of) if part]


def test_input_before_the_first_checkpoint_is_not_lost_with_a_source_that_begins_at_latest(
    settings: Settings, source: Path
) -> None:
    stopped(settings, MESSAGES)
    assert calls(source, "initial") == [5]
    for messages in (8, 11):
        arrive(source, messages)
        stopped(settings, MESSAGES)
    arrive(source, 12)
    run(settings, MESSAGES, RunRequest())
    assert calls(source, "initial") == [5], "it is asked once"
    assert totals_of(settings, "messages") == counted(*range(5, 12))
    arrive(source, 15)
    run(settings, MESSAGES, RunRequest())
    assert totals_of(settings, "messages") == counted(*range(5, 15))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert [s.batch_id for s in place.catalog.input_log.list("messages", 9)] == [0, 1]


def test_a_replay_and_a_rollback_to_nothing_begin_where_the_stream_began(settings: Settings, source: Path) -> None:
    run(settings, MESSAGES, RunRequest())
    for messages in (8, 12):
        arrive(source, messages)
        run(settings, MESSAGES, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        digests = [c.digest for c in place.catalog.checkpoints.list("messages")]
    arrive(source, 20)
    replayed = replay(settings, MESSAGES)
    assert (replayed.since, replayed.rows, replayed.proven, replayed.compared) == (0, 7, True, 3)
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        place.catalog.forks.create("messages", "again", 2)
        place.catalog.rollbacks.roll_back(
            "messages", place.catalog.runs.begin("messages", "a test"), 0, "a test", "a test"
        )
    run(settings, MESSAGES, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert [c.digest for c in place.catalog.checkpoints.list("messages")][:3] == digests
        place.catalog.rollbacks.roll_back("again", place.catalog.runs.begin("again", "a test"), 0, "a test", "a test")
    assert calls(source, "initial") == [5]
    assert totals_of(settings, "messages") == counted(*range(5, 20))
    run(settings, MESSAGES.as_fork("again", "messages"), RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert [c.digest for c in place.catalog.checkpoints.list("again")][:2] == digests[:2]
    assert totals_of(settings, "again") == counted(*range(5, 20))


def test_a_rate_source_goes_on_from_when_it_first_began(settings: Settings) -> None:
    stopped(settings, RATE)
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        begun = place.catalog.input_log.get_position("rate", 0).beginning
        assert begun is not None and begun.sources.startswith('{"0": {"0": "v1')
    time.sleep(1.1)
    run(settings, RATE, RunRequest(batches=1))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.input_log.get_position("rate", 0).beginning == begun
        [step] = place.catalog.input_log.list("rate", 1)
        seconds = int(step.offsets.splitlines()[-1])
    assert seconds >= 1, "what came while the stream was stopped is part of the first batch"
    rows = totals_of(settings, "rate")
    assert sum(n for _, n, _ in rows) == 10 * seconds


def test_a_users_own_query_begins_where_its_first_one_did(
    spark: SparkSession, settings: Settings, source: Path
) -> None:
    def query() -> None:
        rows = open_input(spark, MESSAGES, place.warehouse, {}).rows
        with stream_runner(settings, MESSAGES, spark) as runner:
            writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
            writer.trigger(availableNow=True).start().awaitTermination()

    with OpenWarehouse.open_writable(settings.warehouse) as place:
        with stopping(), pytest.raises(Exception, match="stopped"):
            query()
        arrive(source, 9)
        query()
    assert totals_of(settings, "messages") == counted(*range(5, 9))


def test_a_fenced_runner_records_no_beginning_and_the_newer_one_does(
    spark: SparkSession, settings: Settings, source: Path
) -> None:
    with (
        OpenWarehouse.open_writable(settings.warehouse) as place,
        OpenWarehouse.open_writable(settings.warehouse) as other,
    ):
        rows = open_input(spark, MESSAGES, place.warehouse, {}).rows
        older = StreamRunner(spark, open_region(settings, MESSAGES, place, {}, 1))
        newer = StreamRunner(spark, open_region(settings, MESSAGES, other, {}, 1), max_steps=1)
        with pytest.raises(Fenced):
            run_stream(older, rows)
        assert place.catalog.input_log.get_position("messages", 0).beginning is None
        arrive(source, 7)
        run_stream(newer, rows)
        begun = place.catalog.input_log.get_position("messages", 0).beginning
        assert begun is not None and begun.offsets.endswith('{"next": 7}')


def test_nothing_is_processed_if_the_beginning_cannot_be_recorded(
    spark: SparkSession, settings: Settings, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise StateError("the catalog is away")

    with OpenWarehouse.open_writable(settings.warehouse) as place:
        rows = open_input(spark, MESSAGES, place.warehouse, {}).rows
        runner = StreamRunner(spark, open_region(settings, MESSAGES, place, {}, 1))
        monkeypatch.setattr(runner.region, "record_beginning", away)
        with pytest.raises(StateError, match="the catalog is away"):
            run_stream(runner, rows)
        assert runner.region.step == 0, "no step was begun"
