"""Make what a subtask changed in a step durable through the changelog; or its whole tables, for a checkpoint.

A Python worker may end as soon as its task does. So a task returns only once its changes are in the store or, as
segments too small for an object of their own, in the acknowledgement: the driver stores those together
(`changelog.log`).
"""

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import numpy as np

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.changes import Change, OpaqueChange, WholeTable
from siltstone.changelog.uploader import Placed, Sharers, Uploader, uploader_of
from siltstone.changelog.writer import ChangelogWriter
from siltstone.format.base import write_base
from siltstone.format.block import encode_block
from siltstone.format.segment import Segment
from siltstone.model import Form, KeyGroupRange
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import StepTask
from siltstone.state.backend import StateTable, SubtaskState
from siltstone.store.paths import StepPath
from siltstone.store.ranged import create_ranged

DELTA_ROWS = 1 << 15
"""how many changes are encoded together, about: more are written in several segments of some key groups each, so that
memory stays bounded and a subtask of another parallelism reads little that is not its own"""


class _Inlining:
    """An uploader that keeps small segments, for the driver to store."""

    def __init__(self, uploader: Uploader, limit_bytes: int) -> None:
        self.options, self.checksums = uploader.options, uploader.checksums
        self.opened, self.done, self.discard = uploader.opened, uploader.done, uploader.discard
        self.inline: list[bytes] = []
        self._uploader = uploader
        # Only a writer's last segment may be kept: the driver appends those after stored ones, and a table has the same
        # place in the index of each step. All segments before the last are larger than `preemptive_persist_bytes`.
        self._limit_bytes = min(limit_bytes, uploader.options.preemptive_persist_bytes)

    def submit(self, path: StepPath, segment: Segment) -> "Future[Placed]":
        """Store a segment, or keep it if it is small: then it has no place yet."""
        packed = segment.pack() if len(segment.non) + len(segment.incr) < self._limit_bytes else b""
        if not packed or len(packed) > self._limit_bytes:
            return self._uploader.submit(path, segment)
        self.inline.append(packed)
        future: Future[Placed] = Future()
        future.set_result(Placed((), (), ((), Sharers(1))))
        return future


def write_part(task: StepTask, subtask: int, attempt: str, state: SubtaskState, clock: PhaseTimer) -> Acknowledgement:
    """Make what this subtask changed in the step durable, or its part of a checkpoint, and forget the changes.

    Returns:
        An acknowledgement that says where it is, and nothing else.

    Raises:
        Unreachable: the store failed; nothing refers to what was stored.
    """
    order, nothing = task.checkpoint, Acknowledgement(task.operator.name, subtask, state.groups)
    if order is None and not task.tracking:
        return nothing
    uploader = uploader_of(task.warehouse.store_url, task.upload)
    tracked_bytes = 0
    if order is None or order.form is Form.DELTA:
        limit_bytes = None if order is None or order.limits_bytes is None else order.limits_bytes[subtask]
        part, tracked_bytes = _deltas(task, nothing, limit_bytes, state, clock, uploader)
        if part is not None:
            return part
    part = _bases(task, nothing, attempt, state, clock, uploader)
    return replace(part, tracked_bytes=tracked_bytes)


def _deltas(
    task: StepTask,
    nothing: Acknowledgement,
    limit_bytes: int | None,
    state: SubtaskState,
    clock: PhaseTimer,
    uploader: Uploader,
) -> tuple[Acknowledgement | None, int]:
    """Every table's changes; None and their bytes if these exceed the limit, so that the caller writes bases."""
    inlining = _Inlining(uploader, task.upload.inline_bytes)
    size_bytes = 0
    with ExitStack() as stack:
        with clock.phase("delta"):
            changed = sum((table.changed() for table in state.tables.values()), np.zeros(state.max_parallelism, int))
        if task.checkpoint is None and not (changed.any() or state.changed_opaque):
            return replace(nothing, logged=True), 0
        parts = _key_group_parts(state.groups, changed)
        writers = {part: stack.enter_context(_writer(task, part, inlining)) for part in parts}
        for part, writer in writers.items():
            # Every index has the same tables in the same order: the ordinal is the patent's field iv.
            for ordinal, (name, table) in enumerate(sorted(state.tables.items())):
                with clock.phase("delta"):
                    block = encode_block(*table.changes(part), compression=task.upload.compression)
                size_bytes += len(block.data)
                if limit_bytes is None or size_bytes <= limit_bytes:
                    change = Change(name, block, task.restore.checkpoint, ordinal, _sum(table, part))
                    with clock.phase("persist"):
                        writer.append(change)
        if limit_bytes is not None and size_bytes > limit_bytes:
            return None, size_bytes
        opaque = state.changed_opaque if task.checkpoint is None else state.opaque
        return _persisted(nothing, writers, inlining, state, opaque, clock, uploader), 0


def _key_group_parts(groups: KeyGroupRange, changed: np.ndarray) -> list[KeyGroupRange]:
    """A subtask's key groups, cut where a further `DELTA_ROWS` of the changes (int64 per key group) begin."""
    nth = np.cumsum(changed[groups.start : groups.end]) // DELTA_ROWS
    edges = [groups.start, *(groups.start + 1 + np.flatnonzero(np.diff(nth))).tolist(), groups.end]
    return [KeyGroupRange(start, end) for start, end in pairwise(edges)]


def _bases(
    task: StepTask, nothing: Acknowledgement, attempt: str, state: SubtaskState, clock: PhaseTimer, uploader: Uploader
) -> Acknowledgement:
    """Every table whole, an object each."""
    inlining = _Inlining(uploader, task.upload.inline_bytes)
    operator = task.operator.name
    objects = []
    with _writer(task, state.groups, inlining) as writer:
        for name, table in sorted(state.tables.items()):
            base = task.path.base(operator, name, nothing.subtask, attempt)
            with clock.phase("base"), create_ranged(uploader, base) as out:
                rows = write_base(out, table.schema, table.scan(state.groups))
            assert out.stored is not None
            objects.append(out.stored)
            writer.append(WholeTable(name, out.stored, rows, _sum(table, state.groups)))
        part = _persisted(nothing, {state.groups: writer}, inlining, state, state.opaque, clock, uploader)
    return replace(part, objects=[*objects, *part.objects])


def _writer(task: StepTask, part: KeyGroupRange, uploads: _Inlining) -> ChangelogWriter:
    return ChangelogWriter(uploads, task.operator.name, part, task.path)


def _persisted(
    nothing: Acknowledgement,
    writers: Mapping[KeyGroupRange, ChangelogWriter],
    inlining: _Inlining,
    state: SubtaskState,
    opaque: Collection[str],
    clock: PhaseTimer,
    uploader: Uploader,
) -> Acknowledgement:
    """The opaque variables too, and then wait until all of it is durable."""
    with clock.phase("persist"):
        for part, writer in writers.items():
            for variable in sorted(opaque):
                values = state.opaque[variable]
                writer.append(OpaqueChange(variable, {g: v for g, v in values.items() if g in part}))
        changesets = [future.result() for future in [writer.persist() for writer in writers.values()]]
    for table in state.tables.values():
        table.mark()
    return replace(
        nothing,
        handles=[handle for changeset in changesets for handle in changeset.handles],
        objects=list({stored.name: stored for changeset in changesets for stored in changeset.objects}.values()),
        inline=inlining.inline,
        logged=True,
        uploads=uploader.metrics.take().to_json(),
    )


def _sum(table: StateTable, part: KeyGroupRange) -> int:
    """The digests of some key groups as one."""
    return int(table.digests[part.start : part.end].sum(dtype=np.uint64))
