"""Checkpoints that are marked and forgotten, over every database a catalog can be in."""

from datetime import timedelta

import pytest

from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, UnknownCheckpoint, UsageError
from tests.catalog_cases import NOON, Clock, commit_of, names, stored


def chained(catalog: Catalog) -> None:
    """Checkpoints 1 to 6, an object each beside its manifest; bases at 1 and 5, and of routes at 3."""
    for id, (aircraft, routes) in enumerate([(1, 1), (1, 1), (1, 3), (1, 3), (5, 3), (5, 3)], start=1):
        commit = commit_of(
            id,
            segments=[stored(id, "s.segment")],
            first={"aircraft": aircraft, "routes": routes},
            steps=[Step(id, id - 1, "")],
            event_time_max=NOON,
        )
        catalog.commits.add("flights", 1, commit)


def test_a_marked_checkpoint_is_seen_by_those_that_build_on_it_only(flights: Catalog, clock: Clock) -> None:
    chained(flights)
    flights.reference_copies.add("flights", 1, 4, [stored(4, "a.snapshot.parquet")], 14)
    clock.move(5)
    flights.deletions.mark("flights", 1, [3, 4])
    assert [c.id for c in flights.checkpoints.list("flights")] == [1, 2, 5, 6]
    assert [c.id for c in flights.checkpoints.list("flights", limit=3)] == [2, 5, 6]
    assert [c.id for c in flights.checkpoints.list("flights", limit=3, marked=True)] == [4, 5, 6]
    assert (flights.checkpoints.get_latest("flights").id, flights.checkpoints.last_id("flights")) == (6, 6)
    assert flights.reference_copies.list("flights") == []
    for call in (
        lambda: flights.checkpoints.resolve("flights", "4"),
        lambda: flights.chains.list_checkpoints("flights", 4),
        lambda: flights.reference_copies.add("flights", 1, 3, [], 0),
    ):
        with pytest.raises(UnknownCheckpoint, match=r"no checkpoint [34] of stream flights: it has 4, 1 to 6"):
            call()
    assert flights.chains.list_checkpoints("flights", 6) == [3, 4, 5, 6]
    assert flights.checkpoints.get("flights", 4).deleted_at == NOON + timedelta(minutes=5)
    assert flights.checkpoints.get("flights", 5).deleted_at is None
    assert names(flights, 4) == [
        stored(4, file).name for file in ("a.snapshot.parquet", "manifest.a.arrow", "s.segment")
    ]
    assert [(r.id, r.deleted) for r in flights.checkpoints.list_retained("flights")] == [
        (1, False),
        (2, False),
        (3, True),
        (4, True),
        (5, False),
        (6, False),
    ]
    assert {r.committed_at for r in flights.checkpoints.list_retained("flights")} == {NOON}


def test_a_marked_checkpoint_answers_to_no_time(flights: Catalog, clock: Clock) -> None:
    for id in range(1, 5):
        flights.commits.add("flights", 1, commit_of(id, event_time_max=clock.time))
        clock.move(60)
    flights.deletions.mark("flights", 1, [1, 3])
    half_past_two = NOON + timedelta(hours=2, minutes=30)
    assert (
        flights.checkpoints.resolve("flights", half_past_two.isoformat())
        == flights.checkpoints.as_of("flights", half_past_two)
        == 2
    )
    for call in (
        lambda: flights.checkpoints.resolve("flights", NOON.isoformat()),
        lambda: flights.checkpoints.as_of("flights", NOON),
    ):
        with pytest.raises(UnknownCheckpoint, match="it has 2, 2 to 4"):
            call()


def test_what_is_forgotten_is_gone_but_for_its_input(flights: Catalog) -> None:
    chained(flights)
    flights.deletions.mark("flights", 1, [1, 2, 3, 4])
    flights.deletions.forget("flights", 1, [1, 2], names(flights, 1, 2))
    assert [r.id for r in flights.checkpoints.list_retained("flights")] == [3, 4, 5, 6]
    assert {o.checkpoint for o in flights.objects.list("flights")} == {3, 4, 5, 6}
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 2 of stream flights: it has 2, 5 to 6"):
        flights.checkpoints.get("flights", 2)
    assert [(s.step, s.checkpoint) for s in flights.input_log.list("flights", 6)] == [(id, id) for id in range(1, 7)]
    flights.commits.add("flights", 1, commit_of(7, first={"aircraft": 5}, steps=[Step(7, 6, "")]))
    flights.deletions.mark("flights", 1, [1, 2])  # gone already
    assert [r.deleted for r in flights.checkpoints.list_retained("flights")] == [True, True, False, False, False]


def test_a_marked_checkpoint_outlives_what_only_itself_built_on(flights: Catalog) -> None:
    chained(flights)
    flights.deletions.mark("flights", 1, [1, 2, 3, 4])
    flights.deletions.forget("flights", 1, [1, 2], names(flights, 1, 2))
    assert flights.chains.list_checkpoints("flights", 6) == [3, 4, 5, 6]


def test_only_the_marked_is_forgotten_and_only_without_objects(flights: Catalog) -> None:
    chained(flights)
    everything = (flights.checkpoints.list_retained("flights"), flights.objects.list("flights"))
    flights.deletions.forget("flights", 1, [1, 2], names(flights, 1, 2))
    assert (flights.checkpoints.list_retained("flights"), flights.objects.list("flights")) == everything
    flights.deletions.mark("flights", 1, [3, 4])
    with pytest.raises(UsageError, match="refuses the deletion of checkpoints of stream flights"):
        flights.deletions.forget("flights", 1, [4], [])
    with pytest.raises(UsageError, match=r"3/manifest\.a\.arrow is needed by a checkpoint of stream flights"):
        flights.deletions.forget("flights", 1, [3], names(flights, 3))  # the chain of 6 begins with it
    assert flights.objects.list("flights") == everything[1]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [50, pytest.param(500, marks=pytest.mark.thorough)])
def test_many_are_marked_and_forgotten_in_one_transaction(
    flights: Catalog, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a statement names."""
    monkeypatch.setattr("siltstone.catalog.database.limits._AT_ONCE", at_once)
    last = at_once * 6 // 5 + 3
    for id in range(1, last + 1):
        flights.commits.add("flights", 1, commit_of(id))
    flights.deletions.mark("flights", 1, range(1, last))
    flights.deletions.forget("flights", 1, range(1, last), names(flights, *range(1, last)))
    assert [r.id for r in flights.checkpoints.list_retained("flights")] == [last]
    assert len(flights.objects.list("flights")) == 1


@pytest.mark.parametrize("ids", [[1, 7], [0], [-1], [2**70]])
def test_an_unknown_checkpoint_is_not_deleted_and_nor_is_any_with_it(flights: Catalog, ids: list[int]) -> None:
    chained(flights)
    with pytest.raises(UnknownCheckpoint, match=rf"no checkpoint {ids[-1]} of stream flights: it has 6, 1 to 6"):
        flights.deletions.mark("flights", 1, ids)
    assert [c.id for c in flights.checkpoints.list("flights")] == [1, 2, 3, 4, 5, 6]


def test_the_newest_is_not_deleted_and_nor_is_any_with_it(flights: Catalog) -> None:
    chained(flights)
    with pytest.raises(UsageError, match="checkpoint 6 of stream flights is its newest, which the next run resumes"):
        flights.deletions.mark("flights", 1, range(1, 7))
    assert [c.id for c in flights.checkpoints.list("flights")] == [1, 2, 3, 4, 5, 6]


def test_the_newest_writer_alone_deletes(flights: Catalog) -> None:
    chained(flights)
    flights.deletions.mark("flights", 1, [1, 2, 3, 4])
    flights.runs.begin("flights", "other")
    for call in (
        lambda: flights.deletions.mark("flights", 1, [5]),
        lambda: flights.deletions.forget("flights", 1, [1, 2], names(flights, 1, 2)),
    ):
        with pytest.raises(Fenced):
            call()
    assert [r.deleted for r in flights.checkpoints.list_retained("flights")] == [True] * 4 + [False] * 2
    flights.deletions.forget("flights", 2, [1, 2], names(flights, 1, 2))
    assert [r.id for r in flights.checkpoints.list_retained("flights")] == [3, 4, 5, 6]


def test_streams_are_deleted_from_apart(flights: Catalog) -> None:
    flights.streams.register("bids", 16, {})
    epoch = flights.runs.begin("bids", "host")
    for id in (1, 2):
        flights.commits.add("bids", epoch, commit_of(id, steps=[Step(id, id - 1, "")]))
    chained(flights)
    flights.deletions.mark("bids", epoch, [1])
    flights.deletions.forget("bids", epoch, [1], [o.name for o in flights.objects.list("bids", [1])])
    assert [r.id for r in flights.checkpoints.list_retained("bids")] == [2]
    assert [(r.id, r.deleted) for r in flights.checkpoints.list_retained("flights")] == [
        (id, False) for id in range(1, 7)
    ]
    assert len(flights.objects.list("flights")) == 12
