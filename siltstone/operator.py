"""What a user writes: an `Operator`, a vectorised, keyed, stateful step over Arrow tables.

    class Delays(Operator):
        name = "delays"
        key = {"tailnum": pa.string()}
        output = pa.schema([("tailnum", pa.string()), ("flights", pa.int64())])
        totals = ValueState(value={"flights": pa.int64()})

        def process(self, rows, state):
            old = state.totals.get(rows.keys)  # one row per key, null where there is none yet
            flights = rows.count(initial=old["flights"])  # one value per key
            state.totals.put(rows.keys, {"flights": flights})
            return rows.keys.with_columns({"flights": flights})

`siltstone.rows` has what can be asked of `rows`. An operator keeps nothing between calls but its state: it is sent to
where its subtasks run, and a call may come twice.
"""

from typing import Any, ClassVar

import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.model import Kind, check_name
from siltstone.rows import Keys, Rows
from siltstone.state.backend import SubtaskState
from siltstone.state.schema import TableSchema
from siltstone.state.variables import (
    ListState,
    MapState,
    OpaqueState,
    ValueState,
    Variable,
    WindowState,
    schema_of,
)

__all__ = [
    "SOURCE",
    "Keys",
    "ListState",
    "MapState",
    "OpaqueState",
    "Operator",
    "Rows",
    "State",
    "ValueState",
    "WindowState",
]

SOURCE = "source"
"""what an operator reads that reads no other operator"""


class State:
    """The operator's variables in one subtask, each an attribute of its name: `siltstone.state.access`."""

    def __init__(self, operator: "Operator", state: SubtaskState) -> None:
        self._operator = operator.name
        self._opaque = []
        for name, variable in operator.variables().items():
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


class Operator:
    """A keyed, stateful step. Subclass it, declare variables as class attributes, and write `process`.

    Fields are class attributes or arguments of the constructor:

        name        an identifier, distinct within the stream
        key         the key columns, `{name: type}` or an Arrow schema (a schema once constructed); never null
        reads       "source", or the name of the operator whose output this one reads
        inputs      the columns it reads besides the key; empty means all
        order_by    columns by which the rows of a step are sorted, within a subtask, before `process` sees
                    them; logic for which the order of a key's rows matters is deterministic only with it
        output      the columns of what `process` returns, likewise, or None where it returns nothing

    Raises:
        UsageError: a field or a variable is missing or wrong; the message says which.
    """

    name: str = ""
    key: Any = None
    reads: str = SOURCE
    inputs: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    output: Any = None
    FIELDS: ClassVar = ("name", "key", "reads", "inputs", "order_by", "output")

    def __init__(self, **fields: Any) -> None:
        unknown = sorted(fields.keys() - set(self.FIELDS))
        if unknown:
            raise UsageError(f"an operator has no field {', '.join(unknown)} (it has {', '.join(self.FIELDS)})")
        for field, value in fields.items():
            setattr(self, field, value)
        self._check()

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Take some rows of a step, read and change state, and return output rows, if any.

        A step may come in several calls. All rows of a key come to one subtask; equal rows in equal order
        must have equal effects, since a task may run twice.

        Raises:
            BadRow: there are rows that it cannot take; with `rows`, they may become dead letters.
        """
        raise NotImplementedError(f"operator {self.name} does not define process")

    def region_checkpointed(self, checkpoint: int) -> None:
        """Called on the driver once a checkpoint of the stream is complete."""

    def variables(self) -> dict[str, Variable]:
        """Name -> declared variable, those of base classes first."""
        attributes: dict[str, Any] = {}
        for scope in [*(vars(c) for c in reversed(type(self).__mro__)), vars(self)]:
            attributes.update(scope)
        return {name: value for name, value in attributes.items() if isinstance(value, Variable)}

    def tables(self) -> dict[str, TableSchema]:
        """Every state table of the incremental variables."""
        return {
            table: schema
            for name, variable in self.variables().items()
            for table, schema in variable.tables(name, self.key).items()
        }

    def opaque(self) -> tuple[str, ...]:
        """The names of the opaque variables."""
        return tuple(name for name, v in self.variables().items() if v.kind is Kind.OPAQUE)

    def definition(self) -> dict[str, Any]:
        """What recorded state depends on, as JSON: the key, and per variable its kind and the schemas of its
        tables."""
        return {
            "key": [[f.name, str(f.type)] for f in self.key],
            "variables": {
                name: {
                    "kind": type(variable).__name__,
                    "tables": {t: schema.to_json() for t, schema in variable.tables(name, self.key).items()},
                }
                for name, variable in self.variables().items()
            },
        }

    def _check(self) -> None:
        check_name("operator", self.name)
        if self.reads != SOURCE:
            check_name("operator", self.reads)
        what = f"operator {self.name}"
        self.key = schema_of(self.key, f"the key of {what}")
        if not self.key.names:
            raise UsageError(f"{what} needs at least one key column")
        for field in ("inputs", "order_by"):
            value = getattr(self, field)
            if isinstance(value, str) or not all(isinstance(name, str) for name in value):
                raise UsageError(f"{field} of {what} must be a tuple of column names")
            setattr(self, field, tuple(value))
        if self.output is not None:
            self.output = schema_of(self.output, f"the output of {what}")
        if not self.variables():
            raise UsageError(f"{what} declares no variable, so it keeps no state")
        for name in self.variables():
            check_name("variable", name)
            if hasattr(State, name):
                raise UsageError(f"{what}: {name!r} cannot be the name of a variable")
        try:
            self.tables()
        except UsageError as error:
            raise UsageError(f"{what}: {error}") from None
