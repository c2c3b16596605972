"""Plan a replay of the input log (DBSP's first approach), and compare its digests with the recorded ones.

A replay rebuilds state from logged input alone. From the start, or from a checkpoint, it runs the logged steps again
with the same boundaries and compares digests at every checkpoint on the way. This proves what a restore cannot: that
the recorded state is what the operators make of the input. The stream is not changed, and no output is delivered.

State that was not made from logged input cannot be rebuilt: that of an edit by hand, and that of operators of an older
definition. A replay begins at the newest such checkpoint, if there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.records.steps import InputPosition, StepRecord
from siltstone.catalog.records.streams import StreamRecord
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.compare_digests import Digests, list_differing
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import CorruptObject, ProofFailed, SchemaConflict, StateError, UnknownCheckpoint, UsageError
from siltstone.format.manifests import read_manifest
from siltstone.run.definition import check_definition, definition_of, recorded_options
from siltstone.run.stream_clock import clock_of
from siltstone.run.task import CheckpointOrder, DeadLetterOrder, RestorePoint, StepTask, identities
from siltstone.state.digest import checkpoint_digest
from siltstone.state_handler import PREPARED
from siltstone.store.open import Warehouse
from siltstone.stream import Stream
from siltstone.time.clock_rules import StepClock

START = "start"
NAMED_GROUPS = 5
"""most key groups that an error names"""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The recorded digest of a checkpoint, and its parts; `digests` is None if the manifest is missing or damaged.

    `parallelism` is how many subtasks each operator had.
    """

    checkpoint: int
    digest: str
    digests: Digests | None
    parallelism: int = 0


@dataclass(frozen=True)
class ReplayPlan:
    """The steps and comparisons of a replay.

    Attributes:
        to: the checkpoint whose state is rebuilt.
        since: the checkpoint it begins with, 0 for the start.
        why: why it cannot begin earlier; empty if it begins at the start or where the caller said.
        position: the input position at which the first step begins to read.
        steps: the steps to run, oldest first.
        compared: `compared[n]` lists what the state is compared with after n steps.
    """

    stream: str
    to: int
    since: int
    why: str
    position: InputPosition
    steps: Sequence[StepRecord]
    compared: Sequence[Sequence[Recorded]]

    @property
    def recorded(self) -> Recorded:
        """What is recorded of the checkpoint whose state is rebuilt."""
        return self.compared[-1][-1]


def resolve_range(catalog: Catalog, stream: str, to: str, since: str | None) -> tuple[int, int | None]:
    """Resolve `to` and `since` to checkpoint ids; 0 is the start, None stays None.

    Raises:
        UnknownStream, UnknownCheckpoint: no stream or checkpoint matches.
        UsageError: `since` is not before `to`.
    """
    last = catalog.checkpoints.resolve(stream, to)
    if since is None:
        return last, None
    try:
        first = 0 if since == START else catalog.checkpoints.resolve(stream, since)
    except UnknownCheckpoint as error:
        raise UnknownCheckpoint(f"{error}; or replay from {START}") from None
    if first >= last:
        raise UsageError(f"checkpoint {first} of {stream} is not before {last}: begin earlier or end later")
    return last, first


def plan_replay(warehouse: OpenWarehouse, stream: Stream, to: int, since: int | None) -> ReplayPlan:
    """Plan a replay of `stream` to checkpoint `to`.

    Args:
        since: the checkpoint to begin with, 0 for the start, None for the earliest possible.

    Raises:
        SchemaConflict: the definition does not fit the recorded state, or is newer than checkpoint `to`.
        UsageError: it cannot begin at `since`; the message says where it can.
        StateError: the input log has a gap.
    """
    catalog, name = warehouse.catalog, stream.name
    _check_stream(catalog.streams.get(name), catalog.definitions.get(name, to), stream)
    checkpoints = [c for c in catalog.checkpoints.list(name) if c.id <= to]
    earliest, why = _find_earliest(catalog, name, checkpoints)
    if since is not None and since < earliest:
        raise UsageError(f"{why}: replay from {earliest} or later")
    edited = _find_newest_edit(catalog, name, checkpoints)
    if edited[0] > earliest:
        earliest, why = edited
    older = "was made by an older definition of its operators"
    recorded: list[Recorded] = []
    for checkpoint in reversed(checkpoints):
        if checkpoint.id <= (earliest if since is None else since):
            break
        found, fits = _read_recorded(warehouse, stream, checkpoint)
        if not fits and checkpoint.id == to:
            raise SchemaConflict(f"checkpoint {to} of {name} {older}", advice="replay it with that one")
        if not fits:
            earliest, why = checkpoint.id, f"checkpoint {checkpoint.id} of {name} {older}"
            break
        recorded.append(found)
    if earliest == to and not edited[0] == to:
        raise UsageError(f"{why}: replay {name} to a later one")
    if earliest == to:
        raise UsageError(f"{why}, which replaying input cannot repeat: replay {name} to a later one")
    if since is not None and since < earliest:
        raise UsageError(f"{why}, which replaying input cannot repeat: replay from {earliest} or later")
    begins = earliest if since is None else since
    position, steps = catalog.input_log.get_position(name, begins), catalog.input_log.list(name, to, after=begins)
    for batch, step in enumerate((s for s in steps if s.batch_id is not None), position.next_batch):
        if step.batch_id != batch:
            raise StateError(f"the input log of {name} has no batch {batch}: it can be replayed no further")
    compared: list[list[Recorded]] = [[] for _ in range(len(steps) + 1)]
    for one in reversed(recorded):
        compared[sum(step.checkpoint <= one.checkpoint for step in steps)].append(one)
    return ReplayPlan(name, to, begins, why if since is None else "", position, steps, compared)


def _check_stream(record: StreamRecord, definition: Mapping[str, Any], stream: Stream) -> None:
    check_definition(stream.name, definition, definition_of(stream, recorded_options(stream, definition)))
    if record.max_parallelism != stream.max_parallelism:
        raise SchemaConflict(
            f"stream {stream.name} has max_parallelism {record.max_parallelism}, now {stream.max_parallelism}: "
            "it is fixed at creation"
        )


def _find_earliest(catalog: Catalog, stream: str, checkpoints: Sequence[CheckpointRecord]) -> tuple[int, str]:
    """Find the first checkpoint from which the input log is complete, and why not an earlier one; 0 for the start."""
    begins = catalog.input_log.replayable_from(stream)
    if not begins:
        return 0, ""
    first = next((c.id for c in checkpoints if c.id >= begins), checkpoints[-1].id)
    why = f"what {stream} read before checkpoint {first} is no longer in its input log (retention.input_log keeps more)"
    return first, why


def _find_newest_edit(catalog: Catalog, stream: str, checkpoints: Sequence[CheckpointRecord]) -> tuple[int, str]:
    """Find the first retained checkpoint that includes the newest edit, and say why; 0 if there was no edit."""
    rollbacks = catalog.rollbacks.list(stream)
    made = [
        edit.checkpoint
        for edit in catalog.edits.list(stream)
        if edit.checkpoint <= checkpoints[-1].id
        if not any(r.epoch > edit.epoch and r.checkpoint < edit.checkpoint for r in rollbacks)
    ]
    if not made:
        return 0, ""
    return next(c.id for c in checkpoints if c.id >= made[-1]), f"checkpoint {made[-1]} of {stream} was edited"


def _read_recorded(warehouse: OpenWarehouse, stream: Stream, checkpoint: CheckpointRecord) -> tuple[Recorded, bool]:
    """Read the recorded digests of a checkpoint, and whether it was made by operators of this definition."""
    try:
        manifest = read_manifest(warehouse.warehouse.store, checkpoint.manifest)
    except CorruptObject:  # the catalog's digest is enough to compare with
        return Recorded(checkpoint.id, checkpoint.digest, None, checkpoint.statistics["parallelism"]), True
    fits = manifest.operators == stream.definition()["operators"]
    return Recorded(checkpoint.id, checkpoint.digest, manifest.digests, checkpoint.statistics["parallelism"]), fits


def restore_points(warehouse: OpenWarehouse, stream: Stream, checkpoint: int) -> dict[str, RestorePoint]:
    """Map each operator to the restore point of its state at a checkpoint; an empty one for 0 and for newer operators.

    Raises:
        CorruptObject: the manifest is damaged.
    """
    if not checkpoint:
        return {op.name: RestorePoint() for op in stream.operators}
    stored = tuple(warehouse.catalog.chains.list_manifests(stream.name, checkpoint))
    manifest = read_manifest(
        warehouse.warehouse.store, warehouse.catalog.checkpoints.get(stream.name, checkpoint).manifest
    )
    return {
        op.name: RestorePoint(checkpoint, manifest.step, stored if op.name in manifest.operators else ())
        for op in stream.operators
    }


def replay_tasks(
    stream: Stream,
    warehouse: Warehouse,
    points: Mapping[str, RestorePoint],
    found: Digests,
    clock: StepClock | None,
    *,
    version: int,
    parallelism: int,
    backend: str,
    upload: UploadOptions,
    interval: int = 0,
    ends: bool = False,
    drains: bool = False,
) -> dict[str, StepTask]:
    """Make the tasks of a step that is taken again, with working state of its own; they store nothing.

    Args:
        warehouse: its local files are those of the replay.
        points: operator -> where its state is restored, if it is not there.
        found: the digests of the working state.
        clock: the one that was recorded with the step; None to fire nothing.
        version: the version of the working state before the step.
        interval: the checkpoint that has the step.
    """
    return {
        op.name: StepTask(
            stream=stream.name,
            operator=op,
            epoch=0,
            step=version + 1,
            base_step=version,
            base=identities(op, found[op.name], parallelism, stream.max_parallelism) if op.name in found else (),
            parallelism=parallelism,
            max_parallelism=stream.max_parallelism,
            warehouse=warehouse,
            backend=backend,
            tracked=(),
            restore=points[op.name],
            checkpoint=CheckpointOrder({}) if ends else None,
            stores=False,
            interval=interval,
            upload=upload,
            hands_on=stream.has_reader(op),
            sinks=tuple(stream.sinks),
            drains=drains,
            sources=stream.read_sources,
            times=stream.row_times(op),
            clock=clock_of(stream, op, clock),
            dead_letters=DeadLetterOrder(rows=stream.sorts_out_rows) if stream.dead_letters else None,
        )
        for op in stream.operators
    }


def check_replayed(stream: str, recorded: Recorded, found: Digests, *, prepared: bool = True) -> None:
    """Compare the digests of a replay with the recorded ones.

    Args:
        prepared: whether to compare what operators prepared: other subtasks prepare something else.

    Raises:
        ProofFailed: they differ; the message names checkpoint, operators, tables and key groups.
        UsageError: what was prepared cannot be left out, since the manifest is damaged.
    """
    where = f"checkpoint {recorded.checkpoint} of {stream}"
    if recorded.digests is None and not prepared and any(PREPARED in of for of in found.values()):
        raise UsageError(
            f"the manifest of {where} is damaged, so it can be compared only as a whole: replay with the parallelism "
            f"that it had (--parallelism {recorded.parallelism})"
        )
    differing = []
    if recorded.digests is not None:
        with_recorded = _with_prepared(found, recorded.digests)
        compared = list_differing(recorded.digests, found if prepared else with_recorded)
        differing = [name_groups(name, groups) for name, groups in compared]
        found = with_recorded  # the same parts may lie in other key groups
    digest = checkpoint_digest(found)
    if differing:
        raise ProofFailed(
            f"{where}: the logged input does not give the recorded state in {'; '.join(differing)}: the source's "
            "data, the operators' code or the state have been altered, or the operators are not deterministic"
        )
    if digest != recorded.digest:
        raise ProofFailed(
            f"{where}: the logged input gives digest {digest}, not the recorded {recorded.digest}: the source's "
            "data, the operators' code or the catalog have been altered, or the operators are not deterministic"
        )


def _with_prepared(found: Digests, recorded: Digests) -> Digests:
    """Return digests with those that were recorded of what operators prepared."""
    kept = {operator: {name: of[name] for name in of if name == PREPARED} for operator, of in recorded.items()}
    return {operator: {**of, **kept.get(operator, {})} for operator, of in found.items()}


def name_groups(variable: str, groups: np.ndarray) -> str:
    """Name the key groups of a variable that differ: the first few, and how many more there are."""
    more = "" if len(groups) <= NAMED_GROUPS else f" and {len(groups) - NAMED_GROUPS} more"
    return f"{variable}, key groups {', '.join(map(str, groups[:NAMED_GROUPS]))}{more}"
