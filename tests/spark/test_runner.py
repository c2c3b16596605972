"""The stream runner inside Spark: whatever stops, restarts or damages a run, state and sink come out the same."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Average, Count, First, Last, Max, Min, Sum
from siltstone.catalog.streams import StreamRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.inspect import show_checkpoint
from siltstone.chains.policies import PolicyOptions
from siltstone.errors import BadRow, Fenced, SchemaConflict, StateError, UsageError
from siltstone.model import Form
from siltstone.operator import ValueState
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, open_region, restore, run, stream_runner, verify
from siltstone.spark.runner import StreamRunner, open_source, run_stream
from siltstone.stream import DIRECTORY, Stream
from tests.fault.small_stream import purchases
from tests.region_run import RegionRun
from tests.spark_streams import (
    BREAKING,
    COUNTS,
    FILES,
    FLAKY,
    LITTLE,
    NOTICING,
    NULLS,
    STEPS,
    Counts,
    Grown,
    read_files,
    source_of,
    write_files,
)

pytestmark = pytest.mark.usefixtures("spark")
ROOT = Path(__file__).parents[2]


def at(path: Path, **options: object) -> Settings:
    return Settings(warehouse=str(path), **{"parallelism": 2, **options})


def digests(settings: Settings, stream: str) -> dict[int, str]:
    """Step of every checkpoint -> digest."""
    with OpenWarehouse.existing(settings.warehouse) as place:
        steps = {
            s.checkpoint: s.step
            for s in place.catalog.input_log.list(stream, place.catalog.checkpoints.last_id(stream))
        }
        return {steps[c.id]: c.digest for c in place.catalog.checkpoints.list(stream)}


def recorded(settings: Settings, stream: str) -> tuple[StreamRecord, int, int]:
    """All that a run that is refused must leave alone."""
    with OpenWarehouse.existing(settings.warehouse) as place:
        catalog = place.catalog
        return catalog.streams.get(stream), len(catalog.runs.list(stream)), catalog.checkpoints.last_id(stream)


def proven(settings: Settings, stream: str) -> None:
    result = verify(settings, stream, every=True)
    assert result.proven and not result.failed


def state(settings: Settings, stream: str, operator: str, table: str, to: Path) -> pa.Table:
    """A table of the newest checkpoint, restored."""
    restore(settings, stream, to=to)
    return pq.read_table(to / operator / table)


@dataclass(frozen=True)
class Undisturbed:
    digests: dict[int, str]
    sink: pa.Table


def sink_rows(settings: Settings) -> pa.Table:
    return pq.read_table(Path(settings.warehouse) / "sink" / "little" / "accounts").sort_by("sequence")


@pytest.fixture(scope="module")
def undisturbed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """LITTLE from end to end in one run."""
    settings = at(tmp_path_factory.mktemp("undisturbed") / "w")
    result = run(settings, LITTLE, RunRequest())
    assert result.checkpoints == list(range(1, FILES + 1))
    proven(settings, "little")
    found = digests(settings, "little")
    assert result.digest == found[FILES] and len(set(found.values())) == FILES
    return Undisturbed(found, sink_rows(settings))


def test_spark_makes_no_difference(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Three operators, two of them chained: the same checkpoints as in one process without Spark."""
    with OpenWarehouse.writable(str(tmp_path / "w")) as place:
        from siltstone.chains.policies import policy_by_name

        alone = RegionRun(place, replace(LITTLE, source=None), policy_by_name("marginal-cost"), parallelism=3)
        found = {step: alone.step(rows).digest for step, rows in enumerate(purchases()[:FILES], 1)}
    assert found == undisturbed.digests
    rows = undisturbed.sink
    assert rows.column("sequence").to_pylist() == list(range(FILES * 300))


def nothing(work: Path) -> None:
    """Only stop and go on."""


def lost(work: Path) -> None:
    """All working state is gone."""
    shutil.rmtree(work)


def torn(work: Path) -> None:
    """Every file of one subtask's working state is cut or altered in a way of its own."""
    files = sorted(p for p in work.glob("little/*/state/*/0000*/**/*") if p.is_file() and p.stat().st_size)
    assert files
    random = np.random.default_rng(5)
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        if number % 2:
            data = data[: len(data) // 2]
        else:
            data[random.integers(0, min(len(data), 256))] ^= 0xFF
        path.write_bytes(data)


@pytest.mark.parametrize("disturb", [nothing, lost, torn])
def test_a_run_goes_on_where_the_one_before_stopped(
    disturb: Callable[[Path], None], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    settings = at(tmp_path / "w")
    first = run(settings, LITTLE, RunRequest(batches=3))
    assert (first.checkpoints, first.rows) == ([1, 2, 3], 900)
    disturb(tmp_path / "w" / "work")
    # Other working state, another number of subtasks: `nothing` moves every key group to another subtask.
    parallelism = 3 if disturb is nothing else 2
    last = run(at(tmp_path / "w", parallelism=parallelism), LITTLE, RunRequest())
    assert last.checkpoints == [4, 5, 6]
    assert digests(settings, "little") == undisturbed.digests
    assert sink_rows(settings).equals(undisturbed.sink)
    proven(settings, "little")
    again = run(settings, LITTLE, RunRequest())
    assert (again.checkpoints, again.rows, again.digest) == ([], 0, undisturbed.digests[FILES])


@pytest.mark.parametrize("every", [{"checkpoint_steps": 3}, {"checkpoint_s": 3600.0}])
def test_a_checkpoint_of_several_steps_and_one_for_the_rest(
    every: dict[str, object], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    settings, request = at(tmp_path / "w", **every), RunRequest(options={"files": "5"})
    result = run(settings, LITTLE, request)
    wanted = [1, 2] if "checkpoint_steps" in every else [1]
    assert (result.checkpoints, result.rows, result.digest) == (wanted, 1500, undisturbed.digests[5])
    if "checkpoint_steps" in every:
        assert undisturbed.digests[3] in digests(settings, "little").values()
    with OpenWarehouse.existing(settings.warehouse) as place:
        assert [s.batch_id for s in place.catalog.input_log.list("little", 9)] == [0, 1, 2, 3, 4]
        directory = place.warehouse.local.source("little")
    assert sink_rows(settings).num_rows == 1500
    write_files(directory, purchases()[:FILES])
    result = run(settings, LITTLE, request)
    assert (result.rows, result.digest) == (300, undisturbed.digests[FILES])
    assert sink_rows(settings).select(["sequence", "spent"]).equals(undisturbed.sink.select(["sequence", "spent"]))
    proven(settings, "little")


def test_a_task_that_fails_and_is_tried_again_changes_nothing(tmp_path: Path) -> None:
    """By an exception in one step, by a killed worker in another; local Spark retries only if its master says so."""
    run(at(tmp_path / "steady"), COUNTS, RunRequest())
    wanted = digests(at(tmp_path / "steady"), "counts")
    program = (
        "from siltstone.settings import Settings; from siltstone.spark.operations import *; "
        "from tests.spark_streams import FLAKY; import sys; "
        "print(run(Settings(warehouse=sys.argv[1], parallelism=2, master='local[2,3]'), FLAKY, RunRequest()).digest)"
    )
    environment = {**os.environ, "FLAKY": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path / "flaky")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "raised").exists() and (tmp_path / "died").exists()
    assert digests(at(tmp_path / "flaky"), FLAKY.name) == wanted
    proven(at(tmp_path / "flaky"), FLAKY.name)


class Query:
    """A user's own query: any source, the user's own sink function."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self.spark, self.settings = spark, at(path)
        self.calls: list[tuple[int, list[int]]] = []
        operator = Aggregate("fifths", {"fifth": pa.int64()}, [Count("n"), Sum("sum", of="value")])
        self.stream = Stream("own", source=self.never, operators=[operator], sinks={"fifths": self.sink})

    @staticmethod
    def never(*_: object) -> DataFrame:
        raise AssertionError("the query has a source of its own")

    def sink(self, rows: DataFrame, checkpoint: int) -> None:
        self.calls.append((checkpoint, sorted(row.n for row in rows.collect())))

    def runner(self, max_steps: int | None = None) -> StreamRunner:
        self.place = OpenWarehouse.writable(self.settings.warehouse)
        return StreamRunner(self.spark, open_region(self.settings, self.stream, self.place, {}, 2), max_steps=max_steps)

    def start(self, runner: StreamRunner, location: str | None = None):
        ticks = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 50).load()
        writer = ticks.selectExpr("value", "value % 5 as fifth").writeStream.foreachBatch(runner)
        return writer.option("checkpointLocation", location or runner.checkpoint_location).start()


def test_in_the_users_own_query(spark: SparkSession, tmp_path: Path) -> None:
    own = Query(spark, tmp_path / "w")
    for start in (0, 3):
        runner = own.runner(max_steps=3)
        query = own.start(runner)
        assert runner.enough.wait(60)
        runner.stop(query)
        assert not query.isActive and runner.failure is None
        assert own.calls == [(id, [10 * id] * 5) for id in range(1, start + 4)], "once for each checkpoint"
    totals = state(own.settings, "own", "fifths", "totals", tmp_path / "out").sort_by("fifth")
    assert totals.column("n").to_pylist() == [60] * 5
    assert totals.column("sum").to_pylist() == [sum(range(k, 300, 5)) for k in range(5)]


def test_as_the_readme_does_it(spark: SparkSession, tmp_path: Path) -> None:
    given = {"checkpoint_steps": 2, "openmetrics": tmp_path / "{stream}.txt"}
    settings = at(tmp_path / "w").model_copy(update=given)
    stream = replace(COUNTS, source=None)
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")})
    with stream_runner(settings, stream, spark) as runner:
        writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
        writer.trigger(availableNow=True).start().awaitTermination()
    run(at(tmp_path / "steady"), COUNTS, RunRequest())
    with OpenWarehouse.existing(settings.warehouse) as place:
        assert [r.outcome for r in place.catalog.runs.list("counts")] == ["done"]
        digest = place.catalog.checkpoints.latest("counts").digest
        stored = len(place.catalog.objects.list("counts"))
    metrics = (tmp_path / "counts.txt").read_text()
    assert f'siltstone_upload_objects_total{{stream="counts"}} {stored}.0\n' in metrics, (
        "a user's own query writes them"
    )
    with OpenWarehouse.existing(at(tmp_path / "steady").warehouse) as place:
        assert place.catalog.checkpoints.latest("counts").digest == digest
    with pytest.raises(UsageError, match="no source of its own"):
        run(settings, stream, RunRequest())


def test_in_the_users_own_query_what_was_taken_back_comes_again_first(spark: SparkSession, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    operator = Aggregate("keys", {"key": pa.int64()}, [Count("n"), Sum("sum", of="value")])
    sinks = {"keys": lambda rows, id: heard.append((id, rows.count()))}
    stream = Stream("own", source=None, operators=[operator], sinks=sinks)
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")})

    def query(checkpoint_steps: int, *, follow: bool) -> None:
        settings = at(tmp_path / "w").model_copy(update={"checkpoint_steps": checkpoint_steps})
        with stream_runner(settings, stream, spark) as runner:
            if follow:
                runner.follow_log(rows)
            writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
            writer.trigger(availableNow=True).start().awaitTermination()

    query(3, follow=True)
    before, recorded = heard.copy(), digests(at(tmp_path / "w"), "own")
    assert [id for id, _ in before] == [1, 2] and len(recorded) == 2, "of three steps and of one"
    with OpenWarehouse.existing(at(tmp_path / "w").warehouse) as place:
        place.catalog.rollbacks.roll_back("own", place.catalog.runs.begin("own", "a test"), 0, "a test", "a test")
        with pytest.raises(
            Exception, match=r"4 logged steps are to be run again first: call runner.follow_log\(rows\)"
        ):
            query(1, follow=False)
        assert (heard, place.catalog.checkpoints.last_id("own")) == (before, 0)
    query(1, follow=True)
    assert (heard, digests(at(tmp_path / "w"), "own")) == (before, recorded), "the sink has had its rows"


def test_an_empty_micro_batch_under_adaptive_execution(spark: SparkSession, tmp_path: Path) -> None:
    """A session that Siltstone did not make plans adaptively: an empty batch would get no task at all."""
    stream = replace(COUNTS, source=None)
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")}).filter("key < 0")
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        with stream_runner(at(tmp_path / "w"), stream, spark) as runner:
            writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
            writer.trigger(availableNow=True).start().awaitTermination()
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", before)
    with OpenWarehouse.existing(at(tmp_path / "w").warehouse) as place:
        assert place.catalog.checkpoints.last_id("counts") == len(STEPS)


def test_state_of_sparks_own_before_the_runner_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    stream = replace(COUNTS, source=None)
    rows = source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")}).dropDuplicates(["key"])
    with stream_runner(at(tmp_path / "w"), stream, spark) as runner:
        writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
        with pytest.raises(Exception, match="foreachBatch"):
            writer.trigger(availableNow=True).start().awaitTermination()
        assert isinstance(runner.failure, UsageError) and "dropDuplicates" in str(runner.failure)
    with OpenWarehouse.existing(at(tmp_path / "w").warehouse) as place:
        assert (place.catalog.checkpoints.last_id("counts"), place.catalog.runs.list("counts")[-1].outcome) == (
            0,
            "failed",
        )


def test_another_checkpoint_location_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    own = Query(spark, tmp_path / "w")
    for location in ("first", "second"):
        before = own.calls.copy()
        runner = own.runner()
        query = own.start(runner, str(tmp_path / location))
        with pytest.raises(Exception, match="checkpointLocation"):
            query.awaitTermination(60)
        assert isinstance(runner.failure, StateError) and "runner.checkpoint_location" in str(runner.failure)
        assert own.calls == before
        if location == "first":  # the second is refused where the stream has checkpoints, too
            good = own.runner(max_steps=2)
            query = own.start(good)
            assert good.enough.wait(60)
            good.stop(query)


def test_a_runner_that_failed_takes_no_further_batch(spark: SparkSession, tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    with OpenWarehouse.writable(settings.warehouse) as place:
        runner = StreamRunner(spark, open_region(settings, BREAKING, place, {}, 2))
        rows = open_source(spark, BREAKING, place.warehouse, {})
        for _ in range(2):
            with pytest.raises(StateError, match=r"in step 2: operator counts: ZeroDivisionError: a value is neg"):
                run_stream(runner, rows)
            assert (place.catalog.checkpoints.last_id("breaking"), runner.region.step) == (1, 2)


def test_spark_aggregates_the_same(spark: SparkSession, tmp_path: Path) -> None:
    """`Aggregate` with and without the map side, and Spark's own streaming state, over the same files.

    Keys are floats with NaNs of several kinds and zeros of both signs: one key each.
    """
    tables = [_measurements(seed) for seed in range(3)]
    functions = [
        Count("n"),
        Count("n_v", of="v"),
        Sum("total", of="v"),
        Average("mean", of="v"),
        Min("lo", of="s", type=pa.string()),
        Max("hi", of="x", type=pa.float64()),
        First("first", of="v", by="t", by_type=pa.int64()),
        Last("last", of="v", by="t", by_type=pa.int64()),
    ]
    key = {"k": pa.float64(), "day": pa.date32()}
    operators = [
        Aggregate(name, key, functions, output=False, map_side=name == "mapped") for name in ("plain", "mapped")
    ]
    stream = Stream("measurements", source_of(tables), operators, max_parallelism=8)
    settings = at(tmp_path / "w")
    run(settings, stream, RunRequest())
    restore(settings, stream.name, to=tmp_path / "out")
    plain, mapped = (pq.read_table(tmp_path / "out" / op.name / "totals") for op in operators)
    order = [("k", "ascending"), ("day", "ascending")]
    assert repr(plain.sort_by(order).to_pylist()) == repr(mapped.sort_by(order).to_pylist())

    files = read_files(spark, tmp_path / "w" / "source" / stream.name, tables[0].schema)
    files.createOrReplaceTempView("measurements")
    aggregated = spark.sql(
        "select k, day, count(*) n, count(v) n_v, sum(v) total, avg(v) mean, min(s) lo, max(x) hi, "
        "min(struct(t, v)) filter (where v is not null).v first, max(struct(t, v)) filter (where v is not null).v last "
        "from measurements group by k, day"
    )
    query = aggregated.writeStream.outputMode("complete").format("memory").queryName("spark_state")
    query.option("checkpointLocation", str(tmp_path / "spark")).trigger(availableNow=True).start().awaitTermination()
    wanted = spark.table("spark_state").toArrow().sort_by(order)
    ours = {"k": plain.column("k"), "day": plain.column("day")}
    for f in functions:
        ours[f.name] = f.result([plain.column(name).combine_chunks() for name in f.columns()])
    found = pa.table(ours).sort_by(order)
    assert found.num_rows == 2 * 5 and wanted.column_names == found.column_names
    for name in wanted.column_names:
        assert repr(found.column(name).to_pylist()) == repr(wanted.column(name).to_pylist()), name


def _measurements(seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    odd_nan = np.array([0xFFF8000000000123], np.uint64).view(np.float64)[0]
    keys = np.array([np.nan, odd_nan, -0.0, 0.0, 1.5, -2.5, np.inf])[random.integers(0, 7, 400)]
    return pa.table(
        {
            "k": pa.array(keys),  # a NaN, not a null
            "day": pa.array(random.integers(0, 2, 400), pa.int32()).cast(pa.date32()),
            "v": pa.array(random.integers(-(10**9), 10**9, 400), mask=random.random(400) < 0.1),
            "s": pa.array([f"s{n}" for n in random.integers(0, 999, 400)]),
            "x": pa.array(random.normal(size=400)),
            "t": pa.array(random.permutation(400) + 400 * seed),
        }
    )


def test_a_new_variable_and_a_new_nullable_column(tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    run(settings, COUNTS, RunRequest(batches=2))
    grown = replace(COUNTS, operators=[Grown()])
    assert run(settings, grown, RunRequest()).checkpoints == [3, 4]
    proven(settings, "counts")
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
    proven(settings, "counts")
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


def test_a_second_writer_fences_the_first(spark: SparkSession, tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    with OpenWarehouse.writable(settings.warehouse) as place, OpenWarehouse.writable(settings.warehouse) as other:
        rows = open_source(spark, COUNTS, place.warehouse, {})
        older = StreamRunner(spark, open_region(settings, COUNTS, place, {}, 2))
        newer = StreamRunner(spark, open_region(settings, COUNTS, other, {}, 2), max_steps=2)
        with pytest.raises(Fenced, match="epoch 1 of stream counts was fenced by epoch 2"):
            run_stream(older, rows)
        assert place.catalog.checkpoints.last_id("counts") == 0
        run_stream(newer, rows)
        assert [c.epoch for c in place.catalog.checkpoints.list("counts")] == [2, 2]
    proven(settings, "counts")


def test_operators_hear_of_a_checkpoint_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", str(tmp_path / "w"))
    operator = NOTICING.operators[0]
    operator.seen.clear()
    run(at(tmp_path / "w"), NOTICING, RunRequest(batches=2))
    assert operator.seen == [(1, 1), (2, 2)]


def test_without_deltas_nothing_is_tracked(tmp_path: Path) -> None:
    settings = at(tmp_path / "w", policy_options=PolicyOptions(d_max=0))
    run(settings, COUNTS, RunRequest(batches=3))
    with OpenWarehouse.existing(settings.warehouse) as place:
        assert [(c.forms, c.d) for c in place.catalog.checkpoints.list("counts")] == [
            ({"counts": Form.BASE}, {"counts": 0})
        ] * 3
        handles = show_checkpoint(place.catalog, place.warehouse.store, "counts", "3")["handles"]
        assert {(h["form"], h["previous"]) for h in handles} == {("base", 0)}
        region = open_region(settings, COUNTS, place, {}, 2)
        assert region.begin_step()["counts"].tracking is False
        region.close("done")


def test_a_null_key_stops_the_stream_before_anything_of_its_batch_shows(tmp_path: Path) -> None:
    settings = at(tmp_path / "w")
    with pytest.raises(BadRow, match=r"operator counts: key column key is null in 1 of 2 rows") as stopped:
        run(settings, NULLS, RunRequest())
    assert stopped.value.exit_code == 2
    assert recorded(settings, "nulls")[2] == 1
    proven(settings, "nulls")


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
        (lambda spark, _: spark.range(3), r"the source of stream counts is no stream: make it with spark.readStream"),
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
        with OpenWarehouse.existing(settings.warehouse) as place:
            assert known is any(s.name == "counts" for s in place.catalog.streams.list())
        assert recorded(counted, "counts") == before
