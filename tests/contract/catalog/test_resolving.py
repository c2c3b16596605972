"""Which checkpoint is meant, over every database a catalog can be in."""

from datetime import timedelta

import pytest

from siltstone.catalog.records import parse_time
from siltstone.catalog.repository import Catalog
from siltstone.errors import UnknownCheckpoint
from tests.catalog_cases import NOON, Clock, add, commit_of


def test_commit_times_never_go_back(flights: Catalog, clock: Clock) -> None:
    flights.commit("flights", 1, commit_of(1))
    clock.move(-30)
    flights.commit("flights", 1, commit_of(2))
    clock.move(60)
    flights.commit("flights", 1, commit_of(3))
    times = [c.committed_at for c in flights.checkpoints("flights")]
    assert times == [NOON, NOON, NOON + timedelta(minutes=30)]


def test_resolve_takes_latest_an_id_or_a_time(flights: Catalog, clock: Clock) -> None:
    for id in (1, 2, 3):
        flights.commit("flights", 1, commit_of(id))
        clock.move(10)
    meant = {
        "latest": 3,
        "2": 2,
        "2013-07-04T12:00:00": 1,
        "2013-07-04T12:09:59.999999Z": 1,
        "2013-07-04 12:10": 2,
        "2013-07-04T08:15:00-04:00": 2,
        "2013-07-05": 3,
        "9999-12-31T23:59:59": 3,
    }
    assert {at: flights.resolve("flights", at) for at in meant} == meant


@pytest.mark.parametrize(
    "at",
    [
        "4",
        "0",
        "-1",
        "99999999999999999999999",
        "2013-07-04T11:59:59",
        "1.5",
        "²",
        "",
        "yesterday",
        "0001-01-01",
    ],
)
def test_resolve_says_what_exists(flights: Catalog, at: str) -> None:
    add(flights, 3)
    with pytest.raises(UnknownCheckpoint, match=r"1 to 3|use latest, an id, a savepoint, or an ISO time"):
        flights.resolve("flights", at)


def test_a_stream_without_checkpoints_says_so(flights: Catalog) -> None:
    assert flights.last_id("flights") == 0
    assert flights.checkpoints("flights") == flights.steps("flights", 5) == flights.objects("flights") == []
    for call in (
        lambda: flights.latest("flights"),
        lambda: flights.resolve("flights", "latest"),
        lambda: flights.checkpoint("flights", 1),
        lambda: flights.as_of("flights", NOON),
        lambda: flights.chain("flights", 1),
        lambda: flights.record_proof("flights", 1, True),
        lambda: flights.add_snapshot("flights", 1, 1, [], 0),
        lambda: flights.mark_deleted("flights", 1, [1]),
        lambda: flights.add_savepoint("flights", 1, "stable", 1),
    ):
        with pytest.raises(UnknownCheckpoint, match="stream flights: it has none yet, run it first"):
            call()


def test_as_of_picks_the_last_whose_events_are_not_later(flights: Catalog) -> None:
    hours: list[int | None] = [None, 10, 12, 11, 14]
    for id, hour in enumerate(hours, start=1):
        time = None if hour is None else NOON.replace(hour=hour)
        flights.commit("flights", 1, commit_of(id, event_time_max=time))
    # Late events do not make a state older: checkpoint 4 still holds what 3 holds.
    assert [c.event_time_max and c.event_time_max.hour for c in flights.checkpoints("flights")] == [
        None,
        10,
        12,
        12,
        14,
    ]
    picked = {h: flights.as_of("flights", NOON.replace(hour=h)) for h in (10, 11, 12, 13, 14, 23)}
    assert picked == {10: 2, 11: 2, 12: 4, 13: 4, 14: 5, 23: 5}
    assert flights.as_of("flights", parse_time("2013-07-04T06:00-04:00")) == 2
    with pytest.raises(UnknownCheckpoint, match=r"up to 2013-07-04T09.*events from 2013-07-04T10"):
        flights.as_of("flights", NOON.replace(hour=9))


def test_as_of_without_event_times_says_so(flights: Catalog) -> None:
    add(flights, 2)
    with pytest.raises(UnknownCheckpoint, match="none with an event time"):
        flights.as_of("flights", NOON)


def test_checkpoints_gives_the_newest_in_order(flights: Catalog) -> None:
    add(flights, 5)
    assert [c.id for c in flights.checkpoints("flights")] == [1, 2, 3, 4, 5]
    assert [c.id for c in flights.checkpoints("flights", limit=2)] == [4, 5]
