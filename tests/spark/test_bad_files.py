"""Files that Spark cannot read as dead letters: once, whole, and left out again whenever the step comes again."""

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.records.source_entries import decode_sources, list_files
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError
from siltstone.operator import SOURCE
from siltstone.retention.deletion import delete_checkpoints
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, recover, replay, run, verify
from siltstone.spark.versions import has_python_sources
from siltstone.stream import DEAD_LETTERS, Stream
from tests.delta_run import read_sink
from tests.examples import long_form
from tests.spark.json_files import json_source
from tests.spark.test_changed_input import Last, damage, totals
from tests.spark_runs import at, digests, state

FILES = 6


@pytest.fixture
def _names_files(spark: SparkSession) -> None:
    """What leaves a file out needs its name."""
    if not has_python_sources(spark):
        pytest.skip("before 4.0, Spark names the file of some failures only")


def put(directory: Path, number: int, text: bytes | None = None, name: str = "{}.json.gz") -> Path:
    """A file of rows, or of other bytes; they are read in the order of their numbers."""
    directory.mkdir(exist_ok=True)
    path = directory / name.format(number)
    whole = gzip.compress(b"".join(b'{"k":"k%d","v":%d}\n' % (n % 3, number) for n in range(5000)))
    path.write_bytes(whole if text is None else text)
    os.utime(path, (1_600_000_000 + number,) * 2)
    return path


def cut(directory: Path, number: int, **options: Any) -> Path:
    """A file of which half the rows can be read."""
    path = put(directory, number, **options)
    text = path.read_bytes()
    return put(directory, number, text[: len(text) // 2], **options)


def stream_of(directory: Path, at_once: int = 1, **options: Any) -> Stream:
    sinks = dict.fromkeys(["tot", "last"])
    source = json_source(directory, "k string, v long", at_once=at_once)
    return Stream("b", source, [totals(), Last()], sinks=sinks, max_parallelism=8, on_bad_file="dead-letter", **options)


def settings_at(path: Path, **options: Any) -> Settings:
    return at(path, recovery={"reset_delay_s": 0.01, "resets": 0}, **options)


def letters(settings: Settings) -> list[dict[str, Any]]:
    rows = read_sink(settings.warehouse, "b", DEAD_LETTERS).to_pylist()
    return sorted(rows, key=lambda row: (row["step"], row["row"]))


def files_read(settings: Settings) -> list[str]:
    """The names of the files that steps read, in order."""
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        steps = place.catalog.input_log.list("b", place.catalog.checkpoints.last_id("b"))
    texts = [text for step in steps for entries in decode_sources(step.sources).values() for text in entries.values()]
    return [Path(file.path).name for text in texts for file in list_files(text) if file.unread is None]


@pytest.mark.usefixtures("_names_files")
@pytest.mark.parametrize(
    ("bad", "at_once"), [long_form([0], 1), long_form([5], 4), ([0, 1, 2, 3, 4, 5], 1), ([1, 2, 3], 4)]
)
def test_the_stream_goes_on_without_them(tmp_path: Path, spark: SparkSession, bad: list[int], at_once: int) -> None:
    settings, directory = settings_at(tmp_path / "w"), tmp_path / "in"
    for number in range(FILES):
        (cut if number in bad else put)(directory, number)
    result = run(settings, stream_of(directory, at_once), RunRequest())
    good = [number for number in range(FILES) if number not in bad]
    assert result.rows == 5000 * len(good) and result.dead_letters == {"tot": len(bad)}
    found = letters(settings)
    assert [json.loads(row["row"])["file"] for row in found] == [(directory / f"{n}.json.gz").as_uri() for n in bad]
    assert {row["operator"] for row in found} == {SOURCE}
    assert all("EOFException: Unexpected end of input stream" in row["reason"] for row in found)
    batches = [json.loads(row["offsets"])["batch"] for row in found]
    assert batches == [number // at_once for number in bad]
    assert files_read(settings) == [f"{n}.json.gz" for n in good]
    # Nothing is read again, and what comes later is.
    put(directory, 9)
    again = run(settings, stream_of(directory, at_once), RunRequest())
    assert again.rows == 5000 and not again.dead_letters and again.resets == 0
    assert len(letters(settings)) == len(bad)
    assert replay(settings, stream_of(directory, at_once)).proven
    assert verify(settings, "b", every=True).proven


def twelve(directory: Path) -> list[int]:
    """More files than Spark keeps in files of its log of their own; those that are bad are returned."""
    bad = [0, 8, 9, 10]
    for number in range(12):
        (cut if number in bad else put)(directory, number, name="a {} b%20c.json.gz")
    return bad


@pytest.mark.usefixtures("_names_files")
def test_spark_joins_its_log_and_they_stay_left_out_after_a_rollback_and_a_pruning(tmp_path: Path) -> None:
    settings, directory = settings_at(tmp_path / "w"), tmp_path / "in"
    bad, stream = twelve(directory), stream_of(directory)
    result = run(settings, stream, RunRequest())
    assert result.dead_letters == {"tot": 4} and result.rows == 8 * 5000 and len(result.checkpoints) == 12
    before = digests(settings, "b"), letters(settings), files_read(settings)
    assert len(before[2]) == 8
    # A file that nobody reads may go, or be whole again.
    (directory / "a 0 b%20c.json.gz").unlink()
    put(directory, 9, name="a {} b%20c.json.gz")
    damage(settings, 12, stream="b")
    recover(settings, "b")
    rolled_back = run(settings, stream, RunRequest())
    assert rolled_back.rows and (digests(settings, "b"), letters(settings), files_read(settings)) == before
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        delete_checkpoints(place, "b", range(1, 12))
        epoch = place.catalog.streams.get("b").epoch
        assert place.catalog.input_log.prune("b", epoch, at_least=1)
    put(directory, 12, name="a {} b%20c.json.gz")
    assert run(settings, stream, RunRequest()).rows == 5000
    assert len(letters(settings)) == len(bad)


def damaged_group(directory: Path, number: int) -> Path:
    """A Parquet file whose second group of rows is damaged."""
    path = directory / f"{number}.parquet"
    pq.write_table(
        pa.table({"k": ["a"] * 4000, "v": list(range(4000))}), path, row_group_size=2000, use_dictionary=False
    )
    text = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    text[start : start + 200] = bytes(200)
    path.write_bytes(text)
    return path


@pytest.mark.usefixtures("_names_files")
@pytest.mark.parametrize(
    "options", [{"max_pending": 3}, long_form({"checkpoint_steps": 3}), long_form({"backend": "rocksdb"})]
)
def test_none_of_the_rows_of_a_file_that_is_half_read_count(tmp_path: Path, options: dict[str, Any]) -> None:
    settings, directory = settings_at(tmp_path / "w", **options), tmp_path / "in"
    directory.mkdir()

    def source(spark: SparkSession, _: Mapping[str, str]) -> DataFrame:
        reader = spark.readStream.schema("k string, v long").option("maxFilesPerTrigger", 2)
        return reader.parquet(directory.as_uri())

    for number in range(4):
        pq.write_table(pa.table({"k": ["a", "b"], "v": [1, 2]}), directory / f"{number}.parquet")
    damaged_group(directory, 2)
    other = directory / "other.parquet"
    pq.write_table(pa.table({"k": [1, 2], "v": ["x", "y"]}), other)
    stream = Stream("b", source, [totals(map_side=True)], sinks={"tot": None}, on_bad_file="dead-letter")
    result = run(settings, stream, RunRequest())
    assert result.rows == 6 and result.dead_letters == {"tot": 2}
    assert sorted(json.loads(row["row"])["file"] for row in letters(settings)) == [
        (directory / "2.parquet").as_uri(),
        other.as_uri(),
    ]
    (rows,) = [rows for rows in state(settings, "b", "tot", "totals", tmp_path / "r").to_pylist() if rows["k"] == "a"]
    assert rows["n"] == 3
    assert verify(settings, "b", every=True).proven


def test_a_file_that_only_one_of_two_sources_can_read_stops_the_stream(tmp_path: Path) -> None:
    """Spark does not say which of them could not."""
    settings, directory = settings_at(tmp_path / "w"), tmp_path / "in"
    directory.mkdir()
    pq.write_table(pa.table({"k": ["a", "b"], "v": [1, 2]}), directory / "0.parquet")
    pq.write_table(pa.table({"k": ["a", "b"], "v": ["x", "y"]}), directory / "1.parquet")

    def source(spark: SparkSession, _: Mapping[str, str]) -> DataFrame:
        one = spark.readStream.schema("k string, v long").parquet(directory.as_uri())
        return one.union(spark.readStream.schema("k string").parquet(directory.as_uri()).selectExpr("k", "1L as v"))

    stream = Stream("b", source, [totals()], sinks={"tot": None}, on_bad_file="dead-letter")
    with pytest.raises(StateError, match=r"1\.parquet cannot be read"):
        run(settings, stream, RunRequest())


@pytest.mark.usefixtures("_names_files")
def test_a_lost_letter_is_made_again_by_a_definition_without_the_option(tmp_path: Path) -> None:
    settings, directory, given = settings_at(tmp_path / "w"), tmp_path / "in", list[Any]()

    def fail(rows: DataFrame, _: int) -> None:
        raise OSError("no room")

    def take(rows: DataFrame, _: int) -> None:
        given.extend(rows.collect())

    for number in range(3):
        (cut if number == 2 else put)(directory, number)
    stream = stream_of(directory)
    with pytest.raises(StateError, match="no room"):
        run(settings, replace(stream, sinks={"tot": None, DEAD_LETTERS: fail}), RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        for stored in (each for output in place.catalog.outbox.list("b", outstanding=True) for each in output.objects):
            path = place.warehouse.local.objects / stored.name
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-1])
    damage(settings, 3, stream="b")
    recover(settings, "b")
    run(settings, replace(stream, on_bad_file="fail", sinks={"tot": None, DEAD_LETTERS: take}), RunRequest())
    assert [json.loads(row["row"])["file"] for row in given] == [(directory / "2.json.gz").as_uri()]


def test_a_file_that_spark_does_not_name_stops_the_stream(tmp_path: Path, spark: SparkSession) -> None:
    if has_python_sources(spark):
        pytest.skip("this Spark names the file, so that the stream goes on without it, as tested above")
    settings, directory = settings_at(tmp_path / "w"), tmp_path / "in"
    for number in range(3):
        (cut if number == 2 else put)(directory, number)
    with pytest.raises(StateError, match="Unexpected end of input stream"):
        run(settings, stream_of(directory), RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.checkpoints.last_id("b") == 2, "what was read before stays"
