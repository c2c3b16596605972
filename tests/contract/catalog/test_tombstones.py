"""Leases, and deletions written down before they happen: over every database a catalog can be in."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
from sqlalchemy import event

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.references import CatalogView
from siltstone.catalog.records.tombstones import RECORDS_KEPT, Tombstone
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, StateError, UnknownCheckpoint, UnknownStream, Unreachable
from siltstone.model import Form, StoredObject
from tests.catalog_cases import NOON, Clock

MINUTE = timedelta(minutes=1)


@pytest.fixture
def catalog(catalog_url: str, clock: Clock) -> Iterator[Catalog]:
    """With stream flights in writer epoch 1, checkpoints 1 to 6, and bases at 1 and 4."""
    with open_catalog(catalog_url, now=clock) as opened:
        opened.streams.register("flights", 128, {})
        opened.runs.begin("flights", "host:1")
        for id in range(1, 7):
            commit(opened, id, first=1 if id < 4 else 4)
        yield opened


def name_of(id: int, file: str, stream: str = "flights") -> str:
    return f"{stream}/00000001/{id:012d}/{file}"


def commit(catalog: Catalog, id: int, first: int = 1, stream: str = "flights", segments: Sequence[str] = ()) -> None:
    manifest = StoredObject(name_of(id, "manifest.arrow", stream), 10, "xxh3-128:" + "0" * 32)
    stored = [StoredObject(name, 5, "xxh3-128:" + "0" * 32) for name in segments]
    forms = {"aircraft": Form.DELTA}
    made = CheckpointCommit(id, manifest, "", 0, 0, forms, segments=stored, oldest_needed=first)
    catalog.commits.add(stream, 1, made)


def take(catalog: Catalog, ids: Sequence[int] | None, id: str = "a", minutes: int = 5) -> None:
    catalog.leases.take("flights", ids, id=id, who="host:7 reads", lasts=minutes * MINUTE)


def leased(catalog: Catalog) -> list[str]:
    return [lease.id for lease in catalog.leases.list_live("flights")]


# Leases


def test_a_lease_covers_all_that_the_restores_read(catalog: Catalog) -> None:
    lease = catalog.leases.take("flights", [6], id="a", who="host:7 reads", lasts=5 * MINUTE)
    assert (lease.first, lease.last, lease.taken_at, lease.expires_at) == (4, 6, NOON, NOON + 5 * MINUTE)
    assert [c for c in range(8) if lease.covers(c)] == [4, 5, 6]
    take(catalog, [5, 2], "b")
    take(catalog, None, "c")
    found = catalog.leases.list_live("flights")
    assert found[0] == lease and (found[1].first, found[1].last) == (1, 5)
    assert found[2].covers(0) and found[2].covers(10**12)
    assert catalog.references.view("flights", ()).leases == tuple(found)


def test_a_lease_ends_when_it_is_released_or_expires(catalog: Catalog, clock: Clock) -> None:
    for id, minutes in (("a", 1), ("b", 2), ("c", 3)):
        take(catalog, [6], id, minutes)
    catalog.leases.release("b")
    catalog.leases.release("b")
    assert leased(catalog) == ["a", "c"]
    clock.time += MINUTE
    assert [lease.id for lease in catalog.references.view("flights", ()).leases] == ["c"]
    assert catalog.leases.renew("c", 5 * MINUTE)
    clock.time += 3 * MINUTE
    assert leased(catalog) == ["c"]


def test_an_expired_lease_that_somebody_acted_on_is_not_renewed(catalog: Catalog, clock: Clock) -> None:
    take(catalog, [6])
    clock.time += 6 * MINUTE
    assert catalog.leases.renew("a", MINUTE), "nobody has seen it"
    clock.time += MINUTE
    assert leased(catalog) == []
    assert not catalog.leases.renew("a", MINUTE)


@pytest.mark.parametrize("ids", [[7], [6, 0], [-1], [3], [2**62]])
def test_what_is_not_there_or_deleted_is_not_leased(catalog: Catalog, ids: list[int]) -> None:
    catalog.deletions.mark("flights", 1, [3])
    with pytest.raises(UnknownCheckpoint, match=rf"no checkpoint {ids[-1]} of stream flights: it has 5, 1 to 6"):
        take(catalog, ids)
    assert leased(catalog) == []


def test_of_a_lease_and_a_deletion_at_once_the_first_is_seen_by_the_other(catalog: Catalog) -> None:
    def race(id: int) -> tuple[bool, bool]:
        with ThreadPoolExecutor(2) as pool:
            reader = pool.submit(take, catalog, [id], str(id))
            deleter = pool.submit(lambda: (catalog.deletions.mark("flights", 1, [id]), leased(catalog))[1])
            wait([reader, deleter])
            return reader.exception() is None, str(id) in deleter.result()

    for id in range(1, 6):
        has_lease, seen = race(id)
        assert seen == has_lease


# What the catalog says


def test_the_standing_says_who_writes_what_is_newest_and_what_is_referred_to(catalog: Catalog, clock: Clock) -> None:
    clock.time += MINUTE
    there = catalog.references.view("flights")
    everything = {name_of(id, "manifest.arrow") for id in range(1, 7)}
    assert there == CatalogView("flights", 1, False, 6, frozenset({1}), (), frozenset(everything), NOON + MINUTE)
    some = [name_of(2, "manifest.arrow"), name_of(2, "x.segment"), *(f"n{i}" for i in range(1200))]
    assert catalog.references.view("flights", some).referenced == {name_of(2, "manifest.arrow")}
    assert catalog.references.view("flights", ()).referenced == frozenset()
    catalog.runs.end("flights", 1, "done")
    assert catalog.references.view("flights").ended
    catalog.deletions.mark("flights", 1, [1])
    assert catalog.references.view("flights").referenced == everything
    assert catalog.runs.begin("flights", "host:2") == 2
    after = catalog.references.view("flights")
    assert (after.epoch, after.ended, after.epochs) == (2, False, {1})
    assert [run.first_checkpoint for run in catalog.runs.list("flights")] == [1, 7]


def test_what_another_stream_refers_to_is_referred_to(catalog: Catalog) -> None:
    for stream in ("flights_2", "flights2"):  # one of which LIKE could take for the other
        catalog.streams.register(stream, 128, {})
        catalog.runs.begin(stream, "host")
    forked, own = name_of(6, "s.segment"), name_of(1, "s.segment", "flights2")
    commit(catalog, 1, stream="flights2", segments=[forked, own])
    assert forked in catalog.references.view("flights").referenced
    assert catalog.references.view("flights", [forked, own]).referenced == {forked, own}
    assert catalog.references.view("flights_2").referenced == frozenset()


# Deletions

SWEPT = "2013-07-04T12:00:00"


def condemn(catalog: Catalog, *names: str, reason: str = "of a fenced run") -> list[Tombstone]:
    doomed = [Tombstone(name, 7, reason, NOON - MINUTE) for name in names]
    return catalog.tombstones.record_orphans("flights", "host:9", names, lambda _: doomed)


def test_a_deletion_is_written_down_once(catalog: Catalog, clock: Clock) -> None:
    names = [name_of(7, f"{i:04d}.segment") for i in range(1100)]
    assert [each.name for each in condemn(catalog, *names)] == names
    clock.time += MINUTE
    condemn(catalog, *names[:3], "unfinished token", reason="other")
    found = catalog.tombstones.list("flights")
    assert [d.name for d in found] == [*names, "unfinished token"]
    first = found[0]
    assert (first.stream, first.bytes, first.reason, first.who) == ("flights", 7, "of a fenced run", "host:9")
    assert (first.modified_at, first.deleted_at) == (NOON - MINUTE, NOON)
    assert catalog.tombstones.list("flights", 1) == found[-1:]
    clock.time = NOON + RECORDS_KEPT + MINUTE / 2
    condemn(catalog, "much later")
    assert [d.name for d in catalog.tombstones.list("flights")] == ["unfinished token", "much later"]


def test_what_is_decided_is_decided_as_things_stand(catalog: Catalog, clock: Clock) -> None:
    take(catalog, [6], "expired", 1)
    take(catalog, [6], "live", 9)
    clock.time += 2 * MINUTE
    names, seen = [name_of(6, "manifest.arrow"), name_of(7, "a.segment")], []

    def decide(standing: CatalogView) -> list[Tombstone]:
        seen.append(standing)
        return []

    assert catalog.tombstones.record_orphans("flights", "host:9", names, decide) == []
    assert ([lease.id for lease in seen[0].leases], seen[0].referenced) == (["live"], {names[0]})
    assert not catalog.leases.renew("expired", MINUTE)
    assert catalog.tombstones.list("flights") == []


@pytest.mark.parametrize("kind", ["segment", "snapshot", "another stream's"])
def test_nothing_can_refer_to_what_was_deleted(catalog: Catalog, kind: str) -> None:
    name = name_of(7, "a.segment")
    condemn(catalog, name)
    catalog.streams.register("fork", 128, {})
    catalog.runs.begin("fork", "host")
    calls: dict[str, Callable[[], object]] = {
        "segment": lambda: commit(catalog, 7, segments=[name_of(7, "b.segment"), name]),
        "snapshot": lambda: catalog.reference_copies.add(
            "flights", 1, 6, [StoredObject(name, 1, "xxh3-128:" + "0" * 32)], 1
        ),
        "another stream's": lambda: commit(catalog, 1, stream="fork", segments=[name]),
    }
    before = catalog.objects.list("flights")
    message = rf"object {name} \(of a fenced run\) was deleted by host:9 at {SWEPT}\+00:00, before anything referred"
    with pytest.raises(StateError, match=message):
        calls[kind]()
    assert (
        catalog.objects.list("flights"),
        catalog.reference_copies.list("flights"),
        catalog.objects.list("fork"),
    ) == (before, [], [])
    commit(catalog, 7, segments=[name_of(7, "b.segment")])


def test_of_a_commit_and_a_sweep_at_once_the_first_keeps_the_other_from_happening(catalog: Catalog) -> None:
    for id in range(7, 13):
        name = name_of(id, "a.segment")

        def decide(standing: CatalogView, name: str = name) -> list[Tombstone]:
            return [Tombstone(name, 1, "")] if name not in standing.referenced else []

        with ThreadPoolExecutor(2) as pool:
            committing = pool.submit(commit, catalog, id, segments=[name])
            sweeping = pool.submit(catalog.tombstones.record_orphans, "flights", "host:9", [name], decide)
            wait([committing, sweeping])
        swept = bool(sweeping.result())
        assert isinstance(committing.exception(), StateError) == swept
        assert (name in catalog.references.view("flights").referenced) != swept
        if swept:
            commit(catalog, id)


def test_deletions_of_checkpoints_are_written_down_by_the_newest_writer_only(catalog: Catalog) -> None:
    doomed = [Tombstone(name_of(1, "manifest.arrow"), 10, "of a deleted checkpoint")]
    catalog.tombstones.record_deletion("flights", 1, "host:1", doomed)
    catalog.runs.begin("flights", "host:2")
    with pytest.raises(Fenced):
        catalog.tombstones.record_deletion("flights", 1, "host:1", [Tombstone(name_of(2, "manifest.arrow"), 10, "")])
    assert [d.name for d in catalog.tombstones.list("flights")] == [name_of(1, "manifest.arrow")]


def test_a_catalog_that_cannot_be_written_says_so_and_is_read(catalog: Catalog) -> None:
    if catalog.url.startswith("sqlite"):
        statements = ["PRAGMA query_only = ON"]
    else:
        statements = ["SET default_transaction_read_only = on"]

    def read_only(connection: object, _: object) -> None:
        for statement in statements:
            connection.execute(statement)  # type: ignore[attr-defined]
        connection.commit()  # type: ignore[attr-defined]

    # A server that fails over refuses so, too, and is waited for.
    url = catalog.transactions.engine.url.render_as_string(hide_password=False)
    with open_catalog(url if catalog.url.startswith("postgresql") else catalog.url, outage_s=0) as refused:
        refused.close()
        event.listen(refused.transactions.engine, "connect", read_only)
        with pytest.raises(Unreachable, match=r"read-?only"):
            take(refused, [6])
        assert refused.references.view("flights").newest == 6


def test_an_unknown_stream_is_named(catalog: Catalog) -> None:
    for call in (
        lambda: catalog.leases.take("fligths", [1], id="a", who="", lasts=MINUTE),
        lambda: catalog.leases.list_live("fligths"),
        lambda: catalog.references.view("fligths"),
        lambda: catalog.tombstones.record_orphans("fligths", "", [], lambda _: []),
        lambda: catalog.tombstones.record_deletion("fligths", 1, "", []),
        lambda: catalog.tombstones.list("fligths"),
    ):
        with pytest.raises(UnknownStream, match=r"'fligths'.*it has flights"):
            call()
