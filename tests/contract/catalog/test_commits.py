"""Commits, and what a checkpoint refers to, over every database a catalog can be in."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import event

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.errors import UnknownCheckpoint, UsageError
from siltstone.model import Form, StoredObject
from tests.catalog_cases import NOON, Clock, add, commit_of, stored

# --- commits ---------------------------------------------------------------------------------------------------------


def test_a_commit_is_read_back_whole(flights: Catalog, catalog_url: str) -> None:
    new_york = datetime(2013, 1, 1, 5, 15, 0, 250_000, timezone(timedelta(hours=-5)))
    commit = commit_of(
        1,
        rows=2**40,
        bytes=2**41,
        forms={"aircraft": Form.BASE, "route": Form.DELTA},
        d={"aircraft": 0, "route": 12},
        statistics={"aircraft": {"seconds": 0.125, "note": "détail"}},
        event_time_max=new_york,
        segments=[stored(1, "a.segment", 2**33), stored(1, "b.segment")],
        bases=[stored(1, "c.base.parquet", 3)],
        steps=[Step(1, 0, 'v1\n{"a":1}\n{"b":2}', '{"0":"x"}'), Step(2, 1, "v1\n{}\nnext")],
    )
    flights.commits.add("flights", 1, commit)
    with open_catalog(catalog_url, create=False) as other:
        found = other.checkpoints.get_latest("flights")
        assert found == other.checkpoints.get("flights", 1) == other.checkpoints.list("flights")[0]
        assert (found.stream, found.id, found.epoch, found.committed_at) == ("flights", 1, 1, NOON)
        for name in ("manifest", "digest", "rows", "bytes", "forms", "d", "statistics", "event_time_max"):
            assert getattr(found, name) == getattr(commit, name), name
        assert found.event_time_max is not None and found.event_time_max.tzinfo is UTC
        assert isinstance(found.forms["route"], Form)
        assert found.proven is None
        objects = other.objects.list("flights", [1])
        assert {(o.kind, o.stored) for o in objects} == {
            (ObjectKind.MANIFEST, commit.manifest),
            *((ObjectKind.SEGMENT, s) for s in commit.segments),
            *((ObjectKind.BASE, s) for s in commit.bases),
        }
        assert {(o.checkpoint, o.epoch) for o in objects} == {(1, 1)}
        steps = other.input_log.list("flights", 1)
        assert [(s.step, s.batch_id, s.offsets, s.sources, s.checkpoint) for s in steps] == [
            (1, 0, 'v1\n{"a":1}\n{"b":2}', '{"0":"x"}', 1),
            (2, 1, "v1\n{}\nnext", "{}", 1),
        ]


@pytest.mark.parametrize("id", [0, 2, 4, -1])
def test_an_id_that_does_not_follow_is_refused(flights: Catalog, id: int) -> None:
    add(flights, 2)
    with pytest.raises(UsageError, match=rf"checkpoint {id} of stream flights does not follow .*2"):
        flights.commits.add("flights", 1, commit_of(id, tag="again"))
    assert flights.checkpoints.last_id("flights") == 2


@pytest.mark.parametrize(
    "fault",
    [
        {"bases": [stored(1, "twice.base.parquet")]},
        {"steps": [Step(3, 2, ""), Step(1, 0, "")]},
        {"segments": [stored(3, "same.segment"), stored(3, "same.segment")]},
        {"statistics": {"ratio": float("nan")}},
        {"statistics": {"when": NOON}},
    ],
    ids=["object recorded before", "step recorded before", "object twice", "not a number", "not JSON"],
)
def test_a_commit_that_does_not_fit_changes_nothing(flights: Catalog, fault: dict) -> None:
    flights.commits.add("flights", 1, commit_of(1, bases=[stored(1, "twice.base.parquet")], steps=[Step(1, 0, "")]))
    flights.commits.add("flights", 1, commit_of(2, first={"aircraft": 1}, steps=[Step(2, 1, "")]))
    before = (
        flights.objects.list("flights"),
        flights.input_log.list("flights", 99),
        flights.checkpoints.list("flights"),
    )
    with pytest.raises(UsageError, match="checkpoint 3 of stream flights") as caught:
        flights.commits.add("flights", 1, commit_of(3, **fault))
    assert "\n" not in str(caught.value)
    after = (
        flights.objects.list("flights"),
        flights.input_log.list("flights", 99),
        flights.checkpoints.list("flights"),
    )
    assert after == before
    flights.commits.add("flights", 1, commit_of(3, steps=[Step(3, 2, "")]))


@pytest.mark.parametrize("name", ["../x", "flights/../../x", "/etc/passwd", "", "a//b", "a\\b", "a\nb", ".tmp/x"])
def test_an_object_name_that_leaves_the_store_is_refused(flights: Catalog, name: str) -> None:
    outside = StoredObject(name, 1, "xxh3-128:" + "0" * 32)
    for place in ({"manifest": outside}, {"segments": [outside]}, {"bases": [outside]}):
        with pytest.raises(UsageError, match="not an object name"):
            commit_of(1, **place)
    add(flights, 1)
    with pytest.raises(UsageError, match="not an object name"):
        flights.reference_copies.add("flights", 1, 1, [outside], 1)


def test_streams_may_use_the_same_ids_and_object_names(flights: Catalog) -> None:
    flights.streams.register("bids", 16, {})
    epoch = flights.runs.begin("bids", "host")
    add(flights, 2)
    flights.commits.add("bids", epoch, commit_of(1))
    assert (flights.checkpoints.last_id("flights"), flights.checkpoints.last_id("bids")) == (2, 1)


def test_a_commit_takes_a_fixed_number_of_statements(flights: Catalog) -> None:
    seen: list[str] = []

    def note(_c: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(flights.transactions.engine, "before_cursor_execute", note)
    flights.commits.add("flights", 1, commit_of(1))
    steps = [Step(n + 1, n, "") for n in range(200)]
    segments = [stored(2, f"{n}.segment") for n in range(200)]
    seen.clear()
    flights.commits.add("flights", 1, commit_of(2, segments=segments, first={"aircraft": 1}, steps=steps))
    assert len(seen) <= 10, seen


# --- what a checkpoint refers to -------------------------------------------------------------------------------------


def test_a_chain_is_what_a_restore_may_read(flights: Catalog) -> None:
    # Two operators with bases at 1 and 4, at 3 and 6, both at 8.
    firsts = {1: (1, 1), 2: (1, 1), 3: (1, 3), 4: (4, 3), 5: (4, 3), 6: (4, 6), 7: (4, 6), 8: (8, 8), 9: (8, 8)}
    for id, (aircraft, routes) in firsts.items():
        flights.commits.add("flights", 1, commit_of(id, first={"aircraft": aircraft, "routes": routes}))
    assert {id: flights.chains.list_checkpoints("flights", id) for id in (1, 2, 5, 7, 8, 9)} == {
        1: [1],
        2: [1, 2],
        5: [3, 4, 5],
        7: [4, 5, 6, 7],
        8: [8],
        9: [8, 9],
    }
    with pytest.raises(UnknownCheckpoint):
        flights.chains.list_checkpoints("flights", 10)
    chains = flights.chains
    for ids in ([5], [9, 2, 7], range(1, 10), []):
        many = chains.list_many("flights", ids)
        assert {id: chain.manifests for id, chain in many.items()} == {
            id: chains.list_manifests("flights", id) for id in ids
        }
        names = {id: {stored.name for stored in chains.list_objects("flights", id)} for id in ids}
        assert {id: chain.names for id, chain in many.items()} == names
    for id in (10, 0, -1, 2**70):
        with pytest.raises(UnknownCheckpoint, match=f"no checkpoint {id} of"):
            chains.list_many("flights", [3, id])


@pytest.mark.parametrize("statement", [1, 2, 3, 4, 5])
def test_what_a_restore_reads_is_never_cut_by_a_deletion_that_comes_between(
    flights: Catalog, catalog_url: str, statement: int
) -> None:
    add(flights, 2, first={"aircraft": 1})
    flights.commits.add("flights", 1, commit_of(3, forms={"aircraft": Form.BASE}, first={"aircraft": 3}))
    manifests = [stored(id, "manifest.a.arrow") for id in (1, 2)]
    with open_catalog(catalog_url) as other:
        seen: list[object] = []

        def mark(*_: object) -> None:
            seen.append(None)
            if len(seen) == statement:
                other.deletions.mark("flights", 1, [2])

        event.listen(flights.transactions.engine, "after_cursor_execute", mark)
        try:
            assert flights.chains.list_manifests("flights", 2) == manifests
            assert flights.chains.list_checkpoints("flights", 2) == [1, 2]
        except UnknownCheckpoint:
            assert len(seen) >= statement
    with pytest.raises(UnknownCheckpoint):
        flights.chains.list_checkpoints("flights", 2)
    with pytest.raises(UnknownCheckpoint):
        flights.chains.list_manifests("flights", 2)


def test_objects_of_many_checkpoints(flights: Catalog) -> None:
    for id in range(1, 12):
        flights.commits.add("flights", 1, commit_of(id, segments=[stored(id, "s.segment")]))
    assert [o.checkpoint for o in flights.objects.list("flights", [3, 1, 3, 99, 0, 2**70])] == [1, 1, 3, 3]
    assert len(flights.objects.list("flights")) == len(flights.objects.list("flights", range(5000))) == 22
    assert flights.objects.list("flights", []) == []


def test_steps_are_the_input_between_two_checkpoints(flights: Catalog) -> None:
    for id in range(1, 5):
        steps = [Step(2 * id - 1, 2 * id - 2, f"offsets {2 * id - 1}"), Step(2 * id, 2 * id - 1, "")]
        flights.commits.add("flights", 1, commit_of(id, steps=steps))
    assert [(s.step, s.checkpoint) for s in flights.input_log.list("flights", 2)] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [s.step for s in flights.input_log.list("flights", 3, after=2)] == [5, 6]
    assert [s.step for s in flights.input_log.list("flights", 2**80)] == list(range(1, 9))
    assert flights.input_log.list("flights", 0) == flights.input_log.list("flights", 4, after=2**80) == []


def test_a_proof_replaces_the_one_before(flights: Catalog, clock: Clock) -> None:
    add(flights, 2)
    clock.move(5)
    flights.checkpoints.record_proof("flights", 1, False, "digest differs in aircraft.totals")
    failed = flights.checkpoints.get("flights", 1)
    assert (failed.proven, failed.proof, failed.proven_at) == (
        False,
        "digest differs in aircraft.totals",
        None,
    )
    flights.checkpoints.record_proof("flights", 1, True)
    proven = flights.checkpoints.get("flights", 1)
    assert (proven.proven, proven.proof, proven.proven_at) == (True, None, NOON + timedelta(minutes=5))
    assert flights.checkpoints.get("flights", 2).proven is None
    with pytest.raises(UnknownCheckpoint, match="it has 2, 1 to 2"):
        flights.checkpoints.record_proof("flights", 3, True)


def test_a_measured_restore_stays_until_the_next_one(flights: Catalog) -> None:
    add(flights, 2)
    flights.checkpoints.record_proof("flights", 1, True, restore_s=1.25, restore_bytes=2**40)
    flights.checkpoints.record_proof("flights", 1, False, "digest differs in aircraft.totals")
    measured = flights.checkpoints.get("flights", 1)
    assert (measured.proven, measured.restore_s, measured.restore_bytes) == (False, 1.25, 2**40)
    flights.checkpoints.record_proof("flights", 1, True, restore_s=0.5, restore_bytes=700)
    first, second = flights.checkpoints.list("flights")
    assert (first.proven, first.restore_s, first.restore_bytes) == (True, 0.5, 700)
    assert (second.restore_s, second.restore_bytes) == (None, None)


def test_a_restore_by_a_command_is_recorded_for_runs_to_learn_from(flights: Catalog) -> None:
    add(flights, 3)
    flights.checkpoints.record_proof("flights", 1, False, "its index is damaged")
    flights.checkpoints.record_restore("flights", 1, epoch=1, restore_s=1.25, restore_bytes=2**40)
    flights.checkpoints.record_restore("flights", 3, epoch=1, restore_s=0.5, restore_bytes=9)
    flights.checkpoints.record_restore("flights", 2, epoch=7, restore_s=9.0, restore_bytes=9)  # made again meanwhile
    flights.checkpoints.record_restore("flights", 9, epoch=1, restore_s=9.0, restore_bytes=9)
    found = flights.checkpoints.list_restored("flights", 10)
    assert [(c.id, c.restore_s, c.restore_bytes) for c in found] == [(1, 1.25, 2**40), (3, 0.5, 9)]
    assert found[0].proof == "its index is damaged"
    assert [c.id for c in flights.checkpoints.list_restored("flights", 1)] == [3]


def test_a_snapshot_belongs_to_one_checkpoint(flights: Catalog) -> None:
    add(flights, 2)
    full = [stored(2, "a.snapshot.parquet", 30), stored(2, "b.snapshot.parquet", 12)]
    flights.reference_copies.add("flights", 1, 2, full, 14)
    (found,) = flights.reference_copies.list("flights")
    assert (found.checkpoint, found.rows, found.bytes, found.taken_at) == (2, 14, 42, NOON)
    assert found.objects == tuple(full)
    assert [o.name for o in flights.objects.list("flights", [2]) if o.kind == ObjectKind.REFERENCE_COPY] == [
        o.name for o in full
    ]
    with pytest.raises(UsageError, match=r"^checkpoint 2 of flights has a reference copy already$"):
        flights.reference_copies.add("flights", 1, 2, [stored(2, "c.snapshot.parquet")], 14)
    with pytest.raises(UnknownCheckpoint):
        flights.reference_copies.add("flights", 1, 3, full, 14)
    assert len(flights.objects.list("flights", [2])) == 3
