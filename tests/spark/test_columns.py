"""Columns as sources have them: odd names, types and times. Sources and triggers that a stream cannot have."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Max
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.settings import Settings
from siltstone.spark.inputs import columns_read
from siltstone.spark.operations import RunRequest, replay, run, verify, write_stream
from siltstone.stream import Stream
from siltstone.time.event_time import RowTimes
from tests.delta_run import read_sink
from tests.spark_runs import at


class Every(Operator):
    """Reads all columns there are."""

    name = "every"
    key = pa.schema({"k": pa.string()})
    output = pa.schema({"k": pa.string(), "x.y": pa.int64(), "a`b": pa.string()})
    totals = ValueState({"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        n = rows.count(initial=state.totals.get(rows.keys)["n"])
        state.totals.put(rows.keys, {"n": n})
        seen = ",".join(sorted(rows.table.column_names))
        return rows.keys.with_columns({"x.y": n, "a`b": pa.array([seen] * len(n))})


def source_of(
    directory: Path, expressions: str, lines: int = 2
) -> Callable[[SparkSession, Mapping[str, str]], DataFrame]:
    """A stream of files of a row each: column `k`, and others."""
    directory.mkdir(exist_ok=True)
    for number in range(lines):
        (directory / f"{number}.json").write_text(json.dumps({"k": "a", "n": number}))

    def source(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        rows = spark.readStream.schema("k string, n int").option("maxFilesPerTrigger", 1).json(directory.as_uri())
        return rows.selectExpr("k", "n", *expressions.split(";"))

    return source


def test_names_with_dots_and_backticks_are_read_put_out_and_read_again(tmp_path: Path) -> None:
    odd = "n as `Owner.Name`;n as `a``b`;n as `k é`"
    tops = Aggregate("tops", {"a`b": pa.string()}, [Max("most", of="x.y")], reads="every")
    dotted = Aggregate("dotted", {"Owner.Name": pa.int32()}, [Max("m", of="a`b")])
    stream = Stream(
        "odd", source_of(tmp_path / "in", odd), [Every(), tops, dotted], sinks={"tops": None, "dotted": None}
    )
    settings = at(tmp_path / "w")
    digest = run(settings, stream, RunRequest()).digest
    assert verify(settings, "odd", every=True).failed == [] and replay(settings, stream).digest == digest
    assert {row["a`b"] for row in read_sink(tmp_path / "w", "odd", "tops").to_pylist()} == {"Owner.Name,a`b,k,k é,n"}


@pytest.mark.parametrize("operators", [[Every()], [Every(), Aggregate("own", {"n": pa.int32()}, [Count("rows")])]])
def test_a_column_that_python_has_no_type_for_is_left_out(tmp_path: Path, operators: list[Operator]) -> None:
    source = source_of(
        tmp_path / "in",
        "make_ym_interval(1, 2) as months;array() as none;array(map('a', make_ym_interval(1, 2))) as deep",
    )
    stream = Stream("odd", source, operators, sinks={op.name: None for op in operators})
    run(at(tmp_path / "w"), stream, RunRequest())
    assert {row["a`b"] for row in read_sink(tmp_path / "w", "odd", "every").to_pylist()} == {"k,n,none"}


def test_a_column_that_python_has_no_type_for_cannot_be_asked_for(spark: SparkSession) -> None:
    rows = spark.sql("SELECT 'a' AS k, make_ym_interval(1, 2) AS months")
    said = r"operator asks reads months, whose type Python does not have \(interval year to month\): convert it"
    for asks in ({"inputs": ("months",)}, {"order_by": ("months",)}):
        with pytest.raises(UsageError, match=said):
            columns_read(rows, Every(name="asks", **asks))
    with pytest.raises(UsageError, match=said):
        columns_read(rows, Every(name="asks"), RowTimes("months"))
    twins = spark.sql("SELECT 'a' AS k, struct(1 AS a, 2 AS a) AS s")
    assert columns_read(twins, Every()) == ["k"]


def test_a_column_that_several_operators_leave_alone_is_not_kept_for_them(tmp_path: Path, spark: SparkSession) -> None:
    """Spark cannot cache every type."""
    place = "st_geogfromwkb(X'0101000000000000000000F03F0000000000000040') as place"
    try:
        spark.sql(f"select {place}")
    except AnalysisException:
        pytest.skip("this Spark has no geography, or has it turned off")
    counts = [Aggregate(name, {"k": pa.string()}, [Count("n")], output=False) for name in ("one", "two")]
    result = run(at(tmp_path / "w"), Stream("odd", source_of(tmp_path / "in", place), counts), RunRequest())
    assert result.checkpoints == [1, 2]


@pytest.mark.parametrize(
    ("times", "newest"),
    [
        (["+10000-01-01", "2024-01-01"], "2024-01-01T00:00:00+00:00"),
        (["2024-01-01", "+294247-01-10 04:00:54.775807"], "2024-01-01T00:00:00+00:00"),
        (["-0005-01-01", "0000-01-01"], None),
        (["9999-12-31 23:59:59", "1583-01-01"], "1583-01-01T00:00:00+00:00"),
    ],
)
def test_an_event_time_that_python_has_no_date_for_stops_no_stream(
    tmp_path: Path, times: list[str], newest: str | None
) -> None:
    at_row = " ".join(f"when {number} then timestamp'{time}'" for number, time in enumerate(times))
    counts = Aggregate("counts", {"k": pa.string()}, [Count("n")], map_side=False)
    source = source_of(tmp_path / "in", f"case n {at_row} end as at")
    stream = Stream("odd", source, [counts], event_time="at")
    settings = at(tmp_path / "w")
    assert run(settings, stream, RunRequest()).checkpoints == [1, 2]
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        found = place.catalog.checkpoints.get_latest("odd").event_time_max
    assert (found and found.isoformat()) == newest


@pytest.mark.parametrize(
    "days", ["date'2024-01-02'", "date_from_unix_date(2147483647)", "date_from_unix_date(-2147483648)"]
)
def test_an_event_time_may_be_a_day(tmp_path: Path, days: str) -> None:
    counts = Aggregate("counts", {"k": pa.string()}, [Count("n")], map_side=False)
    stream = Stream("odd", source_of(tmp_path / "in", f"{days} as at"), [counts], event_time="at")
    settings = at(tmp_path / "w")
    assert run(settings, stream, RunRequest()).checkpoints == [1, 2]
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        found = place.catalog.checkpoints.get_latest("odd").event_time_max
    assert (found and found.isoformat()) == ("2024-01-02T00:00:00+00:00" if "2024" in days else None)


@pytest.mark.parametrize(
    ("operators", "event_time", "said"),
    [
        ([Aggregate("counts", {"k": pa.string()}, [Count("n")])], "k", r"its event time, column k, is string: convert"),
        (
            [Every(), Aggregate("later", {"x.y": pa.string()}, [Count("n")], reads="every")],
            None,
            r"operator later: key column x\.y is bigint in every, and string where it is declared",
        ),
        (
            [
                Aggregate("later", {"n": pa.int32()}, [Count("all")], reads="small"),
                Aggregate("small", {"n": pa.uint8()}, [Count("rows")]),
            ],
            None,
            r"operator small: column n of its output is uint8, a type that Spark does not have",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    tmp_path: Path, operators: list[Operator], event_time: str | None, said: str
) -> None:
    stream = Stream("odd", source_of(tmp_path / "in", "n as m"), operators, event_time=event_time)
    with pytest.raises(UsageError, match=said):
        run(at(tmp_path / "w"), stream, RunRequest())


def test_columns_that_spark_does_not_tell_apart_are_refused(spark: SparkSession) -> None:
    rows = spark.sql("SELECT 'a' AS k, 1 AS K, 2 AS other, 3 AS OTHER")
    with pytest.raises(
        UsageError, match=r"reads k, and source has the columns k and K, which Spark does not tell apart"
    ):
        columns_read(rows, Every(inputs=("k",)))
    session = spark.newSession()
    session.conf.set("spark.sql.caseSensitive", "true")
    told = session.sql("SELECT 'a' AS k, 1 AS K, 2 AS other, 3 AS OTHER, 4 AS other")
    assert columns_read(told, Every(inputs=("K",))) == ["k", "K"]
    with pytest.raises(UsageError, match="the columns other and OTHER and other"):
        columns_read(told, Every(inputs=("other",)))


def test_a_source_that_gives_its_rows_once_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.readStream.format("socket").options(host="127.0.0.1", port="9").load().selectExpr("value as k")
    stream = Stream("once", None, [Aggregate("counts", {"k": pa.string()}, [Count("n")])])
    with pytest.raises(UsageError, match="a socket source gives its lines once"):
        write_stream(Settings(warehouse=str(tmp_path / "w")), stream, rows, RunRequest())


@pytest.mark.parametrize(
    "trigger",
    [
        {"continuous": "1 second"},
        {"realTime": "1 minute"},
        {"once": True, "availableNow": True},
        {},
        {"once": False},
        {"processingTime": ""},
    ],
)
def test_a_trigger_that_a_stream_cannot_have_is_refused(
    spark: SparkSession, tmp_path: Path, trigger: Mapping[str, Any]
) -> None:
    rows = source_of(tmp_path / "in", "n as m")(spark, {})
    stream = Stream("counts", None, [Aggregate("counts", {"k": pa.string()}, [Count("n")])])
    with pytest.raises(UsageError, match=r"a stream cannot have the trigger .*: its steps are micro-batches"):
        write_stream(Settings(warehouse=str(tmp_path / "w")), stream, rows, RunRequest(), trigger)
    assert not (tmp_path / "w").exists()
