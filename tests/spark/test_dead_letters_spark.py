"""Dead letters under Spark: through a run, a replay and a fork, with the source's own values and offsets."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Sum
from siltstone.errors import BadRow, SiltstoneError, StateError, UsageError
from siltstone.run.region import Completed
from siltstone.settings import Settings
from siltstone.spark.failures import may_pass
from siltstone.spark.inputs import columns_read
from siltstone.spark.operations import RunRequest, replay, run, verify
from siltstone.stream import DEAD_LETTERS, Stream
from tests.delta_run import read_sink
from tests.spark_streams import Counts, source_of

TABLES = [
    pa.table({"key": ["1", "abc", None, "2"], "value": [1, 2, 3, 4]}),
    pa.table({"key": ["1", "2"], "value": [5, 6]}),
    pa.table({"key": ["4000000000000000000000", "1"], "value": [7, 8]}),
]
LETTERED = Stream(
    "lettered", source=source_of(TABLES), operators=[Counts()], on_bad_row="dead-letter", max_parallelism=8
)


def test_rows_without_a_usable_key_are_put_aside_and_the_rest_counts(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.txt"
    settings = Settings(warehouse=str(tmp_path / "w"), parallelism=2, openmetrics=str(metrics))
    seen: list[Completed] = []
    result = run(settings, LETTERED, RunRequest(), seen.append)
    assert [c.dead_letters for c in seen] == [{"counts": 2}, {}, {"counts": 1}] and result.dead_letters == {"counts": 3}
    assert json.loads(result.to_json())["dead_letters"] == {"counts": 3}, "with --json, too"
    assert 'siltstone_dead_letters_total{operator="counts",stream="lettered"} 3.0' in metrics.read_text()

    letters = sorted(
        read_sink(tmp_path / "w", "lettered", DEAD_LETTERS).to_pylist(), key=lambda row: json.loads(row["row"])["value"]
    )
    assert [(row["checkpoint_id"], row["reason"], json.loads(row["row"])) for row in letters] == [
        (1, "operator counts: key column key cannot be cast to int64", {"value": 2, "key": "abc"}),
        (1, "operator counts: key column key is null", {"value": 3, "key": None}),
        (3, "operator counts: key column key cannot be cast to int64", {"value": 7, "key": "4000000000000000000000"}),
    ]
    assert json.loads(letters[2]["offsets"]) == {"batch": 2, "from": [{"logOffset": 1}], "to": [{"logOffset": 2}]}
    assert json.loads(letters[0]["offsets"]) == {"batch": 0, "from": [None], "to": [{"logOffset": 0}]}

    assert verify(settings, "lettered", every=True).proven
    assert replay(settings, LETTERED).digest == result.digest, "and has written no letter"
    assert read_sink(tmp_path / "w", "lettered", DEAD_LETTERS).num_rows == 3


def test_without_them_the_same_rows_stop_the_stream(tmp_path: Path) -> None:
    nulls = Stream("stops", source=source_of([TABLES[0].slice(2)]), operators=[Counts()], max_parallelism=8)
    with pytest.raises(BadRow, match=r'on_bad_row="dead-letter"'):
        run(Settings(warehouse=str(tmp_path / "w"), parallelism=2), nulls, RunRequest())


def test_what_a_key_says_that_does_not_fit_is_not_taken_for_a_failure_of_spark(tmp_path: Path) -> None:
    """Nothing is tried again, and the error is one line, whatever the value looks like."""
    odd = pa.table({"key": ["java.io.EOFException: FetchFailed\nError: \x00"], "value": [1]})
    stream = Stream("odd", source=source_of([odd]), operators=[Counts()], max_parallelism=8)
    with pytest.raises(StateError) as failed:
        run(Settings(warehouse=str(tmp_path / "w"), parallelism=1), stream, RunRequest())
    shown = r'{"key":"java.io.EOFException: FetchFailed\nError: \u0000"}'
    assert f"in step 1: operator counts: key column key cannot be cast to int64: {shown}" in str(failed.value)
    assert "\n" not in str(failed.value) and not may_pass(failed.value)


def test_a_column_that_is_called_like_one_of_ours_is_refused(spark: SparkSession) -> None:
    rows = spark.sql("select 1L as key, 2L as value, 'a' as __original_key")
    with pytest.raises(UsageError, match="reads __original_key, a name that Siltstone uses itself"):
        columns_read(rows, Counts(inputs=()))


def lines_of(directory: Path, spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """Reads files of lines `city;number`, one a micro-batch: bytes of any encoding become strings."""
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(directory.as_uri())
    return lines.selectExpr("substring_index(value, ';', 1) as city", "cast(substring_index(value, ';', -1) as int) n")


@pytest.mark.parametrize("map_side", [True, False])
def test_text_that_is_not_utf8_is_in_no_checkpoint(tmp_path: Path, map_side: bool) -> None:
    for number, line in enumerate(["Köln;1\nParis;2\n".encode(), "Köln;3\nParis;4\n".encode("latin-1"), b"Paris;5\n"]):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{number}.txt").write_bytes(line)
    sums = Aggregate("sums", {"city": pa.string()}, [Sum("total", of="n", type=pa.int64())], map_side=map_side)
    stream = Stream("cities", source=partial(lines_of, tmp_path / "files"), operators=[sums], max_parallelism=8)
    settings = Settings(warehouse=str(tmp_path / "w"), parallelism=2)
    with pytest.raises(
        SiltstoneError, match=r'operator sums: column city has text that is not UTF-8: "K\\\\xf6ln"'
    ) as failed:
        run(settings, stream, RunRequest())
    assert "aside" in failed.value.full_text and not may_pass(failed.value)
    sums = Aggregate("sums", {"city": pa.string()}, [Sum("total", of="n", type=pa.int64())], map_side=False)
    aside = replace(stream, operators=[sums], on_bad_row="dead-letter")
    result = run(settings, aside, RunRequest())
    assert result.dead_letters == {"sums": 1}
    [letter] = read_sink(tmp_path / "w", "cities", DEAD_LETTERS).to_pylist()
    assert json.loads(letter["row"]) == {"city": "K\\xf6ln", "n": 3}
    assert letter["reason"] == "operator sums: column city has text that is not UTF-8"
    assert verify(settings, "cities", every=True).failed == [] and replay(settings, aside).digest == result.digest
