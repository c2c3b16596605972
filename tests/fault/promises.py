"""The promises of Siltstone (ARCHITECTURE.md), checked on a warehouse that nobody works on, against an undisturbed run.

Each check tells what is broken in lines; none is good. Nothing is changed.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from siltstone.catalog.records.checkpoints import RetainedCheckpoint
from siltstone.catalog.records.steps import InputPosition, StepKind, StepRecord
from siltstone.catalog.records.streams import StreamRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import OUTCOME
from siltstone.retention.orphan_rules import AGE_GUARD, DELETES, judge
from siltstone.store.paths import stream_prefix
from siltstone.time.clock_rules import SourceClock, decode_clock
from tests.fault.deliveries import Deliveries, Memory, birth_of
from tests.fault.journal import journal_of, published
from tests.fault.reference import Reference
from tests.fault.tables import commits_of, table_of
from tests.proofs import failures

LOST = 5
"""maximum transactions that a standby lacks, about: a copy may be several ahead of the one before"""

UNFINISHED = timedelta(seconds=10)
"""older than this, what was never finished is gone after a sweep whose age guard is shorter"""


def broken(
    reference: Reference,
    place: OpenWarehouse,
    *,
    unpublished: Collection[str] = (),
    proven: bool = True,
    memory: Memory | None = None,
    sinks: Path | None = None,
) -> list[str]:
    """All that is broken, of the reference's stream and of its forks, which go on with the same input.

    Args:
        unpublished: streams whose newest run did not end well, so that the newest rows may not be in sight yet.
        proven: also restore and prove every checkpoint, together and each alone.
        memory: what the check before left, of objects that are written once; added to. None proves everything.
        sinks: where streams have their sinks, if not in the warehouse.
    """
    seen = Memory() if memory is None else memory
    found = []
    for stream in place.catalog.streams.list():
        if reference.stream.name in place.catalog.forks.get_lineage(stream.name):
            directory = sinks / stream.name if sinks else place.warehouse.local.sink(stream.name)
            lines = _broken(reference, place, stream, directory, stream.name not in unpublished, seen, proven)
            found += [f"{stream.name}: {line}" for line in lines]
    return found


def _broken(
    reference: Reference,
    place: OpenWarehouse,
    stream: StreamRecord,
    directory: Path,
    ended: bool,
    memory: Memory,
    proven: bool,
) -> list[str]:
    catalog, name = place.catalog, stream.name
    newest = catalog.checkpoints.last_id(name)
    steps, logged = catalog.input_log.list(name, newest) if newest else [], catalog.input_log.list_logged(name)
    of, to_come = _held(steps), _held(logged)
    found = [*_histories(reference, place, stream, [*steps, *logged], of), *_input(place, name, newest)]
    found += [*_references(place, name), *_orphans(place, name)]
    birth = birth_of(place, stream, of, memory)
    for sink, rows in reference.outputs.items():
        deliveries = Deliveries(rows, place, stream, birth, of, to_come, ended)
        if (table := table_of(reference.stream, place, name, sink)) is not None:
            in_sight, lines = commits_of(table, memory.commits)
            lines += deliveries.broken(in_sight, in_sight, journaled=False)
        else:
            calls, in_sight = journal_of(directory / sink), published(directory / sink)
            lines = [*deliveries.broken(calls, in_sight, journaled=sink in reference.journaled)]
        found += [f"sink {sink}: {line}" for line in lines]
    if proven and newest:
        new = {id: key for id, key in _chains(place, name).items() if key not in memory.proven}
        wrong = [f for some in ([*new], *([id] for id in new)) for f in failures(place, name, some)] if new else []
        found += [f"checkpoint {f.checkpoint} is not proven: {f.reason}" for f in wrong]
        memory.proven.update(new.values() if not wrong else ())
        found += _oracle(reference, place, newest, found)
    return found


def _chains(place: OpenWarehouse, name: str) -> dict[int, object]:
    """Visible checkpoint -> what names all that its restore reads."""
    catalog = place.catalog
    return {
        checkpoint.id: (
            name,
            checkpoint.id,
            *(stored.checksum + stored.name for stored in catalog.chains.list_objects(name, checkpoint.id)),
        )
        for checkpoint in catalog.checkpoints.list(name)
    }


def _held(steps: Iterable[StepRecord]) -> dict[int, list[int]]:
    """Checkpoint -> which batches it holds, from 1 on."""
    of: dict[int, list[int]] = {}
    for step in steps:
        if step.batch_id is not None:
            of.setdefault(step.checkpoint, []).append(step.batch_id + 1)
    return of


def _oracle(reference: Reference, place: OpenWarehouse, newest: int, found: list[str]) -> list[str]:
    if reference.oracle is None or found:
        return []
    try:
        reference.oracle(place, newest)
    except AssertionError as error:
        return [f"the state of checkpoint {newest} is not as computed independently: {error}"]
    return []


def _histories(
    reference: Reference,
    place: OpenWarehouse,
    stream: StreamRecord,
    steps: list[StepRecord],
    of: Mapping[int, list[int]],
) -> Iterable[str]:
    """Promises 1 and 2: what is recorded is what the undisturbed run did, step by step."""
    catalog, name = place.catalog, stream.name
    read = [step for step in steps if step.batch_id is not None]
    pruned = read[0].batch if read else 0
    if [s.batch_id for s in read] != [*range(pruned, pruned + len(read))]:
        yield f"steps {[(s.step, s.batch_id) for s in steps]} are not the batches in order"
    if any(before.step + 1 != after.step for before, after in pairwise(steps)):
        yield f"steps {[s.step for s in steps]} have gaps"
    yield from _clocks(steps)
    records, newest = catalog.checkpoints.list(name), catalog.checkpoints.last_id(name)
    if newest and (not records or records[-1].id != newest):
        yield f"the newest checkpoint {newest} is not to be seen"
    oldest = records[0].id if records else 0
    if pruned and sum(step.checkpoint <= oldest for step in read) < 2:
        yield f"of the input log, steps were pruned that a replay from checkpoint {oldest} needs; it has {of}"
    if catalog.input_log.replayable_from(name) > oldest:
        yield f"the input log leads on from checkpoint {catalog.input_log.replayable_from(name)}, not from {oldest}"
    for record in records:
        # One without a batch, such as that of another parallelism, is of the same state as the one before.
        batches = max((max(held) for checkpoint, held in of.items() if checkpoint <= record.id), default=0)
        if not reference.has(record.digest, batches):
            yield f"checkpoint {record.id} does not have the digest of {batches} batches"
    runs = catalog.runs.list(name)
    epochs = [run.epoch for run in runs]
    # Of a run that was killed before its first extract, a rebuilt catalog knows the mark, and goes on above it.
    unknown = {each.epoch for each in runs if each.outcome == OUTCOME}
    # So does one that was lost with its beginning, up to some transactions ago, and marked.
    gaps = [after for before, after in pairwise(epochs) if after > before + LOST and after not in unknown]
    if gaps or epochs[-1:] != [stream.epoch][: len(epochs)]:
        yield f"epochs {epochs} have gaps, or do not end with {stream.epoch}"
    if open_ := [run.epoch for run in runs[:-1] if run.ended_at is None]:
        yield f"epochs {open_} were taken over and are still open"


def _clocks(steps: Iterable[StepRecord]) -> Iterable[str]:
    """No clock is before that of the step before, and rows are late by the watermark that has fired."""
    for before, after in pairwise(steps):
        one, next_ = decode_clock(before.clock), decode_clock(after.clock)
        if one is None or next_ is None or next_.now < one.now:
            yield f"step {after.step} has clock {after.clock!r}, after {before.clock!r}"
            continue
        for source, clock in next_.sources.items():
            known = one.sources.get(source, SourceClock())
            follows = after.kind is StepKind.CHANGE or clock.before == known.watermark
            if not follows or (clock.watermark or 0) < (known.watermark or 0):
                yield f"step {after.step} has clock {after.clock!r}, after {before.clock!r}"


def _input(place: OpenWarehouse, name: str, newest: int) -> Iterable[str]:
    """Promise 2: however the log was pruned, it is known of each file that it was read, by one batch and no other.

    Where sources' beginnings are recorded, as they are under Spark: each batch there is a file.
    """
    position = place.catalog.input_log.get_position(name, newest)
    if position.beginning is None:
        return
    files = _files(position)
    if len(files) != position.next_batch or (files and max(files.values()) > 1):
        yield f"{position.next_batch} batches were made of {len(files)} files: {dict(files)}"


def _files(position: InputPosition) -> Counter[str]:
    """How often each file is named by what a run would begin with."""
    assert position.beginning is not None
    texts = [
        entry
        for step in (position.beginning, *position.entries)
        for numbered in json.loads(step.sources).values()
        for entry in numbered.values()
    ]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("{")]
    return Counter(json.loads(line)["path"] for line in lines if "path" in json.loads(line))


def _references(place: OpenWarehouse, name: str) -> Iterable[str]:
    """Promise 3: whatever a checkpoint that is kept may need is there, whole, and nobody is about to delete it."""
    catalog = place.catalog
    retained = {row.id: row for row in catalog.checkpoints.list_retained(name)}
    visible = {id for id, row in retained.items() if not row.deleted}
    for id in visible:
        if missing := [c for c in catalog.chains.list_checkpoints(name, id) if c not in retained]:
            yield f"checkpoint {id} builds on {missing}, which are gone"
    for savepoint in catalog.savepoints.list(name):
        if savepoint.checkpoint not in visible:
            yield f"savepoint {savepoint.name} keeps checkpoint {savepoint.checkpoint}, which is gone"
    lineage = catalog.forks.get_lineage(name)
    sizes = {object: size for stream in lineage for object, size in _sizes(place, stream).items()}
    sentenced = {deletion.name for stream in lineage for deletion in catalog.tombstones.list(stream)}
    for stored in catalog.objects.list(name):
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


def _orphans(place: OpenWarehouse, name: str) -> Iterable[str]:
    """Promise 4: once the next run has ended and leases have expired, every orphan is one that a sweep deletes."""
    standing = place.catalog.references.view(name)
    later = replace(standing, epoch=standing.epoch + 1, ended=True, leases=(), at=standing.at + 2 * AGE_GUARD)
    for object in _sizes(place, name):
        if (reason := judge(object, later, AGE_GUARD)) is not None and reason not in DELETES:
            yield f"object {object}, which nothing refers to, would be kept for good: {reason}"


def left_over(place: OpenWarehouse, name: str) -> Iterable[str]:
    """Promise 4, after a run that ended, expired leases and a sweep: what is stored is what is referred to."""
    catalog = place.catalog
    names = [stream.name for stream in catalog.streams.list()]
    referenced = {stored.name for each in names for stored in catalog.objects.list(each)}
    referenced |= {stored.name for each in names for output in catalog.outbox.list(each) for stored in output.objects}
    stored = set(_sizes(place, name))
    if orphans := sorted(stored - referenced):
        yield f"{len(orphans)} orphans are left, such as {orphans[0]}"
    for write in place.warehouse.store.list_unfinished(stream_prefix(name)):
        if catalog.now() - write.began_at > UNFINISHED:
            yield f"the unfinished write {write.token} of {write.name} is left"


def _sizes(place: OpenWarehouse, name: str) -> dict[str, int]:
    return dict(place.warehouse.store.list(stream_prefix(name)))


def recorded(place: OpenWarehouse, name: str) -> tuple[object, ...]:
    """All that somebody who was fenced may not have changed."""
    catalog = place.catalog
    ids = [row.id for row in catalog.checkpoints.list_retained(name) if not row.deleted]
    return (
        catalog.checkpoints.list_retained(name),
        catalog.objects.list(name),
        catalog.savepoints.list(name),
        catalog.input_log.list(name, catalog.checkpoints.last_id(name)),
        {id: catalog.chains.list_objects(name, id) for id in ids},
    )
