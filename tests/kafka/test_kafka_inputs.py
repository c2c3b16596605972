"""Kafka beside files in one query: as named sources, which are added and change places, and within one source."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.format.manifests import read_manifests
from siltstone.restore.table import read_table
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, replay, run
from siltstone.stream import SourceFunction, Stream
from tests.kafka.test_kafka_source import Row, counted, kept, roll_back, rows_of
from tests.kafka_server import KafkaServer
from tests.kafka_streams import read_numbers
from tests.spark.json_files import json_source
from tests.spark_runs import at, check_proven

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.usefixtures("spark")]


def records(topic: str, starting: str = "earliest") -> SourceFunction:
    """A topic as a source."""
    options = {"subscribe": topic, "startingOffsets": starting, "maxOffsetsPerTrigger": "40"}
    return lambda spark, _: read_numbers(spark, options)


def files(directory: Path) -> SourceFunction:
    """JSON files as a source."""
    directory.mkdir(exist_ok=True)
    return json_source(directory, "key long, value long")


def add_file(directory: Path, rows: list[Row]) -> None:
    text = "\n".join(json.dumps({"key": key, "value": value}) for key, value in rows)
    (directory / f"{len(list(directory.iterdir()))}.json").write_text(text)


def tallied(sources: Mapping[str, SourceFunction | None]) -> Stream:
    """Counts and adds each source by itself."""
    functions = partial(list, (Count("n"), Sum("sum", of="value")))
    operators = [Aggregate(f"of-{n}", {"key": pa.int64()}, functions(), reads=n, output=False) for n in sources]
    return Stream("inputs", sources=sources, operators=operators, max_parallelism=4)


def state_of(settings: Settings, operator: str) -> dict[int, tuple[int, int]]:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        newest, store = place.catalog.checkpoints.last_id("inputs"), place.warehouse.store
        manifests = read_manifests(store, place.catalog.chains.list_manifests("inputs", newest), "inputs")
        rows: list[dict[str, Any]] = read_table(store, manifests, operator, "totals").to_table().to_pylist()
    return {row["key"]: (row["n"], row["sum"]) for row in rows}


def test_topics_and_files_are_sources_of_one_query_that_come_and_change_places(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "files"
    first, second = (f"{name}-{tmp_path.name}" for name in ("first", "second"))
    for topic in (first, second):
        kafka.create_topic(topic, partitions=2)
    both = {"topic": records(first), "files": files(directory)}
    kafka.produce(first, rows_of(0, 60))
    add_file(directory, rows_of(1000, 9))
    run(settings, tallied(both), RunRequest())
    kafka.produce(first, rows_of(60, 30), partition=1)
    add_file(directory, rows_of(2000, 5))
    run(settings, tallied(dict(reversed(both.items()))), RunRequest())
    # A third one begins at the newest record: in its first run nothing comes, and nothing is lost before the next.
    kafka.produce(second, rows_of(0, 50))
    every = {"newest": records(second, "latest"), **both}
    kafka.produce(first, rows_of(90, 3))
    run(settings, tallied(every), RunRequest())
    kafka.produce(second, came := rows_of(500, 20))
    run(settings, tallied(every), RunRequest())
    wanted = {"of-topic": rows_of(0, 93), "of-files": rows_of(1000, 9) + rows_of(2000, 5), "of-newest": came}

    def check() -> None:
        for operator, rows in wanted.items():
            assert state_of(settings, operator) == counted(rows), operator
        check_proven(settings, "inputs")
        assert replay(settings, tallied(every)).proven

    check()
    roll_back(settings, "inputs", 1)
    run(settings, tallied(every), RunRequest())
    check()


def test_a_source_may_unite_a_topic_and_files(kafka: KafkaServer, tmp_path: Path) -> None:
    settings, directory, topic = at(tmp_path / "w"), tmp_path / "files", f"united-{tmp_path.name}"
    kafka.create_topic(topic)
    from_topic, from_files = records(topic), files(directory)

    def united(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        rows = from_topic(spark, options).select("key", "value")
        return rows.union(from_files(spark, options).select("key", "value"))

    other = files(tmp_path / "other")
    stream = tallied({"other": other, "united": united})
    kafka.produce(topic, rows_of(0, 50))
    add_file(directory, rows_of(100, 7))
    add_file(tmp_path / "other", rows_of(7, 3))
    run(settings, stream, RunRequest())
    add_file(directory, rows_of(200, 7))
    kafka.produce(topic, rows_of(50, 5))
    run(settings, tallied({"united": united, "other": other}), RunRequest())
    assert state_of(settings, "of-united") == counted(kept(kafka.read(topic)) + rows_of(100, 7) + rows_of(200, 7))
    assert state_of(settings, "of-other") == counted(rows_of(7, 3))
    check_proven(settings, "inputs")
    assert replay(settings, stream).proven
