"""Full snapshots: copies of the live state, row by row, to compare restores with.

A snapshot is read from the working state and not from the changelog, so it is independent of what a restore reads. A
backend's own snapshots (`SubtaskState.snapshot`) give the state at the checkpoint's version while a run makes later
steps: `pin_states` holds them for all subtasks, each from a moment on in which no step uses the directory.

A machine may have another attempt at the same step, whose acknowledgement was lost, so the number of the step is not
enough: the digests of the working state must be those that the checkpoint accepted. They are updated with each change,
separately from the rows that the snapshot copies.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import NoLiveState, StateError
from siltstone.format.base import write_base
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import opaque_of, schemas_of
from siltstone.model import KeyGroupRange, StoredObject
from siltstone.restore.export import opaque_rows
from siltstone.restore.restore import digests_of
from siltstone.run.task import held_digests, identity
from siltstone.run.working_state import LOCK_WAIT_S, lock_directory
from siltstone.state.backend import StateSnapshot, SubtaskState
from siltstone.state.backends.named import backend
from siltstone.store.open import Warehouse
from siltstone.store.paths import CheckpointPath


@dataclass(frozen=True)
class SnapshotTask:
    """The task to write one subtask's live state."""

    warehouse: Warehouse
    manifest: Manifest
    operator: str
    subtask: int
    groups: KeyGroupRange
    backend: str
    attempt: str
    pin: Path | None = None
    """the subtask's state at the manifest's version, if `pin_states` holds it"""


@dataclass(frozen=True)
class SnapshotPart:
    """The objects that one subtask wrote, and their rows."""

    objects: list[StoredObject]
    rows: int


def snapshot_tasks(warehouse: Warehouse, manifest: Manifest, backend_name: str, attempt: str) -> list[SnapshotTask]:
    """Make one task per subtask of the run that wrote the manifest."""
    tasks = []
    for operator in sorted(manifest.operators):
        parts = KeyGroupRange(0, manifest.max_parallelism).split(manifest.statistics["parallelism"])
        tasks += [
            SnapshotTask(warehouse, manifest, operator, subtask, groups, backend_name, attempt)
            for subtask, groups in enumerate(parts)
        ]
    return tasks


@contextmanager
def pin_states(tasks: Sequence[SnapshotTask]) -> Iterator[list[SnapshotTask]]:
    """Hold the state of all tasks at their checkpoint, so that a run may make later steps while they read it.

    Yields the tasks to give to `take_snapshot`, also in other processes of this machine.

    Raises:
        NoLiveState: see `take_snapshot`.
    """
    with ExitStack() as stack:
        yield [_pin(task, stack) for task in tasks]


def _pin(task: SnapshotTask, stack: ExitStack) -> SnapshotTask:
    with _open_state(task) as state:
        try:
            snapshot = state.snapshot(task.manifest.step)
        except StateError:
            raise _no_live_state_error(task) from None
        stack.callback(snapshot.release)
        return replace(task, pin=snapshot.path)


def take_snapshot(task: SnapshotTask) -> SnapshotPart:
    """Write the live tables of one subtask, one Parquet object each.

    Raises:
        NoLiveState: this machine has no working state of exactly that checkpoint, only that of another attempt, or a
            step is changing it.
        StateError: a pinned state was removed meanwhile, because its run rolled back, ended or moved.
    """
    with ExitStack() as stack:
        pin = task.pin or _pin(task, stack).pin
        assert pin is not None
        snapshot = backend(task.backend).open_snapshot(pin)
        stack.callback(snapshot.release)
        return _copy(task, snapshot)


@contextmanager
def _open_state(task: SnapshotTask) -> Iterator[SubtaskState]:
    """Open a subtask's working state on this machine, with exclusive use of its directory."""
    manifest, name = task.manifest, task.operator
    directory = task.warehouse.local.state(manifest.stream, manifest.epoch, name, task.subtask)
    with _lock(directory):
        if not directory.exists():
            raise _no_live_state_error(task)
        state = backend(task.backend).open(
            directory, schemas_of(manifest, name), opaque_of(manifest, name), task.groups, manifest.max_parallelism
        )
        try:
            yield state
        finally:
            state.close()


def _copy(task: SnapshotTask, state: StateSnapshot) -> SnapshotPart:
    manifest, name = task.manifest, task.operator
    digests = digests_of(state, held=True)
    if identity(name, digests) != _accepted_identity(task, digests):
        raise _not_accepted_error(task)
    objects, rows = [], 0
    names = CheckpointPath(manifest.stream, manifest.epoch, manifest.checkpoint)
    for table_name, table in state.tables.items():
        path = names.snapshot(name, table_name, task.subtask, task.attempt)
        with task.warehouse.store.create(path) as writer:
            rows += write_base(writer, table.schema, table.scan(task.groups))
        assert writer.stored is not None
        objects.append(writer.stored)
    for variable, values in state.opaque.items():
        path = names.snapshot(name, variable, task.subtask, task.attempt)
        out = pa.BufferOutputStream()
        pq.write_table(opaque_rows(values), out)
        objects.append(task.warehouse.store.put(path, out.getvalue()))
    return SnapshotPart(objects, rows)


def find_obstacle(place: OpenWarehouse, stream: str) -> str | None:
    """Say why a snapshot of the newest checkpoint is not needed or not possible here; None if it can be tried.

    Raises:
        UnknownStream, UnknownCheckpoint: the stream or a checkpoint does not exist.
    """
    newest = place.catalog.checkpoints.get_latest(stream)
    if any(snapshot.checkpoint == newest.id for snapshot in place.catalog.reference_copies.list(stream)):
        return f"checkpoint {newest.id} of {stream} has a full snapshot already"
    if not place.warehouse.local.work(stream, newest.epoch).is_dir():
        return f"the live state of {stream} at checkpoint {newest.id} is not on this machine: take it where it ran"
    return None


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Lock a subtask's directory; `NoLiveState` if another process holds the lock."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(directory, LOCK_WAIT_S))
        except TimeoutError as error:
            raise NoLiveState(str(error)) from None
        yield


def _accepted_identity(task: SnapshotTask, names: Collection[str]) -> str:
    """Return the identity of the subtask's tables and opaque variables in the accepted attempt."""
    manifest, groups = task.manifest, task.groups
    recorded, nothing = manifest.digests[task.operator], np.zeros(manifest.max_parallelism, np.uint64)
    whole = {name: recorded.get(name, nothing) for name in names}
    return identity(task.operator, held_digests(whole, schemas_of(manifest, task.operator), groups))


def _not_accepted_error(task: SnapshotTask) -> NoLiveState:
    manifest = task.manifest
    return NoLiveState(
        f"the live state of {manifest.stream}/{task.operator} subtask {task.subtask} on this machine is not the one "
        f"that checkpoint {manifest.checkpoint} accepted, but another attempt at its last step",
        advice="take the snapshot on the machine whose attempt counted, or run the stream here first",
    )


def _no_live_state_error(task: SnapshotTask) -> NoLiveState:
    manifest = task.manifest
    return NoLiveState(
        f"no live state of {manifest.stream}/{task.operator} subtask {task.subtask} at checkpoint "
        f"{manifest.checkpoint} on this machine",
        advice="run the stream here, then take the snapshot",
    )
