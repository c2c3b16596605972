"""Autonomous operators in a stream's definition: each is kept as a stream of its own."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from siltstone.aggregates.functions import Count
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Tumbling
from siltstone.errors import UsageError
from siltstone.operator import CheckpointWriter, Operator, Rows, State, ValueState
from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import Autonomous, Stream, find_stream, find_streams
from siltstone.time.event_time import EventTime


class Counts(Operator):
    name = "counts"
    key = {"key": pa.int64()}  # noqa: RUF012
    totals = ValueState(value={"rows": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        pass


class Audit(Counts):
    name = "audit"
    output = pa.schema([("key", pa.int64())])


class Preparing(Audit):
    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Write nothing."""


class Chained(Audit):
    reads = "counts"


COUNTED = Stream("counted", lambda spark, _: spark.sql(""), [Counts()], max_parallelism=8, on_bad_row="dead-letter")
SINK = ParquetSink("/somewhere")
STREAM = replace(COUNTED, autonomous=[Autonomous(Audit(), checkpoint_steps=5, sink=SINK)], options={"n": "3"})


def test_it_is_kept_as_a_stream_of_its_own_that_reads_the_same_source() -> None:
    [audit] = STREAM.autonomous_streams()
    assert (audit.name, audit.beside, audit.origin) == ("counted-audit", "counted", None)
    assert (audit.source, audit.options, audit.max_parallelism) == (STREAM.source, {"n": "3"}, 8)
    assert audit.sinks == {"audit": SINK, "dead_letters": None} and audit.dead_letters
    assert [operator.name for operator in audit.operators] == ["audit"] and not audit.autonomous
    [without] = replace(STREAM, autonomous=[Autonomous(Audit())]).autonomous_streams()
    assert "audit" not in without.sinks


def test_windows_that_combine_rows_have_its_event_time() -> None:
    window = Tumbling("1 hour", on="at")
    visits = Aggregate("visits", {"key": pa.int64()}, [Count("n")], window=window, map_side=True)
    [kept] = Stream(
        "s", None, [Counts()], event_time=EventTime("at"), autonomous=[Autonomous(visits)]
    ).autonomous_streams()
    assert kept.event_time == EventTime("at") and "source" in kept.row_times(kept.operators[0])
    plain = Aggregate("plain", {"key": pa.int64()}, [Count("n")], map_side=True)
    [kept] = Stream(
        "s", None, [Counts()], event_time=EventTime("at"), autonomous=[Autonomous(plain)]
    ).autonomous_streams()
    assert kept.event_time is None


@pytest.mark.parametrize(
    ("one", "cadence"),
    [
        (Autonomous(Audit()), {}),
        (Autonomous(Audit(), checkpoint_steps=5), {"checkpoint_steps": 5, "checkpoint_s": None}),
        (Autonomous(Audit(), checkpoint_s=2.5), {"checkpoint_steps": 1, "checkpoint_s": 2.5}),
    ],
)
def test_its_cadence_is_its_own_or_the_runs(one: Autonomous, cadence: dict[str, object]) -> None:
    assert one.cadence == cadence


@pytest.mark.parametrize(
    ("autonomous", "why"),
    [
        ([Autonomous(Counts())], "another operator has this name"),
        ([Autonomous(Audit()), Autonomous(Audit())], "another operator has this name"),
        ([Autonomous(Chained())], "reads the output of counts"),
        ([Autonomous(Preparing())], "prepares for the region's checkpoints"),
        ([Autonomous(Audit(), sink=7)], "cannot take rows"),
    ],
)
def test_what_cannot_be_is_refused(autonomous: list[Autonomous], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        replace(COUNTED, autonomous=autonomous)


@pytest.mark.parametrize("cadence", [{"checkpoint_steps": 0}, {"checkpoint_s": -1.0}])
def test_a_cadence_is_more_than_nothing(cadence: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(cadence))} is"):
        Autonomous(Audit(), **cadence)


def test_nothing_of_the_region_reads_it() -> None:
    with pytest.raises(UsageError, match="reads the output of 'audit'"):
        replace(STREAM, sinks={"audit": SINK})
    with pytest.raises(UsageError, match="reads the output of 'audit'"):
        reading = Chained()
        reading.reads, reading.name = "audit", "reading"
        replace(STREAM, operators=[Counts(), reading])


def test_a_fork_has_none_unless_its_definition_has() -> None:
    assert not STREAM.as_fork("what-if", "counted").autonomous
    own = replace(STREAM, name="what-if", origin="counted")
    [audit] = own.as_fork("what-if", "counted").autonomous_streams()
    assert (audit.name, audit.beside) == ("what-if-audit", "counted")
    with pytest.raises(UsageError, match="would write to its sink"):
        audit.as_fork("audit-again", audit.name)
    plain = replace(own, autonomous=[Autonomous(Audit())]).autonomous_streams()[0]
    assert plain.as_fork("audit-again", plain.name).beside == "counted", "its source keeps reading where it did"


def test_it_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("defined_here")
    module.__dict__["STREAM"] = STREAM
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found, broken = find_streams([module.__name__])
    assert {"counted", "counted-audit"} <= found.keys() and not broken
    assert find_stream("counted-audit", [module.__name__]).beside == "counted"
    module.__dict__["OTHER"] = replace(COUNTED, name="counted-audit")
    assert "two streams are called counted-audit" in find_streams([module.__name__])[1][module.__name__]
