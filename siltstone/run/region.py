"""The consistent region: all operators of a stream, advanced step by step and checkpointed at one point together.

This runs on the driver. Its `Coordinator` says which step or checkpoint may follow (`run.protocol_rules`); the region
decides the form of each operator's part, makes the task of every subtask, collects the acknowledgements and writes the
manifest. Then one catalog transaction, guarded by the writer epoch, completes the checkpoint (a completed checkpoint
restores exactly, and a fenced writer commits nothing; promises 1 and 5). Before that transaction nothing is visible;
after it everything is.

    open             register, fence older writers, continue from the newest completed checkpoint
      begin_step     -> a task per operator
      acknowledge    <- the acknowledgements of its subtasks
      prepare        a checkpoint: what it holds is settled
      upload         outputs and segments, while further steps may be taken
      store          the manifest, once the checkpoint before is complete
      commit         between two steps, without asking the store
      deliver        outputs to sinks, while further steps may be taken
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from siltstone.catalog.epochs import Tenure
from siltstone.catalog.extract_writer import try_write_extract, write_extract
from siltstone.catalog.records.commit_details import CommitDetails, PreviousCheckpoint
from siltstone.catalog.records.edits import Edit
from siltstone.catalog.records.source_entries import LoggedFile
from siltstone.catalog.records.steps import InputPosition, Step, StepKind, StepRecord
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.chain_rules import choose_tracked
from siltstone.chains.policies import Decision, Policy, check_backend
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.log import LoggedInterval, LoggedStep
from siltstone.errors import SiltstoneError, StateError, UnknownCheckpoint, Unreachable, UsageError, WrongWarehouse
from siltstone.log import get_logger
from siltstone.model import Form
from siltstone.operator import Operator
from siltstone.retention.retention_rules import NEW_STREAM
from siltstone.retention.sweep import sweep_ended
from siltstone.run.broadcasts import check_same_tables
from siltstone.run.chains import NextChains, RunChains
from siltstone.run.coordinator import Coordinator
from siltstone.run.definition import (
    SourceShape,
    check_follows,
    check_run,
    check_source_shapes,
    definition_of,
    keep_shapes,
    with_shapes,
)
from siltstone.run.manifests import RunManifests
from siltstone.run.outbox import CheckpointOutputs, Give, Outbox
from siltstone.run.pending import CheckpointInterval, Completed, PendingCheckpoint
from siltstone.run.protocol_rules import Checkpoint, Interval, Region, open_region
from siltstone.run.references import RunReferences
from siltstone.run.region_options import RegionOptions, bound_inline
from siltstone.run.step_digests import OperatorDigests, check_repeated, decode_digests, encode_digests, find_lost_edit
from siltstone.run.stream_clock import StreamClock
from siltstone.run.take_over import take_over
from siltstone.run.task import CheckpointOrder, DeadLetterOrder, StepTask, identities
from siltstone.store.open import Warehouse
from siltstone.store.paths import StepPath
from siltstone.stream import Stream

_LOG = get_logger(__name__)


class ConsistentRegion:
    """One run of one stream. Use `ConsistentRegion.open`.

    One thread takes steps; meanwhile others may `upload`, a checkpoint each, one may `store` and one `deliver`, and
    `commit` between two steps.
    """

    def __init__(
        self, stream: Stream, warehouse: Warehouse, catalog: Catalog, policy: Policy, options: RegionOptions, epoch: int
    ) -> None:
        self.stream, self.warehouse, self.catalog, self.epoch = stream, warehouse, catalog, epoch
        self.options = options = bound_inline(options, stream)
        self._interval = Interval(options.checkpoint_steps, options.checkpoint_s, options.checkpoint_idle_s)
        self._coordinator = self._coordinate(0, 0)
        self.digest: str | None = None
        """digest of the newest completed checkpoint, hex"""
        self.completed_epoch: int | None = None
        """the epoch that completed it"""
        self.oldest_epoch = 0
        """reuse working state only from this epoch on: older state may predate a rollback; 0 if there is none"""
        self._former_parallelism = 0
        """of the newest completed checkpoint, 0 if there is none"""
        self._store, self._place = warehouse.store, OpenWarehouse(warehouse, catalog)
        self.manifests = RunManifests(stream.name, warehouse.store)
        reads, postpones = (catalog, warehouse.store, self.manifests), options.postpones_bases
        self.chains = RunChains(stream, *reads, policy, postpones=postpones)
        self._references = RunReferences(stream.name, catalog, self.manifests)
        self._defined: Mapping[str, Any] = {}
        """the definition"""
        self._definition: Mapping[str, Any] | None = None
        """the same, if the next checkpoint is the first to be made under it"""
        self._dropped: tuple[str, ...] = ()
        """whose state it gives up"""
        self.clock = StreamClock(stream, options.time_us)
        """the clock of its steps"""
        self._previous: PreviousCheckpoint | None = None
        self._event_time_max: datetime | None = None
        self._began_after = 0
        """the last step of the checkpoint that the run began with"""
        self._open = self._open_interval(1, 0)
        """of the checkpoint that is to be prepared next"""
        self._pending: dict[int, PendingCheckpoint] = {}
        """checkpoint -> what the run holds of it, ascending; the protocol says how far each is"""
        self._replaced = deque[str]()
        """names of logged objects that complete checkpoints do not need"""
        self._accepted: dict[str, Mapping[str, np.ndarray]] = {}
        """operator -> the digests that the newest step came to, as they were accepted"""
        self._logged = catalog.input_log.list_logged(stream.name)
        """steps of checkpoints that were given up and have not come again"""
        self._lost_edit = find_lost_edit(catalog, stream.name) if self._logged else None
        """the first checkpoint that comes again without its edit; None if there is none"""
        logged = {step.checkpoint for step in self._logged}
        self.outbox = Outbox(stream, self._place, epoch, logged, options.tables, options.upload, options.keep_outputs)

    @classmethod
    def open(
        cls,
        stream: Stream,
        warehouse: Warehouse,
        catalog: Catalog,
        policy: Policy,
        options: RegionOptions,
        who: str,
        tenure: Tenure | None = None,
    ) -> "ConsistentRegion":
        """Take over the stream: fence older writers, and continue from the newest completed checkpoint.

        Args:
            who: names this process in the catalog, for display.
            tenure: the run's hold on the stream; None for a run of one epoch.

        Raises:
            Fenced: another run has the stream since the epoch of `tenure`.
            SchemaConflict: the definition does not fit the recorded state.
            UsageError: the parallelism exceeds the number of key groups, or source options differ from before.
            WrongWarehouse: the catalog is older than the store (`catalog.epochs`).
            CorruptObject: the newest manifest is damaged.
        """
        check_run(stream, options.options, options.parallelism)
        check_backend(policy, options.backend)
        definition = definition_of(stream, options.options)
        record = catalog.streams.register(stream.name, stream.max_parallelism, definition, NEW_STREAM.to_record())
        check_follows(catalog, record, definition, options.drop)
        epoch = take_over(OpenWarehouse(warehouse, catalog), stream.name, who, tenure)
        region = cls(stream, warehouse, catalog, policy, options, epoch)
        region.chains.own_files = tenure.files if tenure else {}
        try:
            # Again, since only now nobody else makes checkpoints under another definition.
            record = catalog.streams.register(stream.name, stream.max_parallelism, definition)
            region._dropped = check_follows(catalog, record, definition, options.drop)
            region._defined = keep_shapes(record.definition, definition)
            if not catalog.definitions.list(stream.name) or record.definition != region._defined or region._dropped:
                region._definition = region._defined
            region._resume(catalog.checkpoints.last_id(stream.name))
        except BaseException as error:
            region.close("failed")
            if isinstance(error, SiltstoneError):
                with suppress(Unreachable):
                    region.check_fence()  # a newer writer may have deleted what was to be read: then that is why
            raise
        return region

    def _coordinate(self, completed: int, step: int) -> Coordinator:
        operators = [operator.name for operator in self.stream.operators]
        pending = max(1, self.options.max_pending)
        return Coordinator(open_region(self.epoch, operators, completed, step, pending), self._interval)

    def _open_interval(self, checkpoint: int, begins_after: int) -> CheckpointInterval:
        log = LoggedInterval(self.warehouse.store_url, self.options.upload)
        return CheckpointInterval(checkpoint, begins_after, log, CheckpointOutputs(checkpoint))

    @property
    def protocol(self) -> Region:
        """The states of the region, its steps and checkpoints (`run.protocol_rules`)."""
        return self._coordinator.region

    @property
    def step(self) -> int:
        """Number of the newest step."""
        return self.protocol.step

    @property
    def completed(self) -> int:
        """The newest completed checkpoint, 0 before the first."""
        return self.protocol.completed

    @property
    def completed_step(self) -> int:
        """The last step of the newest completed checkpoint."""
        return self.protocol.completed_step

    @property
    def checkpoint(self) -> int:
        """Id of the checkpoint that is to be prepared next."""
        return self._open.checkpoint

    @property
    def _next_chains(self) -> list[NextChains]:
        return [pending.chains for pending in self._pending.values()]

    @property
    def _step_path(self) -> StepPath:
        """Names what the newest step stores."""
        return StepPath(self.stream.name, self.epoch, self.checkpoint, self.step)

    @property
    def checkpoint_due(self) -> bool:
        """Whether the newest step ends in a checkpoint that is not prepared."""
        running = self.protocol.running
        return self.protocol.next_checkpoint > self.checkpoint or (running is not None and running.ends)

    @property
    def has_steps(self) -> bool:
        """Whether steps were taken that are in no checkpoint, prepared ones included."""
        return bool(self._open.steps)

    @property
    def is_overdue(self) -> bool:
        """Whether the interval is to be completed now by a step without rows (`protocol_rules.is_overdue`)."""
        return self._coordinator.is_overdue()

    @property
    def ends_next(self) -> bool:
        """Whether the next step ends in a checkpoint by itself: it is due, or the log has grown too long."""
        log = self._open.log
        return self._coordinator.ends_next() or log.is_full or self.chains.spends_budget(log.change_bytes)

    def _resume(self, latest: int) -> None:
        """Continue after checkpoint `latest`, or from nothing where it is 0."""
        if latest:
            name, manifest = self.stream.name, self.chains.resume(latest)
            self._event_time_max = manifest.event_time_max
            self.digest = manifest.digest
            self.clock.resume(self.catalog.input_log.get_clock(name, latest), manifest.statistics["operators"])
            self._accepted = dict(manifest.digests)
            record = self.catalog.checkpoints.get(name, latest)
            self._previous = PreviousCheckpoint(record.manifest, record.committed_at)
            self._references.resume(manifest, record.manifest.name)
            self.completed_epoch = record.epoch
            self.oldest_epoch = max([record.epoch, *(each.epoch for each in self.catalog.rollbacks.list(name))])
            self._former_parallelism = record.statistics["parallelism"]
            self._began_after = manifest.step
            self._open = self._open_interval(latest + 1, manifest.step)
            self._coordinator = self._coordinate(latest, manifest.step)

    def input_position(self) -> InputPosition:
        """Return the input position after the newest completed checkpoint, for a query to continue from."""
        return self.catalog.input_log.get_position(self.stream.name, self.completed)

    def note_sources(self, shapes: Mapping[str, SourceShape]) -> None:
        """Record with the next checkpoint what operators read of the sources from now on.

        Raises:
            SchemaConflict: it cannot follow what they read before.
        """
        check_source_shapes(self.stream.name, self._defined, shapes)
        now = with_shapes(self._defined, shapes)
        if now != self._defined:
            self._defined = self._definition = now

    def record_beginning(self, beginning: Step) -> None:
        """Record where the sources begin, before the first batch; runs begin there until there is a checkpoint.

        Raises:
            Fenced: a newer writer has taken the stream over.
        """
        self.catalog.input_log.record_beginning(self.stream.name, self.epoch, beginning)
        write_extract(self._place, self.stream.name)

    def logged_steps(self) -> list[StepRecord]:
        """Return the logged steps after the newest completed checkpoint, oldest first.

        They are of checkpoints that were given up and will be made again with these steps (`catalog.rollbacks`). They
        are read once, when the run takes over the stream: nothing else can change them after that.
        """
        return list(self._logged)

    def begin_step(
        self,
        step: Step | None = None,
        *,
        ends: bool | None = None,
        offsets: str = "{}",
        unread: Sequence[LoggedFile] = (),
        finishes: bool = False,
    ) -> dict[str, StepTask]:
        """Start the next step, and decide whether it ends in a checkpoint (`checkpoint_due`).

        Args:
            step: its row of the input log; None for a step without rows.
            ends: whether it does; None decides by `ends_next`.
            offsets: the offsets that the step reads, as JSON for dead letters (`run.dead_letters`).
            unread: the files that it is run without.
            finishes: whether the sources have ended (`StreamClock.begin`).

        Returns:
            Operator name -> the task of its subtasks.

        Raises:
            StateError: a step is running, the region has failed or ended, or the step does not follow the newest.
        """
        base_step = self.step
        step = step or Step.without_rows(base_step + 1)
        if step.step != base_step + 1:
            raise StateError(
                f"step {step.step} of {self.stream.name} does not follow step {base_step}", advice="run it again"
            )
        self._coordinator.begin_step(ends=self.ends_next if ends is None else ends)
        self._follow_materializations(begins=base_step == self.completed_step)
        self._open.steps.append(self.clock.begin(step, finishes=finishes))
        decided, first = self.chains.decisions, next(op.name for op in self.stream.levels()[0])
        letters = {
            op.name: self.outbox.order_letters(self.checkpoint, offsets, unread if op.name == first else ())
            for op in self.stream.operators
        }
        return {op.name: self._task(op, base_step, decided[op.name], letters[op.name]) for op in self.stream.operators}

    def _follow_materializations(self, *, begins: bool) -> None:
        """Let chains begin with what was materialized meanwhile: inside an interval by this run; where it `begins` by
        anyone, since what they began with at the commit, long ago perhaps, may be gone."""
        try:
            with self.manifests.taking_news() as news:
                if news or begins:
                    self.chains.follow(self._next_chains)
        except UnknownCheckpoint:
            self._check_known()
            raise
        except Unreachable:
            if begins:
                raise
        if begins:
            self._references.follow(self.chains.manifests)

    def _task(
        self,
        operator: Operator,
        base_step: int,
        decisions: Mapping[str, Decision],
        letters: DeadLetterOrder | None,
    ) -> StepTask:
        # State that is left behind is rolled forward each time.
        whole, states = not self.completed or not self.options.placed, self.chains.policies[operator.name]
        wanted = choose_tracked(decisions, states, ends=self.checkpoint_due, whole=whole)
        tracked, lacking = self._open.track(operator, wanted, ends=self.checkpoint_due, logs=self.options.log_steps)
        order = None
        if self.checkpoint_due:
            # What was not tracked all the time, since the decision has changed meanwhile, has no delta.
            forms = {v: Form.BASE if v in lacking and d.form is Form.DELTA else d.form for v, d in decisions.items()}
            limits = {v: d.delta_limit_bytes for v, d in decisions.items() if forms[v] is Form.DELTA}
            left = self._open.log.limits_bytes(operator.name, limits, self.options.parallelism)
            order = CheckpointOrder(forms, left, *self.chains.find_reusable(operator.name, self._next_chains))
        return StepTask(
            stream=self.stream.name,
            operator=operator,
            epoch=self.epoch,
            step=self.step,
            base_step=base_step,
            base=identities(
                operator, self._accepted.get(operator.name, {}), self.options.parallelism, self.stream.max_parallelism
            ),
            parallelism=self.options.parallelism,
            max_parallelism=self.stream.max_parallelism,
            warehouse=self.warehouse,
            backend=self.options.backend,
            tracked=tracked - lacking,
            logs=self.options.log_steps,
            restore=self.chains.restore_point(operator.name),
            checkpoint=order,
            upload=self.options.upload,
            interval=self.checkpoint,
            begins_after=self._open.begins_after,
            versions=self.chains.versions.get(operator.name, {}),
            log=self._list_steps(operator.name),
            oldest_epoch=self.oldest_epoch,
            former_parallelism=self._former_parallelism,
            sources=self.stream.read_sources,
            times=self.stream.row_times(operator),
            clock=self.clock.of(operator),
            staged={
                name: name in self.options.tables
                for name in operator.outputs
                if self.outbox.stages(name, self.checkpoint)
            },
            hands_on=self.stream.has_reader(operator),
            sinks=tuple(self.stream.sinks),
            resets=base_step == self._began_after,
            dead_letters=letters,
            drains=order is not None and self._open.steps[-1].kind is not StepKind.CHANGE,
        )

    def _list_steps(self, operator: str) -> tuple[LoggedStep, ...]:
        """List the steps since the newest complete checkpoint, with what was logged of an operator's changes."""
        pending = (step for each in self._pending.values() for step in each.interval.log.list_steps(operator))
        if not self.options.log_steps:  # the last step of each checkpoint has stored what all of them changed
            pending = (replace(step, unlogged=()) for step in pending)
        return (*pending, *self._open.log.list_steps(operator))

    def acknowledge(self, operator: str, received: Sequence[Acknowledgement]) -> None:
        """Add the acknowledgements of one operator's subtasks for the step.

        Raises:
            Unreachable: the store failed on small changes that are too many to wait in memory.
        """
        self._coordinator.acknowledge(operator)
        check_same_tables(operator, received)
        self._open.gathered.add(operator, received)
        self.clock.hear(operator, received)
        self._note_digests(operator, OperatorDigests.of(received))
        self._open.log.append(self._step_path, operator, received)
        self._accepted[operator] = self.digests()[operator]
        self.outbox.add(self._open.outputs, received)

    def _note_digests(self, operator: str, found: OperatorDigests) -> None:
        """Record what an operator has read and made in the newest step; a logged step has to come again as it was.

        Not of a change: that of an edit comes again, if at all, by hand.

        Raises:
            InputChanged: it has not.
        """
        step = self._open.steps[-1] = replace(self._open.steps[-1], clock=self.clock.text)
        if step.kind is StepKind.CHANGE:
            return
        # What was made after an edit that is lost came of state that had it.
        only_read = self._lost_edit is not None and self.checkpoint >= self._lost_edit
        check_repeated(step, operator, found, only_read=only_read)
        digests = {**decode_digests(step.digests), operator: found}
        self._open.steps[-1] = replace(step, digests=encode_digests(digests))

    def check_fence(self) -> None:
        """Raise Fenced if a newer writer has taken over the stream."""
        self.catalog.runs.check_epoch(self.stream.name, self.epoch)

    def _check_known(self) -> None:
        """Check that the catalog has the newest checkpoint of this run.

        Raises:
            Fenced: a newer writer has given it up.
            Unreachable: its database has failed over, and has lost it: taking the stream over again brings it back.
        """
        self.check_fence()
        newest = self.catalog.checkpoints.last_id(self.stream.name)
        if newest < self.completed:
            raise Unreachable(
                f"the catalog {self.catalog.url} has lost checkpoint {self.completed} of stream {self.stream.name}, "
                f"which it had acknowledged; its newest is {newest}: run the stream again, which brings it back"
            )

    def digests(self) -> dict[str, dict[str, np.ndarray]]:
        """Return operator -> table or opaque variable -> digests (uint64[max_parallelism]) after the newest step."""
        return self._open.gathered.digests(self.stream.max_parallelism)

    def prepare(self, *, edit: Edit | None = None, parallelism: int | None = None) -> None:
        """Prepare the checkpoint that ends with the newest step; its contents no longer change.

        Args:
            edit: an edit by hand to record.
            parallelism: the parallelism to record for later runs.
        """
        path, interval = self._step_path, self._open
        interval.log.send(path)
        logged = interval.log.merge(interval.gathered.last)
        chains = self.chains.prepare(path.checkpoint, path.step, replace(interval.gathered, last=logged))
        self._event_time_max = interval.gathered.event_time(self._event_time_max)
        details = CommitDetails(interval.steps, edit, parallelism, self._definition, self._dropped)
        pending = PendingCheckpoint(path, details, interval, chains, self._event_time_max)
        self._pending[pending.id] = pending
        self._open = self._open_interval(pending.id + 1, path.step)
        self._definition, self._dropped = None, ()
        pending.call_operators(self.stream, self.options.upload, blocking=True)

    def upload(self, checkpoint: int) -> None:
        """Store all of a prepared checkpoint but its manifest; several threads may, a checkpoint each, during steps.

        Raises:
            StateError: it is not prepared.
            Unreachable: the store failed; nothing became visible.
        """
        self._coordinator.begin_storing(checkpoint)
        self._pending[checkpoint].upload(self.outbox)

    def store(self, wait: Callable[[], object] | None = None) -> None:
        """Store the oldest checkpoint that is not; another thread may do it while steps are taken.

        Args:
            wait: returns once it is uploaded, or raises what kept it from that; None uploads it.

        Raises:
            StateError: none is prepared, or the one before it is not complete.
            Unreachable: the store or the catalog failed; nothing became visible.
        """
        self._coordinator.store(partial(self._store_pending, wait))

    def _store_pending(self, wait: Callable[[], object] | None, checkpoint: Checkpoint) -> None:
        wait() if wait else self.upload(checkpoint.id)
        self._pending[checkpoint.id].store(
            self.stream,
            self.warehouse,
            self.options.upload,
            self.outbox,
            self._references,
            self._previous,
            self._coordinator.times,
        )

    def commit(self) -> Completed:
        """Commit the oldest pending checkpoint, which is stored, and so complete it; no step is running.

        Raises:
            StateError: it is not stored, or a step is running.
            Fenced: a newer writer has taken the stream over; nothing became visible.
            Unreachable: the catalog failed; it alone knows whether the checkpoint is complete.
        """
        try:
            checkpoint = self._coordinator.commit(self._commit_pending)
        except UsageError:
            self._check_known()
            raise
        pending = self._pending.pop(checkpoint.id)
        self._advance(pending)
        return pending.describe()

    def _commit_pending(self, checkpoint: Checkpoint) -> None:
        pending = self._pending[checkpoint.id]
        assert pending.commit is not None, "what is durable is stored"
        self.outbox.expect(pending.id, pending.commit.details.outputs)
        pending.committed = self.catalog.commits.add(self.stream.name, self.epoch, pending.commit)

    def complete(self, *, edit: Edit | None = None, parallelism: int | None = None) -> Completed:
        """Prepare, store and commit the checkpoint that the newest step ends in; no other is pending."""
        self.prepare(edit=edit, parallelism=parallelism)
        self.store()
        return self.commit()

    def deliver(self, sinks: Mapping[str, Give], *, checked: bool = False) -> None:
        """Deliver the outputs of completed checkpoints (see `Outbox.deliver`), once their log is deleted."""
        self._delete_replaced()
        self._coordinator.deliver(partial(self.outbox.deliver, self.completed, sinks, checked=checked))

    def fail(self, error: BaseException) -> BaseException:
        """Note that a step failed: only a new epoch may go on, from the newest checkpoint. Returns the first error."""
        return self._coordinator.fail(error)

    def close(self, outcome: str) -> None:
        """Record the run's outcome in the catalog, and delete what it stored of a checkpoint that did not complete.

        If the catalog has lost a checkpoint of this run, it is left as after a crash: the next run brings it back.
        """
        self._coordinator.end()
        if not self.catalog.runs.end(self.stream.name, self.epoch, outcome, self.completed):
            _LOG.warning("the catalog does not have what this run completed", completed=self.completed)
            return
        self._delete_replaced()
        self.outbox.clean()
        sweep_ended(self._place, self.stream.name, self.epoch)
        try:
            try_write_extract(self._place, self.stream.name)
        except WrongWarehouse as error:  # the next run says so, too, and does something about it
            _LOG.warning("the catalog is older than the store", stream=self.stream.name, error=str(error))

    def _delete_replaced(self) -> None:
        """Delete what complete checkpoints do not need of the log: tasks that begin later do not read it.

        One thread at a time may. Errors are ignored, because a sweep finds the rest.
        """
        with suppress(SiltstoneError):
            self._store.delete([self._replaced.popleft() for _ in range(len(self._replaced))])

    def _advance(self, pending: PendingCheckpoint) -> None:
        """Go on from a checkpoint that has just been completed."""
        made, committed = pending.commit, pending.committed
        assert made is not None and committed is not None, "it was committed"
        self.chains.advance(pending.chains, committed.manifests, self._next_chains)
        self._references.follow(committed.manifests)
        self._previous = PreviousCheckpoint(made.manifest, committed.at)
        self.digest = made.digest
        needed = {stored.name for stored in (*made.segments, *made.bases)}
        self._replaced.extend(pending.interval.log.list_replaced(needed))
        self._logged = [step for step in self._logged if step.checkpoint > self.completed]
        self.completed_epoch = self.oldest_epoch = self.epoch
        self._former_parallelism = self.options.parallelism
