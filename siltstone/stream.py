"""A stream: one or more sources, one or more operators in one consistent region, sinks. Also finds streams by name."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from siltstone.errors import UnknownStream, UsageError
from siltstone.model import DEFAULT_MAX_PARALLELISM, MAX_MAX_PARALLELISM, check_name
from siltstone.operator import SOURCE, Operator
from siltstone.secret import Secret
from siltstone.state.variables import Purpose
from siltstone.time.event_time import LATE, EventTime, RowTimes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


ENTRY_POINTS = "siltstone.streams"


class Sink(Protocol):
    """Takes one operator's output, checkpoint by checkpoint, in order of their ids.

    Siltstone stages the rows with the checkpoint and delivers them once it is complete. The same id always brings the
    same rows. After a crash between a delivery and its mark in the catalog the id comes once more: a sink that skips
    ids it already has gets every row exactly once.
    """

    def deliver(self, rows: "DataFrame", checkpoint: int) -> None:
        """Take the rows of a completed checkpoint; return once they are durable.

        An exception ends the run. The output stays outstanding, and the next run delivers it first.
        """
        ...


SourceFunction = Callable[["SparkSession", Mapping[str, str]], "DataFrame"]
"""makes a source's streaming DataFrame (`Stream.source`)"""
SinkFunction = Callable[["DataFrame", int], object]
"""a sink that is a function with the arguments of `Sink.deliver`"""
DEAD_LETTERS = "dead_letters"
"""the name of the sink of rows that the stream's operators cannot take, and of files that Spark cannot read"""
_DEAD_LETTER = "dead-letter"
ON_BAD = ("fail", _DEAD_LETTER)
"""what happens to a bad row, or a bad file"""
DIRECTORY = "directory"
"""the source option that Siltstone always sets"""
NO_SINK = object()
"""in place of a sink: the rows go nowhere"""


@dataclass(frozen=True)
class Autonomous:
    """An operator outside the consistent region of its stream: it reads the source by itself, and no checkpoint of the
    region waits for it.

    It is kept as a stream of its own, `STREAM-OPERATOR`, which every run of the stream runs too, in a query beside the
    region's. So it has checkpoints, digests, resets and a working state of its own, and all commands take its name.

    Args:
        operator: it reads the source.
        checkpoint_steps: micro-batches per checkpoint; None for the run's option.
        checkpoint_s: seconds between checkpoints, instead.
        sink: where its output goes, as in `Stream.sinks`; nowhere if it is not given. A sink has every row exactly
            once, but not at the same checkpoint as the region's sinks.
    """

    operator: Operator
    checkpoint_steps: int | None = None
    checkpoint_s: float | None = None
    sink: Any = NO_SINK

    def __post_init__(self) -> None:
        for option in ("checkpoint_steps", "checkpoint_s"):
            value = getattr(self, option)
            if value is not None and value <= 0:
                raise UsageError(
                    f"autonomous operator {self.operator.name}: {option} is {value}: use more than 0, or leave it out"
                )

    @property
    def cadence(self) -> dict[str, Any]:
        """The settings in which its run differs from the region's."""
        if self.checkpoint_steps is None and self.checkpoint_s is None:
            return {}
        return {"checkpoint_steps": self.checkpoint_steps or 1, "checkpoint_s": self.checkpoint_s}


@dataclass(frozen=True)
class Stream:
    """One streaming job.

    Args:
        name: an identifier; it begins every object name.
        source: makes the streaming DataFrame, given the session and the source options. These always include
            `directory`, the stream's own local directory below the warehouse; the others come from
            `run --set NAME=VALUE`. None for a stream that only runs in your own queries.
        options: the source options with their defaults; fixed for the stream's life. An option whose default is a
            `Secret`, such as a password, is read again by each run, and neither recorded nor shown.
        sources: name -> a function like `source`, or None, for a stream that reads several, by one query; `source` is
            short for one named "source". Names identify them: between runs they may be put in another order, and added.
            One that is gone from the code needs `run --drop source.NAME`, after which the name cannot be used again.
        operators: each reads one or more of the sources and of the other operators' outputs.
        event_time: the `EventTime` of the source, which operators with timers need; of several sources, name ->
            `EventTime`. A column's name (timestamp) alone records the highest event time of each checkpoint, and does
            nothing else. None for no event time.
        late: what happens to rows that are late: those whose event time is before the watermark of the step before,
            for an operator that goes by event time. They are always counted. "drop" leaves them out, "dead-letter"
            sends each to the sink of dead letters as well, exactly once per operator, and "process" processes them.
        event_days: the first and the last day (UTC) of its events, if known: state is then restored by day.
        sinks: output (an operator's name, or `OPERATOR-OUTPUT` for a side output) -> `DeltaSink`, `ParquetSink`,
            `JdbcSink`, `KafkaSink`, `ArrowSink`, an object with the methods of `Sink`, or a function
            `(rows, checkpoint)`; such outputs need a schema. None is a Delta table in the warehouse
            (`siltstone.sinks.resolve`). `DEAD_LETTERS` names the sink of dead letters.
        on_bad_row: what happens to a row that an operator cannot take (`BadRow`: a null key, a sum that overflows, a
            row that `process` refuses). "fail" stops the stream before any effect of its checkpoint is visible. With
            "dead-letter" the step goes on without the row, which goes to the sink of dead letters exactly once, with
            its reason, its checkpoint and the source's offsets (`siltstone.run.dead_letters`).
        on_bad_file: what happens to a file of a file source that Spark cannot read, such as one that is cut. "fail"
            stops the stream. With "dead-letter" the stream goes on without any of the file's rows, and its name and the
            reason go to the sink of dead letters, exactly once. Not for a query of your own (`stream_runner`).
        max_parallelism: the number of key groups; fixed for the stream's life.
        origin: for a fork, the first stream of its line, from whose `directory` its source keeps reading.
        autonomous: operators outside the consistent region, which only a stream with a source that can be read twice
            may have. A fork has none.
        beside: for the stream of an autonomous operator, the one from whose `directory` its source reads.

    Raises:
        UsageError: names clash, an operator reads one that does not exist or makes no output, a cycle.
    """

    name: str
    source: SourceFunction | None = None
    operators: Sequence[Operator] = ()
    event_time: str | EventTime | Mapping[str, EventTime] | None = None
    event_days: tuple[date, date] | None = None
    sinks: Mapping[str, Any] = field(default_factory=dict)
    max_parallelism: int = DEFAULT_MAX_PARALLELISM
    options: Mapping[str, str | Secret] = field(default_factory=dict)
    origin: str | None = None
    on_bad_row: str = "fail"
    on_bad_file: str = "fail"
    late: str = LATE[0]
    autonomous: Sequence[Autonomous] = ()
    beside: str | None = None
    sources: Mapping[str, SourceFunction | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option, choices in (("on_bad_row", ON_BAD), ("on_bad_file", ON_BAD), ("late", LATE)):
            if (chosen := getattr(self, option)) not in choices:
                raise UsageError(f"{option} is {chosen!r}: use {' or '.join(map(repr, choices))}")
        if self.dead_letters:
            object.__setattr__(self, "sinks", {**self.sinks, DEAD_LETTERS: self.sinks.get(DEAD_LETTERS)})
        for name in (self.name, self.origin or self.name):
            check_name("stream", name)
        if not 1 <= self.max_parallelism <= MAX_MAX_PARALLELISM:
            raise UsageError(f"max_parallelism is {self.max_parallelism}: use 1 to {MAX_MAX_PARALLELISM}")
        self._check_sources()
        by_name = {op.name: op for op in self.operators}
        if not by_name or len(by_name) != len(self.operators):
            raise UsageError(f"stream {self.name} needs operators with distinct names")
        named = [*self.source_names, *by_name, *(op.side_name(n) for op in self.operators for n in op.side_outputs)]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise UsageError(f"stream {self.name}: two sources, operators or outputs are called {twice[0]}: rename one")
        if DEAD_LETTERS in by_name:
            raise UsageError(f"stream {self.name}: {DEAD_LETTERS} is the name of a sink: rename the operator")
        if hidden := [op.name for op in self.operators if self.sorts_out_rows and op.combined is not None]:
            raise UsageError(
                f"stream {self.name}: operator {hidden[0]} combines rows before the shuffle, so it cannot make a "
                "single row a dead letter: leave out combined (of an Aggregate: map_side), or "
                'on_bad_row="dead-letter"'
            )
        outputs = [name for name in self.sinks if name != DEAD_LETTERS]
        read = [name for op in self.operators for name in op.input_names if name not in self.source_names]
        for name in [*read, *outputs]:
            if name not in self.outputs:
                raise UsageError(
                    f"stream {self.name} reads the output of {name!r}, which is not an operator with an output: "
                    f"declare its field output, or read another, or a source ({', '.join(self.source_names)})"
                )
        for name, sink in self.sinks.items():
            takes_rows = hasattr(sink, "deliver") or hasattr(sink, "stages_table") or callable(sink)
            if not (sink is None or takes_rows):
                raise UsageError(
                    f"the sink of {name} is a {type(sink).__name__}, which cannot take rows: use a DeltaSink, a "
                    "ParquetSink, a JdbcSink, a KafkaSink, an ArrowSink, a function (rows, checkpoint), or an object "
                    "with a method deliver(rows, checkpoint)"
                )
        if self.event_days is not None and (self.event_time is None or self.event_days[0] > self.event_days[1]):
            raise UsageError(f"stream {self.name}: event_days: give the first and last day of its event_time, in order")
        for source in self.time_columns:
            if self._event_time_operator(source) is None:
                raise UsageError(
                    f"stream {self.name} has an event time, so one operator must read the {source} by key and not "
                    "combine rows before the shuffle: leave out combined (of an Aggregate: map_side)"
                )
        self.sort_operators()
        self._check_times()
        self._check_autonomous()

    def _check_sources(self) -> None:
        """Check the names of the sources, and that each is read."""
        if self.sources and self.source is not None:
            raise UsageError(f"stream {self.name} has source and sources: give one of the two")
        read = {name for op in (*self.operators, *(one.operator for one in self.autonomous)) for name in op.input_names}
        for name in self.sources:
            check_name("source", name)
            if name not in read:
                raise UsageError(f"stream {self.name} has a source {name}, which no operator reads: leave it out")
        if isinstance(self.event_time, Mapping):
            for name, one in self.event_time.items():
                if name not in self.source_names or not isinstance(one, EventTime):
                    raise UsageError(
                        f"stream {self.name}: event_time has {name!r}: give {{SOURCE: EventTime(...)}}, of its sources "
                        f"{', '.join(self.source_names)}"
                    )
        elif self.event_time is not None and len(self.sources) > 1:
            raise UsageError(f"stream {self.name} has several sources: give event_time={{SOURCE: EventTime(...)}}")

    def _check_times(self) -> None:
        """Check that what operators know of event time is known where they read."""
        for op in self.operators:
            where = f"stream {self.name}, operator {op.name}"
            goes_by = "event" in op.clocks
            if not goes_by and not op.output_times:
                continue
            for name in op.keyed_inputs:
                if name in self.source_names:
                    known = self.event_times[name].at if name in self.event_times else None
                else:
                    known = self.output_times.get(name)
                if known is None and name in self.source_names:
                    raise UsageError(
                        f"{where} goes by event time, and the stream does not tell that of its {name}: give it "
                        + (
                            'event_time=EventTime("COLUMN", delay="10 minutes")'
                            if not self.sources
                            else f'event_time={{"{name}": EventTime("COLUMN", delay="10 minutes")}}'
                        )
                    )
                if known is None:
                    raise UsageError(
                        f"{where} goes by event time, and the output of {name}, which it reads, has none: name the "
                        "column with it in the field output_time there"
                    )
                if (used := op.time_column(name)) not in (None, known):
                    raise UsageError(
                        f"{where} takes {used} of {name} for its event time, and that is {known}: use {known!r}"
                    )
            fires_by = {by.clock for by in op.due_columns().values() if by.purpose is not Purpose.EXPIRY}
            if "processing" in fires_by and op.output_times:
                raise UsageError(
                    f"{where} goes by the time of day, so its output has no event time: leave out output_time"
                )
            if goes_by and op.combined is not None:
                self._check_combined_times(op, where)

    def _check_combined_times(self, op: Operator, where: str) -> None:
        """Check that rows which are combined before the shuffle can still be told late.

        Raises:
            UsageError: they cannot.
        """
        (times,) = self.row_times(op).values()
        if lacks := [name for name in times.columns if name not in op.combined.names]:
            raise UsageError(
                f"{where} goes by event time, and the rows that it combines before the shuffle do not have "
                f"{', '.join(lacks)}: leave out combined (of an Aggregate: map_side)"
            )
        if times.late == _DEAD_LETTER:
            raise UsageError(
                f"{where} combines rows before the shuffle, so no single one can become a dead letter: leave out "
                f'combined (of an Aggregate: map_side), or late="{_DEAD_LETTER}"'
            )

    def _check_autonomous(self) -> None:
        """Check the autonomous operators, each also as the stream that it is kept as."""
        names = {op.name for op in self.operators}
        for one in self.autonomous:
            operator, where = one.operator, f"stream {self.name}, autonomous operator {one.operator.name}"
            if operator.name in names:
                raise UsageError(f"{where}: another operator has this name: rename one")
            if others := [name for name in operator.input_names if name not in self.source_names]:
                raise UsageError(
                    f"{where} reads the output of {others[0]}, which comes again after a failure: let it read the "
                    "source, or make it one of the operators"
                )
            if operator.defines("prepare_for_nonblocking_checkpoint"):
                raise UsageError(
                    f"{where} prepares for the region's checkpoints, in which it has no part: leave out "
                    "prepare_for_nonblocking_checkpoint, or make it one of the operators"
                )
            names.add(operator.name)
        self.autonomous_streams()

    def autonomous_streams(self) -> list["Stream"]:
        """Return the streams that the autonomous operators are kept as, in their order."""
        return [
            Stream(
                name=f"{self.name}-{one.operator.name}",
                source=self.source,
                sources={name: of for name, of in self.sources.items() if name in one.operator.input_names},
                operators=[one.operator],
                event_time=self._times_of(one.operator) if _tells_times(one.operator) else None,
                late=self.late,
                event_days=self.event_days if _tells_times(one.operator) else None,
                sinks={} if one.sink is NO_SINK else {one.operator.name: one.sink},
                max_parallelism=self.max_parallelism,
                options=self.options,
                on_bad_row=self.on_bad_row,
                on_bad_file=self.on_bad_file,
                beside=self.origin or self.name,
            )
            for one in self.autonomous
        ]

    def as_fork(self, name: str, origin: str | None) -> "Stream":
        """Return this stream as the fork `name` of a line that began with `origin`; itself if `origin` is None.

        Autonomous operators stay with the stream that defines them.

        Raises:
            UsageError: a sink has a fixed path, which both streams would write to.
        """
        if origin is None:
            return self
        for operator, sink in self.sinks.items():
            if name != self.name and getattr(sink, "path", sink) is not None:
                raise UsageError(
                    f"stream {name} is a fork of {self.name} and would write to its sink of {operator}: "
                    f"define a stream {name} with sinks of its own"
                )
        return replace(self, name=name, origin=origin, autonomous=self.autonomous if name == self.name else ())

    @property
    def dead_letters(self) -> bool:
        """Whether bad or late rows, or files that Spark cannot read, become dead letters."""
        return self.sorts_out_rows or self.sorts_out_files or self.late == _DEAD_LETTER

    @property
    def sorts_out_rows(self) -> bool:
        """Whether rows that an operator cannot take become dead letters."""
        return self.on_bad_row == _DEAD_LETTER

    @property
    def sorts_out_files(self) -> bool:
        """Whether files that Spark cannot read become dead letters."""
        return self.on_bad_file == _DEAD_LETTER

    @property
    def source_functions(self) -> dict[str, SourceFunction | None]:
        """Name -> source, of all sources."""
        return dict(self.sources) or {SOURCE: self.source}

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources, in the order in which Spark reads them."""
        return tuple(self.sources) or (SOURCE,)

    @property
    def read_sources(self) -> tuple[str, ...]:
        """The names of the sources that its own operators read: some may be there for autonomous ones alone."""
        read = {name for op in self.operators for name in op.input_names}
        return tuple(name for name in self.source_names if name in read)

    @property
    def time_columns(self) -> dict[str, str]:
        """Source -> its column with the event time, of those that have one."""
        if isinstance(self.event_time, str):
            return {self.source_names[0]: self.event_time}
        return {name: one.at for name, one in self.event_times.items()}

    @property
    def event_times(self) -> dict[str, EventTime]:
        """Source -> its event time, of those with a watermark."""
        if isinstance(self.event_time, Mapping):
            keyed = {name for op in self.operators for name in op.keyed_inputs}
            return {name: of for name, of in self.event_time.items() if name in keyed}
        return {self.source_names[0]: self.event_time} if isinstance(self.event_time, EventTime) else {}

    def _times_of(self, operator: Operator) -> str | EventTime | Mapping[str, EventTime] | None:
        """Return the event times of the sources that an operator reads."""
        if isinstance(self.event_time, Mapping):
            return {name: of for name, of in self.event_time.items() if name in operator.keyed_inputs} or None
        return self.event_time

    @property
    def is_timed(self) -> bool:
        """Whether an operator goes by a clock."""
        return any(op.clocks for op in self.operators)

    def row_times(self, operator: Operator) -> dict[str, RowTimes]:
        """Return input -> how its rows tell their event time, of the inputs of an operator of which it asks that."""
        found = {name: self._row_times(operator, name) for name in operator.keyed_inputs}
        return {name: times for name, times in found.items() if times is not None}

    def _row_times(self, operator: Operator, name: str) -> RowTimes | None:
        late = self.late if "event" in operator.clocks else None
        if name not in self.source_names:
            return None if late is None else RowTimes(self.output_times[name], is_checked=True, late=late)
        if isinstance(self.event_time, str):
            is_reader = name in self.time_columns and operator.name == self._event_time_operator(name)
            return RowTimes(self.event_time) if is_reader else None
        one = self.event_times.get(name)
        if one is None or not _tells_times(operator):
            return None
        return RowTimes(one.at, one.partition, True, one.max_ahead // timedelta(microseconds=1), late)

    def _event_time_operator(self, source: str) -> str | None:
        """Return the operator whose subtasks read the event time of a source: one that gets its rows themselves."""
        column = self.time_columns[source]
        readers = [op for op in self.operators if source in op.keyed_inputs and _tells_times(op)]
        having = [
            op
            for op in readers
            if not op.columns_of(source) or column in (*op.columns_of(source), *op.key_columns(source).values())
        ]
        return next((op.name for op in [*having, *readers]), None)

    def sort_operators(self) -> list[Operator]:
        """Return the operators, each after the one it reads."""
        return [operator for level in self.levels() for operator in level]

    def levels(self) -> list[list[Operator]]:
        """Return the operators that read the source, then those that read their outputs, and so on."""
        levels: list[list[Operator]] = []
        names, left = set(self.source_names), list(self.operators)
        while left:
            ready = [op for op in left if names.issuperset(op.input_names)]
            if not ready:
                raise UsageError(f"stream {self.name}: operators read each other in a circle: let one read the source")
            levels.append(ready)
            names |= {name for op in ready for name in op.outputs}
            left = [op for op in left if op not in ready]
        return levels

    @property
    def outputs(self) -> dict[str, Operator]:
        """Output -> the operator that makes it."""
        return {name: op for op in self.operators for name in op.outputs}

    @property
    def output_times(self) -> dict[str, str]:
        """Output -> its column with the event time, of those that have one."""
        return {name: column for op in self.operators for name, column in op.output_times.items()}

    def has_reader(self, operator: Operator) -> bool:
        """Whether another operator reads an output of this one."""
        return any(name in operator.outputs for op in self.operators for name in op.input_names)

    def definition(self) -> dict[str, Any]:
        """Return the part of the definition that recorded state depends on, as JSON: the operators' variables and
        their schemas."""
        return {"operators": {op.name: op.definition() for op in self.operators}}


def _tells_times(operator: Operator) -> bool:
    """Whether the rows that an operator takes of the source still have their event time after they were combined."""
    return operator.combined is None or "event" in operator.clocks


def find_streams(modules: Iterable[str] = ()) -> tuple[dict[str, Stream], dict[str, str]]:
    """Find every stream defined in `stream` (see `load_module`) and in the entry point group `siltstone.streams`.

    A module's streams are its attributes of type `Stream`, and those that their autonomous operators are kept as; a
    package's are those that it imports itself.

    Returns:
        name -> stream, and module -> reason for each module that could not be imported.
    """
    found: dict[str, Stream] = {}
    broken: dict[str, str] = {}
    for module in [*modules, *installed_streams()]:
        try:
            defined = [each for each in vars(load_module(module)).values() if isinstance(each, Stream)]
            found.update({s.name: s for s in defined})
            for each in (beside for stream in defined for beside in stream.autonomous_streams()):
                if found.setdefault(each.name, each) != each:
                    raise UsageError(f"two streams are called {each.name}, one for an autonomous operator: rename one")
        except Exception as error:  # a user's module may fail in any way; the others must still load
            broken[module] = f"{type(error).__name__}: {error}"
    return found, broken


def installed_streams() -> list[str]:
    """Return the modules in the entry point group `siltstone.streams`."""
    return [point.module for point in entry_points(group=ENTRY_POINTS)]


def find_stream(name: str, modules: Iterable[str] = ()) -> Stream:
    """Return the stream of this name.

    Raises:
        UnknownStream: it is not defined; the message lists the streams found and the modules that failed.
    """
    check_name("stream", name)
    found, broken = find_streams(modules)
    if name in found:
        return found[name]
    known = ", ".join(sorted(found)) or "none"
    failed = "".join(f"; module {module} did not import ({why})" for module, why in broken.items())
    raise UnknownStream(f"no stream {name!r} is defined (defined: {known}){failed}")


def load_module(name: str) -> ModuleType:
    """Import `./streams`, `streams/flights.py` or an installed `my_streams.flights`.

    The directory that contains the path goes last on the module search path, where worker processes search too.

    Raises:
        UsageError: the path is not a module, or another module of its name is found before it.
        Exception: the module raised it.
    """
    if "/" in name or name.endswith(".py"):
        return _by_path(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        here = Path(*name.split("."))
        beside = next((path for path in (here.with_suffix(".py"), here) if path.exists()), None)
        if error.name is None or beside is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"no module {name} is installed: to use the one here, name its path, ./{beside}") from None


def _by_path(name: str) -> ModuleType:
    path = Path(name).resolve()
    package = path / "__init__.py"
    if not (package.is_file() or (path.suffix == ".py" and path.is_file())):
        raise UsageError(f"{name} is not a module: name a .py file, or a directory with an __init__.py")
    root, parts = path.parent, [path.stem if path.suffix == ".py" else path.name]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"{name} cannot be a module's name: use letters, digits and _")
    if str(root) not in sys.path:
        sys.path.append(str(root))
    module = importlib.import_module(".".join(parts))
    found = Path(module.__file__ or "").resolve()
    if found not in (path, package):
        raise UsageError(f"{name} is hidden by another module of its name, {found}: rename it")
    return module
