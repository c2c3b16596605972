"""Dead letters: a bad row stops no stream, and goes to its sink exactly once, with reason, checkpoint and offsets."""

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.aggregates.operator import Aggregate, Sum
from siltstone.catalog.records.steps import Step, with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import BadRow, StateError, UsageError
from siltstone.operator import MapState, Operator, Rows, State, WindowState
from siltstone.run.subtask import run_subtask_again
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.resolve import resolve_sinks
from siltstone.spark.source_log import span
from siltstone.state.json_rows import json_rows
from siltstone.stream import DEAD_LETTERS
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, Tallies, batch, damage, inputs, outstanding, staged
from tests.proofs import failures
from tests.region_run import acknowledgement_of, run_tasks, shuffled


class Choosy(Tallies):
    """Refuses every row of the number 13 in its batch, once it has changed its state."""

    def process(self, rows: Rows, state: State) -> pa.Table:
        output = super().process(rows, state)
        n = rows.table.column("n").to_numpy()
        if (n % 1000 == 13).any():
            raise BadRow("13 is unlucky: take another", rows=n % 1000 == 13, reason="13 is unlucky")
        return output


PUTS_ASIDE = replace(STREAM, operators=[Choosy(name=SINK)], on_bad_row="dead-letter")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


def dirty(n: int, rows: int = 20) -> pa.Table:
    """A micro-batch with two bad rows: one has no key, and one is refused."""
    table = batch(n, rows).to_pylist()
    table[5]["k"] = None
    return pa.Table.from_pylist(table, batch(1).schema)


def good(n: int) -> list[int]:
    return [value for value in inputs([n], 20) if value % 1000 not in (5, 13)]


def told(heard: Heard) -> list[tuple[int, list[tuple[str, Any]]]]:
    return [(id, sorted((row["reason"], json.loads(row["row"])["n"]) for row in rows)) for id, rows in heard.calls]


def expected(n: int) -> list[tuple[str, int]]:
    return [("13 is unlucky", 1000 * n + 13), ("operator by_key: key column k is null", 1000 * n + 5)]


@pytest.mark.slow
def test_one_bad_row_does_not_stop_a_stream_for_ever(place: OpenWarehouse) -> None:
    heard, letters = Heard(), Heard()
    with pytest.raises(BadRow, match=r'key column k is null in 1 of .* rows; .*on_bad_row="dead-letter"'):
        Outboxed(place, heard).step(dirty(1))
    run = Outboxed(place, heard, stream=PUTS_ASIDE, letters=letters)
    completed = run.step(dirty(1))
    assert completed is not None and completed.dead_letters == {SINK: 2} and completed.rows_in == 20
    run.step(batch(2))
    run.step(dirty(3))
    assert heard.ids == [1, 2, 3] and heard.inputs == sorted([*good(1), *inputs([2]), *good(3)])
    assert told(letters) == [(1, expected(1)), (3, expected(3))], "where there is none, its sink hears nothing"
    first = letters.calls[1][1][0]
    assert (first["operator"], first["checkpoint_id"], first["step"], first["offsets"]) == (SINK, 3, 3, "{}")
    run.region.close("done")
    assert staged(place) == [] and failures(place, NAME) == []


@pytest.mark.slow
def test_dead_letters_of_a_crash_after_the_commit_come_with_the_next_run_once(place: OpenWarehouse) -> None:
    heard, letters = Heard(), Heard()
    Outboxed(place, heard, stream=PUTS_ASIDE, delivers=False).step(dirty(1))
    assert outstanding(place) == [1, 1] and letters.calls == []
    Outboxed(place, heard, stream=PUTS_ASIDE, letters=letters, parallelism=3).step(dirty(2))
    assert heard.ids == [1, 2] and told(letters) == [(1, expected(1)), (2, expected(2))]


@pytest.mark.slow
def test_a_checkpoint_that_is_made_again_brings_no_dead_letter_again(place: OpenWarehouse) -> None:
    heard, letters = Heard(), Heard()
    run = Outboxed(place, heard, stream=PUTS_ASIDE, letters=letters)
    digests = [run.step(dirty(n)) for n in (1, 2, 3)]
    place.catalog.rollbacks.roll_back(NAME, place.catalog.runs.begin(NAME, "a test"), 1, "a test", "a test")
    later = Outboxed(place, heard, stream=PUTS_ASIDE, letters=letters)
    again = [later.step(dirty(step.batch + 1), ends=ends) for step, ends in with_ends(later.region.logged_steps())]
    assert [c and c.digest for c in again] == [c and c.digest for c in digests[1:]]
    assert [id for id, _ in told(letters)] == [1, 2, 3] == heard.ids


def test_several_steps_are_one_delivery(place: OpenWarehouse) -> None:
    letters = Heard()
    run = Outboxed(place, Heard(), stream=PUTS_ASIDE, letters=letters, checkpoint_steps=2)
    run.step(dirty(1))
    run.step(dirty(2))
    assert told(letters) == [(1, sorted([*expected(1), *expected(2)]))]
    run.step(batch(3))
    run.step(dirty(4))
    assert failures(place, NAME) == [], "the step that was undone is in no delta"
    assert not list(Path(place.warehouse.local.root).rglob("step-*")), "and has left no file"


def test_each_operator_tells_of_its_own(place: OpenWarehouse) -> None:
    sums = Aggregate("sums", {"k": pa.int64()}, [Sum("total", "sum", pa.int64())], reads=SINK, nullable=())
    both = replace(PUTS_ASIDE, operators=[Tallies(name=SINK), sums], max_parallelism=4)
    heard, letters = Heard(), Heard()
    run = Outboxed(place, heard, stream=both, letters=letters)
    run.step(pa.table({"k": [1, None, 2], "n": [2**62, 1, 5]}))
    completed = run.step(pa.table({"k": pa.array([1, 2], pa.int64()), "n": [2**61, 7]}))
    assert completed is not None and completed.dead_letters == {"sums": 1}
    assert [(id, [(row["operator"], row["reason"]) for row in rows]) for id, rows in letters.calls] == [
        (1, [(SINK, "operator by_key: key column k is null")]),
        (2, [("sums", "operator sums: total of column sum leaves int64")]),
    ]
    assert json.loads(letters.calls[1][1][0]["row"]) == {"k": 1, "sum": 2**62 + 2**61}


def test_dead_letters_that_were_lost_come_again_even_if_there_are_none_any_more(place: OpenWarehouse) -> None:
    run = Outboxed(place, Heard(), stream=PUTS_ASIDE, delivers=False)
    run.step(batch(1))
    run.step(batch(2, 20))
    place.catalog.rollbacks.roll_back(NAME, place.catalog.runs.begin(NAME, "a test"), 1, "a test", "a test")
    damage(place, 2)
    heard, letters = Heard(), Heard()
    mended = replace(PUTS_ASIDE, operators=[Tallies(name=SINK)])
    later = Outboxed(place, heard, stream=mended, letters=letters)
    later.step(batch(2, 20), ends=True)
    later.step(batch(3))
    assert heard.ids == [1, 2, 3] and letters.calls == [(2, [])] and outstanding(place) == []


def test_what_was_acknowledged_and_lost_is_made_again_without_the_bad_rows(place: OpenWarehouse) -> None:
    run = Outboxed(place, Heard(), stream=PUTS_ASIDE, parallelism=1)
    task = run.region.begin_step()[SINK]
    rows = shuffled(task, dirty(1))
    _, (said,) = run_tasks(task, rows)
    *_, last = run_subtask_again(task, 0, iter(rows[0].to_batches()))
    again = acknowledgement_of(last)
    assert said.dead_letters == 2 and said.outputs.keys() == {SINK, DEAD_LETTERS}
    assert again.receipt == said.receipt and again.outputs == {}


@pytest.mark.parametrize(
    ("error", "wanted", "said"),
    [
        (BadRow("no idea which"), BadRow, "no idea which"),
        (BadRow("none of them", rows=[False] * 10), BadRow, "none of them"),
        (BadRow("the first", rows=[True]), UsageError, r"the first: .*bool\[1\], not bool\[10\]"),
        (BadRow("the third", rows=[2]), UsageError, r"the third: .*int64\[1\], not bool\[10\]"),
    ],
)
def test_an_error_that_does_not_name_its_rows_stops_the_stream(
    error: BadRow, wanted: type[Exception], said: str, place: OpenWarehouse
) -> None:
    class Vague(Tallies):
        def process(self, rows: Rows, state: State) -> pa.Table:
            raise error

    run = Outboxed(place, Heard(), stream=replace(PUTS_ASIDE, operators=[Vague(name=SINK)]), parallelism=1)
    with pytest.raises(wanted, match=said):
        run.step(batch(1))


def test_other_errors_stop_the_stream_as_ever(place: OpenWarehouse) -> None:
    class Broken(Tallies):
        def process(self, rows: Rows, state: State) -> pa.Table:
            raise StateError("broken")

    run = Outboxed(place, Heard(), stream=replace(PUTS_ASIDE, operators=[Broken(name=SINK)]))
    with pytest.raises(StateError, match="broken"):
        run.step(batch(1))


def test_a_stream_says_where_its_dead_letters_go(place: OpenWarehouse) -> None:
    assert PUTS_ASIDE.sinks[DEAD_LETTERS] is None
    sink = resolve_sinks(PUTS_ASIDE, place)[DEAD_LETTERS]
    assert isinstance(sink, SinkTable) and (sink.stream, sink.sink) == (NAME, DEAD_LETTERS)
    elsewhere = replace(PUTS_ASIDE, sinks={DEAD_LETTERS: print})
    assert resolve_sinks(elsewhere, place) == {DEAD_LETTERS: print}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"on_bad_row": "skip"}, "on_bad_row is 'skip': use 'fail' or 'dead-letter'"),
        ({"operators": [Tallies(name=DEAD_LETTERS)], "sinks": {}}, "dead_letters is the name of a sink"),
        (
            {"operators": [Aggregate("a", {"k": pa.int64()}, [Sum("s", "n", pa.int64())], map_side=True)], "sinks": {}},
            "operator a combines rows before the shuffle, so it cannot make a single row",
        ),
    ],
)
def test_mistakes_are_said_at_once(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(PUTS_ASIDE, **changed)


def test_offsets_go_from_the_end_of_the_step_before() -> None:
    before, step = Step(4, 3, 'v1\n{}\n{"a":1}\n-'), Step(5, 4, 'v1\n{}\n{"a":7}\n9')
    assert json.loads(span(before, step)) == {"batch": 4, "from": [{"a": 1}, None], "to": [{"a": 7}, 9]}
    assert json.loads(span(None, step)) == {"batch": 4, "from": None, "to": [{"a": 7}, 9]}


def column(kind: pa.DataType, value: Any) -> pa.Array:
    return pa.array([value], kind)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (column(pa.timestamp("us", "UTC"), 2**61), "2305843009213693952 us since 1970-01-01"),
        (column(pa.timestamp("us"), -(2**57)), "-144115188075855872 us since 1970-01-01"),
        (column(pa.timestamp("us", "No/Where"), 1), "1 us since 1970-01-01"),
        (column(pa.timestamp("us", "UTC"), 0), "1970-01-01T00:00:00+00:00"),
        (column(pa.date32(), 2**30), "1073741824 days since 1970-01-01"),
        (column(pa.binary(), b"a\xff").view(pa.string()), "a\\xff"),
        (column(pa.binary(), b"\xff"), "/w=="),
        (column(pa.float64(), float("nan")), "NaN"),
        (column(pa.list_(pa.float32()), [float("-inf"), 1.5, None]), ["-Infinity", 1.5, None]),
        (column(pa.decimal128(5, 2), Decimal("1.50")), "1.50"),
        (column(pa.duration("us"), 1), "0:00:00.000001"),
        (column(pa.map_(pa.string(), pa.int8()), [("a", 1), ("b", None)]), [["a", 1], ["b", None]]),
        (column(pa.struct([("d", pa.date32()), ("n", pa.null())]), {"d": 0}), {"d": "1970-01-01", "n": None}),
        (column(pa.string(), "a").dictionary_encode(), "a"),
        (column(pa.bool_(), True), True),
        (column(pa.struct([("a", pa.int8())]), None), None),
    ],
)
def test_a_row_can_be_told_whatever_is_in_it(value: pa.Array, shown: Any) -> None:
    (text,) = json_rows(pa.table({'odd "name".x': value}))
    assert json.loads(text, parse_constant=pytest.fail) == {'odd "name".x': shown}


def letters_of(place: OpenWarehouse, operator: Operator, rows: pa.Table) -> list[tuple[str, Any]]:
    letters = Heard()
    stream = replace(PUTS_ASIDE, operators=[operator], sinks={})
    Outboxed(place, Heard(), stream=stream, letters=letters).step(rows)
    found = [(row["reason"], json.loads(row["row"])) for _, told in letters.calls for row in told]
    return sorted(found, key=str)


def test_a_key_that_its_type_cannot_hold_is_a_dead_letter(place: OpenWarehouse) -> None:
    """Spark holds an unsigned key in a wider type, so no cast of its own finds it."""
    sums = Aggregate("sums", {"k": pa.uint8()}, [Sum("total", "n", pa.int64())], nullable=())
    rows = pa.table({"k": pa.array([1, 300, -1, None, 255], pa.int16()), "n": pa.array([1, 2, 3, 4, 5])})
    assert letters_of(place, sums, rows) == [
        ("operator sums: key column k cannot be cast to uint8", {"k": -1, "n": 3}),
        ("operator sums: key column k cannot be cast to uint8", {"k": 300, "n": 2}),
        ("operator sums: key column k is null", {"k": None, "n": 4}),
    ]


def test_a_null_key_is_no_dead_letter_where_it_may_be(place: OpenWarehouse) -> None:
    sums = Aggregate("sums", {"k": pa.uint8()}, [Sum("total", "n", pa.int64())])
    rows = pa.table({"k": pa.array([1, 300, None], pa.int16()), "n": pa.array([1, 2, 4])})
    assert letters_of(place, sums, rows) == [
        ("operator sums: key column k cannot be cast to uint8", {"k": 300, "n": 2})
    ]


def test_a_value_that_an_aggregate_cannot_hold_is_a_dead_letter(place: OpenWarehouse) -> None:
    sums = Aggregate("sums", {"k": pa.int64()}, [Sum("total", "n", pa.int64())])
    rows = pa.table({"k": [1, 1, 2, 3], "n": ["1", "x", None, "1e99"]})
    reason = "operator sums: column n does not fit int64"
    assert letters_of(place, sums, rows) == [(reason, {"k": 1, "n": "x"}), (reason, {"k": 3, "n": "1e99"})]


class Turned(Operator):
    """Enters the rows of each call from the last to the first."""

    key = {"k": pa.int64()}  # noqa: RUF012
    week = WindowState(value={"n": pa.int64()}, order="n")

    def process(self, rows: Rows, state: State) -> None:
        state.week.insert(
            rows.keys, rows.key_index[::-1].copy(), {"n": rows.table.column("n").take(np.arange(len(rows))[::-1])}
        )


class Straight(Turned):
    """Enters the rows as they are."""

    def process(self, rows: Rows, state: State) -> None:
        state.week.insert(rows.keys, rows.key_index, {"n": rows.table.column("n")})


def test_entries_of_one_key_in_another_order_name_no_good_row_in_place_of_the_bad_one(place: OpenWarehouse) -> None:
    rows = pa.table({"k": [1, 1, 1, 1], "n": pa.array([7, 8, None, 9], pa.int64())})
    told = [row["n"] for _, row in letters_of(place, Turned(name="turned"), rows)]
    assert sorted(map(str, told)) == ["7", "8", "9", "None"], "which of them it was is not known: all of the key"


class Mapped(Operator):
    """Enters the rows in a map, as they are or from the last to the first."""

    key = {"k": pa.int64()}  # noqa: RUF012
    seen = MapState(key={"n": pa.int64()}, value={"count": pa.int64()})
    turned = False

    def process(self, rows: Rows, state: State) -> None:
        table = rows.table.append_column("count", pa.array([1] * len(rows)))
        state.seen.put(table.take(np.arange(len(rows))[::-1]) if self.turned else table)


class MappedTurned(Mapped):
    """Enters them from the last to the first."""

    turned = True


def test_entries_that_are_the_rows_name_the_bad_row_alone(place: OpenWarehouse) -> None:
    rows = pa.table({"k": [1, 1, 1], "n": pa.array([7, None, 8], pa.int64())})
    assert [row["n"] for _, row in letters_of(place, Straight(name="straight"), rows)] == [None]


def test_entries_of_a_map_that_are_the_rows_name_the_bad_row_alone(place: OpenWarehouse) -> None:
    rows = pa.table({"k": [1, 1, 2, 1], "n": pa.array([7, None, 9, 8], pa.int64())})
    assert [row["n"] for _, row in letters_of(place, Mapped(name="mapped"), rows)] == [None]


def test_entries_of_a_map_in_another_order_name_all_rows_of_their_key(place: OpenWarehouse) -> None:
    rows = pa.table({"k": [1, 1, 2, 1], "n": pa.array([7, None, 9, 8], pa.int64())})
    told = [row["n"] for _, row in letters_of(place, MappedTurned(name="turned"), rows)]
    assert sorted(map(str, told)) == ["7", "8", "None"]


def test_a_column_of_the_source_that_is_called_like_one_of_ours_reaches_the_operator(place: OpenWarehouse) -> None:
    class Reads(Straight):
        def process(self, rows: Rows, state: State) -> None:
            assert rows.table.column_names == ["k", "__original_n", "n"]
            super().process(rows, state)

    rows = pa.table({"k": [1, 1], "__original_n": ["a", "b"], "n": pa.array([7, None], pa.int64())})
    assert [row for _, row in letters_of(place, Reads(name="reads"), rows)] == [
        {"k": 1, "__original_n": "b", "n": None}
    ]
