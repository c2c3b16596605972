"""`spark.read.format("siltstone")` over a stream that has run: every column type, every option, every error.

Before Spark 4.0, which brought data sources in Python, the same is asked of the client's way to read.
"""

import datetime as dt
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, FILES_BACKEND, FILES_POLICY
from siltstone.errors import ProofFailed, UsageError
from siltstone.format.manifests import read_manifests
from siltstone.model import Form, StoredObject
from siltstone.operator import MapState, OpaqueState, Operator, Rows, State, ValueState
from siltstone.restore.scan import Selection, TableShape, plan_scan, scan
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, run
from siltstone.spark.state_scan import StateSource, scan_frame
from siltstone.spark.types import spark_type
from siltstone.spark.versions import has_python_sources
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.stream import Stream
from tests.arrow_frames import to_arrow
from tests.arrow_strategies import TYPES, random_array
from tests.spark_runs import at as settings_at

KEY = {"name": pa.string(), "code": pa.int64()}
VALUES = {f"c{i}": kind for i, kind in enumerate(TYPES)}
MAX_PARALLELISM = 16
KEYS = 300
CHANGED = [KEYS, 40, 30]
"""rows of each step, so that the first is a base and the others deltas"""
DAY = dt.datetime(2013, 7, 1, tzinfo=dt.UTC)


class Kinds(Operator):
    """The newest row of each key, its steps, and the rows of each key group."""

    name = "kinds"
    key = KEY
    row = ValueState(VALUES)
    steps = MapState(key={"step": pa.int64()}, value={"name_too": pa.string()})
    counts = OpaqueState(dict, lambda counts: json.dumps(counts).encode(), json.loads)

    def process(self, rows: Rows, state: State) -> None:
        table = rows.table.take(pa.array(np.argsort(rows.key_index)))  # keys are distinct within a step
        state.row.put(rows.keys, table.select(list(VALUES)))
        state.steps.put(table.append_column("name_too", table["name"]))
        for group, count in zip(*np.unique(rows.key_groups, return_counts=True), strict=True):
            counts = state.counts[group]
            counts["rows"] = counts.get("rows", 0) + int(count)


def source(spark: SparkSession, options: Any) -> DataFrame:
    shape = {"name": pa.string(), "code": pa.int64(), "step": pa.int64(), "time": pa.timestamp("us", "UTC"), **VALUES}
    schema = T.StructType([T.StructField(name, spark_type(kind)) for name, kind in shape.items()])
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(options["input"])


STREAM = Stream("kinds", source, [Kinds()], event_time="time", max_parallelism=MAX_PARALLELISM, options={"input": ""})


@dataclass
class Ran:
    """A warehouse in which the stream has run, and the rows of each step."""

    spark: SparkSession
    settings: Settings
    inputs: list[pa.Table]

    def options(self, **options: Any) -> dict[str, Any]:
        named = {"stream": "kinds", "operator": "kinds", "variable": "row", "warehouse": self.settings.warehouse}
        return {name: value for name, value in {**named, **options}.items() if value is not None}

    def read(self, variable: str = "row", **options: Any) -> DataFrame:
        given = self.options(variable=variable, **options)
        if has_python_sources(self.spark):
            return self.spark.read.format("siltstone").options(**given).load()
        return scan_frame(self.spark, {name: str(value) for name, value in given.items()})

    def expected(self, steps: int = 3) -> list[list[Any]]:
        """[key, values] of the newest row of each key after some steps, sorted by key."""
        newest = {}
        for table in self.inputs[:steps]:
            for row in table.select([*KEY, *VALUES]).to_pylist():
                newest[row["name"], row["code"]] = list(row.values())
        return [newest[key] for key in sorted(newest)]


def _run(spark: SparkSession, home: Path, backend: str, policy: str, forms: Sequence[Form]) -> Ran:
    random = Random(4)
    (home / "input").mkdir()
    inputs = []
    for step, count in enumerate(CHANGED):
        codes = random.sample(range(KEYS), count)
        columns = {name: random_array(random, kind, count) for name, kind in VALUES.items()}
        time = pa.array([DAY + dt.timedelta(days=step)] * count, pa.timestamp("us", "UTC"))
        keys = {"name": [f"é{c % 7}" for c in codes], "code": codes}
        table = pa.table({**keys, "step": [step] * count, "time": time, **columns})
        path = home / "input" / f"{step}.parquet"
        pq.write_table(table, path, store_schema=False)
        inputs.append(table)
    settings = settings_at(home / "warehouse", parallelism=2, backend=backend, policy=policy)
    result = run(settings, STREAM, RunRequest(options={"input": (home / "input").as_uri()}))
    assert result.checkpoints == [1, 2, 3]
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert [place.catalog.checkpoints.get("kinds", c).forms["kinds"] for c in result.checkpoints] == forms
    return Ran(spark, settings, inputs)


@pytest.fixture(scope="module")
def ran(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    forms = [Form.BASE, Form.DELTA, Form.DELTA]
    return _run(spark, tmp_path_factory.mktemp("datasource"), "heap", DEFAULT_POLICY, forms)


@pytest.fixture(scope="module")
def ran_as_files(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return _run(spark, tmp_path_factory.mktemp("files"), FILES_BACKEND, FILES_POLICY, [Form.FILES] * 3)


@pytest.fixture(params=["ran", "ran_as_files"])
def ran_in_form(request: pytest.FixtureRequest) -> Ran:
    """The stream whose checkpoints are bases and deltas, then the one whose checkpoints are files of RocksDB."""
    return request.getfixturevalue(request.param)


def rows_of(frame: DataFrame) -> list[list[Any]]:
    """Every row by key. Arrow's own values, because Spark's rows have times in the machine's zone."""
    table = to_arrow(frame)
    return sorted(([*row.values()] for row in table.to_pylist()), key=lambda row: row[:2])


def same(got: list[list[Any]], wanted: list[list[Any]]) -> bool:
    """Equal, with NaN equal to NaN, and a decimal without fraction (uint64) equal to the integer."""
    return _as_text(got) == _as_text(wanted)


def _as_text(rows: list[list[Any]]) -> list[list[str]]:
    uint64 = len(KEY) + TYPES.index(pa.uint64())
    return [[repr(int(v) if i == uint64 and v is not None else v) for i, v in enumerate(row)] for row in rows]


@pytest.mark.parametrize(("at", "steps"), [("1", 1), ("2", 2), ("latest", 3)])
def test_rows_of_all_types_are_those_of_the_checkpoint(ran_in_form: Ran, at: str, steps: int) -> None:
    frame = ran_in_form.read(at=at)
    assert frame.schema == T.StructType(
        [T.StructField(name, spark_type(kind), name not in KEY) for name, kind in {**KEY, **VALUES}.items()]
    )
    assert same(rows_of(frame), ran_in_form.expected(steps))


def test_maps_and_opaque_values(ran_in_form: Ran) -> None:
    steps = to_arrow(ran_in_form.read("steps")).sort_by([("step", "ascending"), ("code", "ascending")])
    wanted = pa.concat_tables(ran_in_form.inputs).sort_by([("step", "ascending"), ("code", "ascending")])
    wanted = wanted.append_column("name_too", wanted["name"]).select(["name", "code", "step", "name_too"])
    assert steps.to_pydict() == wanted.to_pydict()
    counts = {row.key_group: json.loads(bytes(row.value))["rows"] for row in ran_in_form.read("counts").collect()}
    groups = key_groups(xxhash64(pa.concat_tables(ran_in_form.inputs).select(list(KEY)).columns), MAX_PARALLELISM)
    assert counts == {g: n for g, n in enumerate(np.bincount(groups).tolist()) if n}


@pytest.mark.parametrize("at", ["1", "3"])
def test_columns_and_their_order_are_those_asked_for(ran_in_form: Ran, at: str) -> None:
    frame = ran_in_form.read(at=at, columns="code, c3, name")
    assert frame.columns == ["code", "c3", "name"]
    wanted = {row[1]: row[2 + 3] for row in ran_in_form.expected(int(at))}
    assert {row.code: row.c3 for row in frame.collect()} == wanted
    only_value = ran_in_form.read(at=at, columns="c13", keys=json.dumps([{"name": "é2", "code": 9}]))
    [row] = [row for row in ran_in_form.expected(int(at)) if row[1] == 9]
    assert [one.asDict() for one in only_value.collect()] == [{"c13": row[2 + 13]}]


def test_the_users_own_schema_selects_columns(ran: Ran) -> None:
    if not has_python_sources(ran.spark):
        pytest.skip("the format needs Spark 4.0")
    reader = ran.spark.read.format("siltstone").options(**ran.options())
    wanted = sorted((row[1], row[2 + 3]) for row in ran.expected() if row[2 + 3] is not None)
    frame = reader.schema("code bigint, c3 bigint").load()
    assert sorted(tuple(r) for r in frame.where("c3 is not null").collect()) == wanted
    with pytest.raises(
        AnalysisException, match=r"UsageError: row has no column code int: it has name string, code bigint"
    ):
        reader.schema("code int").load().collect()


def test_one_dataframe_answers_many_queries(ran: Ran) -> None:
    """Spark 4.3 would keep the partitions of the first filtered query for all of them if filters were pushed."""
    frame = ran.read(columns="name,code")
    first, second = (frame.where(f"code = {code}") for code in (5, 6))
    assert [r.code for r in first.collect()] == [5]
    assert frame.count() == len(ran.expected())
    assert sorted(r.code for r in first.union(second).collect()) == [5, 6]


@pytest.mark.parametrize("at", ["1", "3"])
def test_keys_read_only_their_rows_and_partitions(ran_in_form: Ran, at: str) -> None:
    asked = [{"name": f"é{code % 7}", "code": code} for code in (3, 77, 250)]
    frame = ran_in_form.read(at=at, keys=json.dumps([*asked, {"name": "nobody", "code": 1}]))
    assert same(rows_of(frame), [row for row in ran_in_form.expected(int(at)) if row[1] in (3, 77, 250)])
    one = ran_in_form.read(at=at, keys=json.dumps(asked[:1]), parallelism=16)
    assert one.rdd.getNumPartitions() == 1
    assert ran_in_form.read(at=at, parallelism=16).rdd.getNumPartitions() == 16
    assert same(rows_of(one), [row for row in ran_in_form.expected(int(at)) if row[1] == 3])


def test_key_groups_read_only_theirs(ran_in_form: Ran) -> None:
    keys = pa.table({"name": [r[0] for r in ran_in_form.expected()], "code": [r[1] for r in ran_in_form.expected()]})
    groups = key_groups(xxhash64(keys.columns), MAX_PARALLELISM)
    wanted = [row for row, group in zip(ran_in_form.expected(), groups, strict=True) if 3 <= group <= 5]
    assert same(rows_of(ran_in_form.read(key_groups="3-5", parallelism=2)), wanted)
    assert {row.key_group for row in ran_in_form.read("counts", key_groups="7").collect()} == {7}


class CountingStore:
    """Counts the bytes that are read."""

    def __init__(self, store: Any) -> None:
        self.store, self.bytes = store, 0

    def read(self, stored: StoredObject) -> pa.Buffer:
        self.bytes += stored.bytes
        return self.store.read(stored)

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        self.bytes += length
        return self.store.read_range(name, offset, length)


def test_a_task_reads_only_the_blocks_of_its_key_groups(ran: Ran) -> None:
    with OpenWarehouse.open_existing(ran.settings.warehouse) as place:
        store = place.warehouse.store
        manifests = read_manifests(store, place.catalog.chains.list_manifests("kinds", 3))
    shape = TableShape.of(manifests[3], "kinds", "row")
    tasks = plan_scan(manifests, shape, Selection(tuple(shape.columns.names)), parallelism=4)
    every = sum(h.length for m in manifests.values() for h in m.handles if h.variable == "row")
    rows = 0
    for task in tasks:
        counting: Any = CountingStore(store)
        rows += sum(map(len, scan(counting, task)))
        assert 0 < counting.bytes < 0.7 * every  # one of the two subtasks wrote what this one needs
    assert rows == len(ran.expected())


@pytest.mark.parametrize(("at", "variable"), [(1, "row"), (3, "row"), (3, "counts")])
def test_another_digest_than_the_recorded_one_fails_the_task(ran_in_form: Ran, at: int, variable: str) -> None:
    with OpenWarehouse.open_existing(ran_in_form.settings.warehouse) as place:
        store = place.warehouse.store
        manifests = read_manifests(store, place.catalog.chains.list_manifests("kinds", at))
    shape = TableShape.of(manifests[at], "kinds", variable)
    [task] = plan_scan(manifests, shape, Selection(tuple(shape.columns.names)), parallelism=1)
    assert sum(map(len, scan(store, task))) > 0
    digests = task.digests.copy()
    digests[4] ^= np.uint64(1)
    with pytest.raises(ProofFailed, match=rf"checkpoint {at} of kinds: kinds.{variable} .* in 1 key groups from 4 on"):
        list(scan(store, replace(task, digests=digests)))


def test_a_flipped_bit_of_the_footer_fails_a_query_of_some_columns(ran: Ran) -> None:
    with OpenWarehouse.open_existing(ran.settings.warehouse) as place:
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests("kinds", 1))
        objects = place.warehouse.local.objects
    bases = [h.object for h in manifests[1].handles if h.variable == "row"]
    whole = {name: (objects / name).read_bytes() for name in bases}
    try:
        for name, data in whole.items():
            altered = bytearray(data)
            altered[-200] ^= 4
            (objects / name).write_bytes(altered)
        with pytest.raises(PySparkException, match=r"CorruptObject: object kinds/.*base.parquet was altered"):
            ran.read(at=1, columns="c0").collect()
    finally:
        for name, data in whole.items():
            (objects / name).write_bytes(data)
    assert len(ran.read(at=1, columns="c0").collect()) == KEYS


def test_as_of_picks_by_event_time(ran_in_form: Ran) -> None:
    assert same(rows_of(ran_in_form.read(as_of="2013-07-02T12:00:00")), ran_in_form.expected(2))
    assert same(rows_of(ran_in_form.read(as_of="2013-07-02")), ran_in_form.expected(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": None}, "needs the option 'stream'"),
        ({"operator": None}, "needs the option 'operator'"),
        ({"variable": None}, "needs the option 'variable'"),
        ({"colour": "red"}, "has no option 'colour': it has stream, operator, variable, warehouse"),
        ({"stream": "nosuch"}, r"UnknownStream: .*kinds"),
        ({"operator": "nosuch"}, "has no operator 'nosuch': it has kinds"),
        ({"variable": "nosuch"}, "operator kinds has no variable 'nosuch': it has counts, row, steps"),
        ({"at": "99"}, "UnknownCheckpoint: .*99"),
        ({"at": "yesterday"}, "'yesterday' is not a checkpoint"),
        ({"as_of": "2013-06-01"}, "UnknownCheckpoint: no checkpoint of events up to 2013-06-01"),
        ({"as_of": "2013-08-01", "at": "1"}, "at and as_of exclude each other"),
        ({"columns": "code,nosuch"}, "column 'nosuch' of row does not exist: it has name, code, c0"),
        ({"columns": "code,code"}, "column 'code' of row is named twice"),
        ({"keys": "[{"}, "keys are not JSON"),
        ({"keys": '[{"name": "a"}]'}, r"is not a key of this operator: write \[\{\"name\": ..., \"code\": ...\}\]"),
        ({"keys": '[{"name": "a", "code": 1.5}]'}, "keys: code is int64: not an integer"),
        ({"key_groups": "3-16"}, "key_groups '3-16': write FIRST-LAST, from 0 to 15"),
        ({"parallelism": "0"}, "parallelism '0' is not a positive number"),
        ({"warehouse": "/nosuch/warehouse"}, "no warehouse at /nosuch/warehouse"),
    ],
)
def test_bad_options_are_refused(ran: Ran, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        StateSource.find(ran.options(**options))
    line = f"{type(caught.value).__name__}: {caught.value}"
    assert re.search(message, line)
    assert "\n" not in line


def test_a_refusal_comes_at_load_and_ends_in_its_one_line(ran: Ran) -> None:
    refused = AnalysisException if has_python_sources(ran.spark) else UsageError
    with pytest.raises(refused, match=r" has no operator 'nosuch': it has kinds(\n|$)"):
        ran.read(operator="nosuch")
    with pytest.raises(refused, match=r"none of the keys is in the given key groups"):
        keys = json.dumps([{"name": "a", "code": 1}])
        group = int(key_groups(xxhash64([pa.array(["a"]), pa.array([1])]), MAX_PARALLELISM)[0])
        ran.read(keys=keys, key_groups=str((group + 1) % MAX_PARALLELISM)).collect()


@pytest.fixture
def damaged(ran_in_form: Ran) -> Any:
    """Alters one byte of an object for the length of a test."""
    undo: list[Callable[[], Any]] = []

    def alter(name: str, at: int) -> None:
        path = Path(ran_in_form.settings.warehouse) / "objects" / name
        whole, mode = path.read_bytes(), path.stat().st_mode
        path.chmod(0o600)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        undo.append(lambda: (path.write_bytes(whole), path.chmod(mode)))

    yield alter
    for step in undo:
        step()


@pytest.mark.parametrize("variable", ["row", "counts"])
def test_a_damaged_object_is_named(ran_in_form: Ran, damaged: Callable[[str, int], None], variable: str) -> None:
    with OpenWarehouse.open_existing(ran_in_form.settings.warehouse) as place:
        [manifest] = read_manifests(
            place.warehouse.store, [place.catalog.checkpoints.get("kinds", 3).manifest]
        ).values()
    handle = next(h for h in manifest.handles if h.variable == variable)
    damaged(handle.object, handle.offset + handle.length // 2)
    with pytest.raises(PySparkException, match=f"CorruptObject: .*{handle.object}"):
        ran_in_form.read(variable).collect()
