"""What a stream asks of its sources: that recorded input can be read again, wherever the warehouse lies by then."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from siltstone.catalog.records.source_entries import decode_offsets
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.retention.deletion import delete_checkpoints
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, replay, run, stream_runner
from siltstone.spark.queries import check_source
from siltstone.spark.source_log import COMPACT_INTERVAL
from siltstone.stream import DIRECTORY
from tests.examples import usually
from tests.spark.arriving import MESSAGES
from tests.spark.latest_source import arrive, calls, keep_arriving
from tests.spark_streams import COUNTS, STEPS, read_files, source_of, write_files

pytestmark = pytest.mark.usefixtures("spark")


def at(path: Path) -> Settings:
    return Settings(warehouse=str(path), parallelism=1)


def newest(settings: Settings, stream: str) -> tuple[int, str]:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        found = place.catalog.checkpoints.get_latest(stream)
        return found.id, found.digest


def test_a_warehouse_that_was_moved_reads_no_file_twice_and_none_is_lost(tmp_path: Path) -> None:
    """Its own source directory lies in it; the one that stays is what it comes to."""
    stays, moves, moved = at(tmp_path / "stays"), tmp_path / "here", tmp_path / "elsewhere" / "moved"
    run(stays, COUNTS, RunRequest())
    assert run(at(moves), COUNTS, RunRequest(batches=2)).checkpoints == [1, 2]
    moved.parent.mkdir()
    shutil.move(moves, moved)
    result = run(at(moved), COUNTS, RunRequest())
    assert (result.checkpoints, newest(at(moved), "counts")) == ([3, 4], newest(stays, "counts"))
    write_files(moved / "source" / "counts", [*STEPS, STEPS[0]])
    shutil.move(moved, moves)
    assert replay(at(moves), COUNTS).proven
    result = run(at(moves), COUNTS, RunRequest())
    assert (result.checkpoints, result.rows) == ([5], STEPS[0].num_rows)


OFFSET_LOG = "spark.sql.streaming.offsetLog.formatVersion"
SOURCE_NAMES = "spark.sql.streaming.queryEvolution.enableSourceEvolution"


@dataclass(frozen=True)
class NamedFiles:
    """The files of COUNTS' source in two streams with names, if Spark has them: even ones and odd ones."""

    named: bool

    def __call__(self, spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        directory = Path(options[DIRECTORY])
        for name, tables in (("even", 2 * STEPS[::2]), ("odd", 2 * STEPS[1::2])):
            write_files(directory / name, tables)
        readers = {name: spark.readStream for name in ("odd", "even")}
        if self.named:
            readers = {name: reader.name(name) for name, reader in readers.items()}
        odd, even = (
            reader.schema(from_arrow_schema(STEPS[0].schema))
            .option("maxFilesPerTrigger", 1)
            .parquet((directory / name).absolute().as_uri())
            for name, reader in readers.items()
        )
        return odd.unionByName(even)


@pytest.mark.parametrize(
    ("form", "interval"), usually(product(["v1", "v2", "named"], ["1", "3"]), ("v1", "1"), ("v2", "3"), ("named", "1"))
)
def test_each_form_of_sparks_record_is_written_again_at_each_start(
    form: str, interval: str, tmp_path: Path, spark: SparkSession, with_settings: Callable[[dict[str, str]], None]
) -> None:
    if form != "v1" and not hasattr(spark.readStream, "name"):
        pytest.skip("this Spark has neither version 2 nor names of sources, which came with 4.2")
    whole, settings = at(tmp_path / "whole"), at(tmp_path / "w")
    run(whole, replace(COUNTS, source=NamedFiles(named=False)), RunRequest())
    with_settings({COMPACT_INTERVAL: interval})
    second = {OFFSET_LOG: "2"}  # in which alone 4.2 records names
    with_settings({"v1": {}, "v2": second, "named": {SOURCE_NAMES: "true", **second}}[form])
    stream = replace(COUNTS, source=NamedFiles(named=form == "named"))
    checkpoints = [run(settings, stream, RunRequest(batches=1)).checkpoints for _ in range(len(STEPS))]
    assert checkpoints == [[n + 1] for n in range(len(STEPS))]
    assert newest(settings, "counts") == newest(whole, "counts")
    assert replay(settings, stream).proven
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        step = place.catalog.input_log.list("counts", 1)[0]
    names = {"named": {"odd", "even"}, "v1": {"source", "source.1"}}.get(form, {"0", "1"})
    assert set(decode_offsets(step.offsets)) == names


def test_after_a_pruning_of_the_input_log_no_file_is_read_again(tmp_path: Path) -> None:
    settings, whole = at(tmp_path / "w"), at(tmp_path / "whole")
    tables = [STEPS[n % 4] for n in range(14)]
    stream = replace(COUNTS, source=source_of(tables[:12]))
    run(settings, stream, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        delete_checkpoints(place, "counts", range(1, 12))
        epoch = place.catalog.streams.get("counts").epoch
        assert place.catalog.input_log.prune("counts", epoch, at_least=1) == 10
    run(whole, replace(COUNTS, source=source_of(tables)), RunRequest())
    result = run(settings, replace(COUNTS, source=source_of(tables)), RunRequest())
    assert (result.checkpoints, newest(settings, "counts")) == ([13, 14], newest(whole, "counts"))
    replayed = replay(settings, stream)
    assert (replayed.since, replayed.proven) == (12, True) and "retention.input_log keeps more" in replayed.why


def cleaning(value: str) -> Callable[[SparkSession, dict[str, str]], DataFrame]:
    """The files of COUNTS, by a source that takes away what it has read."""

    def source(spark: SparkSession, options: dict[str, str]) -> DataFrame:
        directory = Path(options[DIRECTORY])
        write_files(directory, STEPS)
        schema = read_files(spark, directory, STEPS[0].schema).schema
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).option("cleansource", value)
        return reader.option("sourceArchiveDir", str(directory.parent / "archive")).parquet(directory.as_uri())

    return source


@pytest.mark.parametrize("value", ["delete", "ARCHIVE"])
def test_a_source_that_takes_away_what_it_has_read_is_refused(spark: SparkSession, value: str, tmp_path: Path) -> None:
    settings, stream = at(tmp_path / "w"), replace(COUNTS, source=cleaning(value))
    with pytest.raises(
        UsageError, match=rf"option cleanSource={value} .* a rollback or a replay reads them again: leave it"
    ):
        run(settings, stream, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.streams.list() == [], "before the stream is taken over"
    rows = cleaning(value)(spark, {DIRECTORY: str(tmp_path / "files")})
    for followed in (True, False):
        with stream_runner(settings, replace(COUNTS, source=None), spark) as runner:
            writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
            with pytest.raises(Exception, match=r"cleanSource|foreachBatch"):
                if followed:
                    runner.follow_log(rows)
                writer.trigger(availableNow=True).start().awaitTermination()
            assert followed or (isinstance(runner.failure, UsageError) and "cleanSource" in str(runner.failure))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.checkpoints.last_id("counts") == 0
    assert len(list((tmp_path / "files").glob("*.parquet"))) == len(STEPS)


def test_a_source_that_is_told_to_take_nothing_away_is_fine(tmp_path: Path) -> None:
    assert run(at(tmp_path / "w"), replace(COUNTS, source=cleaning("off")), RunRequest(batches=1)).checkpoints == [1]


def losing(version: int, value: str) -> Callable[[SparkSession, dict[str, str]], DataFrame]:
    """A source of an interface of Spark's, with the option by which Kafka and Delta pass over input that is gone."""

    def source(spark: SparkSession, options: dict[str, str]) -> DataFrame:
        if version == 2:
            rows = spark.readStream.format("rate").option("failondataloss", value).load()
            return rows.selectExpr("value % 2 as key", "value")
        directory = Path(options[DIRECTORY])
        write_files(directory, STEPS)
        schema = read_files(spark, directory, STEPS[0].schema).schema
        reader = spark.readStream.schema(schema).option("failOnDataLoss", value)
        return reader.parquet(directory.as_uri())

    return source


@pytest.mark.parametrize("version", [1, 2])
def test_a_source_that_passes_over_input_that_is_gone_is_refused(
    version: int, spark: SparkSession, tmp_path: Path
) -> None:
    settings, stream = at(tmp_path / "w"), replace(COUNTS, source=losing(version, "False"))
    refused = r"option failOnDataLoss=false .* a rollback or a replay would make other rows"
    with pytest.raises(UsageError, match=refused):
        run(settings, stream, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.streams.list() == [], "before the stream is taken over"
    rows = losing(version, "false")(spark, {DIRECTORY: str(tmp_path / "files")})
    with stream_runner(settings, replace(COUNTS, source=None), spark) as runner:
        writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
        with pytest.raises(Exception, match=r"failOnDataLoss|foreachBatch"):
            writer.trigger(processingTime="0 seconds").start().awaitTermination()
        assert isinstance(runner.failure, UsageError) and "failOnDataLoss" in str(runner.failure)
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.checkpoints.last_id("counts") == 0
    check_source(losing(version, "true")(spark, {DIRECTORY: str(tmp_path / "files")}))


@pytest.mark.parametrize(("checkpoint_steps", "ahead"), [(1, 0), (3, 2)])
def test_spark_calls_commit_of_a_source_when_it_plans_the_next_batch(
    checkpoint_steps: int, ahead: int, tmp_path: Path
) -> None:
    """So with a checkpoint a step never before its checkpoint; with more steps, so many batches before it, less one."""
    settings = at(tmp_path / "w").model_copy(update={"checkpoint_steps": checkpoint_steps})
    source = Path(settings.warehouse) / "source" / "messages"
    arrive(source, 0)
    keep_arriving(source)
    told: list[int] = []
    request = RunRequest(batches=6, follow=True)
    run(settings, MESSAGES, request, lambda _: told.append(len(calls(source, "commit"))))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        last = [
            place.catalog.input_log.list("messages", c.id)[-1].batch_id
            for c in place.catalog.checkpoints.list("messages")
        ]
    assert last == list(range(checkpoint_steps - 1, 6, checkpoint_steps))
    # Of the batches of a checkpoint all but the last have been committed when it completes.
    assert told == last
    completed_before = [batch + 1 for batch in [-1, *last[:-1]]]
    assert [commits - before for commits, before in zip(told, completed_before, strict=True)] == [ahead] * len(last)
