"""Test a stream without Spark and without a JVM, step by step, on the engine that runs it in production.

    from siltstone.testing import StreamTester

    def test_totals():
        with StreamTester(stream, parallelism=2) as tester:
            out = tester.step([{"user": "a", "clicks": 1}, {"user": "a", "clicks": 2}])
            assert out["totals"].to_pylist() == [{"user": "a", "clicks": 3}]
            tester.restart(lost=True)
            assert tester.state("totals", "counts").to_pylist() == [{"user": "a", "clicks": 3}]
            tester.replay()

Region, catalog, store, subtasks and working state are the real ones, in a temporary warehouse. What Spark does is done
here: keys are cast and hashed, rows are combined, sent to the subtask of their key group, and sorted. Each task gets a
copy of its operator, as a Spark worker does: what `process` keeps in attributes is lost after the task.

A stream's own source and sinks are not used: `step` gives rows, and what a sink would get is collected. An autonomous
operator is a stream of its own (`Stream.autonomous_streams`), with a tester of its own.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import pyarrow as pa

from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.records.steps import Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, policy_by_name
from siltstone.change.local_replay import LocalReplay, TakenStep, check_same, digest_made
from siltstone.changelog.uploader import close_uploaders
from siltstone.errors import StateError, UsageError
from siltstone.format.manifests import read_manifests
from siltstone.format.output import read_output, staged_schema
from siltstone.model import KeyGroupRange
from siltstone.operator import SOURCE, Operator
from siltstone.restore.export import opaque_rows
from siltstone.restore.scan import Selection, TableShape, plan_scan, scan
from siltstone.run import callbacks
from siltstone.run.dead_letters import LETTERS
from siltstone.run.definition import check_run
from siltstone.run.local_step import as_spark, run_step
from siltstone.run.processing import outputs_of
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.run.users_code import OperatorFailed
from siltstone.run.working_state import remove_older_epochs
from siltstone.state.backends.named import backend as backend_by_name
from siltstone.state.nested import nested_columns
from siltstone.state.schema import OPAQUE_SCHEMA
from siltstone.stream import DEAD_LETTERS, Stream
from siltstone.time.clock_rules import decode_clock
from siltstone.times import EPOCH, parse_duration, to_us

__all__ = ["OperatorFailed", "StreamTester"]

InputRows: TypeAlias = pa.Table | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""rows as an Arrow table, a dict of columns, or one dict per row; of several sources, source -> such rows"""
Types: TypeAlias = Mapping[str, pa.DataType] | pa.Schema
_NOW = datetime(2026, 1, 1, tzinfo=UTC)
_WHO = "a stream tester"
_PREFIX = "siltstone-test-"


class StreamTester:
    """Runs a stream's steps in this process. Use it in a `with` block, or `close` it.

    Args:
        parallelism: subtasks per operator.
        backend: of working state, "heap" or "rocksdb".
        checkpoint_every: steps per checkpoint.
        schema: types of the source's columns, `{name: type}` or an Arrow schema; of several sources, source -> such
            types. The first rows tell those of others.
        now: the time of day of the first step; a time without a zone is UTC. It moves only by `advance`.

    Raises:
        UsageError: the stream, or an option, is not valid.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        parallelism: int = 1,
        backend: str = "heap",
        checkpoint_every: int = 1,
        schema: Types | Mapping[str, Types] | None = None,
        now: datetime = _NOW,
    ) -> None:
        self.stream, self.parallelism, self.backend = stream, parallelism, backend
        if checkpoint_every < 1:
            raise UsageError(f"checkpoint_every is {checkpoint_every}: use 1 or more")
        self._checkpoint_every, self._now_us = checkpoint_every, to_us(now)
        given: Any = dict(schema or {}) if stream.sources else {SOURCE: schema or {}}
        self._types = {name: _types_of(given.get(name, {})) for name in stream.source_names}
        self._steps: list[TakenStep] = []
        """all steps, those after the newest checkpoint included"""
        self._collected: dict[str, dict[int, pa.Table]] = {}
        """output -> checkpoint -> rows"""
        self._failed = self._closed = False
        with ExitStack() as stack:
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX))
            self._place = stack.enter_context(OpenWarehouse.open_writable(f"{root}/warehouse"))
            stack.callback(close_uploaders, self._place.warehouse.store_url)
            self._region = self._open(parallelism)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the warehouse; the tester cannot be used any more."""
        self._closed = True
        self._stack.close()

    # Steps

    def step(self, rows: InputRows | None = None) -> dict[str, pa.Table]:
        """Take one step of every operator over the rows of a micro-batch.

        Args:
            rows: those of the source; None for a step without a micro-batch. Of several sources `{SOURCE: rows}`, where
                one that is left out gives none.

        Returns:
            Output -> its rows, drained ones included. An operator's own is called like it.

        Raises:
            BadRow, OperatorFailed, SiltstoneError: as the stream would stop with. If the operator refused the rows, the
                step has no effect, and `restart` goes on without it. If a callback at the checkpoint failed, `restart`
                takes it again.
        """
        self._check_running()
        outputs, requested = self._take(None if rows is None else self._read(rows))
        if requested and self._region.has_steps:
            drained, _ = self._take(None, ends=True)
            outputs = {name: pa.concat_tables([output, drained[name]]) for name, output in outputs.items()}
        return outputs

    def advance(self, by: str | timedelta = timedelta(0)) -> dict[str, pa.Table]:
        """Let time pass: move the time of day, and take a step without rows if something is due, as a run does.

        What rows make due in event time fires in the step after them, so `advance()` comes after the last rows.

        Args:
            by: how long, such as "10 minutes".

        Returns:
            Output -> its rows, as `step` does; none if nothing was due.
        """
        self._check_running()
        self._now_us += parse_duration(by) // timedelta(microseconds=1)
        if self._region.clock.is_due():
            return self.step()
        return {name: columns.empty_table() for name, columns in outputs_of(self.stream.operators).items()}

    def finish(self) -> dict[str, pa.Table]:
        """End the source, as `siltstone run --finish` does: all that waits for event time is due, in a checkpoint.

        Returns:
            Output -> its rows, as `step` does.
        """
        self._check_running()
        return self._take(None, ends=True, finishes=True)[0]

    @property
    def now(self) -> datetime:
        """The time of day (UTC)."""
        return EPOCH + timedelta(microseconds=self._now_us)

    @property
    def watermark(self) -> datetime | None:
        """The newest step's watermark (`OperatorClock.watermark`); None before the first row with an event time."""
        return self._region.clock.watermark

    def checkpoint(self) -> int:
        """End the interval in a checkpoint, by a step without rows, if any step is in none; return the newest one."""
        self._check_running()
        if self._region.has_steps:
            self._take(None, ends=True)
        return self._region.completed

    def restart(self, *, lost: bool = False) -> None:
        """End the run as a stop does, with a checkpoint, and begin the next one. After an error, do what `crash` does.

        Args:
            lost: whether the working state is lost, so that it is restored from the checkpoint.
        """
        self._begin_again(self.parallelism, lost=lost, stops=not self._failed)

    def rescale(self, parallelism: int) -> None:
        """Restart with another number of subtasks per operator."""
        check_run(self.stream, {}, parallelism)
        self._begin_again(parallelism, stops=not self._failed)

    def crash(self, *, lost: bool = False) -> None:
        """Abandon the run; the next one begins at the newest checkpoint and takes the steps since then again.

        Args:
            lost: as for `restart`.

        Raises:
            ProofFailed: a step has other effects than before.
        """
        self._begin_again(self.parallelism, lost=lost, stops=False)

    def _begin_again(self, parallelism: int, *, stops: bool, lost: bool = False) -> None:
        self._check_open()
        if stops:
            self.checkpoint()
            self._region.close("completed")
        self._failed = True  # until all steps were taken again
        if lost:
            work = self._place.warehouse.local.work(self.stream.name, self._region.epoch).parent
            shutil.rmtree(work, ignore_errors=True)  # before the first step there is none
        self._region = self._open(parallelism)
        self.parallelism = parallelism
        now_us = self._now_us
        for number, step in enumerate(self._steps[self._region.completed_step :], self._region.step + 1):
            clock = decode_clock(step.clock)
            self._now_us = clock.now if clock else now_us
            self._take(step.rows, ends=step.ends, finishes=step.finishes)
            check_same(self._name(number), step, self._steps[number - 1])
        self._now_us = now_us
        self._failed = False

    def _open(self, parallelism: int) -> ConsistentRegion:
        """Take over the stream, and do what earlier epochs left undone."""
        options = RegionOptions(
            parallelism=parallelism,
            backend=self.backend,
            checkpoint_steps=self._checkpoint_every,
            time_us=lambda: self._now_us,
        )
        place, stream = self._place, self.stream
        backend_by_name(self.backend)
        policy = policy_by_name(DEFAULT_POLICY)
        region = ConsistentRegion.open(stream, place.warehouse, place.catalog, policy, options, _WHO)
        self._batch = region.input_position().next_batch
        region.deliver(self._sinks)
        for id in region.outbox.left:
            callbacks.region_checkpointed(stream.operators, id, region.options.upload)
        remove_older_epochs(place.warehouse.local, stream.name, region.oldest_epoch or region.epoch)
        return region

    def _take(
        self, rows: Mapping[str, pa.Table] | None, *, ends: bool | None = None, finishes: bool = False
    ) -> tuple[dict[str, pa.Table], bool]:
        """Take a step, and complete the checkpoint that it ends in. Every step begins here.

        Args:
            rows: None for a step without rows.
            ends: None lets the region decide.
            finishes: whether the source has ended.

        Returns:
            What `step` does, and whether an operator asked for a checkpoint.
        """
        region, number = self._region, self._region.step + 1
        step = Step.without_rows(number) if rows is None else Step(number, self._batch)
        self._batch += rows is not None
        batch = "null" if rows is None else str(step.batch)
        try:
            tasks = region.begin_step(step, ends=ends, offsets=f'{{"batch": {batch}}}', finishes=finishes)
            outputs, received = run_step(self.stream, tasks, rows)
            for name, acknowledgements in received.items():
                region.acknowledge(name, acknowledgements)
            made, ends = digest_made(outputs, received), region.checkpoint_due
            came = self.parallelism, region.digests(), made
            late = {name: count for name, each in received.items() if (count := sum(a.late for a in each))}
            taken = TakenStep(rows, region.checkpoint, ends, *came, region.clock.text, finishes, late)
            self._steps[number - 1 : number] = [taken]
            if ends:
                completed = region.complete()
                region.deliver(self._sinks, checked=True)
                callbacks.region_checkpointed(self.stream.operators, completed.id, region.options.upload)
        except BaseException as error:
            self._failed = True
            region.fail(error)
            raise
        requested = any(a.wants_checkpoint for acknowledgements in received.values() for a in acknowledgements)
        return {name: outputs[name] for name in self.stream.outputs}, requested

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the tester of {self.stream.name} is closed: use it within its with block")

    def _check_running(self) -> None:
        self._check_open()
        if self._failed:
            raise StateError(f"this run of {self.stream.name} has failed", advice="call restart() to go on")

    def _read(self, rows: InputRows) -> dict[str, pa.Table]:
        """Return the rows of each source as Spark would have them.

        Raises:
            UsageError: a column does not fit the type that it has, or the stream has no such source.
        """
        if not self.stream.sources:
            return {SOURCE: self._read_source(SOURCE, rows)}
        names = self.stream.source_names
        if not isinstance(rows, Mapping) or rows.keys() - set(names):
            raise UsageError(
                f"stream {self.stream.name} has named sources: give {{SOURCE: rows}}, of {', '.join(names)}"
            )
        return {name: self._read_source(name, rows.get(name, {})) for name in names}

    def _read_source(self, source: str, rows: InputRows) -> pa.Table:
        types = self._types[source]
        if isinstance(rows, Mapping):
            columns = dict(rows)
        elif isinstance(rows, Sequence):
            names = dict.fromkeys([*types, *(name for row in rows for name in row)])
            columns = {name: [row.get(name) for row in rows] for name in names}
        else:
            columns = dict(zip(rows.column_names, rows.columns, strict=True))
        if not columns and source in self.stream.sources:  # none of its rows come
            columns = {name: [] for name in types}
        return pa.table({name: _read_column(types, name, values) for name, values in columns.items()})

    # What came of them
    @property
    def digest(self) -> str | None:
        """The digest of the newest checkpoint, as `siltstone verify` shows it: that of the whole state; None before."""
        return self._region.digest

    @property
    def dead_letters(self) -> pa.Table:
        """The dead letters delivered so far (`siltstone.run.dead_letters`)."""
        return self._join(DEAD_LETTERS, LETTERS)

    @property
    def late(self) -> dict[str, int]:
        """Operator -> its late rows so far, of those that had any."""
        return dict(sum((Counter(step.late) for step in self._steps), Counter()))

    def delivered(self, output: str) -> pa.Table:
        """Return all rows that the sink of an output was given so far.

        Args:
            output: an operator's name, or `OPERATOR-OUTPUT` for a side output.

        Raises:
            UsageError: it has no sink.
        """
        if output not in self.stream.sinks or output == DEAD_LETTERS:
            known = ", ".join(name for name in self.stream.sinks if name != DEAD_LETTERS) or "none"
            raise UsageError(f"stream {self.stream.name} has no sink of {output!r} (sinks: {known})")
        return self._join(output, outputs_of(self.stream.operators)[output])

    def state(self, operator: str, variable: str) -> pa.Table:
        """Return the live rows of a variable, ordered by their keys.

        Args:
            variable: a list or window also has the table `VARIABLE.bounds`. The rows of an opaque variable are the key
                groups and their bytes.

        Raises:
            UsageError: the operator, or its variable, does not exist.
        """
        self._check_running()
        op = self._operator(operator)
        schema = op.tables().get(variable)
        if schema is None and variable not in op.opaque_variables():
            known = ", ".join([*op.tables(), *op.opaque_variables()])
            raise UsageError(f"operator {operator} has no variable {variable!r}: it has {known}")
        columns = OPAQUE_SCHEMA if schema is None else schema.shown_rows
        key = ["key_group"] if schema is None else schema.primary_key.names
        at_checkpoint = self._region.step == self._region.completed_step
        found = self._read_checkpoint(operator, variable) if at_checkpoint else self._read_working(op, variable)
        rows = pa.concat_tables([columns.empty_table(), *(table.select(columns.names) for table in found)])
        return rows.sort_by([(name, "ascending") for name in key])

    def _read_checkpoint(self, operator: str, variable: str) -> Iterator[pa.Table]:
        name, checkpoint, store = self.stream.name, self._region.completed, self._place.warehouse.store
        if checkpoint:
            manifests = read_manifests(store, self._place.catalog.chains.list_manifests(name, checkpoint), name)
            shape = TableShape.of(manifests[checkpoint], operator, variable)
            for task in plan_scan(manifests, shape, Selection(tuple(shape.columns.names))):
                yield from scan(store, task)

    def _read_working(self, op: Operator, variable: str) -> Iterator[pa.Table]:
        region, groups = self._region, KeyGroupRange(0, self.stream.max_parallelism)
        for subtask, own in enumerate(groups.split(self.parallelism)):
            directory = region.warehouse.local.state(self.stream.name, region.epoch, op.name, subtask)
            state = backend_by_name(self.backend).open(
                directory, op.tables(), op.opaque_variables(), own, self.stream.max_parallelism
            )
            try:
                if variable in state.opaque:
                    yield opaque_rows(state.opaque[variable])
                else:
                    table = state.tables[variable]
                    yield from (nested_columns(rows, table.schema.nested) for rows, _ in table.scan(own))
            finally:
                state.close()

    def _operator(self, name: str) -> Operator:
        found = next((op for op in self.stream.operators if op.name == name), None)
        if found is None:
            known = ", ".join(op.name for op in self.stream.operators)
            raise UsageError(f"stream {self.stream.name} has no operator {name!r}: it has {known}")
        return found

    @property
    def _sinks(self) -> dict[str, Any]:
        return dict.fromkeys(self.stream.sinks, self._collect)

    def _collect(self, output: OutputRecord) -> None:
        store, schema = self._place.warehouse.store, staged_schema(output.arrow_schema)
        batches = [batch for each in output.objects for batch in read_output(store, each, output.arrow_schema)]
        self._collected.setdefault(output.name, {})[output.sink_id] = pa.Table.from_batches(batches, schema)

    def _join(self, output: str, schema: pa.Schema) -> pa.Table:
        return pa.concat_tables([schema.empty_table(), *self._collected.get(output, {}).values()])

    # Determinism

    def replay(self, *, since: int = 0, parallelism: int | None = None, backend: str | None = None) -> int:
        """Take all steps again elsewhere, from the start or a checkpoint; compare state and output after each step.

        Args:
            since: the checkpoint to begin with, 0 for the start.
            parallelism: subtasks per operator; by default as many as each step had.
            backend: by default that of this tester.

        Returns:
            How many steps were compared.

        Raises:
            ProofFailed: a step has other effects than before. The message names its operator, table and key groups.
        """
        self._check_running()
        if parallelism is not None:
            check_run(self.stream, {}, parallelism)
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as scratch:
            backend = backend or self.backend
            replay = LocalReplay(self._place, self.stream, backend, Path(scratch), since, parallelism)
            steps = self._steps[replay.step :]
            for step in steps:
                again = replay.take(step)
                check_same(self._name(replay.step), step, again)
        return len(steps)

    def _name(self, step: int) -> str:
        return f"step {step} of {self.stream.name}"


def _types_of(given: Types) -> dict[str, pa.DataType]:
    return dict(given) if isinstance(given, Mapping) else {field.name: field.type for field in given}


def _read_column(types: dict[str, pa.DataType], name: str, values: Any) -> pa.Array:
    """Return a column as Spark would have it, and note its type."""
    known = types.get(name, pa.null())
    kind = None if pa.types.is_null(known) else known
    try:
        if not isinstance(values, pa.Array | pa.ChunkedArray):
            # Asked for integers, Arrow would cut floats off.
            values = pa.array(values, None if kind is None or pa.types.is_integer(kind) else kind)
        column = as_spark(values if kind is None else values.cast(kind))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"column {name} of the rows does not fit {kind or 'any type'}: {error}", advice="give a schema"
        ) from error
    if kind is None:  # null until a value tells
        types[name] = column.type
    return column
