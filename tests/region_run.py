"""Runs steps of a stream through its consistent region without Spark: what the runner does, one process, no shuffle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pyarrow as pa

from siltstone.catalog.epochs import Tenure
from siltstone.catalog.records.edits import Edit
from siltstone.catalog.records.steps import Step, StepKind, with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import Policy
from siltstone.change.edit import Editable, Route, edit_task
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.upload_options import UploadOptions
from siltstone.operator import SOURCE
from siltstone.run.inputs import HASH
from siltstone.run.processing import ACKNOWLEDGEMENT, combine
from siltstone.run.region import Completed, ConsistentRegion, RegionOptions
from siltstone.run.subtask import run_subtask
from siltstone.run.task import StepTask
from siltstone.state.hashing import key_groups, normalise_keys, xxhash64
from siltstone.state.schema import KEY_GROUP
from siltstone.stream import Stream
from siltstone.time.clock_rules import StepClock, encode_clock


def clock_of(step: int) -> str:
    """The clock that is recorded with a step."""
    return encode_clock(StepClock(1_700_000_000_000_000 + 1_000_000 * step))


class RegionSteps:
    """The steps of an open region: `step` for each micro-batch."""

    def __init__(self, region: ConsistentRegion) -> None:
        self.region = region
        self.batches = region.input_position().next_batch
        """taken so far; steps without rows take none"""
        self.outputs: dict[str, pa.Table] = {}
        """operator -> what it returned in the newest step; and the step's rows"""
        self.completed: list[Completed] = []
        """those that were pending before"""

    def step(
        self,
        rows: pa.Table,
        *,
        last: bool = False,
        ends: bool | None = None,
        offsets: str = "v1\n{}\n",
        clock: str | None = None,
    ) -> Completed | None:
        """One micro-batch through every operator; the checkpoint, if one was due, or the step `ends` in one.

        If checkpoints may be pending, it is only prepared: `complete_oldest` completes it. A step that was logged has
        the clock that was recorded with it.
        """
        self.make_room()
        step = Step(self.region.step + 1, self.batches, offsets, clock=self._clock() if clock is None else clock)
        self.batches += 1
        self._take(step, {SOURCE: rows}, ends=last or None if ends is None else ends)
        return self.end_interval() if self.region.checkpoint_due else None

    def _without_rows(self, kind: StepKind, clock: str | None = None) -> Step:
        return replace(Step.without_rows(self.region.step + 1, kind), clock=self._clock() if clock is None else clock)

    def _clock(self) -> str:
        return clock_of(self.region.step + 1)

    def _take(self, step: Step, outputs: dict[str, pa.Table], ends: bool | None, *, finishes: bool = False) -> None:
        """A step of every operator, after those whose output it reads."""
        region, self.outputs = self.region, outputs
        tasks = region.begin_step(step, ends=ends, finishes=finishes)
        for operator in region.stream.sort_operators():
            task, rows = replace(tasks[operator.name], hands_on=True), outputs.get(*operator.input_names)
            there = {} if rows is None else shuffled(task, rows)
            outputs[operator.name], received = self.attempt(task, there)
            region.acknowledge(operator.name, received)

    def make_room(self) -> None:
        """Complete pending checkpoints until one more may be prepared."""
        while self.region.protocol.pending and not self.region.protocol.has_room:
            self.complete_oldest()

    def end_interval(self) -> Completed | None:
        """Complete the checkpoint that is due; prepare it only, if checkpoints may be pending."""
        if not self.region.options.max_pending:
            return self.complete()
        self.region.prepare()
        return None

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        """One step of one operator: its output, and what its subtasks said."""
        return run_tasks(task, rows)

    def step_without_rows(
        self,
        kind: StepKind = StepKind.EMPTY,
        *,
        ends: bool = True,
        finishes: bool = False,
        clock: str | None = None,
    ) -> Completed | None:
        """A step that takes no micro-batch; a checkpoint in which it ends is only prepared if some may be pending."""
        self.make_room()
        self._take(self._without_rows(kind, clock), {}, ends=ends, finishes=finishes)
        return self.end_interval() if ends else None

    def follow(self, rows_of: Callable[[str], pa.Table]) -> None:
        """The steps of checkpoints that were given up, with the boundaries that they had."""
        for step, ends in with_ends(self.region.logged_steps()):
            self.make_room()
            self._take(step, {} if step.batch_id is None else {SOURCE: rows_of(step.offsets)}, ends=ends)
            self.batches += step.batch_id is not None
            if ends:
                self.end_interval()

    def edit(self, operator: str, variable: str, changes: pa.Table) -> Completed:
        """A change by hand of one variable's table, with a checkpoint of its own; no other is pending."""
        tasks = self.region.begin_step(self._without_rows(StepKind.CHANGE), ends=True)
        for own in self.region.stream.sort_operators():
            task, there = tasks[own.name], {}
            if own.name == operator:
                edited = Editable(own, variable)
                task = edit_task(task, edited)
                there = {
                    Route.KEY: lambda task=task: shuffled(task, changes),
                    Route.KEY_GROUP: lambda task=task: by_key_group(task, changes),
                    Route.EVERY: lambda task=task: dict.fromkeys(range(task.parallelism), with_hashes(task, changes)),
                }[edited.route]()
            self.outputs[own.name], received = run_tasks(task, there)
            self.region.acknowledge(own.name, received)
        made = Edit(operator, variable, len(changes), 0, "a test", None, "a test")
        return self.region.complete(edit=made)

    def complete_oldest(self) -> None:
        """The oldest checkpoint that is pending."""
        self.region.store()
        self.completed.append(self.region.commit())
        self._tidy()

    def complete_pending(self) -> None:
        """All checkpoints that are pending."""
        while self.region.protocol.pending:
            self.complete_oldest()

    def complete(self) -> Completed:
        """The checkpoint that is due."""
        completed = self.region.complete()
        self._tidy()
        return completed

    def _tidy(self) -> None:
        if not self.region.stream.sinks:  # who has sinks delivers to them
            self.region.deliver({}, checked=True)


class RegionRun(RegionSteps):
    """One run of a stream: takes it over."""

    def __init__(
        self,
        place: OpenWarehouse,
        stream: Stream,
        policy: Policy,
        parallelism: int = 1,
        checkpoint_steps: int = 1,
        upload: UploadOptions | None = None,
        tables: frozenset[str] = frozenset(),
        placed: bool = True,
        backend: str = "heap",
        max_pending: int = 0,
        postpones_bases: bool = False,
        tenure: Tenure | None = None,
        drop: Sequence[str] = (),
        keep_outputs: timedelta = timedelta(0),
        log_steps: bool = True,
    ) -> None:
        options = RegionOptions(
            keep_outputs=keep_outputs,
            log_steps=log_steps,
            parallelism=parallelism,
            backend=backend,
            max_pending=max_pending,
            postpones_bases=postpones_bases,
            checkpoint_steps=checkpoint_steps,
            upload=upload or UploadOptions(),
            tables=tables,
            placed=placed,
            drop=drop,
        )
        opened = ConsistentRegion.open(stream, place.warehouse, place.catalog, policy, options, "a test", tenure)
        super().__init__(opened)


def run_tasks(
    task: StepTask, rows: Mapping[int, pa.Table], attempt: str = "test"
) -> tuple[pa.Table, Sequence[Acknowledgement]]:
    """One step of one operator, one subtask after the other, some of which have rows: output, and what they said."""
    parts, received = [], []
    for subtask in range(task.parallelism):
        batches = rows[subtask].to_batches() if subtask in rows else []
        for batch in run_subtask(task, subtask, attempt, iter(batches)):
            if batch.column(ACKNOWLEDGEMENT).null_count:
                parts.append(pa.Table.from_batches([batch.drop_columns([ACKNOWLEDGEMENT])]))
            else:
                received.append(acknowledgement_of(batch))
    for acknowledgement in received:
        acknowledgement.raise_failure()
    nothing = pa.schema(list(task.operator.output or [])).empty_table()
    return pa.concat_tables([*parts]) if parts else nothing, received


def acknowledgement_of(last: pa.RecordBatch) -> Acknowledgement:
    """What a subtask's last batch says."""
    return Acknowledgement.from_bytes(last.column(ACKNOWLEDGEMENT)[0].as_py())


def shuffled(task: StepTask, rows: pa.Table) -> Mapping[int, pa.Table]:
    """Each subtask's rows, with their hashes, in the operator's order."""
    operator = task.operator
    times = [column for of in task.times.values() for column in of.columns]
    rows = rows.select(list(dict.fromkeys([*operator.key.names, *(operator.inputs or rows.column_names), *times])))
    if operator.combined is not None and len(rows):
        parts = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        rows = pa.concat_tables([combine(operator, part) for part in parts if len(part)])
    if operator.order_by:
        rows = rows.sort_by([(name, "ascending") for name in operator.order_by])
    rows = with_hashes(task, rows)
    return _split(task, rows, key_groups(rows.column(HASH).to_numpy().view(np.uint64), task.max_parallelism))


def by_key_group(task: StepTask, changes: pa.Table) -> Mapping[int, pa.Table]:
    """Each subtask's rows of an edit of an opaque variable."""
    return _split(task, with_hashes(task, changes), changes.column(KEY_GROUP).to_numpy())


def with_hashes(task: StepTask, rows: pa.Table) -> pa.Table:
    """Rows with the hashes of the operator's keys."""
    keys = rows.select(task.operator.key.names)
    hashes = xxhash64(normalise_keys(keys).columns) if len(rows) else np.zeros(0, np.uint64)
    return rows.append_column(HASH, pa.array(hashes.view(np.int64)))


def _split(task: StepTask, rows: pa.Table, groups: np.ndarray) -> Mapping[int, pa.Table]:
    return {
        subtask: rows.filter(pa.array((groups >= own.start) & (groups < own.end)))
        for subtask, own in ((s, task.groups(s)) for s in range(task.parallelism))
    }
