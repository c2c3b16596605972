"""Forks in the catalog, over every database it can be in: which rows they are, and what deletions spare for them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from siltstone.catalog.database.tables import OPEN
from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.edits import Edit
from siltstone.catalog.records.steps import Step
from siltstone.catalog.records.tombstones import Tombstone
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, StateError, UnknownCheckpoint, UnknownStream, UsageError
from siltstone.model import Form, StoredObject
from tests.catalog_cases import Clock

OPERATORS = ("aircraft", "routes")


@pytest.fixture
def catalog(catalog_url: str, clock: Clock) -> Iterator[Catalog]:
    """With stream flights in writer epoch 2, checkpoints 1 to 5; the bases of aircraft at 1 and 4, of routes at 2."""
    with open_catalog(catalog_url, now=clock) as opened:
        opened.streams.register("flights", 128, {"operators": {}, "options": {}})
        opened.runs.begin("flights", "host:1")
        opened.runs.begin("flights", "host:2")
        for id, firsts in enumerate([(1, 1), (1, 2), (1, 2), (4, 2), (4, 2)], 1):
            clock.time += timedelta(minutes=1)
            commit(opened, id, firsts)
        yield opened


def stored(name: str, size: int = 10) -> StoredObject:
    return StoredObject(name, size, f"{len(name):032x}")


def name_of(id: int, file: str, stream: str = "flights") -> str:
    return f"{stream}/00000002/{id:012d}/{file}"


def commit(
    catalog: Catalog, id: int, firsts: Sequence[int], stream: str = "flights", epoch: int = 2, edit: Edit | None = None
) -> None:
    """A segment and its opaque variables apart, a base, two steps."""
    catalog.commits.add(
        stream,
        epoch,
        CheckpointCommit(
            id,
            stored(name_of(id, "manifest.arrow", stream)),
            f"{id:032x}",
            id,
            100,
            dict.fromkeys(OPERATORS, Form.DELTA),
            segments=[stored(name_of(id, file, stream)) for file in ("s.INCR", "s.NON")],
            bases=[stored(name_of(id, "aircraft.totals.00000.a.base.parquet", stream))],
            oldest_needed=min(firsts),
            replaced=[name_of(id - 1, "s.NON", stream)] if id > 1 else [],
            details=CommitDetails([Step(2 * id + n, 2 * id + n, f"v1\n{{}}\n{n}") for n in (-1, 0)], edit),
        ),
    )


def names(catalog: Catalog, stream: str) -> set[str]:
    return {o.name for o in catalog.objects.list(stream)}


def doomed(*objects: str) -> list[Tombstone]:
    return [Tombstone(name, 10, "of a deleted checkpoint") for name in objects]


def materialize(
    catalog: Catalog,
    operator: str,
    checkpoint: int,
    id: str,
    stream: str = "flights",
    unneeded: Collection[str] = (),
) -> list[str]:
    catalog.leases.take(stream, [checkpoint], id=id, who="host:3", lasts=timedelta(hours=1))
    catalog.materializations.begin(stream, operator, checkpoint, id=id, who="host:3")
    manifest = stored(name_of(checkpoint, f"{operator}.{id}.materialized.arrow"))
    bases = [stored(name_of(checkpoint, f"{operator}.totals.00000.{id}.materialized.parquet"))]
    replaced = [name_of(checkpoint, "s.INCR")]
    catalog.materializations.complete(
        stream, id, manifest, bases, replaced=replaced, unneeded=unneeded, rows_=1, bytes_=10, seconds=1.0
    )
    catalog.leases.release(id)
    return [manifest.name, bases[0].name]


def everything(catalog: Catalog) -> list[object]:
    """All that a fork that is refused leaves alone."""
    return [
        (
            s,
            catalog.checkpoints.list_retained(s.name),
            catalog.objects.list(s.name),
            catalog.input_log.list(s.name, 99),
            catalog.materializations.list(s.name),
        )
        for s in catalog.streams.list()
    ]


def test_a_fork_is_the_checkpoint_and_what_its_chain_needs(catalog: Catalog, clock: Clock) -> None:
    catalog.savepoints.add("flights", 2, "kept", 3)
    catalog.reference_copies.add("flights", 2, 3, [stored(name_of(3, "aircraft.totals.00000.s.snapshot.parquet"))], 3)
    catalog.checkpoints.record_proof("flights", 3, True, restore_s=2.0, restore_bytes=30)
    clock.time += timedelta(hours=1)
    parent = catalog.streams.get("flights")
    made = catalog.forks.create("flights", "what-if", 3)
    assert (made.name, made.epoch, made.created_at) == ("what-if", 2, clock.time)
    assert (made.forked_from, made.forked_at) == ("flights", 3)
    assert (made.max_parallelism, made.definition) == (parent.max_parallelism, parent.definition)
    assert made == catalog.streams.get("what-if") and parent == catalog.streams.get("flights")
    assert [(r.id, r.deleted) for r in catalog.checkpoints.list_retained("what-if")] == [
        (1, True),
        (2, True),
        (3, False),
    ]
    [copied], [original] = catalog.checkpoints.list("what-if"), catalog.checkpoints.list("flights")[2:3]
    assert (copied.manifest, copied.digest, copied.committed_at) == (
        original.manifest,
        original.digest,
        original.committed_at,
    )
    assert (copied.proven, copied.restore_s, copied.epoch) == (True, 2.0, 2)
    assert catalog.chains.list_checkpoints("what-if", 3) == [1, 2, 3]
    assert catalog.chains.list_manifests("what-if", 3) == catalog.chains.list_manifests("flights", 3)
    files = ["manifest.arrow", "s.INCR", "aircraft.totals.00000.a.base.parquet"]
    needed = {name_of(id, file) for id in (1, 2, 3) for file in files} | {name_of(3, "s.NON")}
    assert names(catalog, "what-if") == needed
    original = {o.name: o for o in catalog.objects.list("flights")}
    assert catalog.objects.list("what-if") == [
        replace(o, until=OPEN) for o in catalog.chains.list_objects("flights", 3) if o.name in needed
    ]
    assert {name: o.until for name, o in original.items() if name.endswith(".NON")} == {
        name_of(id, "s.NON"): id if id < 5 else OPEN for id in range(1, 6)
    }
    assert catalog.input_log.list("what-if", 99) == catalog.input_log.list("flights", 3)
    assert catalog.input_log.list("what-if", 99)[-1].step == 6
    assert (
        not catalog.savepoints.list("what-if")
        and not catalog.reference_copies.list("what-if")
        and not catalog.runs.list("what-if")
    )
    assert catalog.forks.get_lineage("what-if") == ["what-if", "flights"]
    standing = catalog.references.view("what-if")
    assert (standing.epoch, standing.newest, standing.epochs) == (2, 3, {2})


def test_a_fork_goes_on_by_itself(catalog: Catalog) -> None:
    catalog.forks.create("flights", "what-if", 3)
    assert catalog.runs.begin("what-if", "host:9") == 3
    assert catalog.runs.list("what-if")[0].first_checkpoint == 4
    commit(catalog, 4, (1, 2), "what-if", 3)
    assert catalog.checkpoints.get_latest("what-if").id == 4 and catalog.checkpoints.get_latest("flights").id == 5
    assert catalog.streams.get("flights").epoch == 2, "the parent's run is not fenced"
    commit(catalog, 6, (4, 2))
    catalog.forks.create("what-if", "again", 4)
    assert catalog.forks.get_lineage("again") == ["again", "what-if", "flights"]
    assert [r.id for r in catalog.checkpoints.list_retained("again")] == [1, 2, 3, 4]


def test_a_fork_begins_with_the_materialized_bases_of_its_chain_only(catalog: Catalog) -> None:
    first = materialize(catalog, "routes", 3, "m1")
    replaced = materialize(catalog, "aircraft", 2, "m2")
    before = [o.name for o in catalog.objects.list("flights", [1, 2])]
    used = materialize(catalog, "aircraft", 3, "m3", unneeded=before)
    later = materialize(catalog, "routes", 5, "m4")
    catalog.forks.create("flights", "what-if", 3)
    assert {m.id for m in catalog.materializations.list("what-if")} == {"m1", "m3"}
    assert {m.id for m in catalog.materializations.list_in_chain("what-if", 3)} == {"m1", "m3"}
    assert catalog.chains.list_checkpoints("what-if", 3) == [3]
    found = names(catalog, "what-if")
    assert found >= {*first, *used} and not found & {*replaced, *later}
    # What comes later on either side moves the chains of that side only.
    materialize(catalog, "routes", 4, "m5")
    assert (
        catalog.chains.list_checkpoints("what-if", 3) == [3]
        and len(catalog.materializations.list_in_chain("what-if", 3)) == 2
    )


def test_edits_come_along_that_were_not_given_up(catalog: Catalog) -> None:
    edit = Edit("aircraft", "totals", 1, 0, "rows.parquet", None, "host:1")
    commit(catalog, 6, (4, 2), edit=edit)
    catalog.runs.begin("flights", "host:3")
    catalog.rollbacks.roll_back("flights", 3, 5, "damaged", "host:3")
    commit(catalog, 6, (6, 6), epoch=3)
    commit(catalog, 7, (6, 6), epoch=3, edit=edit)
    for at, wanted in ((6, []), (7, [(7, 3)])):
        catalog.forks.create("flights", f"at-{at}", at)
        assert [(e.checkpoint, e.epoch) for e in catalog.edits.list(f"at-{at}")] == wanted


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("flights", "flights", 3), UsageError, "stream flights exists already: give the fork another name"),
        (("flights", "idle", 3), UsageError, "stream idle exists already"),
        (("flights", "../x", 3), UsageError, "'../x' is not a stream name"),
        (("flights", "", 3), UsageError, "'' is not a stream name"),
        (("fligths", "new", 3), UnknownStream, "no stream 'fligths' in this catalog: it has flights, idle"),
        (("idle", "new", 1), UnknownCheckpoint, "no checkpoint 1 of stream idle: it has none yet"),
        (("flights", "new", 6), UnknownCheckpoint, "no checkpoint 6 of stream flights: it has 4, 1 to 5"),
        (("flights", "new", 2), UnknownCheckpoint, "no checkpoint 2 of stream flights"),
        (("flights", "new", 0), UnknownCheckpoint, "no checkpoint 0"),
        (("flights", "new", 2**70), UnknownCheckpoint, "no checkpoint"),
    ],
)
def test_what_cannot_be_forked_changes_nothing(
    catalog: Catalog, arguments: tuple[str, str, int], error: type[Exception], said: str
) -> None:
    catalog.streams.register("idle", 4, {})
    catalog.deletions.mark("flights", 2, [2])
    before = everything(catalog)
    with pytest.raises(error, match=said.replace(".", r"\.")):
        catalog.forks.create(*arguments)
    assert everything(catalog) == before


def test_what_is_written_down_as_deleted_begins_no_fork(catalog: Catalog) -> None:
    catalog.tombstones.record_deletion("flights", 2, "host:1", doomed(name_of(2, "s.INCR")))
    before = everything(catalog)
    with pytest.raises(StateError, match=r"s\.INCR .* was deleted by host:1"):
        catalog.forks.create("flights", "what-if", 3)
    assert everything(catalog) == before


def test_a_deletion_spares_what_another_stream_refers_to(catalog: Catalog) -> None:
    catalog.forks.create("flights", "what-if", 3)
    shared, own = [name_of(1, "s.INCR"), name_of(3, "s.NON")], [name_of(1, "s.NON"), name_of(4, "s.INCR")]
    assert (
        catalog.references.find_shared("flights", [*shared, *own])
        == set(shared)
        == catalog.references.find_shared("what-if", [*shared, *own][:2])
    )
    for stream in ("flights", "what-if"):
        assert catalog.tombstones.record_deletion(stream, 2, "host:1", doomed(*shared)) == []
        assert catalog.tombstones.list(stream) == []
    assert catalog.tombstones.record_deletion("flights", 2, "host:1", doomed(*shared, *own)) == doomed(*own)
    assert {d.name for d in catalog.tombstones.list("flights")} == set(own)
    catalog.deletions.mark("flights", 2, [1, 2, 3, 4])
    catalog.deletions.forget("flights", 2, [], shared)
    assert catalog.references.view("flights", shared).referenced == set(shared), "by the fork"
    assert catalog.references.find_shared("what-if", shared) == frozenset()
    assert catalog.tombstones.record_deletion("what-if", 2, "host:1", doomed(*shared)) == doomed(*shared), (
        "the last one"
    )
    assert {d.name for d in catalog.tombstones.list("what-if")} == set(shared)
    with pytest.raises(Fenced):
        catalog.tombstones.record_deletion("what-if", 1, "host:1", [])


def at_once(*calls: Callable[[], object]) -> list[object]:
    """What each came to: its answer, or its error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in running]


def test_of_two_forks_of_one_name_at_once_one_is_made(catalog: Catalog) -> None:
    catalog.forks.create("flights", "other", 4)
    for number in range(6):
        new = f"new{number}"
        # From two streams, so that not even the lock on the parent comes between them.
        outcomes = at_once(
            lambda new=new: catalog.forks.create("flights", new, 3),
            lambda new=new: catalog.forks.create("other", new, 4),
        )
        [refused] = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert isinstance(refused, UsageError) and f"stream {new} exists already" in str(refused)
        origin, at = catalog.streams.get(new).forked_from, catalog.streams.get(new).forked_at
        assert [c.id for c in catalog.checkpoints.list(new)] == [at] and (origin, at) in {("flights", 3), ("other", 4)}


def test_of_a_fork_and_a_deletion_at_once_the_first_is_seen_by_the_other(catalog: Catalog) -> None:
    for id in (1, 2, 3, 4):
        new, mine = f"new{id}", [o.name for o in catalog.objects.list("flights", [id])]

        def delete(id: int = id, mine: Sequence[str] = mine) -> list[Tombstone]:
            catalog.deletions.mark("flights", 2, [id])
            return catalog.tombstones.record_deletion("flights", 2, "host:1", doomed(*mine))

        forked, deleted = at_once(lambda id=id, new=new: catalog.forks.create("flights", new, id), delete)
        assert isinstance(deleted, list)
        if isinstance(forked, UnknownCheckpoint):
            assert {each.name for each in deleted} == set(mine)
            break  # the later ones build on what is gone
        assert not isinstance(forked, Exception)
        assert not {each.name for each in deleted} & names(catalog, new)


@pytest.mark.slow
def test_a_stream_without_forks_is_its_own_lineage(catalog: Catalog) -> None:
    assert catalog.forks.get_lineage("flights") == ["flights"]
    for call in (lambda: catalog.forks.get_lineage("fligths"), lambda: catalog.references.find_shared("fligths", [])):
        with pytest.raises(UnknownStream, match="'fligths'"):
            call()
