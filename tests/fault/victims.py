"""Processes to be hurt that cost no start: forked from one that has imported everything, without a JVM.

Such a victim runs a command of the real command line. Where that maps a function over Spark's tasks, this process maps
it in a loop, and so the tasks of `rescale`'s step, which has no rows. `run` moves the stream's region from step to step
as the runner does; input and outputs are Arrow tables instead of Spark's, the sinks are the real ones.

What hurts may come from outside, or from the victim itself, at a line of the engine's own code: so a moment that passes
too fast to be met from outside is met as often as any other line.
"""

import errno
import json
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone import cli
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.records.steps import StepKind, with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import find_definition
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import Fenced, StateError, Unreachable
from siltstone.format.output import read_output, staged_schema
from siltstone.run.behind import CheckpointsBehind
from siltstone.run.outbox import Give
from siltstone.run.region import Completed, ConsistentRegion
from siltstone.run.task import StepTask
from siltstone.run.working_state import remove_older_epochs
from siltstone.settings import load_settings
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.resolve import resolve_sinks
from siltstone.spark import operations, step
from siltstone.store.open import Warehouse
from tests.fault import held_stream
from tests.fault.attempts import LostAttempts
from tests.fault.journal import JournaledSink
from tests.fault.jumping_clock import jumping_clock
from tests.fault.lines import Within, signal_at
from tests.fault.pruning import prune_early
from tests.fault.small_stream import purchases
from tests.proofs import in_order
from tests.region_run import RegionSteps, run_tasks

FAILING = ("open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.scandir")
"""audit events of what a broken disk refuses"""


@dataclass(frozen=True)
class Orders:
    """What a victim is to do, and what becomes of it.

    Attributes:
        arguments: of `siltstone`.
        said: where its standard output and error go, `.out` and `.err`.
        at_line: it sends itself `signal` when it comes to so many lines of the engine's code.
        within: only lines count that are run by this function of the engine, or by what it calls (`lines`).
        refused: a share of what it asks of the disk below `objects` that fails with an I/O error.
        file_bytes: no file may grow beyond.
        environment: further variables.
        sinks: where streams have their sinks, if not in the warehouse.
        stream: whose stream it is, if not that of the first argument.
        hosts: the warehouse's URL as each host names it: tasks of `run` are done on any of them.
        lost: a share of the attempts at such tasks is done, and its acknowledgement lost; another follows.
    """

    arguments: Sequence[str]
    said: Path
    at_line: int | None = None
    signal: int = signal.SIGKILL
    within: Within | None = None
    refused: float = 0.0
    seed: int = 0
    file_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    sinks: Path | None = None
    stream: str | None = None
    hosts: Sequence[str] = ()
    lost: float = 0.0


def main(orders: Orders) -> None:
    """The life of a victim."""
    for number, suffix in ((1, ".out"), (2, ".err")):
        opened = os.open(orders.said.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
    os.environ.update(orders.environment, SILTSTONE_STREAMS=json.dumps([held_stream.__name__]))
    _without_spark()
    prune_early()
    if orders.refused:
        _break_disk(orders)
    if orders.file_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (orders.file_bytes, orders.file_bytes))
    command, *rest = orders.arguments
    sys.argv = ["siltstone", *orders.arguments]
    if orders.at_line is not None:
        signal_at(orders.at_line, orders.signal, orders.within)
    with jumping_clock(random.Random(orders.seed)):
        if command == "run":
            cli.main(lambda: run(rest[0], _options(rest), orders))
        cli.main()


def _without_spark() -> None:
    """Map in this process what would be mapped by Spark's tasks."""

    for name, module in list(sys.modules.items()):
        if name.startswith("siltstone.spark.operations."):
            without = {
                "spark_session": lambda *_, **__: None,
                "cores": lambda _: 2,
                "spark_map": lambda _, *work, **__: in_order(*work),
            }
            for attribute, value in without.items():
                if hasattr(module, attribute):
                    setattr(module, attribute, value)

    def acknowledgements(_: object, tasks: Mapping[str, StepTask]) -> dict[str, list[Acknowledgement]]:
        return {name: list(run_tasks(task, {})[1]) for name, task in tasks.items()}

    said = {"empty_step_frame": lambda *_: None, "collect_acknowledgements": acknowledgements}
    for attribute, value in said.items():
        setattr(step, attribute, value)


def _break_disk(orders: Orders) -> None:
    place = urlsplit(orders.arguments[orders.arguments.index("--warehouse") + 1])
    objects = os.path.join(unquote(place.path), "objects") + os.sep
    chance = random.Random(orders.seed)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FAILING and str(arguments[0]).startswith(objects) and chance.random() < orders.refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))

    sys.addaudithook(hook)


# --- a run without Spark ---------------------------------------------------------------------------------------------


def _options(arguments: Sequence[str]) -> dict[str, str]:
    names = [name.removeprefix("--").replace("-", "_") for name in arguments[1::2]]
    return dict(zip(names, arguments[2::2], strict=True))


def run(name: str, options: Mapping[str, str], orders: Orders) -> None:
    """`siltstone run`, with some options, of the small stream or a fork of it.

    What a rollback has logged comes again with the same boundaries, whatever the options say.
    """
    wanted = dict(options)
    batches = int(wanted.pop("batches", len(purchases())))
    settings = load_settings(**wanted)
    with OpenWarehouse.open_writable(settings.warehouse, settings.catalog) as place:
        region = operations.open_region(settings, find_definition(settings, name), place, {}, 2)
        outcome, steps = "failed", None
        try:
            hosts = [Warehouse.at(url) for url in orders.hosts]
            lost = LostAttempts(hosts, orders.lost, orders.seed) if hosts else None
            steps = SinkingSteps(region, orders.sinks, lost)
            remove_older_epochs(region.warehouse.local, name, region.oldest_epoch or region.epoch)
            until = min(steps.batches + batches, len(purchases()))
            for step, ends in with_ends(region.logged_steps()):
                # Of a checkpoint that comes again all steps do, even if these are more than were asked for.
                if steps.batches >= until and region.step == region.completed_step:
                    break
                if step.batch_id is None:
                    steps.step_without_rows(step.kind, ends=ends, clock=step.clock)
                else:
                    steps.step(purchases()[steps.batches], ends=ends, clock=step.clock)
            steps.goes_on = region.options.max_pending > 0
            # Half of the runs end their last interval by a step without rows, as Spark's runner does.
            by_batch = region.epoch % 2 == 0
            for number in range(steps.batches, until):
                if region.has_steps and region.clock.is_due() and number % 3 == 0:
                    steps.step_without_rows(ends=False)
                steps.step(purchases()[number], last=by_batch and number + 1 == until)
            if region.has_steps:
                steps.step_without_rows()
            steps.drain()
            outcome = "done"
        except Exception as error:
            error = region.fail(error)
            if isinstance(error, Fenced):
                outcome = "fenced"
            else:
                with suppress(Unreachable):
                    region.check_fence()  # then that is why, as for the stream's runner
            raise error from None
        finally:
            if steps is not None:
                steps.behind.close()
            with suppress(Unreachable):
                region.close(outcome)
    print(json.dumps({"checkpoint": region.completed, "digest": region.digest}), flush=True)


class SinkingSteps(RegionSteps):
    """Steps whose output goes to the stream's sinks, in the order of the stream's runner."""

    def __init__(self, region: ConsistentRegion, sinks: Path | None = None, lost: LostAttempts | None = None) -> None:
        super().__init__(region)
        name = region.stream.name
        directory = sinks / name if sinks else region.warehouse.local.sink(name)
        resolved = resolve_sinks(region.stream, OpenWarehouse(region.warehouse, region.catalog))
        self._gives: dict[str, Give] = {
            each: sink.deliver if isinstance(sink, SinkTable) else partial(self._give, JournaledSink(directory / each))
            for each, sink in resolved.items()
        }
        self._lost = lost
        self.goes_on = False
        """whether it goes on while checkpoints are pending"""
        self._turn, self._failed = threading.Condition(threading.Lock()), False
        self.behind = CheckpointsBehind(region, self._turn, self._deliver, self._fail)
        region.deliver(self._gives)

    def step(self, rows: pa.Table, *, last: bool = False, ends: bool | None = None, **logged: Any) -> Completed | None:
        """One micro-batch, once there is room for the checkpoint that it may end in."""
        with self._turn:
            ends = last or self.region.ends_next if ends is None else ends
            self._turn.wait_for(lambda: self.behind.has_room or not ends or self._failed)
            return super().step(rows, ends=ends, **logged)

    def step_without_rows(
        self, kind: StepKind = StepKind.EMPTY, *, ends: bool = True, **logged: Any
    ) -> Completed | None:
        """One without a micro-batch, once there is room for the checkpoint that it may end in."""
        with self._turn:
            self._turn.wait_for(lambda: self.behind.has_room or not ends or self._failed)
            return super().step_without_rows(kind, ends=ends, **logged)

    def _clock(self) -> str:
        """The region decides it, by a time of day that jumps."""
        return ""

    def make_room(self) -> None:
        """Behind the stream, room is made."""

    def end_interval(self) -> Completed | None:
        """Leave the checkpoint to the threads behind the stream, or complete it."""
        if not self.goes_on:
            return self.complete()
        super().end_interval()
        self.behind.add()
        return None

    def drain(self) -> None:
        """Wait until all checkpoints are complete and delivered.

        Raises:
            StateError: one was not.
        """
        with self._turn:
            self._turn.wait_for(lambda: self.behind.is_empty or self._failed)
        if self._failed:
            raise StateError("a checkpoint failed behind the stream")

    def complete(self) -> Completed:
        """Commit, then deliver."""
        completed = super().complete()
        self._deliver(completed)
        return completed

    def _deliver(self, _: Completed) -> None:
        self.region.deliver(self._gives, checked=True)

    def _fail(self, error: BaseException) -> None:
        self.region.fail(error)
        self._failed = True

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        """On any host, after some whose acknowledgements were lost."""
        if self._lost is None:
            return super().attempt(task, rows)
        return super().attempt(self._lost.before(task, rows), rows)

    def _give(self, sink: JournaledSink, output: OutputRecord) -> None:
        """Hand the staged rows over."""
        store, schema = self.region.warehouse.store, staged_schema(output.arrow_schema)
        batches = [batch for stored in output.objects for batch in read_output(store, stored)]
        rows: Any = Frame(pa.Table.from_batches(batches, schema))
        sink.deliver(rows, output.sink_id)


class Frame:
    """As much of a DataFrame and its writer as the sink uses, around an Arrow table."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def toArrow(self) -> pa.Table:
        """All rows."""
        return self._rows

    def coalesce(self, _: int) -> "Frame":
        """One file it is."""
        return self

    @property
    def write(self) -> "Frame":
        """The writer."""
        return self

    def mode(self, mode: str) -> "Frame":
        """Overwrite is all that it knows."""
        assert mode == "overwrite"
        return self

    def parquet(self, url: str) -> None:
        """Replace the directory."""
        directory = Path(unquote(urlsplit(url).path))
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        pq.write_table(self._rows, directory / "part-00000.parquet")
