"""Which checkpoint is meant, over every database a catalog can be in."""

from datetime import datetime, timedelta

import pytest
from sqlalchemy import create_engine, text

from siltstone.catalog.database import transactions
from siltstone.catalog.open import open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.errors import UnknownCheckpoint
from siltstone.retention.retention_rules import RetentionOptions, plan_retention
from siltstone.times import parse_time
from tests.catalog_cases import NOON, Clock, add, commit_of


def hourly(flights: Catalog, clock: Clock, count: int, ahead: int) -> None:
    """Commit every hour, and checkpoint `ahead` under a clock that is a year ahead just then."""
    for id in range(1, count + 1):
        wrong = 365 * 24 if id == ahead else 0
        clock.move(hours=wrong)
        flights.commits.add("flights", 1, commit_of(id))
        clock.move(hours=1 - wrong)


def test_a_commit_under_a_clock_that_ran_ahead_carries_its_time_no_further(
    flights: Catalog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    hourly(flights, clock, 4, ahead=2)
    times = [c.committed_at - NOON for c in flights.checkpoints.list("flights")]
    assert times == [timedelta(hours=h) for h in (0, 1 + 365 * 24, 2, 3)]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "stream=flights checkpoint=3 committed_at=2013-07-04T14:00:00" in said[0]


def test_retention_by_time_tells_apart_what_was_committed_after_a_clock_ran_ahead(
    flights: Catalog, clock: Clock
) -> None:
    hourly(flights, clock, 30, ahead=3)
    committed_at = {c.id: c.committed_at for c in flights.checkpoints.list_retained("flights")}
    for rules, kept in (
        (RetentionOptions(keep_hourly=5), [26, 27, 28, 29, 30]),
        (RetentionOptions(keep_daily=1), [30]),
        (RetentionOptions(keep_within=timedelta(hours=2)), [3, 29, 30]),
    ):
        assert list(plan_retention(committed_at, [], rules, flights.now()).kept) == kept


def test_a_time_means_the_highest_id_that_bears_it_or_an_earlier_one_whatever_clocks_did(
    flights: Catalog, clock: Clock
) -> None:
    hourly(flights, clock, 4, ahead=2)
    meant = {"2013-07-04T13:30:00": 1, "2013-07-04T14:00:00": 3, "2013-07-04T23:00:00": 4, "2014-07-05T00:00:00": 4}
    assert {at: flights.checkpoints.resolve("flights", at) for at in meant} == meant


def test_times_are_those_of_the_database_not_of_its_clients(catalog_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if catalog_url.startswith("sqlite"):
        pytest.skip("its host is this one")
    engine = create_engine(catalog_url)

    def server_time() -> datetime:
        with engine.connect() as connection:
            return connection.execute(text("SELECT clock_timestamp()")).scalar_one()

    monkeypatch.setattr(transactions, "datetime", None)  # to ask this host fails
    with open_catalog(catalog_url) as catalog:
        before = server_time()
        catalog.streams.register("flights", 128, {})
        catalog.runs.begin("flights", "host:1")
        catalog.commits.add("flights", 1, commit_of(1))
        lease = catalog.leases.take("flights", [1], id="a", who="me", lasts=timedelta(hours=1))
        assert catalog.leases.renew("a", timedelta(hours=1))
        assert [live.id for live in catalog.leases.list_live("flights")] == ["a"]
        asked = [
            catalog.runs.list("flights")[0].started_at,
            catalog.checkpoints.get_latest("flights").committed_at,
            lease.taken_at,
        ]
        assert before <= asked[0] <= asked[1] <= asked[2] <= catalog.now() <= server_time()
    engine.dispose()


def test_resolve_takes_latest_an_id_or_a_time(flights: Catalog, clock: Clock) -> None:
    for id in (1, 2, 3):
        flights.commits.add("flights", 1, commit_of(id))
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
    assert {at: flights.checkpoints.resolve("flights", at) for at in meant} == meant


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
        flights.checkpoints.resolve("flights", at)


def test_a_stream_without_checkpoints_says_so(flights: Catalog) -> None:
    assert flights.checkpoints.last_id("flights") == 0
    assert (
        flights.checkpoints.list("flights")
        == flights.input_log.list("flights", 5)
        == flights.objects.list("flights")
        == []
    )
    for call in (
        lambda: flights.checkpoints.get_latest("flights"),
        lambda: flights.checkpoints.resolve("flights", "latest"),
        lambda: flights.checkpoints.get("flights", 1),
        lambda: flights.checkpoints.as_of("flights", NOON),
        lambda: flights.chains.list_checkpoints("flights", 1),
        lambda: flights.checkpoints.record_proof("flights", 1, True),
        lambda: flights.reference_copies.add("flights", 1, 1, [], 0),
        lambda: flights.deletions.mark("flights", 1, [1]),
        lambda: flights.savepoints.add("flights", 1, "stable", 1),
    ):
        with pytest.raises(UnknownCheckpoint, match="stream flights: it has none yet, run it first"):
            call()


def test_as_of_picks_the_last_whose_events_are_not_later(flights: Catalog) -> None:
    hours: list[int | None] = [None, 10, 12, 11, 14]
    for id, hour in enumerate(hours, start=1):
        time = None if hour is None else NOON.replace(hour=hour)
        flights.commits.add("flights", 1, commit_of(id, event_time_max=time))
    # Late events do not make a state older: checkpoint 4 still holds what 3 holds.
    assert [c.event_time_max and c.event_time_max.hour for c in flights.checkpoints.list("flights")] == [
        None,
        10,
        12,
        12,
        14,
    ]
    picked = {h: flights.checkpoints.as_of("flights", NOON.replace(hour=h)) for h in (10, 11, 12, 13, 14, 23)}
    assert picked == {10: 2, 11: 2, 12: 4, 13: 4, 14: 5, 23: 5}
    assert flights.checkpoints.as_of("flights", parse_time("2013-07-04T06:00-04:00")) == 2
    with pytest.raises(UnknownCheckpoint, match=r"up to 2013-07-04T09.*events from 2013-07-04T10"):
        flights.checkpoints.as_of("flights", NOON.replace(hour=9))


def test_as_of_without_event_times_says_so(flights: Catalog) -> None:
    add(flights, 2)
    with pytest.raises(UnknownCheckpoint, match="none with an event time"):
        flights.checkpoints.as_of("flights", NOON)


def test_checkpoints_gives_the_newest_in_order(flights: Catalog) -> None:
    add(flights, 5)
    assert [c.id for c in flights.checkpoints.list("flights")] == [1, 2, 3, 4, 5]
    assert [c.id for c in flights.checkpoints.list("flights", limit=2)] == [4, 5]
