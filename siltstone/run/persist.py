"""Make what a subtask changed in a step durable through the changelog; or whole tables, for a checkpoint.

A Python worker may end as soon as its task does. So a task returns only once its changes are in the store or, as
segments too small for an object of their own, in the acknowledgement: the driver stores those together
(`changelog.log`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from siltstone.changelog.acknowledgement import Acknowledgement, merge_uploads
from siltstone.changelog.changes import Change, OpaqueChange, WholeTable
from siltstone.changelog.uploader import InliningUploader, Uploader, uploader_of
from siltstone.changelog.writer import ChangelogWriter
from siltstone.errors import SiltstoneError
from siltstone.format.base import write_base
from siltstone.format.block import encode_block
from siltstone.format.opaque import encode_opaque
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.run.changed import list_changed, list_unlogged, opaque_to_write, unchanged_tables, values_in, version_of
from siltstone.run.persist_files import write_files
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import StepTask
from siltstone.state.backend import StateTable, SubtaskState
from siltstone.state.protocol import get_delta
from siltstone.store.ranged import create_ranged

OPAQUE_BYTES = 64 << 10
"""bytes of an opaque variable's values above which they get an object of their own"""
DELTA_ROWS = 1 << 15
"""how many changes are encoded together, about: more are written in several segments of some key groups each, so that
memory stays bounded and a subtask of another parallelism reads little that is not its own"""


def write_part(task: StepTask, subtask: int, attempt: str, state: SubtaskState, clock: PhaseTimer) -> Acknowledgement:
    """Make what this subtask changed in the step durable, or its part of a checkpoint, and forget the changes.

    In a checkpoint, each variable is written in the form that the order gives it; one whose delta exceeds its limit is
    written as a base, and one that did not change not at all if its chain is a base already. If any table is ordered as
    files, all are, since they share them. Elsewhere, changes of the variables that the step tracks are logged.

    Returns:
        An acknowledgement that says where it is, and what is not logged; nothing else.

    Raises:
        Unreachable: the store failed; nothing refers to what was stored.
    """
    order, nothing = task.checkpoint, Acknowledgement(task.operator.name, subtask, state.groups)
    if not task.stores:
        return nothing
    if order is None:
        nothing = replace(nothing, unlogged=tuple(sorted(list_unlogged(task, state))))
        if not (task.tracked and task.logs):
            return nothing
    before = frozenset[str]() if order is None else frozenset(list_changed(task, subtask))
    uploader = uploader_of(task.warehouse.store_url, task.upload)
    if order is not None and any(order.forms[name] is Form.FILES for name in state.tables):
        stored = write_files(task, subtask, state, clock, uploader, before)
        part = _Part(task, nothing, attempt, state, clock, uploader, before, written=True)
        part.write((), {})
        assert part.acknowledgement is not None
        uploads = merge_uploads([part.acknowledgement]).merge(uploader.metrics.take())
        return replace(
            part.acknowledgement,
            handles=[*stored.handles, *part.acknowledgement.handles],
            objects=[*stored.objects, *part.acknowledgement.objects],
            uploads=uploads.to_json(),
        )
    bases = set() if order is None else {name for name in state.tables if order.forms[name] is Form.BASE}
    if order is not None:
        bases -= unchanged_tables(task, state, bases.intersection(order.base_only), before)
    limits = {} if order is None else {n: of[subtask] for n, of in order.limits_bytes.items() if n in state.tables}
    part = _Part(task, nothing, attempt, state, clock, uploader, before)
    # What earlier steps of the interval have logged may be too large already.
    gives_way = {name: 0 for name, limit in limits.items() if limit < 0}
    bases |= gives_way.keys()
    too_large = part.write(bases, {name: limit for name, limit in limits.items() if name not in bases})
    if too_large:
        # What was stored of the first try is discarded. The second has its deltas without those that give way.
        part = replace(part, attempt=f"{attempt}-again")
        part.write(bases | too_large.keys(), {})
    assert part.acknowledgement is not None
    return replace(part.acknowledgement, tracked_bytes={**part.acknowledgement.tracked_bytes, **gives_way, **too_large})


@dataclass
class _Part:
    """One subtask's part of a step or checkpoint: some tables as bases, the others' changes; if all tables are
    `written`, only what is not in tables. Earlier steps of the interval changed what is in `changed_before`."""

    task: StepTask
    nothing: Acknowledgement
    attempt: str
    state: SubtaskState
    clock: PhaseTimer
    uploader: Uploader
    changed_before: Collection[str]
    acknowledgement: Acknowledgement | None = None
    written: bool = False

    def write(self, bases: Collection[str], limits: Mapping[str, int]) -> dict[str, int]:
        """Write `bases` whole, and of the other tables that are tracked the changes; and opaque variables.

        Args:
            limits: table -> bytes above which its delta is too large.

        Returns:
            The tables whose deltas are too large, with their sizes in bytes. If there are any, nothing is kept.
        """
        task, state = self.task, self.state
        with self.clock.phase("delta"):
            wanted = [name for name in state.tables if task.checkpoint is not None or name in task.tracked]
            counts = {} if self.written else self._count_changed(name for name in wanted if name not in bases)
            changes = opaque_to_write(task, self.nothing.subtask, state, self.changed_before)
            opaque, nothing = changes.groups, replace(self.nothing, tracked_bytes=changes.too_large)
        if not (bases or counts or opaque):
            self.acknowledgement = nothing
            return {}
        # What did not change in any of the key groups is left out: the chain stays as it is.
        versions = {name: version_of(task, name) for name in (*counts, *opaque)}
        inlining, sizes, objects = InliningUploader(self.uploader, task.upload.inline_bytes), Counter[str](), []
        with ExitStack() as stack:
            parts = _key_group_parts(state.groups, list(counts.values()), list(versions.values()))
            writers = {part: stack.enter_context(_writer(task, part, inlining)) for part in parts}
            for part, writer in writers.items():
                # Every index has its tables in the same order: the ordinal is the patent's field iv.
                for ordinal, name in enumerate(sorted(state.tables)):
                    if name in bases:
                        objects.append(self._append_base(writer, part, name))
                    if name not in counts:
                        continue
                    previous = int(versions[name][part.start]) or task.interval - 1
                    change = self._change(part, name, previous, ordinal)
                    sizes[name] += change.size_bytes
                    if sizes[name] <= limits.get(name, sizes[name]):
                        with self.clock.phase("persist"):
                            writer.append(change)
            too_large = {name: sizes[name] for name, limit in limits.items() if sizes[name] > limit}
            if too_large:
                with suppress(SiltstoneError):  # a sweep finds what stays
                    task.warehouse.store.delete([stored.name for stored in objects])
            else:
                handles = list[Handle]()
                with self.clock.phase("persist"):
                    for part, writer in writers.items():
                        for name, groups in sorted(opaque.items()):
                            previous = 0 if groups is None else int(versions[name][part.start])
                            change = OpaqueChange(name, values_in(state, name, groups, part), previous)
                            if change.size_bytes <= OPAQUE_BYTES:
                                writer.append(change)
                            else:
                                handles.append(self._store_opaque(part, change))
                tables = [state.tables[name] for name in wanted]
                persisted = _await_uploads(nothing, writers, inlining, tables, self.clock, self.uploader)
                objects += [StoredObject(h.object, h.length, h.checksum) for h in handles]
                self.acknowledgement = replace(
                    persisted, handles=[*handles, *persisted.handles], objects=[*objects, *persisted.objects]
                )
            return too_large

    def _count_changed(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return, of those that changed, table -> how many keys of each key group did (int64[max_parallelism])."""
        own = slice(self.state.groups.start, self.state.groups.end)  # of a broadcast table, others log the rest
        counts = {name: self.state.tables[name].count_changed() for name in names}
        return {name: count for name, count in counts.items() if count[own].any()}

    def _change(self, part: KeyGroupRange, name: str, previous: int, ordinal: int) -> Change:
        table = self.state.tables[name]
        with self.clock.phase("delta"):
            block = encode_block(*get_delta(self.state, name, part), compression=self.task.upload.compression)
        return Change(name, block, previous, ordinal, _sum(table, part))

    def _store_opaque(self, part: KeyGroupRange, change: OpaqueChange) -> Handle:
        """Store large values as an object of their own, which can be deleted by itself."""
        task, operator = self.task, self.task.operator.name
        attempt = f"{self.attempt}-{task.step}-{part.start}"
        name = task.path.opaque(operator, change.variable, self.nothing.subtask, attempt)
        stored = self.uploader.put(name, encode_opaque(change.values))
        form = Form.DELTA if change.previous_checkpoint else Form.BASE
        place = stored.name, 0, stored.bytes, stored.checksum, part
        previous = change.previous_checkpoint
        return Handle(operator, change.variable, Kind.OPAQUE, form, *place, 0, previous, task.step)

    def _append_base(self, writer: ChangelogWriter, part: KeyGroupRange, name: str) -> StoredObject:
        """Store some key groups of a table as an object of their own, and log where it is."""
        table, attempt = self.state.tables[name], self.attempt
        if part != self.state.groups:
            attempt = f"{attempt}-{part.start}"
        base = self.task.path.base(self.task.operator.name, name, self.nothing.subtask, attempt)
        with self.clock.phase("base"), create_ranged(self.uploader, base) as out:
            rows = write_base(out, table.schema, table.scan(part))
        assert out.stored is not None
        writer.append(WholeTable(name, out.stored, rows, _sum(table, part)))
        return out.stored


def _key_group_parts(
    groups: KeyGroupRange, changed: Sequence[np.ndarray], versions: Sequence[np.ndarray]
) -> list[KeyGroupRange]:
    """A subtask's key groups, cut where a further `DELTA_ROWS` of the changes (int64 per key group) begin, and where a
    change builds on another version (int64 per key group), as it may after a change of parallelism."""
    own = slice(groups.start, groups.end)
    nth = sum((count[own] for count in changed), np.zeros(len(groups), int)).cumsum() // DELTA_ROWS
    cuts = sum((np.diff(each[own]) != 0 for each in versions), np.diff(nth) != 0)
    edges = [groups.start, *(groups.start + 1 + np.flatnonzero(cuts)).tolist(), groups.end]
    return [KeyGroupRange(start, end) for start, end in pairwise(edges)]


def _writer(task: StepTask, part: KeyGroupRange, uploads: InliningUploader) -> ChangelogWriter:
    return ChangelogWriter(uploads, task.operator.name, part, task.path)


def _await_uploads(
    nothing: Acknowledgement,
    writers: Mapping[KeyGroupRange, ChangelogWriter],
    inlining: InliningUploader,
    tables: Iterable[StateTable],
    clock: PhaseTimer,
    uploader: Uploader,
) -> Acknowledgement:
    """Wait until all uploads are durable, and forget the changes of these tables; return the acknowledgement."""
    with clock.phase("persist"):
        changesets = [future.result() for future in [writer.persist() for writer in writers.values()]]
    for table in tables:
        table.mark()
    return replace(
        nothing,
        handles=[handle for changeset in changesets for handle in changeset.handles],
        objects=list({stored.name: stored for changeset in changesets for stored in changeset.objects}.values()),
        inline=inlining.inline,
        uploads=uploader.metrics.take().to_json(),
    )


def _sum(table: StateTable, part: KeyGroupRange) -> int:
    """The digests of some key groups as one."""
    return int(table.digests[part.start : part.end].sum(dtype=np.uint64))
