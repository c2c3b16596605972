"""The client, and a query of one's own, as a user has them."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import siltstone as st
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.spark.stopping import StopRequest
from siltstone.spark.stream_run import StreamRun
from siltstone.stream import DIRECTORY
from tests.spark_streams import COUNTS, STEPS, source_of

pytestmark = pytest.mark.usefixtures("spark")
OWN = replace(COUNTS, source=None)
ONCE = {"availableNow": True}


@pytest.fixture
def warehouse(tmp_path: Path) -> Path:
    return tmp_path / "w"


@pytest.fixture
def rows(spark: SparkSession, tmp_path: Path) -> DataFrame:
    return source_of(STEPS)(spark, {DIRECTORY: str(tmp_path / "files")})


def begin(warehouse: Path, rows: DataFrame, stream: st.Stream = OWN, **options: Any) -> Any:
    return st.write_stream(rows, stream, warehouse=warehouse, parallelism=2, **options)


def outcomes(warehouse: Path) -> list[str | None]:
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        return [run.outcome for run in place.catalog.runs.list("counts")]


def test_one_call_runs_a_query_to_its_last_checkpoint(rows: DataFrame, warehouse: Path, tmp_path: Path) -> None:
    run = begin(warehouse, rows, trigger=ONCE, checkpoint_steps=3)
    assert run.await_termination()
    assert not run.is_active and run.exception is None and run.status == {"message": "ended"}
    client = st.open(warehouse).stream("counts")
    listed = client.checkpoints()
    assert run.result.checkpoints == [each["id"] for each in listed.checkpoints] and len(STEPS) % 3
    assert run.last_checkpoint.id == listed.checkpoints[-1]["id"] == -(-len(STEPS) // 3)
    steady = st.open(tmp_path / "steady", parallelism=2).stream(COUNTS).run()
    assert run.result.digest == steady.digest and outcomes(warehouse) == ["done"]


def test_a_run_that_goes_on_is_stopped_with_a_checkpoint(rows: DataFrame, warehouse: Path) -> None:
    with begin(warehouse, rows, checkpoint_steps=1000) as run:
        assert run.is_active and not run.await_termination(0)
        while not run.status.get("isTriggerActive") and run.status["message"] != "Waiting for data to arrive":
            run.await_termination(0.05)
    assert run.result.stopped == "stop" and outcomes(warehouse) == ["stopped"]
    assert run.last_checkpoint is None or run.result.checkpoints == [1]


def test_a_run_is_stopped_from_its_own_callback(rows: DataFrame, warehouse: Path) -> None:
    """A checkpoint waits for `on_checkpoint`: one that waited for the run there would wait for ever."""
    begun: list[Any] = []
    client = st.open(warehouse, parallelism=2).stream(OWN)
    may_begin = threading.Event()

    def stop(_: Any) -> None:
        assert may_begin.wait(60)
        begun[0].stop(wait=False)

    begun.append(client.write_stream(rows, on_checkpoint=stop))
    may_begin.set()
    assert begun[0].await_termination() and begun[0].result.stopped == "stop"
    assert outcomes(warehouse) == ["stopped"]


def test_a_thread_that_cannot_work_fails_who_waits(spark: SparkSession) -> None:
    def work(_: StreamRun) -> Any:
        raise st.Unreachable("no JVM")

    run = StreamRun("counts", spark, StopRequest(), work)
    for wait in (run.await_start, run.await_termination, run.stop, lambda: run.await_termination(60)):
        with pytest.raises(st.Unreachable, match="no JVM"):
            wait()


def test_a_sink_has_an_active_session_in_the_last_checkpoint(rows: DataFrame, warehouse: Path) -> None:
    seen: list[bool] = []
    sinks = {"counts": lambda *_: seen.append(SparkSession.getActiveSession() is not None)}
    operator = st.Aggregate("counts", {"key": pa.int64()}, [st.Count("n")])
    stream = st.Stream("own", source=None, operators=[operator], sinks=sinks)
    begin(warehouse, rows, stream, trigger=ONCE, checkpoint_steps=1000).await_termination()
    assert seen == [True]


def test_what_fails_in_a_step_is_raised_where_it_is_waited_for(rows: DataFrame, warehouse: Path) -> None:
    class Failing(st.Operator):
        name, key, output = "failing", {"key": pa.int64()}, {"key": pa.int64()}
        seen = st.ValueState({"n": pa.int64()})

        def process(self, rows: Any, state: Any) -> pa.Table:
            raise ValueError("no such airport")

    run = begin(warehouse, rows, replace(OWN, operators=[Failing()], sinks={}), trigger=ONCE)
    with pytest.raises(st.StateError, match="no such airport"):
        run.await_termination()
    assert isinstance(run.exception, st.StateError) and run.result is None and outcomes(warehouse) == ["failed"]
    with pytest.raises(st.StateError, match="no such airport"):
        run.stop()


def test_rows_that_are_no_stream_change_nothing(spark: SparkSession, warehouse: Path) -> None:
    with pytest.raises(st.UsageError, match=r"spark\.readStream"):
        begin(warehouse, spark.range(3))
    assert st.open(warehouse).streams().streams == []


def test_after_a_rollback_the_logged_steps_come_first(rows: DataFrame, warehouse: Path) -> None:
    begin(warehouse, rows, trigger=ONCE, checkpoint_steps=3).await_termination()
    client = st.open(warehouse).stream("counts")
    before = [(each["id"], each["digest"]) for each in client.checkpoints().checkpoints]
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        place.catalog.rollbacks.roll_back("counts", place.catalog.runs.begin("counts", "a test"), 0, "a test", "a test")
    begin(warehouse, rows, trigger=ONCE).await_termination()
    assert [(each["id"], each["digest"]) for each in client.checkpoints().checkpoints] == before


def test_a_newer_run_fences_an_older_one(rows: DataFrame, warehouse: Path) -> None:
    older = begin(warehouse, rows, checkpoint_steps=1000)
    begin(warehouse, rows, trigger=ONCE).await_termination()
    with pytest.raises(st.Fenced):
        older.stop()


def test_a_table_is_the_same_with_and_without_spark(spark: SparkSession, rows: DataFrame, warehouse: Path) -> None:
    begin(warehouse, rows, trigger=ONCE).await_termination()
    client = st.open(warehouse).stream("counts")
    operator, variable = "counts", "totals"
    whole = client.table(operator, variable)
    there = sorted(map(str, whole.to_table().to_pylist()))
    assert there and there == sorted(
        str(row.asDict()) for row in client.table(operator, variable, spark=spark).collect()
    )
    [name] = client.table(operator, variable, columns=["key"]).schema.names
    assert name == "key"
    first = client.table(operator, variable, at="1").count_rows()
    assert 0 < first <= whole.count_rows()
    with pytest.raises(st.UsageError, match="more than 8 bytes of memory"):
        client.table(operator, variable, limit_bytes=8)
    with pytest.raises(st.UsageError, match="no variable 'sums': it has"):
        client.table(operator, "sums")


def test_every_result_is_one_json_object(rows: DataFrame, warehouse: Path, tmp_path: Path) -> None:
    run = begin(warehouse, rows, trigger=ONCE)
    run.await_termination()
    client = st.open(warehouse)
    stream = client.stream(OWN)
    results = [
        run.result,
        client.streams(),
        client.doctor(),
        client.back_up(),
        stream.checkpoints(),
        stream.show(),
        stream.restore(to=tmp_path / "out"),
        stream.verify(every=True),
        stream.materialize(),
        stream.retention({"keep_last": 2}),
        stream.savepoint("friday", at="2"),
        stream.savepoints(),
        stream.truncate(),
        stream.drop_savepoint("friday"),
        stream.delete([2]),
        stream.deletions(),
        stream.sweep(dry_run=True),
        stream.snapshot(),
        stream.compare_snapshot(),
        stream.report(tmp_path / "chain.svg"),
        stream.fork("second"),
        stream.rescale(3),
        stream.recover(dry_run=True),
    ]
    for result in results:
        text = result.to_json()
        assert "\n" not in text and json.loads(text) == json.loads(json.dumps(result.to_dict())), result
