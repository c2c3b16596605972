"""One query reads several named sources, which come, go and change places between runs."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Max
from siltstone.catalog.records.source_entries import decode_offsets
from siltstone.catalog.records.steps import InputPosition
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import write_stream
from siltstone.errors import SchemaConflict, StateError, UsageError
from siltstone.format.manifests import read_manifests
from siltstone.restore.table import read_table
from siltstone.run.region import ConsistentRegion
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, replay, run, stream_runner
from siltstone.spark.queries import SOURCE_EVOLUTION
from siltstone.spark.sources import make_input
from siltstone.stream import DIRECTORY, Autonomous, SourceFunction, Stream
from tests.spark.json_files import json_source
from tests.spark.latest_source import LatestSource, arrive, calls
from tests.spark_runs import at, check_proven, digests, recorded

pytestmark = pytest.mark.usefixtures("spark")

NAME = "shop"
KEYS = {"clicks": pa.string(), "orders": pa.int64(), "visits": pa.string(), "source": pa.string()}
SCHEMAS = {"clicks": "k string, v int", "orders": "k long, v string", "visits": "k string, v double"}
SCHEMAS["source"] = SCHEMAS["clicks"]
MOST = {"orders": pa.string(), "visits": pa.float64()}
VALUES = {"clicks": ("a", 1), "orders": (7, "x"), "visits": ("b", 0.5), "source": ("a", 1)}
"""of each source the key and the value of its rows; the columns have the same names everywhere"""


def add(directory: Path, source: str, files: int = 1) -> None:
    """Add files with a row each to a source."""
    (directory / source).mkdir(parents=True, exist_ok=True)
    key, value = VALUES[source]
    for _ in range(files):
        number = len(list((directory / source).iterdir()))
        (directory / source / f"{number}.json").write_text(json.dumps({"k": key, "v": value}))


def counter(source: str) -> Aggregate:
    """Counts the rows of a source by key."""
    functions = [Count("n"), Max("most", of="v", type=MOST.get(source, pa.int64()))]
    return Aggregate(f"of-{source}", {"k": KEYS.get(source, pa.int64())}, functions, reads=source, output=False)


def files_of(directory: Path, source: str) -> SourceFunction:
    (directory / source).mkdir(parents=True, exist_ok=True)
    return json_source(directory / source, SCHEMAS[source])


def shop(directory: Path, *sources: str, extra: Mapping[str, SourceFunction | None] | None = None) -> Stream:
    """A stream with these sources, each counted by its own operator."""
    functions = {**{name: files_of(directory, name) for name in sources}, **(extra or {})}
    return Stream(NAME, sources=functions, operators=[counter(name) for name in functions], max_parallelism=4)


def short(directory: Path) -> Stream:
    """The same with one source that has no name."""
    return Stream(NAME, files_of(directory, "source"), [counter("source")], max_parallelism=4)


def alarms(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """A source that begins at "latest"."""
    spark.dataSource.register(LatestSource)
    rows = spark.readStream.format("begins_latest").option("directory", options[DIRECTORY]).load()
    return rows.selectExpr("value % 2 as k", "value as v")


def counted(settings: Settings, source: str) -> int:
    """How many rows of a source the newest checkpoint has counted."""
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        newest, operator = place.catalog.checkpoints.last_id(NAME), f"of-{source}"
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, newest), NAME)
        rows = read_table(place.warehouse.store, manifests, operator, "totals").to_table().to_pylist()
    return sum(row["n"] for row in rows)


def position(settings: Settings) -> InputPosition:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        return place.catalog.input_log.get_position(NAME, place.catalog.checkpoints.last_id(NAME))


def roll_back(settings: Settings, to: int) -> None:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        epoch = place.catalog.runs.begin(NAME, "a test")
        place.catalog.rollbacks.roll_back(NAME, epoch, to, "a test", "a test")


def stopped(settings: Settings, stream: Stream, **request: object) -> None:
    """A run ends in its first step, after Spark has planned the batch and before anything is processed."""

    def stop(*_: object, **__: object) -> None:
        raise StateError("stopped")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StateError, match="stopped"):
        patch.setattr(ConsistentRegion, "begin_step", stop)
        run(settings, stream, RunRequest(**request))  # pyright: ignore[reportArgumentType]


def test_sources_come_go_and_change_places(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    add(directory, "clicks", 2)
    add(directory, "orders", 3)
    run(settings, shop(directory, "clicks", "orders"), RunRequest())
    assert (counted(settings, "clicks"), counted(settings, "orders")) == (2, 3)
    assert position(settings).newest[-1].offsets.splitlines()[0] == "v1 named"
    for name in ("clicks", "orders", "visits"):
        add(directory, name)
    run(settings, shop(directory, "visits", "orders", "clicks"), RunRequest())
    assert [counted(settings, name) for name in ("clicks", "orders", "visits")] == [3, 4, 1]
    known = recorded(settings, NAME)
    with pytest.raises(SchemaConflict, match=r"shop lost source orders: .*--drop source\.orders"):
        run(settings, shop(directory, "clicks", "visits"), RunRequest())
    assert recorded(settings, NAME) == known
    for name in ("clicks", "orders", "visits"):
        add(directory, name)
    drop = ["source.orders", "of-orders"]
    with pytest.raises(UsageError, match=r"still has source\.orders in its code"):
        run(settings, shop(directory, "clicks", "orders"), RunRequest(drop=drop))
    run(settings, shop(directory, "clicks", "visits"), RunRequest(drop=drop))
    assert [counted(settings, name) for name in ("clicks", "visits")] == [4, 2]
    assert set(recorded(settings, NAME)[0].definition["inputs"]) == {"clicks", "visits"}
    with pytest.raises(UsageError, match=r"source orders of stream shop was given up at checkpoint \d+: give it ano"):
        run(settings, shop(directory, "clicks", "orders", "visits"), RunRequest())
    check_proven(settings, NAME)


def test_logged_steps_come_again_from_before_and_after_a_source_was_added(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w", checkpoint_steps=1), tmp_path / "in"
    add(directory, "clicks", 2)
    run(settings, shop(directory, "clicks"), RunRequest())
    for name in ("clicks", "orders"):
        add(directory, name, 2)
    stream = shop(directory, "orders", "clicks")
    run(settings, stream, RunRequest())
    # The steps before, of one operator, have another digest once they are of two.
    before = {step: digest for step, digest in digests(settings, NAME).items() if step > 2}
    replayed = replay(settings, stream)
    assert (replayed.since, replayed.rows, replayed.proven) == (2, 4, True)
    for to in (2, 1, 0):
        roll_back(settings, to)
        if to == 2:
            with pytest.raises(UsageError, match=r"step 3 read the source orders, which the code no longer has"):
                run(settings, shop(directory, "clicks"), RunRequest())
        add(directory, "orders")
        run(settings, stream, RunRequest())
        found = digests(settings, NAME)
        assert {step: found[step] for step in before} == before
    assert (counted(settings, "clicks"), counted(settings, "orders")) == (4, 5)


def test_a_source_that_is_added_begins_where_it_first_said(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    messages = Path(settings.warehouse) / "source" / NAME
    arrive(messages, 5)
    add(directory, "clicks")
    run(settings, shop(directory, "clicks"), RunRequest())
    stream = shop(directory, "clicks", extra={"alarms": alarms})
    add(directory, "clicks")
    stopped(settings, stream)
    first = position(settings)
    assert first.beginning is not None and first.beginning.offsets.splitlines()[2:] == [
        "clicks:-",
        'alarms:{"next": 5}',
    ]
    arrive(messages, 8)
    stopped(settings, shop(directory, extra={"alarms": alarms, "clicks": files_of(directory, "clicks")}))
    arrive(messages, 9)
    run(settings, stream, RunRequest())
    assert (counted(settings, "clicks"), counted(settings, "alarms")) == (2, 4)
    assert position(settings).beginning == first.beginning and set(calls(messages, "initial")) == {5}
    roll_back(settings, 1)
    arrive(messages, 11)
    run(settings, stream, RunRequest())
    assert (counted(settings, "clicks"), counted(settings, "alarms")) == (2, 6)
    assert replay(settings, stream, since="1").proven


def test_a_rate_source_that_is_added_goes_on_from_when_it_first_began(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    add(directory, "clicks")
    run(settings, shop(directory, "clicks"), RunRequest())

    def ticks(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        rows = spark.readStream.format("rate").option("rowsPerSecond", 10).option("numPartitions", 1).load()
        return rows.selectExpr("value % 2 as k", "value as v")

    stream = shop(directory, extra={"ticks": ticks, "clicks": files_of(directory, "clicks")})
    add(directory, "clicks")
    stopped(settings, stream)
    begun = position(settings).beginning
    assert begun is not None and begun.offsets.splitlines()[2:] == ["clicks:-", "ticks:-"]
    assert begun.sources.startswith('{"ticks": {"0": "v1')
    time.sleep(1.1)
    run(settings, stream, RunRequest(batches=1))
    assert position(settings).beginning == begun
    offsets = decode_offsets(position(settings).newest[-1].offsets)
    assert int(offsets["ticks"]) >= 1, "what came while the stream was stopped is part of its first batch"
    assert counted(settings, "ticks") == 10 * int(offsets["ticks"])


def test_a_source_without_a_name_goes_on_as_the_one_called_source(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    add(directory, "source", 2)
    run(settings, short(directory), RunRequest())
    assert position(settings).newest[-1].offsets.startswith("v1\n"), "Spark's own text"
    for name in ("source", "orders"):
        add(directory, name)
    both = shop(directory, "orders", "source")
    run(settings, both, RunRequest())
    assert (counted(settings, "source"), counted(settings, "orders")) == (3, 1)
    assert replay(settings, both).proven
    add(directory, "source")
    run(settings, short(directory), RunRequest(drop=["source.orders", "of-orders"]))
    assert counted(settings, "source") == 4
    check_proven(settings, NAME)


def test_a_source_may_be_several_of_sparks(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    add(directory, "clicks", 2)
    add(directory, "visits")

    def union(*sources: str) -> SourceFunction:
        def source(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
            frames = [json_source(directory / name, SCHEMAS["visits"])(spark, options) for name in sources]
            return frames[0].union(frames[1])

        return source

    def stream(*sources: str, first: bool) -> Stream:
        orders = {"orders": files_of(directory, "orders")}
        clicks = {"visits": union(*sources)}
        return shop(directory, extra={**orders, **clicks} if first else {**clicks, **orders})

    add(directory, "orders")
    run(settings, stream("clicks", "visits", first=True), RunRequest())
    names = [line.partition(":")[0] for line in position(settings).newest[-1].offsets.splitlines()[2:]]
    assert names == ["orders", "visits", "visits.1"]
    for name in ("clicks", "visits", "orders"):
        add(directory, name)
    run(settings, stream("clicks", "visits", first=False), RunRequest())
    assert (counted(settings, "visits"), counted(settings, "orders")) == (5, 2)
    with pytest.raises(SchemaConflict, match=r"the sources of source visits of stream shop have another order"):
        run(settings, stream("visits", "clicks", first=False), RunRequest())


def test_rows_of_ones_own_are_given_by_name(tmp_path: Path, spark: SparkSession) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    for name in ("clicks", "orders"):
        add(directory, name)
    stream = shop(directory, "clicks", "orders")
    rows = {name: source(spark, {}) for name, source in stream.source_functions.items() if source is not None}
    refused: dict[str, Callable[[], object]] = {
        r"has the sources clicks, orders: give the rows of each": lambda: make_input(stream, rows["clicks"]),
        r"rows are given of clicks: give those of each": lambda: make_input(stream, {"clicks": rows["clicks"]}),
        r"orders reads the same DataFrame as clicks: open it twice": lambda: make_input(
            shop(directory, extra={"clicks": None, "orders": None}),
            {"clicks": rows["orders"], "orders": rows["orders"].where("k > 1")},
        ),
        r"source orders of stream shop is not a stream": lambda: make_input(
            stream, {**rows, "orders": spark.createDataFrame([(1, "x")], "k long, v string")}
        ),
        r"names its sources, which a query of your own does not": lambda: stream_runner(
            settings, stream, spark
        ).__enter__(),
    }
    for said, call in refused.items():
        with pytest.raises(UsageError, match=said):
            call()
    spark.conf.set(SOURCE_EVOLUTION, "true")
    try:
        with pytest.raises(UsageError, match=f"names its sources, and so would Spark: set {SOURCE_EVOLUTION} to false"):
            make_input(stream, rows)
    finally:
        spark.conf.unset(SOURCE_EVOLUTION)
    query = write_stream(rows, stream, trigger={"availableNow": True}, warehouse=settings.warehouse, parallelism=2)
    query.await_termination()
    assert (counted(settings, "clicks"), counted(settings, "orders")) == (1, 1)


def test_an_autonomous_operator_reads_a_source_of_its_own(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    add(directory, "clicks", 2)
    add(directory, "orders", 3)
    both = shop(directory, "clicks", "orders")
    clicks, orders = both.operators
    stream = replace(both, operators=[clicks], autonomous=[Autonomous(orders)])
    result = run(settings, stream, RunRequest())
    assert (result.rows, [each.rows for each in result.autonomous]) == (2, [3])
    assert set(recorded(settings, NAME)[0].definition["inputs"]) == {"clicks"}
    assert set(recorded(settings, f"{NAME}-of-orders")[0].definition["inputs"]) == {"orders"}
    assert list(decode_offsets(position(settings).newest[-1].offsets)) == ["clicks"]


def test_another_type_is_refused_source_by_source(tmp_path: Path) -> None:
    settings, directory = at(tmp_path / "w"), tmp_path / "in"
    for name in ("clicks", "orders"):
        add(directory, name)
    run(settings, shop(directory, "clicks", "orders"), RunRequest())
    other = json_source(directory / "orders", "k long, v int")
    with pytest.raises(SchemaConflict, match="column v of source orders of stream shop was string, and now it is inte"):
        run(settings, shop(directory, "clicks", extra={"orders": other}), RunRequest())
