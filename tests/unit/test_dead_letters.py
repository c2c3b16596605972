"""Dead letters: a bad row stops no stream, and goes to its sink exactly once, with reason, checkpoint and offsets."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from siltstone.aggregate import Aggregate, Sum
from siltstone.catalog.place import Place
from siltstone.catalog.records import Step
from siltstone.errors import BadRow, StateError, UsageError
from siltstone.lifecycle.replay import follow
from siltstone.lifecycle.subtask import run_subtask_again
from siltstone.operator import Rows, State
from siltstone.spark.sinks import ParquetSink, parquet_sinks
from siltstone.spark.source_log import span
from siltstone.stream import DEAD_LETTERS
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, Tallies, batch, inputs, outstanding, staged
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
def place(tmp_path: Path) -> Iterator[Place]:
    with Place.writable(str(tmp_path / "w")) as opened:
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


def test_one_bad_row_does_not_stop_a_stream_for_ever(place: Place) -> None:
    heard, letters = Heard(), Heard()
    with pytest.raises(BadRow, match=r'key column k is null in 1 of .* rows: .*on_bad_row="dead-letter"'):
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


def test_dead_letters_of_a_crash_after_the_commit_come_with_the_next_run_once(place: Place) -> None:
    heard, letters = Heard(), Heard()
    Outboxed(place, heard, stream=PUTS_ASIDE, delivers=False).step(dirty(1))
    assert outstanding(place) == [1, 1] and letters.calls == []
    Outboxed(place, heard, stream=PUTS_ASIDE, letters=letters, parallelism=3).step(dirty(2))
    assert heard.ids == [1, 2] and told(letters) == [(1, expected(1)), (2, expected(2))]


def test_a_checkpoint_that_is_made_again_brings_no_dead_letter_again(place: Place) -> None:
    heard, letters = Heard(), Heard()
    run = Outboxed(place, heard, stream=PUTS_ASIDE, letters=letters)
    digests = [run.step(dirty(n)) for n in (1, 2, 3)]
    place.catalog.rewind(NAME, place.catalog.new_epoch(NAME, "a test"), 1, "a test", "a test")
    later = Outboxed(place, heard, stream=PUTS_ASIDE, letters=letters)
    again = [
        later.step(dirty(piece.step.batch_id + 1), ends=piece.ends)
        for piece in follow(1, later.region.logged_steps())
        if piece.step is not None
    ]
    assert [c and c.digest for c in again] == [c and c.digest for c in digests[1:]]
    assert [id for id, _ in told(letters)] == [1, 2, 3] == heard.ids


def test_several_steps_are_one_delivery(place: Place) -> None:
    letters = Heard()
    run = Outboxed(place, Heard(), stream=PUTS_ASIDE, letters=letters, checkpoint_steps=2)
    run.step(dirty(1))
    run.step(dirty(2))
    assert told(letters) == [(1, sorted([*expected(1), *expected(2)]))]


def test_each_operator_tells_of_its_own(place: Place) -> None:
    sums = Aggregate("sums", {"k": pa.int64()}, [Sum("total", "sum", pa.int64())], reads=SINK)
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


def test_what_was_acknowledged_and_lost_is_made_again_without_the_bad_rows(place: Place) -> None:
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
    error: BadRow, wanted: type[Exception], said: str, place: Place
) -> None:
    class Vague(Tallies):
        def process(self, rows: Rows, state: State) -> pa.Table:
            raise error

    run = Outboxed(place, Heard(), stream=replace(PUTS_ASIDE, operators=[Vague(name=SINK)]), parallelism=1)
    with pytest.raises(wanted, match=said):
        run.step(batch(1))


def test_other_errors_stop_the_stream_as_ever(place: Place) -> None:
    class Broken(Tallies):
        def process(self, rows: Rows, state: State) -> pa.Table:
            raise StateError("broken")

    run = Outboxed(place, Heard(), stream=replace(PUTS_ASIDE, operators=[Broken(name=SINK)]))
    with pytest.raises(StateError, match="broken"):
        run.step(batch(1))


def test_a_stream_says_where_its_dead_letters_go() -> None:
    assert PUTS_ASIDE.sinks[DEAD_LETTERS] is None
    shown = parquet_sinks(PUTS_ASIDE.sinks, Path("/own"))
    assert shown[DEAD_LETTERS] == ParquetSink(Path("/own/dead_letters"))
    elsewhere = replace(PUTS_ASIDE, sinks={DEAD_LETTERS: print})
    assert parquet_sinks(elsewhere.sinks, Path("/own")) == {} and elsewhere.sinks[DEAD_LETTERS] is print


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"on_bad_row": "skip"}, "on_bad_row is 'skip': use 'fail' or 'dead-letter'"),
        ({"operators": [Tallies(name=DEAD_LETTERS)], "sinks": {}}, "dead_letters is the name of a sink"),
        (
            {"operators": [Aggregate("a", {"k": pa.int64()}, [Sum("s", "n", pa.int64())], map_side=True)], "sinks": {}},
            "operator a has map_side=True, so it sees no single row",
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
