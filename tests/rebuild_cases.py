"""A warehouse with a long history, whose catalog is thrown away and rebuilt; and what a catalog knows, to compare."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.objects import ObjectRecord
from siltstone.catalog.records.steps import BEFORE_FIRST, Step
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.change.fork import fork
from siltstone.change.rebuild import Rebuild, rebuild_catalog
from siltstone.format.manifest import encode_manifest
from siltstone.format.manifests import read_manifest
from siltstone.retention.deletion import delete_checkpoints, foresee
from siltstone.run.take_over import take_over
from siltstone.store.paths import CheckpointPath, is_row_file
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, batch, follow_log
from tests.proofs import in_order

FORK = "branch"
BEGINNING = Step(0, BEFORE_FIRST, 'v1\n{}\n{"from":3}', '{"0": {"0": "v1\\n3"}}')
LATER = Step(0, BEFORE_FIRST, "v1 named\n{}\norders:7\ntopic:-", '{"topic": {"0": "v1\\n17"}}')
"""where two sources begin that the stream gets later"""


def what_it_knows(catalog: Catalog, stored: Collection[str] | None = None) -> dict[str, Any]:
    """What a rebuilt catalog must know as the lost one did, by stream: all but proofs, tombstones, leases and runs.

    Args:
        stored: the names of all objects in the store. A deletion that was killed, or fenced, may have left rows of
            others, and of checkpoints whose manifests are gone. A rebuilt catalog does not have these.
    """
    return {record.name: _of_stream(catalog, record.name, stored) for record in catalog.streams.list()}


def _of_stream(catalog: Catalog, stream: str, stored: Collection[str] | None) -> dict[str, Any]:
    record, newest = catalog.streams.get(stream), catalog.checkpoints.last_id(stream)
    materializations = [m for m in catalog.materializations.list(stream) if m.manifest]
    manifests = {m.manifest.name: m.checkpoint for m in materializations if m.manifest}
    known = catalog.checkpoints.list(stream, marked=True)
    manifests |= {c.manifest.name: c.id for c in known}
    there = {id for name, id in manifests.items() if stored is None or name in stored}
    retained = [c for c in known if c.deleted_at is None or c.id in there]
    gone = {c.id for c in known} - {c.id for c in retained}
    position = catalog.input_log.get_position(stream, newest)
    marked, forked_at = [c.id for c in retained if c.deleted_at], record.forked_at or 0

    def is_left(each: ObjectRecord) -> bool:
        shared = each.checkpoint < forked_at and not each.is_needed_by(forked_at)
        if each.checkpoint in gone:
            return False
        return stored is None or each.checkpoint not in marked or (each.name in stored and not shared)

    objects = [each for each in catalog.objects.list(stream) if is_left(each)]
    names = {each.name for each in objects}
    # Of a materialization at a deleted checkpoint, or one that was replaced, only a record is left.
    materialized = [m for m in materializations if m.manifest and m.manifest.name in names]
    return {
        "stream": {k: v for k, v in asdict(record).items() if k not in ("epoch", "extracts")},
        "checkpoints": [
            replace(c, proven_at=None, proof=None, restore_s=None, restore_bytes=None, deleted_at=None)
            for c in retained
        ],
        "marked": marked,
        "objects": objects,
        "manifests": {c.id: catalog.chains.list_manifests(stream, c.id) for c in retained if c.deleted_at is None},
        "steps": catalog.input_log.list(stream, newest),
        "beginning": position.beginning,
        "clock": catalog.input_log.get_clock(stream, newest),
        "logged": catalog.input_log.list_logged(stream),
        "outputs": [replace(output, delivered_at=None) for output in catalog.outbox.list(stream, outstanding=True)],
        "definitions": catalog.definitions.list(stream),
        "edits": catalog.edits.list(stream),
        "rollbacks": catalog.rollbacks.list(stream),
        "savepoints": catalog.savepoints.list(stream),
        "copies": catalog.reference_copies.list(stream),
        "materializations": materialized,
        "deletable": [name for name in _deletable(catalog, stream, [c.id for c in retained[:-1]]) if name in names],
    }


def check_same(found: dict[str, Any], known: dict[str, Any]) -> None:
    """Check that a rebuilt catalog knows what the lost one did.

    Only the next manifest, or an extract, says exactly when the newest checkpoint was committed. When an object was
    replaced matters to a run that is open, and none is. The interval of checkpoints that need an object may be another
    one, but no checkpoint that can be restored needs more: the lost interval may have been too long, until a run would
    have noticed (`catalog.objects`). The rebuilt one may end later, among checkpoints that are deleted, if what
    replaced the object at one of these was deleted with it. So of what a fork shares with its parent, the rebuilt one
    may lack files (`_kept_files`).
    """
    assert found.keys() == known.keys()
    # A deletion forgets what a fork still needs and no checkpoint of the stream does; a rebuild finds it again.
    again = {name for stream in known for name in _object_names(found[stream]) - _object_names(known[stream])}
    for stream, theirs in known.items():
        mine = found[stream]
        excused = _kept_files(found, stream, theirs)
        for what in theirs.keys() - {"checkpoints", "objects", "manifests", "deletable"}:
            assert mine[what] == theirs[what], f"{what} of {stream}: {mine[what]}, and before {theirs[what]}"
        newest = theirs["checkpoints"][-1:]
        assert mine["checkpoints"][:-1] == theirs["checkpoints"][:-1]
        assert [replace(c, committed_at=newest[0].committed_at) for c in mine["checkpoints"][-1:]] == newest
        restorable = mine["manifests"].keys()
        there = _object_names(theirs)
        own_objects = [
            each for each in mine["objects"] if each.name in there or any(map(each.is_needed_by, restorable))
        ]
        lost_objects = [each for each in theirs["objects"] if each.name not in excused]
        names = [{each.name: each for each in objects} for objects in (own_objects, lost_objects)]
        differ = [of[name] for name in names[0].keys() ^ names[1].keys() for of in names if name in of]
        assert not differ, f"objects of {stream}, in one of both only: {differ}; marked {theirs['marked']}"
        for own, lost in zip(own_objects, lost_objects, strict=True):
            needing = [{id for id in restorable if each.is_needed_by(id)} for each in (own, lost)]
            assert needing[0] <= needing[1], f"{own} is needed by more than {lost}: {needing[0] - needing[1]}"
            assert replace(own, until=lost.until, replaced_at=lost.replaced_at) == lost, (own, lost)
        assert mine["manifests"].keys() == theirs["manifests"].keys()
        assert all(set(mine["manifests"][id]) <= set(read) for id, read in theirs["manifests"].items())
        assert set(mine["deletable"]) >= set(theirs["deletable"]) - excused - again


def _object_names(of: dict[str, Any]) -> set[str]:
    return {each.name for each in of["objects"]}


def _kept_files(found: dict[str, Any], stream: str, theirs: dict[str, Any]) -> set[str]:
    """Return the names of table files, and of the manifests of their writers, that a fork got although its beginning
    does not need them, and that the rebuilt catalog lacks, because it knows that.

    A materialization at the beginning replaced them, but only a run closes the interval of a file
    (`live_rules.shared_names`), and none of the parent's had when the fork copied what was open.
    """
    mine, beginning = _object_names(found[stream]), theirs["stream"]["forked_at"] or 0
    lacking = [each for each in theirs["objects"] if each.name not in mine and each.checkpoint < beginning]
    files = {each.name for each in lacking if is_row_file(each.name)}
    writers = {path.manifest() for name in files if (path := CheckpointPath.of(name))}
    parents = found[theirs["stream"]["forked_from"]]["objects"] if beginning else ()
    needed = {each.name for each in parents if each.is_needed_by(beginning)}
    return {each.name for each in lacking if each.checkpoint in theirs["marked"]} & (files | writers) - needed


def _deletable(catalog: Catalog, stream: str, ids: Sequence[int]) -> list[str]:
    """The objects that would go if all checkpoints went that no savepoint keeps."""
    kept = {savepoint.checkpoint for savepoint in catalog.savepoints.list(stream)}
    plan = foresee(catalog, stream, [id for id in ids if id not in kept])
    return [stored.name for stored in plan.objects]


def rebuilt(place: OpenWarehouse, url: str) -> tuple[Rebuild, dict[str, Any]]:
    """Rebuild the catalog at another URL; return the report, and what it knows."""
    done = rebuild_catalog(place.warehouse, url)
    with open_catalog(url, create=False) as catalog:
        return done, what_it_knows(catalog)


def write_history(place: OpenWarehouse, heard: Heard) -> Outboxed:
    """Runs, a savepoint, a materialization, a reference copy, a fork that runs, deletions and a rollback.

    Returns the run that is at work.
    """
    run = Outboxed(place, heard)
    run.region.record_beginning(BEGINNING)
    _steps(run, 1, 5)
    run.region.close("done")
    run = Outboxed(place, heard)
    run.region.record_beginning(LATER)
    _steps(run, 6, 12)
    catalog, epoch = place.catalog, run.region.epoch
    catalog.savepoints.add(NAME, epoch, "release", 7)
    write_extract(place, NAME)
    materialize(place, NAME, SINK, 10, id="m1", parallelism=2, run=in_order)
    copy = CheckpointPath(NAME, epoch, 9).snapshot(SINK, "totals", 0, "copy")
    catalog.reference_copies.add(NAME, epoch, 9, [place.warehouse.store.put(copy, b"a copy")], 7)
    fork(place, NAME, FORK, "8")
    branch = Outboxed(place, Heard(), stream=STREAM.as_fork(FORK, NAME))
    _steps(branch, 9, 10)
    branch.region.close("done")
    delete_checkpoints(place, NAME, [1, 2, 3, 5, 6])
    _steps(run, 13, 14)
    run.region.close("done")
    epoch = take_over(place, NAME, "a test")
    catalog.rollbacks.roll_back(NAME, epoch, 12, "a test", "a test")
    write_extract(place, NAME)
    run = Outboxed(place, heard)
    follow_log(run)
    _steps(run, 15, 17)
    return run


def plant(place: OpenWarehouse, epoch: int, checkpoint: int, like: int, stream: str = NAME) -> str:
    """Store a manifest that was never committed, like that of another checkpoint; return its name."""
    manifest = read_manifest(place.warehouse.store, place.catalog.checkpoints.get(stream, like).manifest)
    name = CheckpointPath(stream, epoch, checkpoint).manifest()
    place.warehouse.store.put(name, encode_manifest(replace(manifest, epoch=epoch, checkpoint=checkpoint)))
    return name


def _steps(run: Outboxed, first: int, last: int) -> None:
    for n in range(first, last + 1):
        run.step(batch(n))


def catalog_url(directory: Path) -> str:
    """A catalog that does not exist yet."""
    return f"sqlite:///{directory / 'rebuilt.db'}"
