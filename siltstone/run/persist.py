"""Make a subtask's part of a checkpoint durable: its changes through the changelog, or its whole tables.

The executor writes them; segments too small for an object of their own go to the driver with the acknowledgement. The
driver stores such segments of all subtasks and operators of the checkpoint together.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.changes import Change, OpaqueChange, WholeTable
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Placed, Sharers, Uploader, uploader_of
from siltstone.changelog.writer import ChangelogWriter
from siltstone.format.base import write_base
from siltstone.format.block import encode_block
from siltstone.format.segment import Segment
from siltstone.model import Form, Handle, KeyGroupRange, StoredObject
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import CheckpointOrder, StepTask
from siltstone.state.backend import StateTable, SubtaskState
from siltstone.store.open import Warehouse
from siltstone.store.paths import CheckpointPath
from siltstone.store.ranged import create_ranged

DELTA_ROWS = 1 << 15
"""how many changes are encoded together, about: more are written in several segments of some key groups each, so that
memory stays bounded and a subtask of another parallelism reads little that is not its own"""


@dataclass(frozen=True)
class Part:
    """One subtask's part of a checkpoint.

    Attributes:
        inline: packed segments for the driver to store.
        tracked_bytes: bytes of deltas that were too large, so that bases were written instead; else 0.
    """

    handles: Sequence[Handle] = ()
    objects: Sequence[StoredObject] = ()
    inline: Sequence[bytes] = ()
    uploads: UploadStatistics | None = None
    tracked_bytes: int = 0


class _Inlining:
    """An uploader that keeps small segments, for the driver to store."""

    def __init__(self, uploader: Uploader, limit_bytes: int) -> None:
        self.options, self.checksums = uploader.options, uploader.checksums
        self.opened, self.done, self.discard = uploader.opened, uploader.done, uploader.discard
        self.inline: list[bytes] = []
        self._uploader = uploader
        self._limit_bytes = limit_bytes

    def submit(self, path: CheckpointPath, segment: Segment) -> "Future[Placed]":
        """As `Uploader.submit`; a small segment has no place yet."""
        packed = segment.pack() if len(segment.non) + len(segment.incr) < self._limit_bytes else b""
        if not packed or len(packed) > self._limit_bytes:
            return self._uploader.submit(path, segment)
        self.inline.append(packed)
        future: Future[Placed] = Future()
        future.set_result(Placed((), (), ((), Sharers(1))))
        return future


def write_part(
    task: StepTask, order: CheckpointOrder, subtask: int, attempt: str, state: SubtaskState, clock: PhaseTimer
) -> Part:
    """Persist this subtask's part of a checkpoint and start a new interval of changes.

    Raises:
        Unreachable: the store failed; nothing refers to what was stored.
    """
    uploader = uploader_of(task.warehouse.store_url, task.upload)
    tracked_bytes = 0
    if order.form is Form.DELTA:
        part, tracked_bytes = _deltas(task, order, state, clock, uploader)
        if part is not None:
            return part
    part = _bases(task, order, subtask, attempt, state, clock, uploader)
    return replace(part, tracked_bytes=tracked_bytes)


def _deltas(
    task: StepTask, order: CheckpointOrder, state: SubtaskState, clock: PhaseTimer, uploader: Uploader
) -> tuple[Part | None, int]:
    """Every table's changes; no part, but how large they are, if that is beyond the limit (promise 7)."""
    inlining = _Inlining(uploader, task.upload.inline_bytes)
    size_bytes = 0
    with ExitStack() as stack:
        with clock.phase("delta"):
            parts = _key_group_parts(state)
        writers = {part: stack.enter_context(_writer(task, order, part, inlining)) for part in parts}
        for part, writer in writers.items():
            # Every index has the same tables in the same order: the ordinal is the patent's field iv.
            for ordinal, (name, table) in enumerate(sorted(state.tables.items())):
                with clock.phase("delta"):
                    block = encode_block(*table.changes(part), compression=task.upload.compression)
                size_bytes += len(block.data)
                if order.delta_limit_bytes is None or size_bytes <= order.delta_limit_bytes:
                    change = Change(name, block, order.previous, ordinal, _sum(table, part))
                    with clock.phase("persist"):
                        writer.append(part, change)
        if order.delta_limit_bytes is not None and size_bytes > order.delta_limit_bytes:
            return None, size_bytes
        return _persisted(writers, inlining, state, clock, uploader), 0


def _key_group_parts(state: SubtaskState) -> list[KeyGroupRange]:
    """The subtask's key groups, cut where a further `DELTA_ROWS` changes begin."""
    changed = sum((table.changed() for table in state.tables.values()), np.zeros(state.max_parallelism, np.int64))
    nth = np.cumsum(changed[state.groups.start : state.groups.end]) // DELTA_ROWS
    edges = [state.groups.start, *(state.groups.start + 1 + np.flatnonzero(np.diff(nth))).tolist(), state.groups.end]
    return [KeyGroupRange(start, end) for start, end in pairwise(edges)]


def _bases(
    task: StepTask,
    order: CheckpointOrder,
    subtask: int,
    attempt: str,
    state: SubtaskState,
    clock: PhaseTimer,
    uploader: Uploader,
) -> Part:
    """Every table whole, an object each."""
    inlining = _Inlining(uploader, task.upload.inline_bytes)
    store, operator = task.warehouse.store, task.operator.name
    names = CheckpointPath(task.stream, task.epoch, order.checkpoint)
    objects = []
    with _writer(task, order, state.groups, inlining) as writer:
        for name, table in sorted(state.tables.items()):
            began = time.perf_counter()
            with clock.phase("base"), create_ranged(store, names.base(operator, name, subtask, attempt)) as out:
                rows = write_base(out, table.schema, table.scan(state.groups))
            assert out.stored is not None
            uploader.metrics.direct(out.stored.bytes, time.perf_counter() - began)
            objects.append(out.stored)
            writer.append(state.groups, WholeTable(name, out.stored, rows, _sum(table, state.groups)))
        part = _persisted({state.groups: writer}, inlining, state, clock, uploader)
    return replace(part, objects=[*objects, *part.objects])


def _writer(task: StepTask, order: CheckpointOrder, part: KeyGroupRange, uploads: _Inlining) -> ChangelogWriter:
    return ChangelogWriter(uploads, task.operator.name, part, CheckpointPath(task.stream, task.epoch, order.checkpoint))


def _persisted(
    writers: Mapping[KeyGroupRange, ChangelogWriter],
    inlining: _Inlining,
    state: SubtaskState,
    clock: PhaseTimer,
    uploader: Uploader,
) -> Part:
    """The opaque variables too, and then wait until all of it is durable."""
    with clock.phase("persist"):
        for part, writer in writers.items():
            for variable, values in sorted(state.opaque.items()):
                writer.append(part, OpaqueChange(variable, {g: v for g, v in values.items() if g in part}))
        handles = [future.result() for future in [writer.persist(0) for writer in writers.values()]]
    for table in state.tables.values():
        table.mark()
    objects = {stored.name: stored for handle in handles for stored in handle.objects}
    return Part(
        [part for handle in handles for part in handle.handles],
        list(objects.values()),
        inlining.inline,
        uploader.metrics.take(),
    )


def _sum(table: StateTable, part: KeyGroupRange) -> int:
    """The digests of some key groups as one."""
    return int(table.digests[part.start : part.end].sum(dtype=np.uint64))


def place_inline(
    warehouse: Warehouse,
    options: UploadOptions,
    path: CheckpointPath,
    received: Mapping[str, Sequence[Acknowledgement]],
) -> tuple[dict[str, list[Acknowledgement]], UploadStatistics]:
    """Store the segments in acknowledgements together.

    Returns:
        The acknowledgements with the handles of their segments, and the statistics of the uploads.

    Raises:
        Unreachable: the store failed.
        CorruptObject: a segment was damaged on its way.
    """
    if not any(a.inline for of_operator in received.values() for a in of_operator):
        return {operator: list(of_operator) for operator, of_operator in received.items()}, UploadStatistics()
    uploader = uploader_of(warehouse.store_url, options)
    packed = [segment for of_operator in received.values() for a in of_operator for segment in a.inline]
    futures = iter(uploader.submit_all(path, [Segment.unpack(segment) for segment in packed]))
    uploader.flush()
    answered = {
        operator: [_placed(a, [next(futures).result() for _ in a.inline]) for a in of_operator]
        for operator, of_operator in received.items()
    }
    return answered, uploader.metrics.take()


def _placed(acknowledgement: Acknowledgement, placed: Sequence[Placed]) -> Acknowledgement:
    return replace(
        acknowledgement,
        inline=(),
        handles=[*acknowledgement.handles, *(handle for part in placed for handle in part.handles)],
        objects=[*acknowledgement.objects, *(stored for part in placed for stored in part.objects)],
    )
