"""Steps that are recorded by the names of sources, as queries with these sources in any order find them laid out."""

import json
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path

import pytest

from siltstone.catalog.records.source_entries import decode_offsets, merge
from siltstone.catalog.records.steps import BEFORE_FIRST, InputPosition, Step
from siltstone.errors import StateError, UsageError
from siltstone.spark.source_log import SourceLog, span

HEADER = '{"batchWatermarkMs":0}'


def file_entry(source: str, number: int) -> str:
    line = {"path": f"file:///{source}/{number}", "timestamp": number, "batchId": number}
    return "v1\n" + json.dumps(line, separators=(",", ":"))


def step(number: int, offsets: Mapping[str, object], **logs: str) -> Step:
    """A step that is recorded by names; its entries have the number of its batch."""
    lines = [f"{name}:{offset}" for name, offset in offsets.items()]
    entries = json.dumps({name: {str(number - 1): text} for name, text in logs.items()})
    return Step(number, number - 1, "\n".join(["v1 named", HEADER, *lines]), entries)


def beginning(offsets: Mapping[str, object], **logs: str) -> Step:
    return Step(0, BEFORE_FIRST, step(1, offsets).offsets, json.dumps({name: {"0": of} for name, of in logs.items()}))


def prepared(to: Path, position: InputPosition, names: Sequence[str] | None) -> SourceLog:
    log = SourceLog(to, names=names)
    log.prepare(position)
    return log


def offsets_of(log: SourceLog, batch: int) -> list[str]:
    version, header, *lines = (log.location / "offsets" / str(batch)).read_text().split("\n")
    assert (version, header) == ("v1", HEADER)
    return lines


def entries_of(log: SourceLog, directory: int) -> list[str]:
    found = sorted((log.location / "sources" / str(directory)).glob("*"), key=lambda path: int(path.name))
    return [path.read_text() for path in found]


CLICKS = [file_entry("clicks", number) for number in range(2)]
STEPS = [
    step(1, {"clicks": '{"logOffset":0}', "alarms": 5}, clicks=CLICKS[0]),
    step(2, {"alarms": 8, "clicks": '{"logOffset":1}'}, clicks=CLICKS[1]),
]
BEGINNING = beginning({"clicks": "-", "alarms": 5, "orders": 7, "topic": "-"}, topic="v1\n17")
POSITION = InputPosition(BEGINNING, STEPS, STEPS)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("order", list(permutations(["clicks", "alarms", "orders", "topic"])), ids=",".join)
def test_the_order_of_sources_does_not_matter_and_new_ones_begin_where_they_said(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    log = prepared(tmp_path / "spark", POSITION, order)
    ends = {"clicks": ['{"logOffset":0}', '{"logOffset":1}'], "alarms": ["5", "8"], "orders": ["7"] * 2}
    for batch in (0, 1):
        assert offsets_of(log, batch) == [ends.get(name, ["-"] * 2)[batch] for name in order]
    logs = {"clicks": CLICKS, "topic": ["v1\n17"]}
    assert [entries_of(log, n) for n in range(4)] == [logs.get(name, []) for name in order]
    # What Spark writes next is recorded by names again.
    following = "\n".join(["v1", HEADER, *(f'"{name}"' for name in order)])
    (tmp_path / "spark" / "offsets" / "2").write_text(following)
    fresh = tmp_path / "spark" / "sources" / str(order.index("clicks")) / "2"
    fresh.write_text(file_entry("clicks", 2))
    read = log.read(2, 3)
    assert decode_offsets(read.offsets) == {name: f'"{name}"' for name in order}
    assert json.loads(read.sources) == {"clicks": {"2": file_entry("clicks", 2)}}
    assert json.loads(span(STEPS[1], read)) == {
        "batch": 2,
        "from": {"alarms": 8, "clicks": {"logOffset": 1}},
        "to": {name: name for name in order},
    }
    assert log.find_new(POSITION) == set()


def test_sources_of_which_nothing_is_recorded_are_new(tmp_path: Path) -> None:
    log = prepared(tmp_path, POSITION, ["more", "clicks", "more.1"])
    assert log.find_new(POSITION) == {"more", "more.1"}
    (tmp_path / "offsets" / "2").write_text(f'v1\n{HEADER}\n9\n{{"logOffset":1}}\n-')
    kept = tmp_path / "sources" / "2" / "0"
    kept.parent.mkdir()
    kept.write_text("v1\n3")
    found = log.read_beginning(["6", None, "3"], batch=2, only={"more", "more.1"})
    assert found == Step(0, BEFORE_FIRST, f"v1 named\n{HEADER}\nmore:6\nmore.1:-", '{"more.1": {"0": "v1\\n3"}}')
    assert json.loads(log.read(2, 3).sources) == {}


def test_a_query_without_a_source_leaves_it_out_but_runs_no_step_that_read_it(tmp_path: Path) -> None:
    log = prepared(tmp_path / "a", POSITION, ["alarms"])
    assert [offsets_of(log, 1), entries_of(log, 0)] == [["8"], []]
    log = prepared(tmp_path / "b", InputPosition(BEGINNING, STEPS[:1], STEPS[:1]), ["alarms"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="step 2 read the source clicks, which the code no longer has: run the code"):
        log.rerun(STEPS[1])
    quiet = step(2, {"alarms": 9, "clicks": '{"logOffset":0}', "orders": 7})
    log.rerun(quiet)
    assert offsets_of(log, 1) == ["9"]
    with pytest.raises(UsageError, match="step 3 read the source orders"):
        log.rerun(step(3, {"alarms": 9, "clicks": '{"logOffset":0}', "orders": 8}))


def test_a_step_from_before_a_source_was_added_reads_nothing_of_it(tmp_path: Path) -> None:
    log = prepared(tmp_path, InputPosition(BEGINNING, [], []), ["orders", "topic", "clicks"])
    assert log.number(0) == 1 and offsets_of(log, 0) == ["7", "-", "-"]
    only_clicks = [step(n + 1, {"clicks": f'{{"logOffset":{n}}}'}, clicks=CLICKS[n]) for n in range(2)]
    for each in only_clicks:
        log.rerun(each)
        assert offsets_of(log, each.batch + 1)[:2] == ["7", "-"]
    log.rerun(step(3, {"orders": 9, "topic": 18, "clicks": '{"logOffset":1}'}))
    assert [offsets_of(log, 2)[0], offsets_of(log, 3)[0]] == ["7", "9"]


@pytest.mark.parametrize("pruned", [False, True])
def test_a_record_by_place_is_of_the_source_called_source(pruned: bool, tmp_path: Path) -> None:
    old = [Step(1, 0, f"v1\n{HEADER}\n1\n2", json.dumps({"1": {"0": file_entry("b", 0)}}))]
    new = [step(2, {"orders": 1, "source": 3, "source.1": 4}, **{"source.1": file_entry("b", 1)})]
    every = [*old, *new]
    position = InputPosition(None, every, every)  # pyright: ignore[reportArgumentType]
    if pruned:
        known = Step(0, BEFORE_FIRST, "", merge(each.sources for each in every))
        position = InputPosition(known, [], every)  # pyright: ignore[reportArgumentType]
    both = [file_entry("b", 0), file_entry("b", 1)]
    log = prepared(tmp_path / "a", position, ["orders", "source", "source.1"])
    assert [offsets_of(log, 0), offsets_of(log, 1)] == [["-", "1", "2"], ["1", "3", "4"]]
    assert entries_of(log, 2) == both
    log = prepared(tmp_path / "b", position, None)
    assert [offsets_of(log, 0), offsets_of(log, 1), entries_of(log, 1)] == [["1", "2"], ["3", "4"], both]
    assert log.find_new(position) == set()


def test_a_source_that_is_used_twice_has_one_log_and_two_places(tmp_path: Path) -> None:
    position = InputPosition(None, STEPS, STEPS)  # pyright: ignore[reportArgumentType]
    log = prepared(tmp_path, position, ["alarms", "alarms", "clicks"])
    assert offsets_of(log, 1) == ["8", "8", '{"logOffset":1}'] and entries_of(log, 1) == CLICKS
    (tmp_path / "offsets" / "2").write_text(f"v1\n{HEADER}\n9\n9\n2")
    assert decode_offsets(log.read(2, 3).offsets) == {"alarms": "9", "clicks": "2"}
    by_place = [Step(1, 0, f"v1\n{HEADER}\n5\n5", "{}")]
    log = prepared(tmp_path, InputPosition(None, [], by_place), ["orders", "source", "source"])  # pyright: ignore[reportArgumentType]
    assert offsets_of(log, 0) == ["-", "5", "5"]


def test_a_query_with_other_sources_is_refused(tmp_path: Path) -> None:
    log = prepared(tmp_path, POSITION, ["alarms", "clicks"])
    for text, said in (
        (f"v1\n{HEADER}\n9", "the query does not have the sources alarms, clicks, in this order"),
        (f"v2\n{HEADER}\n0:9\n1:2", "offsetLog.formatVersion to 1"),
    ):
        (tmp_path / "offsets" / "2").write_text(text)
        with pytest.raises((StateError, UsageError), match=said):
            log.read(2, 3)
    by_spark = Step(1, 0, f"v2\n{HEADER}\nclicks:1", "{}")
    with pytest.raises(UsageError, match="step 1 is recorded with Spark's own names"):
        log.prepare(InputPosition(None, [], [by_spark]))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("line", ["no name", "../a:1", "a/b:1", ":1", "a.0:1", "a.b:1", "a:1\na:2"])
def test_names_that_no_source_has_are_refused(line: str) -> None:
    with pytest.raises(StateError):
        decode_offsets(f"v1 named\n{HEADER}\n{line}")


def test_a_source_stays_where_it_was_read_to_in_steps_that_do_not_tell_of_it(tmp_path: Path) -> None:
    last = step(2, {"alarms": 8})
    after = InputPosition(BEGINNING, STEPS[:1], [STEPS[0], last])  # pyright: ignore[reportArgumentType]
    log = prepared(tmp_path / "a", after, ["clicks", "alarms"])
    assert offsets_of(log, 1) == ['{"logOffset":0}', "8"]
    log.rerun(step(3, {"alarms": 9}))
    assert offsets_of(log, 2) == ['{"logOffset":0}', "9"]
    # A step of a query without `clicks` still records how far it was read; a source that was never read is left out.
    log = prepared(tmp_path / "b", after, ["alarms"])
    (tmp_path / "b" / "offsets" / "2").write_text(f"v1\n{HEADER}\n9")
    read = log.read(2, 3)
    assert decode_offsets(read.offsets) == {"alarms": "9", "clicks": '{"logOffset":0}'}
    later = InputPosition(BEGINNING, STEPS[:1], [last, read])  # pyright: ignore[reportArgumentType]
    assert offsets_of(prepared(tmp_path / "c", later, ["alarms", "clicks"]), 2) == ["9", '{"logOffset":0}']
    prepared(tmp_path / "d", later, ["alarms"]).rerun(step(4, {"alarms": 9, "clicks": '{"logOffset":0}'}))
    # A source without a name is recorded by its name, then; otherwise as Spark writes it.
    log = prepared(tmp_path / "e", later, None)
    (tmp_path / "e" / "offsets" / "3").write_text(f"v1\n{HEADER}\n4")
    assert log.read(3, 4).offsets == f'v1 named\n{HEADER}\nsource:4\nclicks:{{"logOffset":0}}\nalarms:9'
