"""The `Operator` that a user writes: a vectorised, keyed, stateful step over Arrow tables.

    class Delays(Operator):
        name = "delays"
        key = {"tailnum": pa.string()}
        output = pa.schema([("tailnum", pa.string()), ("flights", pa.int64())])
        totals = ValueState(value={"flights": pa.int64()})

        def process(self, rows, state):
            old = state.totals.get(rows.keys)  # one row per key, null for a new key
            flights = rows.count(initial=old["flights"])  # one value per key
            state.totals.put(rows.keys, {"flights": flights})
            return rows.keys.with_columns({"flights": flights})

`siltstone.rows` describes the methods of `rows`. An operator keeps nothing but its state between calls: copies of it
run wherever its subtasks run, and a call may come twice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.model import KeyGroupRange, Kind, check_name
from siltstone.rows import Due, Keys, Rows
from siltstone.state.backend import KeyedState
from siltstone.state.schema import TableSchema, describe_key
from siltstone.state.time_index import DueRows
from siltstone.state.ttl import TTL
from siltstone.state.variables import (
    BroadcastState,
    DueColumn,
    ListState,
    MapState,
    OpaqueState,
    Timer,
    ValueState,
    Variable,
    WindowState,
    key_of,
    schema_of,
)
from siltstone.state_handler import (
    PREPARED,
    PREPARED_STATE,
    CheckpointWriter,
    OperatorCheckpoint,
    Returned,
    StateHandler,
)
from siltstone.time.clock_rules import OperatorClock
from siltstone.times import parse_duration

__all__ = [
    "SOURCE",
    "TTL",
    "BroadcastState",
    "CheckpointWriter",
    "Due",
    "Keys",
    "ListState",
    "MapState",
    "OpaqueState",
    "Operator",
    "OperatorCheckpoint",
    "OperatorContext",
    "Rows",
    "State",
    "StateHandler",
    "Timer",
    "ValueState",
    "WindowState",
]

SOURCE = "source"
"""the name of a stream's source, unless it gives its sources names"""
COMBINED_ROWS = "__rows"
"""a column of `combined`, if late rows are to be counted: how many rows each combined one stands for"""


class State:
    """The operator's variables in one subtask, each an attribute named after it (`siltstone.state.access`)."""

    def __init__(self, operator: "Operator", state: KeyedState, clock: OperatorClock | None = None) -> None:
        self._operator = operator.name
        self._clock = clock
        self._opaque = []
        self._requested = False
        for name, variable in operator.declared_variables().items():
            bound = variable.bind(name, state)
            setattr(self, name, bound)
            if variable.kind is Kind.OPAQUE:
                self._opaque.append(bound)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"operator {self.__dict__.get('_operator')} has no variable {name!r}")

    def flush(self) -> None:
        """Save the opaque objects that changed; the engine calls it at the end of each step."""
        for bound in self._opaque:
            bound.flush()

    def request_checkpoint(self) -> None:
        """Ask that the stream be checkpointed right after the step in progress, at once rather than when it is due.

        It is Teracloud's `makeConsistentNonBlocking`, from within the region: the call returns, and `process` goes on.
        The request counts once for a step, however many subtasks make it.
        """
        self._requested = True

    @property
    def clock(self) -> OperatorClock:
        """The step's clock: `now`, the time of day, and `watermark`. It is the same each time the step is run.

        Raises:
            UsageError: the step has none, since it changes the stream between two runs, or is older than clocks.
        """
        if self._clock is None:
            raise UsageError(f"operator {self._operator}: this step has no clock: it was logged before steps had one")
        return self._clock

    @property
    def checkpoint_requested(self) -> bool:
        """Whether the step has asked for a checkpoint so far."""
        return self._requested


@dataclass(frozen=True)
class OperatorContext:
    """The task that an operator is opened for.

    Attributes:
        operator: its name.
        subtask: which of the `parallelism` subtasks it is, from 0.
        parallelism: how many subtasks the operator has.
        key_groups: the key groups whose rows and state the subtask has.
        step: the step that is about to run.
        checkpoint: the checkpoint that this step ends with, or None.
    """

    operator: str
    subtask: int
    parallelism: int
    key_groups: KeyGroupRange
    step: int
    checkpoint: int | None


class Operator(StateHandler):
    """A keyed, stateful step. Subclass it, declare variables as class attributes, and write `process`.

    Fields are class attributes or arguments of the constructor:

        name        an identifier, distinct within the stream
        key         the key columns, `{name: type}` or an Arrow schema (a schema once constructed)
        nullable    the key columns in which null is one more value, as in Spark's `groupBy`; a row with a null in
                    another one is refused (`BadRow`)
        reads       the source, or the operator, that it reads. For several: input -> {its column: the key column},
                    such as {"auctions": {"id": "auction"}, "bids": {"auction": "auction"}}; `rows.of("bids")` are the
                    rows of one of them. Beside a `BroadcastState` a dict, even of one input: the table names its own
        inputs      the columns it reads besides the key; empty means all that Python has a type for. For several
                    inputs: input -> its columns; of one that is left out, all, and of a table's those of the table
        order_by    columns by which the rows of a step are sorted, within a subtask, before `process` sees
                    them; logic that depends on the order of a key's rows is deterministic only with it. A column of
                    one of several inputs is "INPUT.COLUMN"; "INPUT" sorts its rows by all their columns, after the
                    rows of the others
        output      the columns that `process` returns, likewise, or None if it returns nothing
        output_time the column of `output` with the event time of its rows, for operators that read them; None if they
                    have none
        keeps_key   whether each row of `output` has a key of the rows or timers of the call that returns it, in columns
                    with the key's names and types. An operator that reads the output by the same key is then fused to
                    it: it runs in the same tasks, without a shuffle between them (`siltstone.run.fusing`). True for
                    those of the library
        side_outputs
                    further outputs: name -> the columns. `process`, and whatever else returns rows, may then return a
                    dict, {"alerts": table}, which has its own output, if any, under the operator's name. Readers and
                    sinks call such an output `OPERATOR-OUTPUT`, as in "carts-alerts"
        side_times  side output -> its column with the event time of its rows
        holds_back  how much earlier than the watermark of its inputs the event time of its output may be, such as "1
                    hour": that much less is the watermark of the operators that read it
        combined    the columns that `combine` returns, likewise, including the key's and those of `order_by`;
                    None if rows go through the shuffle unchanged. With event time, it has that column, too, with
                    a time by which a combined row is late if and only if all of its rows are

    Raises:
        UsageError: a field or a variable is missing or wrong; the message says which.
    """

    name: str = ""
    key: Any = None
    nullable: tuple[str, ...] = ()
    reads: str | Mapping[str, Mapping[str, str]] = SOURCE
    inputs: Any = ()
    order_by: tuple[str, ...] = ()
    output: Any = None
    output_time: str | None = None
    keeps_key: bool = False
    side_outputs: Mapping[str, Any] = {}
    side_times: Mapping[str, str] = {}
    holds_back: Any = timedelta(0)
    combined: Any = None
    takes_all: bool = False
    """whether one call of `process` gets all rows that a step has for a subtask; for the engine"""
    FIELDS: ClassVar = (
        *("name", "key", "nullable", "reads", "inputs", "order_by"),
        *("output", "output_time", "keeps_key", "side_outputs", "side_times", "holds_back", "combined"),
    )

    def __init__(self, **fields: Any) -> None:
        unknown = sorted(fields.keys() - set(self.FIELDS))
        if unknown:
            raise UsageError(f"an operator has no field {', '.join(unknown)} (it has {', '.join(self.FIELDS)})")
        for field, value in fields.items():
            setattr(self, field, value)
        self._check()

    def open(self, context: OperatorContext) -> None:
        """Prepare for one task's calls of `process`, for example by connecting to a service; by default do nothing.

        Called once per task (one subtask in one step), before the first call of `process`, also in a step without rows
        for the subtask. It runs in a Python worker of a Spark executor, on the copy of the operator that was sent
        there. A task that runs again opens again. Attributes are only a cache: they are gone after the task, and no
        checkpoint contains them. State belongs in variables.
        """

    def close(self) -> None:
        """Release what `open` made; by default do nothing.

        Called once per task whose `open` returned, after the last call of `process`, before the state is saved, also if
        `process` raised or the task was cancelled. It is not called if the task's process dies.
        """

    def combine(self, table: pa.Table) -> pa.Table:
        """Aggregate rows before the shuffle, so that fewer go through it; pays if many rows share few keys.

        Called only if `combined` is set, in the tasks that read the operator's input, with any part of its rows, any
        number of times; never with its own results. `process` then gets the results instead of the rows, and must reach
        the same state and output however the rows were split and combined. State is not available, and `open` has not
        been called.

        Args:
            table: the columns that the operator reads; the key has the declared types and may still be null. Return
                rows with a null in a column that is not `nullable` unchanged: the engine refuses them.

        Returns:
            Rows of the columns `combined`. Spark has no unsigned integers.
        """
        raise NotImplementedError(f"operator {self.name} does not define combine")

    def process(self, rows: Rows, state: State) -> Returned:
        """Process some rows of a step, read and change state, and return output rows, if any.

        A step may take several calls. All rows of a key go to one subtask. Equal rows in equal order must have equal
        effects, because a task may run twice.

        Raises:
            BadRow: the operator cannot take some rows; with `rows`, they may become dead letters.
        """
        raise NotImplementedError(f"operator {self.name} does not define process")

    def on_timer(self, due: Due, state: State) -> Returned:
        """React to timers that are due, of many keys at once; may change state, set timers, and return output rows.

        Called after the last `process` of a step, also of one without rows, with at most 262,144 keys of one timer
        variable. A timer is removed before it fires. Those of one key fire in the order of their times and names, and
        one that an earlier call clears or moves does not fire. Timers that are set here and due already fire in a
        further round of the same step. Equal state and clocks must have equal effects: use `state.clock.now`, not the
        time of day.
        """
        raise NotImplementedError(f"operator {self.name} does not define on_timer")

    def on_due(self, table: str, take: Callable[[int], DueRows], state: State) -> Iterator[Returned]:
        """React to rows of one of its tables that are due, and yield output rows: how operators of the library close
        what ends by itself, such as a window.

        Called once at the end of each step for a table that `due_columns` names with `Purpose.ROWS`, after timers.

        Args:
            table: the name of the state table.
            take: returns the next rows that are due, at most this number, in the order of their due times; an empty
                result means that nothing more is due. The caller deletes these rows, or puts them with a later time.
        """
        raise NotImplementedError(f"operator {self.name} does not define on_due")

    def find_late(self, at: np.ndarray, before_us: int) -> np.ndarray:
        """Return which rows are late (bool[n]): all that they could change had fired in the step before.

        Args:
            at: int64[n], their event times in microseconds since 1970.
            before_us: the watermark of the step before.
        """
        return at < before_us

    def time_column(self, name: str) -> str | None:
        """Return the column of an input that it takes for the event time of its rows, which the stream checks; None if
        it takes none."""
        return None

    @property
    def reads_several(self) -> bool:
        """Whether its rows are of several inputs, each of which says which of its columns are the key."""
        return isinstance(self.reads, Mapping)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the sources and operators that it reads: by key, then for its broadcast tables."""
        return self.keyed_inputs + self.broadcast_inputs

    @property
    def keyed_inputs(self) -> tuple[str, ...]:
        """The inputs whose rows go each to the subtask of its key."""
        return (self.reads,) if isinstance(self.reads, str) else tuple(self.reads)

    @property
    def broadcasts(self) -> dict[str, str]:
        """Broadcast table -> the input whose rows go to every subtask, for that table."""
        variables = self.variables().items()
        return {name: variable.reads for name, variable in variables if isinstance(variable, BroadcastState)}

    @property
    def broadcast_inputs(self) -> tuple[str, ...]:
        """The inputs of broadcast tables, each once."""
        return tuple(dict.fromkeys(self.broadcasts.values()))

    def key_columns(self, name: str) -> dict[str, str]:
        """Return key column -> the column of an input that it is; nothing of one of a broadcast table."""
        if isinstance(self.reads, str):
            return {column: column for column in self.key.names}
        return {key: column for column, key in self.reads.get(name, {}).items()}

    @property
    def outputs(self) -> dict[str, pa.Schema]:
        """Output -> its columns: the operator's own, under its name, and the side outputs."""
        own = {} if self.output is None else {self.name: self.output}
        return own | {self.side_name(name): columns for name, columns in self.side_outputs.items()}

    @property
    def output_times(self) -> dict[str, str]:
        """Output -> the column with the event time of its rows, of those that have one."""
        own = {} if self.output_time is None else {self.name: self.output_time}
        return own | {self.side_name(name): column for name, column in self.side_times.items()}

    def side_name(self, output: str) -> str:
        """Return the name of a side output for readers and sinks."""
        return f"{self.name}-{output}"

    def columns_of(self, name: str) -> tuple[str, ...]:
        """Return the columns of an input that it reads besides the key; empty for all."""
        if not self.reads_several:
            return self.inputs
        tables = self.tables()
        shared = (column for table, of in self.broadcasts.items() if of == name for column in tables[table].rows.names)
        return self.inputs.get(name, ()) or tuple(dict.fromkeys(shared))

    def variables(self) -> dict[str, Variable]:
        """Return name -> variable: those declared, of base classes first, and last what it prepares, if it does.

        Tables, opaque variables and the definition all follow from this list. An operator that stands in for another
        one has the list of that one.
        """
        attributes: dict[str, Any] = {}
        for scope in [*(vars(c) for c in reversed(type(self).__mro__)), vars(self)]:
            attributes.update(scope)
        found = {name: value for name, value in attributes.items() if isinstance(value, Variable)}
        if self.defines("prepare_for_nonblocking_checkpoint"):
            found.setdefault(PREPARED, PREPARED_STATE)
        return found

    def declared_variables(self) -> dict[str, Variable]:
        """Return name -> variable that `process` may use: all but what the operator prepares."""
        return {name: variable for name, variable in self.variables().items() if variable is not PREPARED_STATE}

    def due_columns(self) -> dict[str, DueColumn]:
        """Return, of the state tables whose rows fall due, by what."""
        variables = self.variables().items()
        return {table: by for name, variable in variables for table, by in variable.due_columns(name).items()}

    def ttls(self) -> dict[str, TTL]:
        """Return, of the state tables whose rows are stamped, their TTL."""
        variables = self.variables().items()
        return {table: ttl for name, variable in variables for table, ttl in variable.ttls(name).items()}

    @property
    def clocks(self) -> frozenset[str]:
        """The clocks that it goes by, of "event" and "processing"; empty if time means nothing to it."""
        return frozenset(by.clock for by in self.due_columns().values())

    def defines(self, callback: str) -> bool:
        """Whether the operator has a callback of its own."""
        return getattr(type(self), callback) is not getattr(StateHandler, callback)

    def tables(self) -> dict[str, TableSchema]:
        """Return name -> schema of every state table of the incremental variables."""
        return {
            table: schema
            for name, variable in self.variables().items()
            for table, schema in variable.tables(name, self.key).items()
        }

    def opaque_variables(self) -> tuple[str, ...]:
        """Return the names of the opaque variables."""
        return tuple(name for name, variable in self.variables().items() if variable.kind is Kind.OPAQUE)

    def definition(self) -> dict[str, Any]:
        """Return what recorded state depends on, as JSON: the key, and each variable's kind and table schemas."""
        variables = {
            name: {
                "kind": variable.layout(),
                "tables": {t: schema.to_json() for t, schema in variable.tables(name, self.key).items()},
            }
            for name, variable in self.variables().items()
        }
        return {"key": describe_key(self.key), "variables": variables}

    def _check(self) -> None:
        check_name("operator", self.name)
        what = f"operator {self.name}"
        self.key = key_of(self.key, self.nullable, f"the key of {what}")
        self.nullable = tuple(self.nullable)
        if not self.key.names:
            raise UsageError(f"{what} needs at least one key column")
        self._check_inputs(what)
        try:
            self.holds_back = parse_duration(self.holds_back)
        except UsageError as error:
            raise UsageError(f"{what}: holds_back: {error}") from None
        if self.output is not None:
            self.output = schema_of(self.output, f"the output of {what}")
            given = {(field.name, field.type) for field in self.output}
            if lacks := [f.name for f in self.key if self.keeps_key and (f.name, f.type) not in given]:
                raise UsageError(
                    f"{what} keeps the key (keeps_key), so its output needs the key columns, of their types: add "
                    f"{', '.join(lacks)}, or set keeps_key = False"
                )
        if self.combined is not None:
            self.combined = schema_of(self.combined, f"the combined columns of {what}")
            if lacks := [n for n in (*self.key.names, *self.order_by) if n not in self.combined.names]:
                raise UsageError(f"{what}: combined lacks {', '.join(lacks)}, a column of the key or of order_by")
            if type(self).combine is Operator.combine:
                raise UsageError(f"{what} has combined columns, so it needs a method combine")
        self.side_outputs = {
            name: schema_of(columns, f"the output {name} of {what}") for name, columns in self.side_outputs.items()
        }
        for name, columns in self.outputs.items():
            check_name("output", name)
            if taken := set(columns.names) & {self.side_name(each) for each in self.side_outputs}:
                raise UsageError(f"{what}: a column and an output are called {taken.pop()}: rename the column")
        for name, column in self.output_times.items():
            columns = self.outputs.get(name, pa.schema([]))
            if column not in columns.names or not pa.types.is_timestamp(columns.field(column).type):
                raise UsageError(f"{what}: output_time is {column!r}: name a timestamp column of its output {name}")
        timers = any(isinstance(each, Timer) for each in self.variables().values())
        if timers and type(self).on_timer is Operator.on_timer:
            raise UsageError(f"{what} has a timer, so it needs a method on_timer")
        for name in self.declared_variables():
            check_name("variable", name)
            if hasattr(State, name) or hasattr(Operator, name) or name == PREPARED:
                raise UsageError(f"{what}: {name!r} cannot be the name of a variable")
        try:
            self.tables()
        except UsageError as error:
            raise UsageError(f"{what}: {error}") from None

    def _check_inputs(self, what: str) -> None:
        """Check `reads`, `inputs` and `order_by`, and make the latter two tuples."""
        for name in self.input_names:
            check_name("source or operator", name)
        for table, name in self.broadcasts.items():
            if not isinstance(self.reads, Mapping):
                raise UsageError(
                    f"{what} has the broadcast table {table}, so reads is a dict, even of one input: "
                    "{INPUT: {COLUMN: KEY}}"
                )
            if name in self.reads:
                raise UsageError(
                    f"{what} reads {name} by key and for its broadcast table {table}: let another operator do one"
                )
        if isinstance(self.reads, Mapping):
            for name, columns in self.reads.items():
                if not isinstance(columns, Mapping) or sorted(columns.values()) != sorted(self.key.names):
                    raise UsageError(
                        f"{what} reads {name} by {columns!r}: give each key column one of its columns, "
                        f"{{COLUMN: KEY}}, with the keys {', '.join(self.key.names)}"
                    )
            given = self.inputs or {}
            if not isinstance(given, Mapping) or (given.keys() - set(self.keyed_inputs)):
                of = " and ".join(self.keyed_inputs)
                raise UsageError(
                    f"{what} reads its inputs by name, so inputs is {{INPUT: (COLUMN, ...)}}, of {of} alone"
                )
            self.inputs = {name: _column_names(columns, f"inputs of {what}") for name, columns in given.items()}
            known = {name.casefold() for name in self.key.names}  # Spark's names know no case
            for name in self.input_names:
                if name.casefold() in known:
                    raise UsageError(f"{what}: a key column and an input are called {name}: rename the key column")
            for name, columns in self.reads.items():
                if taken := set(self.columns_of(name)) & set(self.key.names) - set(columns):
                    raise UsageError(f"{what}: {taken.pop()} is a key column, and another column of {name}: rename one")
            if self.combined is not None:
                raise UsageError(f"{what} reads several inputs, so it cannot combine rows before the shuffle")
        else:
            self.inputs = _column_names(self.inputs, f"inputs of {what}")
        self.order_by = _column_names(self.order_by, f"order_by of {what}")


def _column_names(given: Any, what: str) -> tuple[str, ...]:
    if isinstance(given, str | Mapping) or not all(isinstance(name, str) for name in given):
        raise UsageError(f"{what} must be a tuple of column names")
    return tuple(given)
