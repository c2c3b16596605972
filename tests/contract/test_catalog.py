"""One behaviour, over every database a catalog can be in."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta, timezone
from threading import Barrier
from time import sleep

import pytest
from sqlalchemy import event

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records import CheckpointCommit, ObjectKind, Step, parse_time
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, SchemaConflict, UnknownCheckpoint, UnknownStream, UsageError
from siltstone.model import Form, StoredObject

NOON = datetime(2013, 7, 4, 12, tzinfo=UTC)


class Clock:
    """Time that stands still until moved."""

    def __init__(self) -> None:
        self.time = NOON

    def __call__(self) -> datetime:
        return self.time

    def move(self, minutes: float) -> None:
        self.time += timedelta(minutes=minutes)


def stored(id: int, file: str, size: int = 10) -> StoredObject:
    return StoredObject(f"flights/00000001/{id:012d}/{file}", size, f"{size:032x}")


def commit_of(id: int, **changes: object) -> CheckpointCommit:
    values: dict = {
        "id": id,
        "manifest": stored(id, f"manifest.{changes.pop('tag', 'a')}.arrow"),
        "digest": f"{id:032x}",
        "rows": 7 * id,
        "bytes": 100 * id,
        "forms": {"aircraft": Form.DELTA if id > 1 else Form.BASE},
    }
    return CheckpointCommit(**(values | changes))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog(catalog_url: str, clock: Clock) -> Iterator[Catalog]:
    with open_catalog(catalog_url, now=clock) as opened:
        yield opened


@pytest.fixture
def flights(catalog: Catalog) -> Catalog:
    """A catalog with stream flights in writer epoch 1."""
    catalog.register("flights", 128, {"operators": []})
    assert catalog.new_epoch("flights", "host:1") == 1
    return catalog


def add(catalog: Catalog, count: int, **changes: object) -> None:
    for id in range(1, count + 1):
        catalog.commit("flights", 1, commit_of(id, **changes))


# Streams


def test_a_stream_is_registered_once_and_found_again(catalog: Catalog, catalog_url: str) -> None:
    made = catalog.register("flights", 64, {"operators": {"aircraft": {"key": ["tail"]}}})
    assert (made.max_parallelism, made.epoch, made.created_at) == (64, 0, NOON)
    again = catalog.register("flights", 64, {"something": "else"})
    assert again == made == catalog.stream("flights")
    catalog.register("bids", 128, {})
    with open_catalog(catalog_url, create=False) as reopened:
        assert [s.name for s in reopened.streams()] == ["bids", "flights"]
        assert reopened.stream("flights") == made


def test_a_changed_max_parallelism_is_refused_with_both_shown(flights: Catalog) -> None:
    with pytest.raises(SchemaConflict, match=r"stream flights has max_parallelism 128, now 64.*keep 128"):
        flights.register("flights", 64, {})
    assert flights.stream("flights").max_parallelism == 128


@pytest.mark.parametrize("name", ["../flights", "/etc", "a/b", "", "Flights", "a" * 65, "f\0"])
def test_a_name_that_is_no_identifier_is_refused(catalog: Catalog, name: str) -> None:
    with pytest.raises(UsageError, match="not a stream name"):
        catalog.register(name, 128, {})
    assert catalog.streams() == []


@pytest.mark.parametrize("count", [0, -1, 32769])
def test_a_max_parallelism_out_of_range_is_refused(catalog: Catalog, count: int) -> None:
    with pytest.raises(UsageError, match=f"max_parallelism {count}"):
        catalog.register("flights", count, {})


def test_an_unknown_stream_is_named_with_those_there_are(catalog: Catalog) -> None:
    with pytest.raises(UnknownStream, match="none yet, run a stream first"):
        catalog.stream("fligths")
    catalog.register("flights", 128, {})
    catalog.register("bids", 128, {})
    for call in (
        lambda: catalog.stream("fligths"),
        lambda: catalog.new_epoch("fligths", "me"),
        lambda: catalog.end_epoch("fligths", 1, "done"),
        lambda: catalog.check_epoch("fligths", 1),
        lambda: catalog.runs("fligths"),
        lambda: catalog.commit("fligths", 1, commit_of(1)),
        lambda: catalog.update_definition("fligths", 1, {}),
        lambda: catalog.last_id("fligths"),
        lambda: catalog.latest("fligths"),
        lambda: catalog.checkpoint("fligths", 1),
        lambda: catalog.checkpoints("fligths"),
        lambda: catalog.resolve("fligths", "latest"),
        lambda: catalog.resolve("fligths", "what"),
        lambda: catalog.as_of("fligths", NOON),
        lambda: catalog.chain("fligths", 1),
        lambda: catalog.objects("fligths"),
        lambda: catalog.steps("fligths", 1),
        lambda: catalog.record_proof("fligths", 1, True),
        lambda: catalog.add_snapshot("fligths", 1, 1, [], 0),
        lambda: catalog.snapshots("fligths"),
        lambda: catalog.retained("fligths"),
        lambda: catalog.mark_deleted("fligths", 1, [1]),
        lambda: catalog.forget("fligths", 1, [1], []),
        lambda: catalog.add_savepoint("fligths", 1, "stable", 1),
        lambda: catalog.drop_savepoint("fligths", 1, "stable"),
        lambda: catalog.savepoints("fligths"),
    ):
        with pytest.raises(UnknownStream, match=r"'fligths'.*it has bids, flights"):
            call()


def test_the_definition_is_updated_by_the_newest_writer_only(flights: Catalog) -> None:
    flights.update_definition("flights", 1, {"operators": ["new"]})
    flights.new_epoch("flights", "other")
    with pytest.raises(Fenced):
        flights.update_definition("flights", 1, {"operators": ["stale"]})
    assert flights.stream("flights").definition == {"operators": ["new"]}


def test_a_stream_may_be_registered_by_many_at_once(catalog_url: str) -> None:
    open_catalog(catalog_url).close()
    start = Barrier(4)

    def register() -> int:
        with open_catalog(catalog_url) as catalog:
            start.wait()
            return catalog.register("flights", 128, {}).max_parallelism

    with ThreadPoolExecutor(4) as pool:
        assert [f.result() for f in [pool.submit(register) for _ in range(4)]] == [128] * 4


# Writer epochs


def test_a_newer_epoch_fences_the_older_one(flights: Catalog) -> None:
    add(flights, 1)
    flights.check_epoch("flights", 1)
    assert [flights.new_epoch("flights", f"host:{n}") for n in (2, 3, 4)] == [2, 3, 4]
    flights.check_epoch("flights", 4)
    message = "writer epoch 3 of stream flights was fenced by epoch 4: another run has taken over; stop this one"
    for call in (
        lambda: flights.check_epoch("flights", 3),
        lambda: flights.commit("flights", 3, commit_of(2)),
        lambda: flights.add_snapshot("flights", 3, 1, [stored(1, "full.snapshot.parquet")], 1),
    ):
        with pytest.raises(Fenced, match=f"^{message}$"):
            call()
    assert flights.last_id("flights") == 1 and flights.snapshots("flights") == []
    flights.commit("flights", 4, commit_of(2))


@pytest.mark.parametrize("epoch", [0, -1, 2, 2**40])
def test_an_epoch_that_was_never_begun_writes_nothing(flights: Catalog, epoch: int) -> None:
    with pytest.raises(Fenced):
        flights.commit("flights", epoch, commit_of(1))
    assert flights.last_id("flights") == 0


def test_a_stream_without_a_run_has_no_writer(catalog: Catalog) -> None:
    catalog.register("flights", 128, {})
    with pytest.raises(Fenced, match="never begun"):
        catalog.commit("flights", 0, commit_of(1))


def test_runs_tell_who_wrote_and_how_it_ended(flights: Catalog, clock: Clock) -> None:
    clock.move(1)
    flights.new_epoch("flights", "host:2")
    flights.end_epoch("flights", 1, "too late to matter")
    clock.move(1)
    flights.end_epoch("flights", 2, "done")
    first, second = flights.runs("flights")
    assert (first.who, first.started_at, first.outcome) == ("host:1", NOON, "superseded by epoch 2")
    assert first.ended_at == second.started_at == NOON + timedelta(minutes=1)
    assert (second.outcome, second.ended_at) == ("done", NOON + timedelta(minutes=2))


def test_epochs_of_one_stream_leave_others_alone(flights: Catalog) -> None:
    flights.register("bids", 128, {})
    flights.new_epoch("bids", "host")
    flights.new_epoch("bids", "host")
    flights.check_epoch("flights", 1)
    assert flights.runs("flights")[0].ended_at is None


# Commits


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
    flights.commit("flights", 1, commit)
    with open_catalog(catalog_url, create=False) as other:
        found = other.latest("flights")
        assert found == other.checkpoint("flights", 1) == other.checkpoints("flights")[0]
        assert (found.stream, found.id, found.epoch, found.committed_at) == ("flights", 1, 1, NOON)
        for name in ("manifest", "digest", "rows", "bytes", "forms", "d", "statistics", "event_time_max"):
            assert getattr(found, name) == getattr(commit, name), name
        assert found.event_time_max is not None and found.event_time_max.tzinfo is UTC
        assert isinstance(found.forms["route"], Form)
        assert found.proven is None
        objects = other.objects("flights", [1])
        assert {(o.kind, o.stored) for o in objects} == {
            (ObjectKind.MANIFEST, commit.manifest),
            *((ObjectKind.SEGMENT, s) for s in commit.segments),
            *((ObjectKind.BASE, s) for s in commit.bases),
        }
        assert {(o.checkpoint, o.epoch) for o in objects} == {(1, 1)}
        steps = other.steps("flights", 1)
        assert [(s.step, s.batch_id, s.offsets, s.sources, s.checkpoint) for s in steps] == [
            (1, 0, 'v1\n{"a":1}\n{"b":2}', '{"0":"x"}', 1),
            (2, 1, "v1\n{}\nnext", "{}", 1),
        ]


@pytest.mark.parametrize("id", [0, 2, 4, -1])
def test_an_id_that_does_not_follow_is_refused(flights: Catalog, id: int) -> None:
    add(flights, 2)
    with pytest.raises(UsageError, match=rf"checkpoint {id} of stream flights does not follow .*2"):
        flights.commit("flights", 1, commit_of(id, tag="again"))
    assert flights.last_id("flights") == 2


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
    flights.commit("flights", 1, commit_of(1, bases=[stored(1, "twice.base.parquet")], steps=[Step(1, 0, "")]))
    flights.commit("flights", 1, commit_of(2, first={"aircraft": 1}, steps=[Step(2, 1, "")]))
    before = (flights.objects("flights"), flights.steps("flights", 99), flights.checkpoints("flights"))
    with pytest.raises(UsageError, match="checkpoint 3 of stream flights") as caught:
        flights.commit("flights", 1, commit_of(3, **fault))
    assert "\n" not in str(caught.value)
    after = (flights.objects("flights"), flights.steps("flights", 99), flights.checkpoints("flights"))
    assert after == before
    flights.commit("flights", 1, commit_of(3, steps=[Step(3, 2, "")]))


@pytest.mark.parametrize("name", ["../x", "flights/../../x", "/etc/passwd", "", "a//b", "a\\b", "a\nb", ".tmp/x"])
def test_an_object_name_that_leaves_the_store_is_refused(flights: Catalog, name: str) -> None:
    outside = StoredObject(name, 1, "0" * 32)
    for place in ({"manifest": outside}, {"segments": [outside]}, {"bases": [outside]}):
        with pytest.raises(UsageError, match="not an object name"):
            commit_of(1, **place)
    add(flights, 1)
    with pytest.raises(UsageError, match="not an object name"):
        flights.add_snapshot("flights", 1, 1, [outside], 1)


@pytest.mark.parametrize("first", [0, 3, -1])
def test_a_dependency_that_is_not_earlier_is_refused(first: int) -> None:
    with pytest.raises(UsageError, match="checkpoint 2 cannot depend on"):
        commit_of(2, first={"aircraft": 1, "routes": first})


def test_streams_may_use_the_same_ids_and_object_names(flights: Catalog) -> None:
    flights.register("bids", 16, {})
    epoch = flights.new_epoch("bids", "host")
    add(flights, 2)
    flights.commit("bids", epoch, commit_of(1))
    assert (flights.last_id("flights"), flights.last_id("bids")) == (2, 1)


def test_a_commit_takes_a_fixed_number_of_statements(flights: Catalog) -> None:
    seen: list[str] = []

    def note(_c: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(flights._engine, "before_cursor_execute", note)
    flights.commit("flights", 1, commit_of(1))
    steps = [Step(n + 1, n, "") for n in range(200)]
    segments = [stored(2, f"{n}.segment") for n in range(200)]
    seen.clear()
    flights.commit("flights", 1, commit_of(2, segments=segments, first={"aircraft": 1}, steps=steps))
    assert len(seen) <= 10, seen


# Which checkpoint


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


# What a checkpoint refers to


def test_a_chain_is_what_a_restore_may_read(flights: Catalog) -> None:
    # Two operators with bases at 1 and 4, at 3 and 6, both at 8.
    firsts = {1: (1, 1), 2: (1, 1), 3: (1, 3), 4: (4, 3), 5: (4, 3), 6: (4, 6), 7: (4, 6), 8: (8, 8), 9: (8, 8)}
    for id, (aircraft, routes) in firsts.items():
        flights.commit("flights", 1, commit_of(id, first={"aircraft": aircraft, "routes": routes}))
    assert {id: flights.chain("flights", id) for id in (1, 2, 5, 7, 8, 9)} == {
        1: [1],
        2: [1, 2],
        5: [3, 4, 5],
        7: [4, 5, 6, 7],
        8: [8],
        9: [8, 9],
    }
    with pytest.raises(UnknownCheckpoint):
        flights.chain("flights", 10)


@pytest.mark.parametrize("statement", [1, 2, 3, 4, 5])
def test_what_a_restore_reads_is_never_cut_by_a_deletion_that_comes_between(
    flights: Catalog, catalog_url: str, statement: int
) -> None:
    add(flights, 2, first={"aircraft": 1})
    flights.commit("flights", 1, commit_of(3, forms={"aircraft": Form.BASE}, first={"aircraft": 3}))
    manifests = [stored(id, "manifest.a.arrow") for id in (1, 2)]
    with open_catalog(catalog_url) as other:
        seen: list[object] = []

        def mark(*_: object) -> None:
            seen.append(None)
            if len(seen) == statement:
                other.mark_deleted("flights", 1, [2])

        event.listen(flights._engine, "after_cursor_execute", mark)
        try:
            assert flights.chain_manifests("flights", 2) == manifests
            assert flights.chain("flights", 2) == [1, 2]
        except UnknownCheckpoint:
            assert len(seen) >= statement
    with pytest.raises(UnknownCheckpoint):
        flights.chain("flights", 2)
    with pytest.raises(UnknownCheckpoint):
        flights.chain_manifests("flights", 2)


def test_objects_of_many_checkpoints(flights: Catalog) -> None:
    for id in range(1, 12):
        flights.commit("flights", 1, commit_of(id, segments=[stored(id, "s.segment")]))
    assert [o.checkpoint for o in flights.objects("flights", [3, 1, 3, 99, 0, 2**70])] == [1, 1, 3, 3]
    assert len(flights.objects("flights")) == len(flights.objects("flights", range(5000))) == 22
    assert flights.objects("flights", []) == []


def test_steps_are_the_input_between_two_checkpoints(flights: Catalog) -> None:
    for id in range(1, 5):
        steps = [Step(2 * id - 1, 2 * id - 2, f"offsets {2 * id - 1}"), Step(2 * id, 2 * id - 1, "")]
        flights.commit("flights", 1, commit_of(id, steps=steps))
    assert [(s.step, s.checkpoint) for s in flights.steps("flights", 2)] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [s.step for s in flights.steps("flights", 3, after=2)] == [5, 6]
    assert [s.step for s in flights.steps("flights", 2**80)] == list(range(1, 9))
    assert flights.steps("flights", 0) == flights.steps("flights", 4, after=2**80) == []


def test_a_proof_replaces_the_one_before(flights: Catalog, clock: Clock) -> None:
    add(flights, 2)
    clock.move(5)
    flights.record_proof("flights", 1, False, "digest differs in aircraft.totals")
    failed = flights.checkpoint("flights", 1)
    assert (failed.proven, failed.proof, failed.proven_at) == (
        False,
        "digest differs in aircraft.totals",
        None,
    )
    flights.record_proof("flights", 1, True)
    proven = flights.checkpoint("flights", 1)
    assert (proven.proven, proven.proof, proven.proven_at) == (True, None, NOON + timedelta(minutes=5))
    assert flights.checkpoint("flights", 2).proven is None
    with pytest.raises(UnknownCheckpoint, match="it has 2, 1 to 2"):
        flights.record_proof("flights", 3, True)


def test_a_measured_restore_stays_until_the_next_one(flights: Catalog) -> None:
    add(flights, 2)
    flights.record_proof("flights", 1, True, restore_s=1.25, restore_bytes=2**40)
    flights.record_proof("flights", 1, False, "digest differs in aircraft.totals")
    measured = flights.checkpoint("flights", 1)
    assert (measured.proven, measured.restore_s, measured.restore_bytes) == (False, 1.25, 2**40)
    flights.record_proof("flights", 1, True, restore_s=0.5, restore_bytes=700)
    first, second = flights.checkpoints("flights")
    assert (first.proven, first.restore_s, first.restore_bytes) == (True, 0.5, 700)
    assert (second.restore_s, second.restore_bytes) == (None, None)


def test_a_snapshot_belongs_to_one_checkpoint(flights: Catalog) -> None:
    add(flights, 2)
    full = [stored(2, "a.snapshot.parquet", 30), stored(2, "b.snapshot.parquet", 12)]
    flights.add_snapshot("flights", 1, 2, full, 14)
    (found,) = flights.snapshots("flights")
    assert (found.checkpoint, found.rows, found.bytes, found.taken_at) == (2, 14, 42, NOON)
    assert found.objects == tuple(full)
    assert [o.name for o in flights.objects("flights", [2]) if o.kind == ObjectKind.SNAPSHOT] == [o.name for o in full]
    with pytest.raises(UsageError, match=r"^checkpoint 2 of flights has a snapshot already$"):
        flights.add_snapshot("flights", 1, 2, [stored(2, "c.snapshot.parquet")], 14)
    with pytest.raises(UnknownCheckpoint):
        flights.add_snapshot("flights", 1, 3, full, 14)
    assert len(flights.objects("flights", [2])) == 3


# Deletion


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
        catalog.commit("flights", 1, commit)


def names(catalog: Catalog, *ids: int) -> list[str]:
    return [o.name for o in catalog.objects("flights", ids)]


def test_a_marked_checkpoint_is_seen_by_those_that_build_on_it_only(flights: Catalog, clock: Clock) -> None:
    chained(flights)
    flights.add_snapshot("flights", 1, 4, [stored(4, "a.snapshot.parquet")], 14)
    clock.move(5)
    flights.mark_deleted("flights", 1, [3, 4])
    assert [c.id for c in flights.checkpoints("flights")] == [1, 2, 5, 6]
    assert [c.id for c in flights.checkpoints("flights", limit=3)] == [2, 5, 6]
    assert [c.id for c in flights.checkpoints("flights", limit=3, marked=True)] == [4, 5, 6]
    assert (flights.latest("flights").id, flights.last_id("flights")) == (6, 6)
    assert flights.snapshots("flights") == []
    for call in (
        lambda: flights.resolve("flights", "4"),
        lambda: flights.chain("flights", 4),
        lambda: flights.add_snapshot("flights", 1, 3, [], 0),
    ):
        with pytest.raises(UnknownCheckpoint, match=r"no checkpoint [34] of stream flights: it has 4, 1 to 6"):
            call()
    assert flights.chain("flights", 6) == [3, 4, 5, 6]
    assert flights.checkpoint("flights", 4).deleted_at == NOON + timedelta(minutes=5)
    assert flights.checkpoint("flights", 5).deleted_at is None
    assert names(flights, 4) == [
        stored(4, file).name for file in ("a.snapshot.parquet", "manifest.a.arrow", "s.segment")
    ]
    assert [(r.id, r.first, r.deleted) for r in flights.retained("flights")] == [
        (1, 1, False),
        (2, 1, False),
        (3, 3, True),
        (4, 4, True),
        (5, 3, False),
        (6, 3, False),
    ]
    assert {r.committed_at for r in flights.retained("flights")} == {NOON}


def test_a_marked_checkpoint_answers_to_no_time(flights: Catalog, clock: Clock) -> None:
    for id in range(1, 5):
        flights.commit("flights", 1, commit_of(id, event_time_max=clock.time))
        clock.move(60)
    flights.mark_deleted("flights", 1, [1, 3])
    half_past_two = NOON + timedelta(hours=2, minutes=30)
    assert flights.resolve("flights", half_past_two.isoformat()) == flights.as_of("flights", half_past_two) == 2
    for call in (lambda: flights.resolve("flights", NOON.isoformat()), lambda: flights.as_of("flights", NOON)):
        with pytest.raises(UnknownCheckpoint, match="it has 2, 2 to 4"):
            call()


def test_what_is_forgotten_is_gone_but_for_its_input(flights: Catalog) -> None:
    chained(flights)
    flights.mark_deleted("flights", 1, [1, 2, 3, 4])
    flights.forget("flights", 1, [1, 2], names(flights, 1, 2))
    assert [r.id for r in flights.retained("flights")] == [3, 4, 5, 6]
    assert {o.checkpoint for o in flights.objects("flights")} == {3, 4, 5, 6}
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 2 of stream flights: it has 2, 5 to 6"):
        flights.checkpoint("flights", 2)
    assert [(s.step, s.checkpoint) for s in flights.steps("flights", 6)] == [(id, id) for id in range(1, 7)]
    flights.commit("flights", 1, commit_of(7, first={"aircraft": 5}, steps=[Step(7, 6, "")]))
    flights.mark_deleted("flights", 1, [1, 2])  # gone already
    assert [r.deleted for r in flights.retained("flights")] == [True, True, False, False, False]


def test_a_marked_checkpoint_outlives_what_only_itself_built_on(flights: Catalog) -> None:
    chained(flights)
    flights.mark_deleted("flights", 1, [1, 2, 3, 4])
    flights.forget("flights", 1, [1, 2], names(flights, 1, 2))
    assert flights.chain("flights", 6) == [3, 4, 5, 6]
    flights.forget("flights", 1, [], [stored(4, "s.segment").name])
    assert names(flights, 4) == [stored(4, "manifest.a.arrow").name]


def test_only_the_marked_is_forgotten_and_only_without_objects(flights: Catalog) -> None:
    chained(flights)
    everything = (flights.retained("flights"), flights.objects("flights"))
    flights.forget("flights", 1, [1, 2], names(flights, 1, 2))
    assert (flights.retained("flights"), flights.objects("flights")) == everything
    flights.mark_deleted("flights", 1, [3, 4])
    with pytest.raises(UsageError, match="refuses the deletion of checkpoints of stream flights"):
        flights.forget("flights", 1, [4], names(flights, 4)[:1])
    with pytest.raises(UsageError, match="refuses the deletion of checkpoints of stream flights"):
        flights.forget("flights", 1, [3], names(flights, 3))  # the chain of 6 begins with it
    assert flights.objects("flights") == everything[1]


def test_many_are_marked_and_forgotten_in_one_transaction(flights: Catalog) -> None:
    for id in range(1, 604):
        flights.commit("flights", 1, commit_of(id))
    flights.mark_deleted("flights", 1, range(1, 603))
    flights.forget("flights", 1, range(1, 603), names(flights, *range(1, 603)))
    assert [(r.id, r.first) for r in flights.retained("flights")] == [(603, 603)]
    assert len(flights.objects("flights")) == 1


@pytest.mark.parametrize("ids", [[1, 7], [0], [-1], [2**70]])
def test_an_unknown_checkpoint_is_not_deleted_and_nor_is_any_with_it(flights: Catalog, ids: list[int]) -> None:
    chained(flights)
    with pytest.raises(UnknownCheckpoint, match=rf"no checkpoint {ids[-1]} of stream flights: it has 6, 1 to 6"):
        flights.mark_deleted("flights", 1, ids)
    assert [c.id for c in flights.checkpoints("flights")] == [1, 2, 3, 4, 5, 6]


def test_the_newest_is_not_deleted_and_nor_is_any_with_it(flights: Catalog) -> None:
    chained(flights)
    with pytest.raises(UsageError, match="checkpoint 6 of stream flights is its newest, which the next run resumes"):
        flights.mark_deleted("flights", 1, range(1, 7))
    assert [c.id for c in flights.checkpoints("flights")] == [1, 2, 3, 4, 5, 6]


def test_the_newest_writer_alone_deletes(flights: Catalog) -> None:
    chained(flights)
    flights.mark_deleted("flights", 1, [1, 2, 3, 4])
    flights.new_epoch("flights", "other")
    for call in (
        lambda: flights.mark_deleted("flights", 1, [5]),
        lambda: flights.forget("flights", 1, [1, 2], names(flights, 1, 2)),
    ):
        with pytest.raises(Fenced):
            call()
    assert [r.deleted for r in flights.retained("flights")] == [True] * 4 + [False] * 2
    flights.forget("flights", 2, [1, 2], names(flights, 1, 2))
    assert [r.id for r in flights.retained("flights")] == [3, 4, 5, 6]


def test_streams_are_deleted_from_apart(flights: Catalog) -> None:
    flights.register("bids", 16, {})
    epoch = flights.new_epoch("bids", "host")
    for id in (1, 2):
        flights.commit("bids", epoch, commit_of(id, steps=[Step(id, id - 1, "")]))
    chained(flights)
    flights.mark_deleted("bids", epoch, [1])
    flights.forget("bids", epoch, [1], [o.name for o in flights.objects("bids", [1])])
    assert [r.id for r in flights.retained("bids")] == [2]
    assert [(r.id, r.deleted) for r in flights.retained("flights")] == [(id, False) for id in range(1, 7)]
    assert len(flights.objects("flights")) == 12


# Savepoints


def test_a_savepoint_is_read_back_and_answers_to_its_name(flights: Catalog, clock: Clock, catalog_url: str) -> None:
    add(flights, 3)
    clock.move(1)
    stable = flights.add_savepoint("flights", 1, "stable", 2)
    assert (stable.stream, stable.name, stable.checkpoint) == ("flights", "stable", 2)
    assert (stable.created_at, stable.expires_at) == (NOON + timedelta(minutes=1), None)
    audit = flights.add_savepoint("flights", 1, "audit", 2, timedelta(days=30))
    assert audit.expires_at == NOON + timedelta(days=30, minutes=1)
    with open_catalog(catalog_url, create=False) as other:
        assert other.savepoints("flights") == [audit, stable]
        assert (other.resolve("flights", "stable"), other.resolve("flights", "audit")) == (2, 2)
        with pytest.raises(UnknownCheckpoint, match=r"'nightly' is no checkpoint: .*a savepoint \(audit, stable\), or"):
            other.resolve("flights", "nightly")
        other.drop_savepoint("flights", 1, "audit")
    assert flights.savepoints("flights") == [stable]
    with pytest.raises(UsageError, match="no savepoint 'audit' of stream flights: it has stable"):
        flights.drop_savepoint("flights", 1, "audit")
    assert [c.id for c in flights.checkpoints("flights")] == [1, 2, 3]


@pytest.mark.parametrize("name", ["2", "latest", "2013-07-04", "", "Stable", "a/b", "../x", "a" * 65, "a\n", "é"])
def test_a_name_that_means_something_else_is_no_savepoint(flights: Catalog, name: str) -> None:
    add(flights, 2)
    with pytest.raises(UsageError, match=r"is not a savepoint name|cannot be named latest"):
        flights.add_savepoint("flights", 1, name, 1)
    assert flights.savepoints("flights") == []


@pytest.mark.parametrize("expires_in", [timedelta(0), timedelta(days=-1), timedelta.max])
def test_a_savepoint_expires_in_time_to_come(flights: Catalog, expires_in: timedelta) -> None:
    add(flights, 1)
    with pytest.raises(UsageError, match=r"savepoint stable (would have expired already|cannot expire in)"):
        flights.add_savepoint("flights", 1, "stable", 1, expires_in)
    assert flights.savepoints("flights") == []


def test_a_taken_name_says_what_it_names(flights: Catalog, clock: Clock) -> None:
    add(flights, 3)
    flights.add_savepoint("flights", 1, "stable", 2, timedelta(hours=1))
    clock.move(120)
    before = flights.savepoints("flights")
    with pytest.raises(UsageError, match="stream flights has a savepoint stable already, of checkpoint 2: drop it"):
        flights.add_savepoint("flights", 1, "stable", 3)
    assert flights.savepoints("flights") == before
    flights.drop_savepoint("flights", 1, "stable")
    assert flights.add_savepoint("flights", 1, "stable", 3).checkpoint == 3


@pytest.mark.parametrize("id", [0, 4, -1, 2**70, 1])
def test_a_checkpoint_that_is_not_to_be_seen_gets_no_savepoint(flights: Catalog, id: int) -> None:
    add(flights, 3)
    flights.mark_deleted("flights", 1, [1])
    with pytest.raises(UnknownCheckpoint, match=f"no checkpoint {id} of stream flights: it has 2, 2 to 3"):
        flights.add_savepoint("flights", 1, "stable", id)
    assert flights.savepoints("flights") == []


def test_what_a_savepoint_keeps_is_not_deleted_and_nor_is_any_with_it(flights: Catalog) -> None:
    add(flights, 4)
    flights.add_savepoint("flights", 1, "stable", 2)
    with pytest.raises(UsageError, match=r"checkpoint 2 of stream flights is kept by its savepoint stable: .*drop"):
        flights.mark_deleted("flights", 1, [1, 2, 3])
    assert [r.deleted for r in flights.retained("flights")] == [False] * 4
    flights.mark_deleted("flights", 1, [1, 3])
    flights.drop_savepoint("flights", 1, "stable")
    flights.mark_deleted("flights", 1, [1, 2, 3])
    assert [c.id for c in flights.checkpoints("flights")] == [4]


def test_an_expired_savepoint_keeps_nothing_and_goes_with_its_checkpoint(flights: Catalog, clock: Clock) -> None:
    add(flights, 4)
    hour = flights.add_savepoint("flights", 1, "hour", 2, timedelta(hours=1))
    day = flights.add_savepoint("flights", 1, "day", 2, timedelta(days=1))
    clock.move(60)
    assert [(s.name, s.expired(clock())) for s in flights.savepoints("flights")] == [("day", False), ("hour", True)]
    with pytest.raises(UsageError, match="kept by its savepoint day"):
        flights.mark_deleted("flights", 1, [2])
    clock.move(23 * 60 - 1)
    with pytest.raises(UsageError, match="kept by its savepoint day"):
        flights.mark_deleted("flights", 1, [2])
    clock.move(1)
    assert flights.savepoints("flights") == [day, hour]
    assert flights.resolve("flights", "hour") == 2
    flights.mark_deleted("flights", 1, [2])
    assert flights.savepoints("flights") == []
    flights.forget("flights", 1, [2], names(flights, 2))
    assert [r.id for r in flights.retained("flights")] == [1, 3, 4]
    assert flights.add_savepoint("flights", 1, "hour", 3).checkpoint == 3


def test_the_newest_writer_alone_names_checkpoints(flights: Catalog) -> None:
    add(flights, 2)
    stable = flights.add_savepoint("flights", 1, "stable", 1)
    flights.new_epoch("flights", "other")
    for call in (
        lambda: flights.add_savepoint("flights", 1, "late", 1),
        lambda: flights.drop_savepoint("flights", 1, "stable"),
    ):
        with pytest.raises(Fenced):
            call()
    assert flights.savepoints("flights") == [stable]
    flights.drop_savepoint("flights", 2, "stable")


def test_streams_may_use_the_same_savepoint_names(flights: Catalog) -> None:
    flights.register("bids", 16, {})
    epoch = flights.new_epoch("bids", "host")
    flights.commit("bids", epoch, commit_of(1))
    flights.commit("bids", epoch, commit_of(2))
    add(flights, 2)
    flights.add_savepoint("flights", 1, "stable", 1)
    flights.mark_deleted("bids", epoch, [1])
    flights.add_savepoint("bids", epoch, "stable", 2)
    flights.drop_savepoint("bids", epoch, "stable")
    assert [s.checkpoint for s in flights.savepoints("flights")] == [1]


def test_a_savepoint_and_a_deletion_at_once_are_one_after_the_other(flights: Catalog, catalog_url: str) -> None:
    """Whichever has begun, the other waits for it, and then is refused."""
    add(flights, 3)
    begun: list[Future[object]] = []
    waited: list[bool] = []
    with ThreadPoolExecutor(1) as pool, open_catalog(catalog_url) as other:
        rivals: dict[str, Callable[[], object]] = {
            "UPDATE checkpoint": lambda: other.add_savepoint("flights", 1, "late", 1),
            "INSERT INTO savepoint": lambda: other.mark_deleted("flights", 1, [2]),
        }

        def begin(_c: object, _cursor: object, statement: str, *_: object) -> None:
            for change, rival in rivals.items():
                if statement.startswith(change):
                    begun.append(pool.submit(rival))
                    waited.append(not wait(begun[-1:], timeout=0.3).done)

        event.listen(flights._engine, "before_cursor_execute", begin)
        flights.mark_deleted("flights", 1, [1])
        with pytest.raises(UnknownCheckpoint, match="no checkpoint 1 of stream flights: it has 2, 2 to 3"):
            begun[0].result()
        flights.add_savepoint("flights", 1, "stable", 2)
        with pytest.raises(UsageError, match="kept by its savepoint stable"):
            begun[1].result()
        assert waited == [True, True]
    assert [(s.name, s.checkpoint) for s in flights.savepoints("flights")] == [("stable", 2)]
    assert [c.id for c in flights.checkpoints("flights")] == [2, 3]


# Races


def outcomes(count: int, work: Callable[[int], object]) -> list[object]:
    """Run `work(0..count-1)` at once; what each returned or raised."""
    start = Barrier(count)

    def one(n: int) -> object:
        start.wait()
        try:
            return work(n)
        except (Fenced, UsageError) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_of_two_epochs_racing_for_one_id_the_newer_wins(flights: Catalog, catalog_url: str) -> None:
    for id in range(1, 11):
        old = flights.new_epoch("flights", "old")
        new = flights.new_epoch("flights", "new")
        with open_catalog(catalog_url) as other:
            pairs = [(flights, old), (other, new)][:: 1 if id % 2 else -1]

            def work(n: int, id: int = id, pairs: list = pairs) -> int:
                catalog, epoch = pairs[n]
                catalog.commit("flights", epoch, commit_of(id, tag=f"e{epoch}"))
                return epoch

            results = outcomes(2, work)
        assert new in results
        assert sum(isinstance(r, Fenced) for r in results) == 1
        assert flights.latest("flights").epoch == new
        assert len(flights.objects("flights", [id])) == 1


def test_of_two_threads_of_one_epoch_racing_for_one_id_one_wins(flights: Catalog) -> None:
    for id in range(1, 6):
        results = outcomes(3, lambda n, id=id: flights.commit("flights", 1, commit_of(id, tag=f"t{n}")))
        assert results.count({}) == 1
        assert sum(type(r) is UsageError for r in results) == 2
    assert flights.last_id("flights") == 5


def test_of_a_savepoint_and_a_deletion_racing_one_wins(flights: Catalog, catalog_url: str) -> None:
    add(flights, 9)
    with open_catalog(catalog_url) as other:
        for id in range(1, 9):

            def work(n: int, id: int = id) -> str:
                if n == id % 2:
                    flights.add_savepoint("flights", 1, f"s{id}", id)
                    return "kept"
                other.mark_deleted("flights", 1, [id])
                return "deleted"

            [won] = [result for result in outcomes(2, work) if isinstance(result, str)]
            there = id in {c.id for c in flights.checkpoints("flights")}
            assert there == (won == "kept") == any(s.checkpoint == id for s in flights.savepoints("flights"))


def test_after_a_take_over_the_older_run_commits_nothing_more(flights: Catalog, catalog_url: str) -> None:
    def old_run() -> int:
        """Commit until fenced; how many commits were acknowledged."""
        for id in range(1, 100_000):
            try:
                flights.commit("flights", 1, commit_of(id))
            except Fenced:
                return id - 1
        raise AssertionError("never fenced")

    with ThreadPoolExecutor(1) as pool, open_catalog(catalog_url) as other:
        running = pool.submit(old_run)
        while other.last_id("flights") < 10:
            sleep(0.002)
        epoch = other.new_epoch("flights", "new")
        seen = other.last_id("flights")
        other.commit("flights", epoch, commit_of(seen + 1, tag="new"))
        acknowledged = running.result()
    assert acknowledged == seen
    assert [c.epoch for c in flights.checkpoints("flights")] == [1] * seen + [2]


def test_a_take_over_waits_for_a_commit_that_has_begun(flights: Catalog, catalog_url: str) -> None:
    taking: list[Future[int]] = []
    waited: list[bool] = []
    with ThreadPoolExecutor(1) as pool, open_catalog(catalog_url) as other:

        def take_over(_c: object, _cursor: object, statement: str, *_: object) -> None:
            if statement.startswith("INSERT INTO checkpoint"):  # the epoch was found to be the newest
                taking.append(pool.submit(other.new_epoch, "flights", "new"))
                waited.append(not wait(taking, timeout=0.3).done)

        event.listen(flights._engine, "before_cursor_execute", take_over)
        flights.commit("flights", 1, commit_of(1))
        assert waited == [True]
        assert taking[0].result() == 2
        assert other.last_id("flights") == 1
    with pytest.raises(Fenced):
        flights.commit("flights", 1, commit_of(2))


def test_epochs_begun_at_once_are_all_different(flights: Catalog) -> None:
    assert sorted(outcomes(6, lambda n: flights.new_epoch("flights", f"host:{n}"))) == [2, 3, 4, 5, 6, 7]  # type: ignore[type-var]
    assert [r.ended_at is None for r in flights.runs("flights")] == [False] * 6 + [True]
