"""The promises of Siltstone (ARCHITECTURE.md), checked on a warehouse that nobody works on, against an undisturbed run.

Each check tells what is broken in lines; none is good. Nothing is changed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.place import Place
from siltstone.catalog.records import RetainedCheckpoint, StepRecord, StreamRecord
from siltstone.policy.orphans import AGE_GUARD, DELETES, judge
from siltstone.store.paths import stream_prefix
from tests.fault.reference import Reference
from tests.proofs import failures

UNFINISHED = timedelta(seconds=10)
"""older than this, what was never finished is gone after a sweep whose age guard is shorter"""


def broken(
    reference: Reference,
    place: Place,
    *,
    unpublished: Collection[str] = (),
    proven: bool = True,
    before: set[object] | None = None,
) -> list[str]:
    """All that is broken, of the reference's stream and of its forks, which go on with the same input.

    Args:
        unpublished: streams whose newest run did not end well, so that the newest rows may not be in sight yet.
        proven: also restore and prove every checkpoint.
        before: what has been proven already, of objects that are written once; added to. None proves everything.
    """
    seen: set[object] = set() if before is None else before
    return [
        f"{stream.name}: {line}"
        for stream in place.catalog.streams()
        if reference.stream.name in place.catalog.lineage(stream.name)
        for line in _broken(reference, place, stream, stream.name not in unpublished, seen if proven else None)
    ]


def _broken(
    reference: Reference, place: Place, stream: StreamRecord, published: bool, seen: set[object] | None
) -> list[str]:
    catalog, name = place.catalog, stream.name
    newest = catalog.last_id(name)
    steps, logged = catalog.steps(name, newest) if newest else [], catalog.logged_steps(name)
    of = _held(steps)
    found = [*_histories(reference, place, stream, [*steps, *logged], of)]
    found += [*_references(place, name), *_orphans(place, name)]
    sink = place.warehouse.local.sink(name) / reference.sink
    own = {checkpoint: held for checkpoint, held in of.items() if checkpoint > (stream.forked_at or 0)}
    found += _sink(reference, sink, own, _held(logged), published)
    if seen is not None and newest:
        new = {id: key for id, key in _chains(place, name).items() if key not in seen}
        wrong = failures(place, name, [*new]) if new else []
        found += [f"checkpoint {f.checkpoint} is not proven: {f.reason}" for f in wrong]
        seen.update(new.values() if not wrong else ())
        found += _oracle(reference, place, newest, found)
    return found


def _chains(place: Place, name: str) -> dict[int, object]:
    """Visible checkpoint -> what names all that its restore reads."""
    catalog = place.catalog
    of: dict[int, list[str]] = {}
    for stored in catalog.objects(name):
        of.setdefault(stored.checkpoint, []).append(stored.checksum + stored.name)
    ids = [checkpoint.id for checkpoint in catalog.checkpoints(name)]
    firsts = {id: catalog.firsts(name, id) for id in ids}
    return {
        id: (
            name,
            id,
            *sorted(first.items()),
            *(o for c in range(min(first.values(), default=id), id + 1) for o in of.get(c, ())),
        )
        for id, first in firsts.items()
    }


def _held(steps: Iterable[StepRecord]) -> dict[int, list[int]]:
    """Checkpoint -> which batches it holds, from 1 on."""
    of: dict[int, list[int]] = {}
    for step in steps:
        of.setdefault(step.checkpoint, []).append(step.batch_id + 1)
    return of


def _oracle(reference: Reference, place: Place, newest: int, found: list[str]) -> list[str]:
    if reference.oracle is None or found:
        return []
    try:
        reference.oracle(place, newest)
    except AssertionError as error:
        return [f"the state of checkpoint {newest} is not as computed independently: {error}"]
    return []


def _histories(
    reference: Reference, place: Place, stream: StreamRecord, steps: list[StepRecord], of: Mapping[int, list[int]]
) -> Iterable[str]:
    """Promises 1 and 2: what is recorded is what the undisturbed run did, step by step."""
    catalog, name = place.catalog, stream.name
    if [s.batch_id for s in steps] != [*range(len(steps))]:
        yield f"steps {[(s.step, s.batch_id) for s in steps]} are not the batches in order"
    if any(before.step >= after.step for before, after in pairwise(steps)):
        yield f"steps {[s.step for s in steps]} do not ascend"
    records, newest = catalog.checkpoints(name), catalog.last_id(name)
    if newest and (not records or records[-1].id != newest):
        yield f"the newest checkpoint {newest} is not to be seen"
    for record in records:
        # One without a batch, such as that of another parallelism, is of the same state as the one before.
        batches = max((max(held) for checkpoint, held in of.items() if checkpoint <= record.id), default=0)
        if not batches or record.digest != reference.digests[batches - 1]:
            yield f"checkpoint {record.id} does not have the digest of {batches} batches"
    runs = catalog.runs(name)
    epochs = [run.epoch for run in runs]
    if epochs and epochs != list(range(stream.epoch - len(epochs) + 1, stream.epoch + 1)):
        yield f"epochs {epochs} have gaps, or do not end with {stream.epoch}"
    if open_ := [run.epoch for run in runs[:-1] if run.ended_at is None]:
        yield f"epochs {open_} were taken over and are still open"


def _references(place: Place, name: str) -> Iterable[str]:
    """Promise 3: whatever a checkpoint that is kept may need is there, whole, and nobody is about to delete it."""
    catalog = place.catalog
    retained = {row.id: row for row in catalog.retained(name)}
    visible = {id for id, row in retained.items() if not row.deleted}
    for id in visible:
        if missing := [c for c in range(retained[id].first, id + 1) if c not in retained]:
            yield f"checkpoint {id} builds on {missing}, which are gone"
    for savepoint in catalog.savepoints(name):
        if savepoint.checkpoint not in visible:
            yield f"savepoint {savepoint.name} keeps checkpoint {savepoint.checkpoint}, which is gone"
    lineage = catalog.lineage(name)
    sizes = {object: size for stream in lineage for object, size in _sizes(place, stream).items()}
    sentenced = {deletion.name for stream in lineage for deletion in catalog.deletions(stream)}
    for stored in catalog.objects(name):
        if _needed(stored.checkpoint, retained, sentenced, stored.name):
            if stored.name not in sizes:
                yield f"object {stored.name} of checkpoint {stored.checkpoint} is missing"
            elif sizes[stored.name] != stored.bytes:
                yield f"object {stored.name} has {sizes[stored.name]} bytes, not the {stored.bytes} recorded"
            if stored.name in sentenced:
                yield f"object {stored.name} of checkpoint {stored.checkpoint} is written down as deleted"


def _needed(checkpoint: int, retained: Mapping[int, RetainedCheckpoint], sentenced: set[str], object: str) -> bool:
    """Of a marked checkpoint, what is written down may have been deleted already."""
    return not (retained[checkpoint].deleted and object in sentenced)


def _orphans(place: Place, name: str) -> Iterable[str]:
    """Promise 4: once the next run has ended and leases have expired, every orphan is one that a sweep deletes."""
    standing = place.catalog.standing(name)
    later = replace(standing, epoch=standing.epoch + 1, ended=True, leases=(), at=standing.at + 2 * AGE_GUARD)
    for object in _sizes(place, name):
        if (reason := judge(object, later, AGE_GUARD)) is not None and reason not in DELETES:
            yield f"object {object}, which nothing refers to, would be kept for good: {reason}"


def left_over(place: Place, name: str) -> Iterable[str]:
    """Promise 4, after a run that ended, expired leases and a sweep: what is stored is what is referred to."""
    catalog = place.catalog
    names = [stream.name for stream in catalog.streams()]
    referenced = {stored.name for each in names for stored in catalog.objects(each)}
    referenced |= {stored.name for each in names for output in catalog.outputs(each) for stored in output.objects}
    stored = set(_sizes(place, name))
    if orphans := sorted(stored - referenced):
        yield f"{len(orphans)} orphans are left, such as {orphans[0]}"
    for write in place.warehouse.store.unfinished(stream_prefix(name)):
        if catalog.now() - write.began_at > UNFINISHED:
            yield f"the unfinished write {write.token} of {write.name} is left"


def _sizes(place: Place, name: str) -> dict[str, int]:
    return dict(place.warehouse.store.list(stream_prefix(name)))


def _sink(
    reference: Reference, sink: Path, of: Mapping[int, list[int]], logged: Mapping[int, list[int]], ended: bool
) -> Iterable[str]:
    """Promise 2: each row once, published with its checkpoint, whether that is kept, deleted, or to come again."""
    published = {int(path.name.partition("=")[2]): path for path in sink.glob("checkpoint=*")}
    missing = of.keys() - published.keys() - (set() if ended or not of else {max(of)})
    if missing:
        yield f"the rows of checkpoints {sorted(missing)} are not published"
    of = {**logged, **of}
    for checkpoint in sorted(published.keys() - of.keys()):
        if any(pq.ParquetFile(path).metadata.num_rows for path in published[checkpoint].glob("*.parquet")):
            yield f"rows are published of {checkpoint}, which never completed, or holds none"
    for checkpoint in sorted(published.keys() & of.keys()):
        wanted = pa.concat_tables([reference.written[batch - 1] for batch in of[checkpoint]])
        files = [pq.ParquetFile(path).read() for path in published[checkpoint].glob("*.parquet")]
        rows = pa.concat_tables(files).select(wanted.column_names).cast(wanted.schema)
        if not rows.sort_by("sequence").equals(wanted.sort_by("sequence")):
            yield f"the rows of checkpoint {checkpoint} are not those of the undisturbed run"


def recorded(place: Place, name: str) -> tuple[object, ...]:
    """All that somebody who was fenced may not have changed."""
    catalog = place.catalog
    ids = [row.id for row in catalog.retained(name) if not row.deleted]
    return (
        catalog.retained(name),
        catalog.objects(name),
        catalog.savepoints(name),
        catalog.steps(name, catalog.last_id(name)),
        {id: catalog.firsts(name, id) for id in ids},
    )
