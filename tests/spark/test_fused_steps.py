"""Fused operators in runs on Spark: nothing that can be seen tells that they are."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.operator import SOURCE, BroadcastState, Operator, Rows, State, ValueState
from siltstone.settings import RecoveryOptions
from siltstone.sinks.parquet import ParquetSink
from siltstone.spark import step as step_module
from siltstone.spark.operations import RunRequest, replay, rescale, run
from siltstone.stream import Stream
from tests.spark_runs import at, check_proven, digests, read_parquet_sink
from tests.spark_streams import keyed, source_of

KEY = {"key": pa.int64()}
THIRD = {"third": pa.schema(KEY)}
TIME = pa.timestamp("us", "UTC")
OUTPUTS = ("stamped", "zones", "sums", "by_zone")
ROWS = [keyed([n % 17 for n in range(60)], range(60)), keyed(range(30), range(100, 130)), keyed([3, 3], [1, 2])]


class Stamped(Operator):
    """Its rows, each with a time, and how many its key has had; a key's third row goes to a side output as well."""

    name = "stamped"
    key = KEY
    inputs = ("value",)
    output = pa.schema({"value": pa.int64(), "at": TIME, "local": pa.timestamp("us"), "seen": pa.int64(), **KEY})
    side_outputs = THIRD
    keeps_key = True
    counts = ValueState(value={"rows": pa.int64()})

    def process(self, rows: Rows, state: State) -> Any:
        """Count."""
        seen = rows.count(initial=state.counts.get(rows.keys)["rows"])
        state.counts.put(rows.keys, {"rows": seen})
        at = pa.array([1_700_000_000_000_000 + value for value in rows.table["value"].to_pylist()])
        made = {"value": rows.table["value"], "at": at.cast(TIME), "local": at.cast(pa.timestamp("us"))}
        made |= {"seen": seen.take(pa.array(rows.key_index)), "key": rows.table["key"]}
        third = rows.table.select(["key"]).filter(pa.array([n == 3 for n in made["seen"].to_pylist()]))
        return {"stamped": pa.table(made), "third": third}


class Zones(Operator):
    """What it gets, with the types of the times; `marker` is where it notes that it has died, once."""

    name = "zones"
    key = KEY
    reads = "stamped"
    inputs = ("at", "value", "local")
    output = pa.schema({**KEY, "value": pa.int64(), "types": pa.string(), "calls": pa.int64()})
    keeps_key = True
    calls = ValueState(value={"calls": pa.int64()})

    def __init__(self, marker: Path | None) -> None:
        super().__init__()
        self.marker = marker

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Say which columns there are, and in which order the rows came."""
        if self.marker is not None and 100 in rows.table["value"].to_pylist() and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        calls = rows.count(initial=state.calls.get(rows.keys)["calls"])
        state.calls.put(rows.keys, {"calls": calls})
        types = ", ".join(f"{field.name} {field.type}" for field in rows.table.schema)
        made = {"key": rows.table["key"], "value": rows.table["value"], "types": [types] * len(rows)}
        return pa.table(made | {"calls": calls.take(pa.array(rows.key_index))}, schema=self.output)


def stream(marker: Path | None = None) -> Stream:
    """Three operators by one key, each of which reads the one before, and one by another."""
    operators = [
        Stamped(),
        Zones(marker),
        Aggregate("sums", KEY, [Sum("sum", of="value"), Count("rows")], reads="zones"),
        Aggregate("by_zone", {"sum": pa.int64()}, [Count("rows")], reads="sums"),
    ]
    sinks = {name: ParquetSink() for name in (*OUTPUTS, "stamped-third")}
    return Stream("fused", source_of(ROWS), operators, sinks=sinks, max_parallelism=16)


@pytest.fixture(autouse=True)
def in_another_zone(with_settings: Callable[[dict[str, str]], None]) -> None:
    """A session whose zone is not UTC."""
    with_settings({"spark.sql.session.timeZone": "America/St_Johns"})


def sunk(warehouse: Path) -> dict[str, list[str]]:
    """Each sink's rows."""
    names = (*OUTPUTS, "stamped-third")
    return {name: sorted(map(str, read_parquet_sink(warehouse, "fused", name).to_pylist())) for name in names}


def jobs_of(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The operators of each job that runs a step, as they come."""
    jobs, genuine = list[list[str]](), step_module.frame_of_job

    def noted(frames: Any, tasks: Any) -> DataFrame:
        jobs.append([each.operator.name for name in frames for each in tasks[name].together])
        return genuine(frames, tasks)

    monkeypatch.setattr(step_module, "frame_of_job", noted)
    return jobs


def test_fused_operators_leave_and_replay_what_they_do_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of(monkeypatch)
    fused = run(at(tmp_path / "fused"), stream(), RunRequest())
    assert jobs == [["stamped", "zones", "sums"], ["by_zone"]] * len(ROWS)
    jobs.clear()
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "fuse", dict)
        alone = run(at(tmp_path / "alone"), stream(), RunRequest())
        assert jobs == [["stamped"], ["zones"], ["sums"], ["by_zone"]] * len(ROWS)
        assert replay(at(tmp_path / "fused"), stream()).steps == len(ROWS)
    assert replay(at(tmp_path / "alone"), stream()).steps == len(ROWS)
    assert (fused.digest, fused.checkpoints) == (alone.digest, alone.checkpoints)
    assert digests(at(tmp_path / "fused"), "fused") == digests(at(tmp_path / "alone"), "fused")
    made = sunk(tmp_path / "fused")
    assert made == sunk(tmp_path / "alone")
    assert all(made.values())
    assert "at timestamp[us, tz=America/St_Johns], value int64, local timestamp[us]" in made["zones"][0]
    check_proven(at(tmp_path / "fused"), "fused")


class Priced(Operator):
    """Its rows by two sources: the one gives values, and the other one factors to every subtask."""

    name = "priced"
    key = KEY
    output = pa.schema({**KEY, "price": pa.int64()})
    keeps_key = True
    factors = BroadcastState(reads="factors", key={"key": pa.int64()}, value={"value": pa.int64()}, by="value")

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Multiply."""
        own = rows.of("values").table
        factor = state.factors.get(pa.table({"key": pa.array([0] * len(own))}))["value"].fill_null(1)
        return pa.table({"key": own["key"], "price": pc.multiply(own["value"], factor)})


def two_pairs() -> Stream:
    """Two operators that read the sources, and behind each one that is fused to it."""
    many = [keyed([n % 23 for n in range(step, 40 + step)], range(40)) for step in range(4)]
    few = [keyed([0], [factor]) for factor in (3, 5, 7, 11)]
    operators = [
        Priced(reads={"values": {"key": "key"}}, inputs={"values": ("value",)}),
        Aggregate("counts", KEY, [Count("rows"), Sum("sum", of="value")], reads="values"),
        Aggregate("prices", KEY, [Sum("sum", of="price"), Count("rows")], reads="priced"),
        Aggregate("changes", KEY, [Count("times"), Sum("sums", of="sum")], reads="counts"),
    ]
    sinks = {name: ParquetSink() for name in ("prices", "changes")}
    return Stream(
        "pairs", sources={"values": source_of(many), "factors": source_of(few)}, operators=operators, sinks=sinks
    )


def test_two_fused_pairs_go_through_a_rescale_and_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, stream = jobs_of(monkeypatch), two_pairs()
    run(at(tmp_path / "steady"), stream, RunRequest())
    assert jobs == [["priced", "prices", "counts", "changes"]] * 4
    expected = digests(at(tmp_path / "steady"), "pairs")
    settings = at(tmp_path / "w")
    run(settings, stream, RunRequest(batches=2))
    rescale(settings, stream, 3)
    changed = at(tmp_path / "w", parallelism=3)
    run(changed, stream, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        begun = place.catalog.runs.begin("pairs", "a test")
        place.catalog.rollbacks.roll_back("pairs", begun, 1, "a test", "a test")
    monkeypatch.setattr(step_module, "fuse", dict)
    run(changed, stream, RunRequest())
    assert [*digests(changed, "pairs").values()][-1] == expected[4]
    check_proven(changed, "pairs")
    for name in ("prices", "changes"):
        steady, here = (
            read_parquet_sink(tmp_path / each, "pairs", name).drop_columns(["checkpoint"]).to_pylist()
            for each in ("steady", "w")
        )
        assert sorted(map(str, here)) == sorted(map(str, steady))


class Drawing(Operator):
    """Gives each row the next random number of an object that another operator has as well."""

    key = KEY
    inputs = ("value",)
    output = pa.schema({**KEY, "value": pa.int64()})
    keeps_key = True

    def __init__(self, name: str, reads: str, random: np.random.Generator) -> None:
        self.random = random
        super().__init__(name=name, reads=reads)

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Draw."""
        return pa.table({"key": rows.table["key"], "value": self.random.integers(0, 1 << 40, len(rows))})


def test_fused_operators_share_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They did not when each had a job of its own."""
    random = np.random.default_rng(7)
    operators = [Drawing("first", SOURCE, random), Drawing("behind", "first", random)]
    sinks = {name: ParquetSink() for name in ("first", "behind")}
    one = Stream("drawn", source_of(ROWS[:1]), operators, sinks=sinks, max_parallelism=16)
    jobs = jobs_of(monkeypatch)
    run(at(tmp_path / "w"), one, RunRequest())
    assert jobs == [["first", "behind"]]
    drawn = [sorted(read_parquet_sink(tmp_path / "w", "drawn", name)["value"].to_pylist()) for name in sinks]
    assert drawn[0] == drawn[1]


def test_a_worker_that_dies_between_two_fused_operators_changes_nothing(tmp_path: Path) -> None:
    """The first has taken its step by then, or is about to."""
    steady = run(at(tmp_path / "steady"), stream(), RunRequest())
    settings = at(tmp_path / "w", recovery=RecoveryOptions(resets=1, reset_delay_s=0.0))
    died = run(settings, stream(tmp_path / "died"), RunRequest())
    assert (tmp_path / "died").exists()
    assert (died.resets, died.digest, died.checkpoints) == (1, steady.digest, steady.checkpoints)
    assert sunk(tmp_path / "w") == sunk(tmp_path / "steady")
    check_proven(settings, "fused")


def test_text_of_a_type_that_spark_changes_goes_by_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_settings: Callable[[dict[str, str]], None]
) -> None:
    jobs = jobs_of(monkeypatch)
    with_settings({step_module.LARGE_TYPES: "true"})
    run(at(tmp_path / "w"), stream(), RunRequest())
    assert jobs[0] == ["stamped"]
