"""Savepoints, over every database a catalog can be in."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
from sqlalchemy import event

from siltstone.catalog.open import open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, UnknownCheckpoint, UsageError
from tests.catalog_cases import NOON, Clock, add, commit_of, names


def test_a_savepoint_is_read_back_and_answers_to_its_name(flights: Catalog, clock: Clock, catalog_url: str) -> None:
    add(flights, 3)
    clock.move(1)
    stable = flights.savepoints.add("flights", 1, "stable", 2)
    assert (stable.stream, stable.name, stable.checkpoint) == ("flights", "stable", 2)
    assert (stable.created_at, stable.expires_at) == (NOON + timedelta(minutes=1), None)
    audit = flights.savepoints.add("flights", 1, "audit", 2, timedelta(days=30))
    assert audit.expires_at == NOON + timedelta(days=30, minutes=1)
    with open_catalog(catalog_url, create=False) as other:
        assert other.savepoints.list("flights") == [audit, stable]
        assert (other.checkpoints.resolve("flights", "stable"), other.checkpoints.resolve("flights", "audit")) == (2, 2)
        with pytest.raises(
            UnknownCheckpoint, match=r"'nightly' is not a checkpoint: .*a savepoint \(audit, stable\), or"
        ):
            other.checkpoints.resolve("flights", "nightly")
        other.savepoints.drop("flights", 1, "audit")
    assert flights.savepoints.list("flights") == [stable]
    with pytest.raises(UsageError, match="no savepoint 'audit' of stream flights: it has stable"):
        flights.savepoints.drop("flights", 1, "audit")
    assert [c.id for c in flights.checkpoints.list("flights")] == [1, 2, 3]


@pytest.mark.parametrize("name", ["2", "latest", "2013-07-04", "", "Stable", "a/b", "../x", "a" * 65, "a\n", "é"])
def test_a_name_that_means_something_else_is_no_savepoint(flights: Catalog, name: str) -> None:
    add(flights, 2)
    with pytest.raises(UsageError, match=r"is not a savepoint name|cannot be named latest"):
        flights.savepoints.add("flights", 1, name, 1)
    assert flights.savepoints.list("flights") == []


@pytest.mark.parametrize("expires_in", [timedelta(0), timedelta(days=-1), timedelta.max])
def test_a_savepoint_expires_in_time_to_come(flights: Catalog, expires_in: timedelta) -> None:
    add(flights, 1)
    with pytest.raises(UsageError, match=r"savepoint stable (would have expired already|cannot expire in)"):
        flights.savepoints.add("flights", 1, "stable", 1, expires_in)
    assert flights.savepoints.list("flights") == []


def test_a_taken_name_says_what_it_names(flights: Catalog, clock: Clock) -> None:
    add(flights, 3)
    flights.savepoints.add("flights", 1, "stable", 2, timedelta(hours=1))
    clock.move(120)
    before = flights.savepoints.list("flights")
    with pytest.raises(UsageError, match="stream flights has a savepoint stable already, of checkpoint 2: drop it"):
        flights.savepoints.add("flights", 1, "stable", 3)
    assert flights.savepoints.list("flights") == before
    flights.savepoints.drop("flights", 1, "stable")
    assert flights.savepoints.add("flights", 1, "stable", 3).checkpoint == 3


@pytest.mark.parametrize("id", [0, 4, -1, 2**70, 1])
def test_a_checkpoint_that_is_not_to_be_seen_gets_no_savepoint(flights: Catalog, id: int) -> None:
    add(flights, 3)
    flights.deletions.mark("flights", 1, [1])
    with pytest.raises(UnknownCheckpoint, match=f"no checkpoint {id} of stream flights: it has 2, 2 to 3"):
        flights.savepoints.add("flights", 1, "stable", id)
    assert flights.savepoints.list("flights") == []


def test_what_a_savepoint_keeps_is_not_deleted_and_nor_is_any_with_it(flights: Catalog) -> None:
    add(flights, 4)
    flights.savepoints.add("flights", 1, "stable", 2)
    with pytest.raises(UsageError, match=r"checkpoint 2 of stream flights is kept by its savepoint stable: .*drop"):
        flights.deletions.mark("flights", 1, [1, 2, 3])
    assert [r.deleted for r in flights.checkpoints.list_retained("flights")] == [False] * 4
    flights.deletions.mark("flights", 1, [1, 3])
    flights.savepoints.drop("flights", 1, "stable")
    flights.deletions.mark("flights", 1, [1, 2, 3])
    assert [c.id for c in flights.checkpoints.list("flights")] == [4]


@pytest.mark.slow
def test_an_expired_savepoint_keeps_nothing_and_goes_with_its_checkpoint(flights: Catalog, clock: Clock) -> None:
    add(flights, 4)
    hour = flights.savepoints.add("flights", 1, "hour", 2, timedelta(hours=1))
    day = flights.savepoints.add("flights", 1, "day", 2, timedelta(days=1))
    clock.move(60)
    assert [(s.name, s.is_expired(clock())) for s in flights.savepoints.list("flights")] == [
        ("day", False),
        ("hour", True),
    ]
    with pytest.raises(UsageError, match="kept by its savepoint day"):
        flights.deletions.mark("flights", 1, [2])
    clock.move(23 * 60 - 1)
    with pytest.raises(UsageError, match="kept by its savepoint day"):
        flights.deletions.mark("flights", 1, [2])
    clock.move(1)
    assert flights.savepoints.list("flights") == [day, hour]
    assert flights.checkpoints.resolve("flights", "hour") == 2
    flights.deletions.mark("flights", 1, [2])
    assert flights.savepoints.list("flights") == []
    flights.deletions.forget("flights", 1, [2], names(flights, 2))
    assert [r.id for r in flights.checkpoints.list_retained("flights")] == [1, 3, 4]
    assert flights.savepoints.add("flights", 1, "hour", 3).checkpoint == 3


def test_the_newest_writer_alone_names_checkpoints(flights: Catalog) -> None:
    add(flights, 2)
    stable = flights.savepoints.add("flights", 1, "stable", 1)
    flights.runs.begin("flights", "other")
    for call in (
        lambda: flights.savepoints.add("flights", 1, "late", 1),
        lambda: flights.savepoints.drop("flights", 1, "stable"),
    ):
        with pytest.raises(Fenced):
            call()
    assert flights.savepoints.list("flights") == [stable]
    flights.savepoints.drop("flights", 2, "stable")


def test_streams_may_use_the_same_savepoint_names(flights: Catalog) -> None:
    flights.streams.register("bids", 16, {})
    epoch = flights.runs.begin("bids", "host")
    flights.commits.add("bids", epoch, commit_of(1))
    flights.commits.add("bids", epoch, commit_of(2))
    add(flights, 2)
    flights.savepoints.add("flights", 1, "stable", 1)
    flights.deletions.mark("bids", epoch, [1])
    flights.savepoints.add("bids", epoch, "stable", 2)
    flights.savepoints.drop("bids", epoch, "stable")
    assert [s.checkpoint for s in flights.savepoints.list("flights")] == [1]


@pytest.mark.slow
def test_a_savepoint_and_a_deletion_at_once_are_one_after_the_other(flights: Catalog, catalog_url: str) -> None:
    """Whichever has begun, the other waits for it, and then is refused."""
    add(flights, 3)
    begun: list[Future[object]] = []
    waited: list[bool] = []
    with ThreadPoolExecutor(1) as pool, open_catalog(catalog_url) as other:
        rivals: dict[str, Callable[[], object]] = {
            "UPDATE checkpoint": lambda: other.savepoints.add("flights", 1, "late", 1),
            "INSERT INTO savepoint": lambda: other.deletions.mark("flights", 1, [2]),
        }

        def begin(_c: object, _cursor: object, statement: str, *_: object) -> None:
            for change, rival in rivals.items():
                if statement.startswith(change):
                    begun.append(pool.submit(rival))
                    waited.append(not wait(begun[-1:], timeout=0.3).done)

        event.listen(flights.transactions.engine, "before_cursor_execute", begin)
        flights.deletions.mark("flights", 1, [1])
        with pytest.raises(UnknownCheckpoint, match="no checkpoint 1 of stream flights: it has 2, 2 to 3"):
            begun[0].result()
        flights.savepoints.add("flights", 1, "stable", 2)
        with pytest.raises(UsageError, match="kept by its savepoint stable"):
            begun[1].result()
        assert waited == [True, True]
    assert [(s.name, s.checkpoint) for s in flights.savepoints.list("flights")] == [("stable", 2)]
    assert [c.id for c in flights.checkpoints.list("flights")] == [2, 3]
