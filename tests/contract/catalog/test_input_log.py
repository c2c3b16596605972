"""Where sources begin and what was read since, over every database a catalog can be in."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from siltstone.catalog.records.source_entries import NO_ENTRIES, count_files, decode_offsets, decode_sources, merge
from siltstone.catalog.records.steps import BEFORE_FIRST, InputPosition, Step
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, UnknownStream
from tests.catalog_cases import Clock, commit_of

HEADER = 'v1\n{"batchWatermarkMs":0}'
BEGINNING = Step(0, BEFORE_FIRST, f'{HEADER}\n{{"next": 5}}', '{"1": {"0": "v1\\n17"}}')


def step(number: int, sources: str = "{}") -> Step:
    return Step(number, number - 1, f"{HEADER}\n{number}", sources)


def test_a_beginning_is_recorded_once_and_before_any_step(flights: Catalog) -> None:
    assert flights.input_log.get_position("flights", 0).beginning is None
    flights.input_log.record_beginning("flights", 1, BEGINNING)
    flights.input_log.record_beginning("flights", 1, Step(0, BEFORE_FIRST, "later"))
    position = flights.input_log.get_position("flights", 0)
    found = position.beginning
    assert found is not None
    assert (found.step, found.batch_id, found.offsets, found.sources) == (
        *(0, BEFORE_FIRST),
        *(BEGINNING.offsets, BEGINNING.sources),
    )
    assert (position.next_batch, list(position.newest), list(position.entries)) == (0, [], [])
    assert flights.input_log.list("flights", 9) == flights.input_log.list_logged("flights") == [], (
        "it is no step that was run"
    )


def test_a_fenced_writer_records_no_beginning(flights: Catalog) -> None:
    flights.runs.begin("flights", "host:2")
    with pytest.raises(Fenced):
        flights.input_log.record_beginning("flights", 1, BEGINNING)
    assert flights.input_log.get_position("flights", 0).beginning is None


def test_a_beginning_outlives_rollbacks_and_goes_with_forks(flights: Catalog) -> None:
    flights.input_log.record_beginning("flights", 1, BEGINNING)
    for id in (1, 2):
        flights.commits.add("flights", 1, commit_of(id, steps=[step(id)]))
    flights.forks.create("flights", "again", 1)
    flights.rollbacks.roll_back("flights", flights.runs.begin("flights", "host:2"), 0, "damaged", "host:2")
    for stream, epoch in (("flights", 2), ("again", flights.runs.begin("again", "host:3"))):
        beginning = flights.input_log.get_position(stream, 0).beginning
        assert beginning is not None and beginning.offsets == BEGINNING.offsets
        # Another way than the logged one: the log goes, the beginning stays.
        if stream == "flights":
            flights.commits.add(stream, epoch, commit_of(1, tag="b", steps=[step(1), step(2), step(3)]))
            assert flights.input_log.get_position(stream, 1).beginning == beginning


NAMED = HEADER.replace("v1", "v1 named", 1)


def named(*lines: str, **sources: str) -> Step:
    """Where named sources begin; those with an entry keep it in their log."""
    entries = json.dumps({name: {"0": entry} for name, entry in sources.items()})
    return Step(0, BEFORE_FIRST, "\n".join([NAMED, *lines]), entries)


def beginning_of(catalog: Catalog, stream: str = "flights") -> tuple[str, dict[str, dict[int, str]]]:
    found = catalog.input_log.get_position(stream, 0).beginning
    assert found is not None and (found.step, found.batch_id) == (0, BEFORE_FIRST)
    return found.offsets, decode_sources(found.sources)


def test_named_sources_that_come_later_begin_where_they_first_said(flights: Catalog) -> None:
    flights.input_log.record_beginning("flights", 1, named("clicks:-", 'alarms:{"next": 5}', clicks="v1\n17"))
    first = beginning_of(flights)
    flights.input_log.record_beginning("flights", 1, named('alarms:{"next": 8}', "clicks:3", clicks="v1\n99"))
    assert beginning_of(flights) == first
    flights.commits.add("flights", 1, commit_of(1, steps=[step(1)]))
    flights.input_log.record_beginning("flights", 1, named("orders:7", "alarms:9", "visits:-", visits="v1\n4"))
    offsets = "\n".join([NAMED, "clicks:-", 'alarms:{"next": 5}', "orders:7", "visits:-"])
    assert beginning_of(flights) == (offsets, {"clicks": {0: "v1\n17"}, "visits": {0: "v1\n4"}})
    flights.forks.create("flights", "again", 1)
    flights.rollbacks.roll_back("flights", flights.runs.begin("flights", "host:2"), 0, "damaged", "host:2")
    assert beginning_of(flights)[0] == offsets
    of_fork = beginning_of(flights, "again")
    assert decode_offsets(of_fork[0]) == of_fork[1] == {}, "it has these sources under no definition of its own"
    with pytest.raises(Fenced):
        flights.input_log.record_beginning("flights", 1, named("more:1"))
    assert beginning_of(flights)[0] == offsets


def test_the_source_of_a_stream_without_names_is_the_one_called_source(flights: Catalog) -> None:
    flights.input_log.record_beginning("flights", 1, BEGINNING)
    flights.input_log.record_beginning("flights", 1, named("source:9", "source.1:9", "orders:7"))
    offsets, sources = beginning_of(flights)
    assert decode_offsets(offsets) == {"source": '{"next": 5}', "orders": "7"}, "source.1 keeps its own in its log"
    assert sources == decode_sources(BEGINNING.sources)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_source_may_come_after_older_steps_were_pruned(flights: Catalog, recorded: bool) -> None:
    if recorded:
        flights.input_log.record_beginning("flights", 1, Step(0, BEFORE_FIRST, f"{HEADER}\n-"))
    ten(flights)
    flights.deletions.mark("flights", 1, range(1, 6))
    assert flights.input_log.prune("flights", 1, at_least=1) > 0
    files_before = count_files(merge(of(flights.input_log.get_position("flights", 10))))
    for offset in (7, 8):
        flights.input_log.record_beginning("flights", 1, named(f"orders:{offset}", "clicks:-", clicks="v1\n4"))
    offsets, sources = beginning_of(flights)
    assert decode_offsets(offsets) == ({"source": "-"} if recorded else {}) | {"orders": "7", "clicks": "-"}
    assert sources["clicks"] == {0: "v1\n4"} and count_files(json.dumps(sources)) == 5
    assert count_files(merge(of(flights.input_log.get_position("flights", 10)))) == files_before
    flights.rollbacks.roll_back("flights", flights.runs.begin("flights", "host:2"), 0, "damaged", "host:2")
    assert beginning_of(flights) == (offsets, {"clicks": {0: "v1\n4"}}), "the stream reads its files from the first on"


def test_a_position_is_the_newest_two_steps_and_the_logs_of_sources(flights: Catalog) -> None:
    for id, sources in (
        (1, '{"0":{"0":"v1"}}'),
        (2, "{}"),
        (3, '{"0":{"1":"v1"}}'),
        (4, "{}"),
        (5, '{"0":{"2":"v1"}}'),
    ):
        flights.commits.add("flights", 1, commit_of(id, steps=[step(2 * id - 1), step(2 * id, sources)]))
    position = flights.input_log.get_position("flights", 4)
    assert [s.step for s in position.newest] == [7, 8] and position.next_batch == 8
    assert [s.step for s in position.entries] == [2, 6]


def test_the_clock_of_a_checkpoint_is_that_of_its_newest_step(flights: Catalog) -> None:
    for id in range(1, 5):
        # The last step of the second checkpoint has no batch, and nothing was recorded with that of the third.
        steps = [replace(step(2 * id - 1), clock=f"{id} began"), replace(step(2 * id), clock=f"{id}")]
        if id == 2:
            steps[1] = replace(Step.without_rows(4), clock="2")
        flights.commits.add("flights", 1, commit_of(id, steps=steps if id != 3 else [steps[0], step(6)]))
    clocks = {id: flights.input_log.get_clock("flights", id) for id in range(6)}
    assert clocks == {0: "", 1: "1", 2: "2", 3: "", 4: "4", 5: "4"}
    flights.forks.create("flights", "again", 2)
    flights.rollbacks.roll_back("flights", flights.runs.begin("flights", "host:2"), 1, "damaged", "host:2")
    assert flights.input_log.get_clock("flights", 1) == "1", "the clocks of steps that are logged come later"
    assert flights.input_log.get_clock("again", 2) == "2"
    with pytest.raises(UnknownStream):
        flights.input_log.get_clock("fligths", 1)


# Pruning


def files(number: int, *names: str) -> str:
    """What a file source notes of a batch of these files."""
    lines = [json.dumps({"path": f"file:///in/{name}", "timestamp": number, "batchId": number}) for name in names]
    return json.dumps({"0": {str(number): "\n".join(["v1", *lines])}})


def planned(catalog: Catalog, number: int, sources: str = NO_ENTRIES) -> Step:
    """A step that Spark planned now."""
    header = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": int(catalog.now().timestamp() * 1000)})
    return Step(number, number - 1, f"v1\n{header}\n{number}", sources)


def logged(catalog: Catalog) -> list[int]:
    return [s.step for s in catalog.input_log.list("flights", 10**6)]


def ten(catalog: Catalog) -> None:
    """Ten checkpoints of two steps, the second of which reads a file."""
    for id in range(1, 11):
        steps = [planned(catalog, 2 * id - 1), planned(catalog, 2 * id, files(id - 1, f"{id}.parquet"))]
        catalog.commits.add("flights", 1, commit_of(id, steps=steps, first={"aircraft": id}))


def test_the_log_is_kept_as_far_back_as_a_checkpoint_is(flights: Catalog) -> None:
    flights.input_log.record_beginning("flights", 1, BEGINNING)
    ten(flights)
    whole = flights.input_log.get_position("flights", 10)
    assert flights.input_log.prune("flights", 1, at_least=1) == 0, "a replay can begin with checkpoint 1"
    flights.deletions.mark("flights", 1, [2, 3])
    assert flights.input_log.prune("flights", 1, at_least=1) == 0
    flights.savepoints.add("flights", 1, "kept", 5)
    flights.deletions.mark("flights", 1, [1, 4])
    assert flights.input_log.prune("flights", 1, at_least=9) == 0, "too few to be worth it"
    assert flights.input_log.prune("flights", 1, at_least=8) == 8
    assert logged(flights) == list(range(9, 21)), "the two that checkpoint 5 goes on from, and what comes after it"
    assert flights.input_log.replayable_from("flights") == 5
    assert flights.input_log.prune("flights", 1, at_least=1) == 0
    position = flights.input_log.get_position("flights", 10)
    assert position.newest == whole.newest and len(position.entries) == 6
    assert position.beginning is not None and position.beginning.offsets == BEGINNING.offsets
    assert count_files(position.beginning.sources) == 4
    assert merge(of(position)) == merge(of(whole))


def test_a_pruning_keeps_the_clock_of_the_oldest_checkpoint(flights: Catalog) -> None:
    """Also if the checkpoint ended with steps without a batch."""
    for id in range(1, 7):
        made = [replace(planned(flights, id), step=3 * id - 2)]
        made += [replace(Step.without_rows(3 * id - n), clock=f"{id}.{n}") for n in (1, 0)]
        flights.commits.add("flights", 1, commit_of(id, steps=made, first={"aircraft": id}))
    flights.deletions.mark("flights", 1, [1, 2, 3])
    assert flights.input_log.prune("flights", 1, at_least=1) == 6
    assert logged(flights) == list(range(7, 19)), "from the older of the two with a batch on"
    flights.forks.create("flights", "again", 4)
    for stream in ("flights", "again"):
        assert flights.input_log.get_clock(stream, 4) == "4.0"


def of(position: InputPosition) -> list[str]:
    beginning = [] if position.beginning is None else [position.beginning.sources]
    return [*beginning, *(step.sources for step in position.entries)]


def test_the_option_keeps_more_and_a_fenced_writer_prunes_nothing(flights: Catalog, clock: Clock) -> None:
    for id in range(1, 11):
        flights.commits.add("flights", 1, commit_of(id, steps=[planned(flights, id)], first={"aircraft": id}))
        clock.move(60)
    flights.deletions.mark("flights", 1, range(1, 10))
    flights.runs.begin("flights", "host:2")
    with pytest.raises(Fenced):
        flights.input_log.prune("flights", 1, at_least=1)
    assert flights.input_log.prune("flights", 2, keep=timedelta.max, at_least=1) == 0
    assert flights.input_log.prune("flights", 2, keep=timedelta(hours=6), at_least=1) == 4
    assert logged(flights) == list(range(5, 11))
    assert flights.input_log.prune("flights", 2, at_least=1) == 4
    assert logged(flights) == [9, 10]
    assert flights.input_log.get_position("flights", 10).beginning is None, (
        "there is nothing to remember of such sources"
    )


def test_a_rollback_to_nothing_after_a_pruning_leaves_no_log(flights: Catalog) -> None:
    flights.input_log.record_beginning("flights", 1, BEGINNING)
    ten(flights)
    flights.deletions.mark("flights", 1, range(1, 6))
    flights.input_log.prune("flights", 1, at_least=1)
    flights.forks.create("flights", "again", 7)
    flights.rollbacks.roll_back("flights", flights.runs.begin("flights", "host:2"), 6, "damaged", "host:2")
    assert [s.step for s in flights.input_log.list_logged("flights")] == list(range(13, 21))
    flights.rollbacks.roll_back("flights", flights.runs.begin("flights", "host:2"), 0, "damaged", "host:2")
    assert flights.input_log.list_logged("flights") == []
    position = flights.input_log.get_position("flights", 0)
    assert position.beginning is not None and position.beginning.sources == BEGINNING.sources
    assert count_files(merge(of(flights.input_log.get_position("again", 7)))) == 7, (
        "a fork knows all that was read before it"
    )
    assert [s.step for s in flights.input_log.list("again", 9)] == list(range(11, 15))


def test_long_lists_of_files_are_not_written_anew_for_every_step(flights: Catalog) -> None:
    for id in range(1, 31):
        steps = [planned(flights, id, files(id - 1, *(f"{id}-{n}.parquet" for n in range(10))))]
        flights.commits.add("flights", 1, commit_of(id, steps=steps, first={"aircraft": id}))
        if id > 1:
            flights.deletions.mark("flights", 1, [id - 1])
    assert flights.input_log.prune("flights", 1, at_least=1) == 28
    for id in range(31, 67):
        steps = [planned(flights, id, files(id - 1, f"{id}.parquet"))]
        flights.commits.add("flights", 1, commit_of(id, steps=steps, first={"aircraft": id}))
        flights.deletions.mark("flights", 1, [id - 1])
        pruned = flights.input_log.prune("flights", 1, at_least=1)
        assert pruned == (35 if id == 65 else 0), "the eighth part of 280 files"
