"""Where sources begin and what was read since, over every database a catalog can be in."""

import pytest

from siltstone.catalog.records import BEFORE_FIRST, Step
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced
from tests.catalog_cases import commit_of

HEADER = 'v1\n{"batchWatermarkMs":0}'
BEGINNING = Step(0, BEFORE_FIRST, f'{HEADER}\n{{"next": 5}}', '{"1": {"0": "v1\\n17"}}')


def step(number: int, sources: str = "{}") -> Step:
    return Step(number, number - 1, f"{HEADER}\n{number}", sources)


def test_a_beginning_is_recorded_once_and_before_any_step(flights: Catalog) -> None:
    assert flights.input_position("flights", 0).beginning is None
    flights.record_beginning("flights", 1, BEGINNING)
    flights.record_beginning("flights", 1, Step(0, BEFORE_FIRST, "later"))
    position = flights.input_position("flights", 0)
    found = position.beginning
    assert found is not None
    assert (found.step, found.batch_id, found.offsets, found.sources) == (
        *(0, BEFORE_FIRST),
        *(BEGINNING.offsets, BEGINNING.sources),
    )
    assert (position.next_batch, list(position.newest), list(position.entries)) == (0, [], [])
    assert flights.steps("flights", 9) == flights.logged_steps("flights") == [], "it is no step that was run"


def test_a_fenced_writer_records_no_beginning(flights: Catalog) -> None:
    flights.new_epoch("flights", "host:2")
    with pytest.raises(Fenced):
        flights.record_beginning("flights", 1, BEGINNING)
    assert flights.input_position("flights", 0).beginning is None


def test_a_beginning_outlives_rollbacks_and_goes_with_forks(flights: Catalog) -> None:
    flights.record_beginning("flights", 1, BEGINNING)
    for id in (1, 2):
        flights.commit("flights", 1, commit_of(id, steps=[step(id)]))
    flights.fork("flights", "again", 1)
    flights.rewind("flights", flights.new_epoch("flights", "host:2"), 0, "damaged", "host:2")
    for stream, epoch in (("flights", 2), ("again", flights.new_epoch("again", "host:3"))):
        beginning = flights.input_position(stream, 0).beginning
        assert beginning is not None and beginning.offsets == BEGINNING.offsets
        # Another way than the logged one: the log goes, the beginning stays.
        if stream == "flights":
            flights.commit(stream, epoch, commit_of(1, tag="b", steps=[step(1), step(2), step(3)]))
            assert flights.input_position(stream, 1).beginning == beginning


def test_a_position_is_the_newest_two_steps_and_the_logs_of_sources(flights: Catalog) -> None:
    for id, sources in (
        (1, '{"0":{"0":"v1"}}'),
        (2, "{}"),
        (3, '{"0":{"1":"v1"}}'),
        (4, "{}"),
        (5, '{"0":{"2":"v1"}}'),
    ):
        flights.commit("flights", 1, commit_of(id, steps=[step(2 * id - 1), step(2 * id, sources)]))
    position = flights.input_position("flights", 4)
    assert [s.step for s in position.newest] == [7, 8] and position.next_batch == 8
    assert [s.step for s in position.entries] == [2, 6]
