"""`KeyedProcessor`: an operator for code that handles one key at a time, as Spark's `StatefulProcessor` does.

    class Sessions(KeyedProcessor):
        name = "sessions"
        key = {"user": pa.string()}
        output = {"user": pa.string(), "clicks": pa.int64()}
        totals = ValueState({"clicks": pa.int64()})

        def handle_input(self, key, rows, state):
            old = state.totals.get()  # of this key alone: a dict, or None
            clicks = len(rows) + (old["clicks"] if old else 0)
            state.totals.put({"clicks": clicks})
            yield {"user": key[0], "clicks": clicks}

With a `Timer`, it has a method `handle_timer`, too, which is called for each key whose timer is due.

Methods of `state.<variable>`, each for the current key:

    ValueState     get() -> dict or None, put(values), remove()
    MapState       get(entry) -> dict or None, put(entry, values), remove(entry); an entry is a dict of its map key
    ListState      get() -> list of dicts, append(values), remove()
    WindowState    get() -> list of dicts in order, insert(values), evict(before), remove()
    OpaqueState    get() -> the object of the key's key group, put(object)
    Timer          get() -> when it is due (UTC) or None, set(at), clear()

A value is what Arrow makes of it in its column's type, from the call on: a date of a datetime, UTC of a naive time, the
nearest float32 of 0.1. So equal map keys are one entry, however they are written, and `get` returns what was put as a
later step reads it. A value that does not fit its column, and a null map key, is a bad row (`BadRow`). So is a row with
a time that Python does not have. If such a time is in state, where an operator with `process` has put it, reading the
variable raises `UsageError`.

Each variable is read once for all keys of a call of `process`, on first use, and written at the end. Map entries are
read together if the rows have the map key's columns; other entries are read one by one. `state.request_checkpoint()`
asks for a checkpoint after the step. `state.clock` has the step's `now` and `watermark`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.errors import BadRow, UsageError
from siltstone.operator import (
    Due,
    ListState,
    MapState,
    OpaqueState,
    Operator,
    Rows,
    State,
    Timer,
    ValueState,
    WindowState,
)
from siltstone.state.backend import Keys
from siltstone.state.ordering import stable_order
from siltstone.state.python_values import NAN, RowCast, cast_value, to_comparable
from siltstone.state.ttl import RENEWALS
from siltstone.state.types import is_nested
from siltstone.state.variables import key_of, schema_of
from siltstone.time.clock_rules import OperatorClock
from siltstone.times import as_utc

Record = Mapping[str, Any]
_NO_TIME = "a time is not within the years 1 to 9999, which are those of Python"


class KeyedProcessor(Operator):
    """An operator that handles one key at a time; write `handle_input` instead of `process`.

    It is declared like any `Operator`, with the same variables but broadcast tables, and a stream may change from one
    to the other and keep its state. It is slower, since it makes Python objects of every row and state value. A sum per
    key over 200,000 rows of two integers took 4.5 times as long as the same sum written as `process` with 10 rows per
    key, and 7.2 times with one row per key (checkpoint included, without Spark; medians of 15 steps). Write
    `process` if that matters; `python -m benchmarks keyed` measures the difference.
    """

    def handle_input(self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any) -> Iterable[Record] | None:
        """Process the rows of one key, read and change its state, and return or yield output rows, if any.

        A step may bring a key's rows in several calls. Equal rows in equal order must have equal effects, since a task
        may run twice; the order is the same only with `order_by`.

        Args:
            key: the values of the key columns.
            rows: each row as a dict of its columns.
            state: the variables, each an attribute named after it (see the module).

        Returns:
            Rows with the columns `output`, each a dict.

        Raises:
            BadRow: the operator cannot take rows of this key: those marked in `rows` (one boolean per row of the key),
                or all of them.
        """
        raise NotImplementedError(f"operator {self.name} does not define handle_input")

    def handle_timer(self, key: tuple[Any, ...], timer: str, at: datetime, state: Any) -> Iterable[Record] | None:
        """React to a timer of one key that is due, and no longer set; return or yield output rows, if any.

        Equal state and clocks must have equal effects. It may set the timer again.

        Args:
            timer: the name of the variable.
            at: when it was due (UTC).
        """
        raise NotImplementedError(f"operator {self.name} does not define handle_timer")

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Call `handle_input` for each key."""
        views = self._views(rows.keys, rows, state)
        order = stable_order(rows.key_index)
        records = _read_records(rows.table, order)
        starts = np.searchsorted(rows.key_index[order], np.arange(len(rows.keys) + 1)).tolist()
        own, made = self._key_state(views, state), list[Record]()
        for ordinal, key in _each_key(rows.keys, views):
            start, end = starts[ordinal], starts[ordinal + 1]
            try:
                made += self.handle_input(key, records[start:end], own) or ()
            except BadRow as error:
                if error.keys is None:  # else it marks entries of a state table by their keys
                    error.rows = _mark_rows(error, order[start:end], len(rows))
                raise
        return self._finish(views, made)

    def on_timer(self, due: Due, state: State) -> pa.Table | None:
        """Call `handle_timer` for each key."""
        views = self._views(due.keys, None, state)
        own, made, at = self._key_state(views, state), list[Record](), _read_times(due.at, due.timer)
        for ordinal, key in _each_key(due.keys, views):
            made += self.handle_timer(key, due.timer, at[ordinal], own) or ()
        return self._finish(views, made)

    def _check(self) -> None:
        super()._check()
        for name, kind in self.declared_variables().items():
            if type(kind) not in _VIEWS:
                what = f"operator {self.name}: variable {name} is a {type(kind).__name__}"
                raise UsageError(f"{what}, which has no calls for one key: write process")

    def _views(self, keys: Keys, rows: Rows | None, state: State) -> "dict[str, _View]":
        declared = self.declared_variables().items()
        return {name: _VIEWS[type(kind)](name, kind, keys, rows, state) for name, kind in declared}

    def _key_state(self, views: "Mapping[str, _View]", state: State) -> "_KeyState":
        return _KeyState(self.name, state, {**views, "request_checkpoint": state.request_checkpoint})

    def _finish(self, views: "Mapping[str, _View]", made: list[Record]) -> pa.Table | None:
        """Write what changed, and return the output rows."""
        for view in views.values():
            view.flush()
        if not made:
            return None
        if self.output is None:
            raise UsageError(f"operator {self.name} returns rows but declares no output: set its field output")
        what = f"the output of operator {self.name}"
        try:
            return _table([*map(RowCast(self.output, what), made)], self.output, what)
        except BadRow as error:
            raise UsageError(str(error)) from None


def _each_key(keys: Keys, views: "Mapping[str, _View]") -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield each key with its ordinal, and have the views be of it."""
    for ordinal, key in enumerate(zip(*(c.to_pylist() for c in keys.columns.columns), strict=True)):
        for view in views.values():
            view.ordinal = ordinal
        yield ordinal, key


def _read_times(at: pa.Array, timer: str) -> list[Any]:
    try:
        return at.to_pylist()
    except (ArithmeticError, ValueError):
        raise UsageError(f"timer {timer}: {_NO_TIME}: write on_timer in place of handle_timer") from None


def _read_records(table: pa.Table, order: np.ndarray) -> list[dict[str, Any]]:
    """Return rows in an order, each as a dict.

    Raises:
        BadRow: Python has no such value, as of a date after the year 9999, which Arrow and Spark have.
    """
    try:
        return table.take(pa.array(order)).to_pylist()
    except (ArithmeticError, ValueError):
        bad = _find_unreadable(table)
        raise BadRow(_NO_TIME, advice="write process for them, or drop the row", rows=bad) from None


def _find_unreadable(table: pa.Table) -> np.ndarray:
    """Return bool[n]: the rows with a value that Python does not have."""
    bad, left = np.zeros(len(table), bool), [(0, len(table))]
    while left:
        start, end = left.pop()
        try:
            table.slice(start, end - start).to_pylist()
        except (ArithmeticError, ValueError):
            middle = (start + end) // 2
            bad[start] |= end - start == 1
            left += [] if end - start == 1 else [(start, middle), (middle, end)]
    return bad


def _mark_rows(error: BadRow, own: np.ndarray, count: int) -> np.ndarray:
    """Return bool[count]: the rows of the call that an error of one key is about.

    Args:
        own: the key's rows in the call. The error marks some of them, or all if it marks none.
    """
    marks = np.ones(len(own), bool) if error.rows is None else np.asarray(error.rows)
    if marks.dtype != bool or marks.shape != (len(own),):
        raise UsageError(
            f"{error}: its rows are {marks.dtype}{list(marks.shape)}, not bool[{len(own)}], one value per row of a key"
        ) from error
    bad = np.zeros(count, bool)
    bad[own] = marks
    return bad


class _KeyState:
    """The variables of one key, each an attribute named after it."""

    def __init__(self, operator: str, state: State, further: Mapping[str, Any]) -> None:
        self.__dict__.update(further)
        self.__dict__.update(_operator=operator, _state=state)

    @property
    def clock(self) -> OperatorClock:
        return self._state.clock

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"operator {self.__dict__.get('_operator')} has no variable {name!r}")


class _View:
    """One variable of the current key, `ordinal`, which moves from key to key. `flush` writes the changes."""

    def __init__(self, name: str, variable: Any, keys: Keys, rows: Rows | None, state: State) -> None:
        self.name, self.rows, self.keys = name, rows, keys
        self.access: Any = getattr(state, name)
        self.ordinal = 0
        self.value = schema_of(variable.value, name) if hasattr(variable, "value") else pa.schema([])
        self.copied: Callable[[Record], dict[str, Any]] = (
            (lambda row: deepcopy(dict(row))) if any(is_nested(field.type) for field in self.value) else dict
        )
        """copies a row, so that changing what was got or put changes no state"""
        self.cast_row = RowCast(self.value, name)
        ttl = getattr(variable, "ttl", None)
        self.renews = ttl is not None and ttl.renew == RENEWALS[1]
        """whether reading a row renews it: only of the keys for which it is read, whatever is read ahead for others"""

    def flush(self) -> None:
        """Write what changed."""

    def read(self, values: pa.Table, ordinals: np.ndarray) -> list[dict[str, Any]]:
        """Return rows of state as dicts, each of the key with its ordinal.

        Raises:
            UsageError: Python does not have a value; an operator with `process` may have put it there.
        """
        try:
            return values.to_pylist()
        except (ArithmeticError, ValueError):
            ordinal = int(ordinals[np.flatnonzero(_find_unreadable(values))[0]])
            [key] = self.keys.columns.slice(ordinal, 1).to_pylist()
            named = ", ".join(f"{name} {value!r}" for name, value in key.items())
            raise UsageError(
                f"variable {self.name} of key {named}: {_NO_TIME}: write process in place of handle_input, or put "
                "another value there with `siltstone edit`"
            ) from None


class _Value(_View):
    """At most one row of the key."""

    def __init__(self, name: str, variable: ValueState, keys: Keys, rows: Rows | None, state: State) -> None:
        super().__init__(name, variable, keys, rows, state)
        self._read: list[dict[str, Any] | None] | None = None
        self._changed: dict[int, dict[str, Any] | None] = {}
        self._got: set[int] = set()

    def get(self) -> dict[str, Any] | None:
        if self.renews:
            self._got.add(self.ordinal)
        if self.ordinal in self._changed:
            found = self._changed[self.ordinal]
        else:
            if self._read is None:
                lookup = self.access.lookup(self.keys, renews=False)
                values = self.read(lookup.values, np.arange(len(self.keys)))
                self._read = [row if there else None for row, there in zip(values, lookup.found.tolist(), strict=True)]
            found = self._read[self.ordinal]
        return None if found is None else self.copied(found)

    def put(self, values: Record) -> None:
        self._changed[self.ordinal] = self.cast_row(values)

    def remove(self) -> None:
        self._changed[self.ordinal] = None

    def flush(self) -> None:
        if got := sorted(self._got - self._changed.keys()):
            self.access.lookup(self.keys.take(np.array(got)))
        if gone := [k for k, values in self._changed.items() if values is None]:
            self.access.delete(self.keys.take(np.array(gone)))
        if new := {k: values for k, values in self._changed.items() if values is not None}:
            self.access.put(self.keys.take(np.array([*new])), _table([*new.values()], self.value, self.name))


class _Map(_View):
    """The key's map."""

    def __init__(self, name: str, variable: MapState, keys: Keys, rows: Rows | None, state: State) -> None:
        super().__init__(name, variable, keys, rows, state)
        self._subkey = key_of(variable.key, variable.nullable, name)
        self._schema = pa.schema([*keys.columns.schema, *self._subkey])
        self._cast_subkey = RowCast(self._subkey, name)
        self._known: dict[tuple[Any, ...], dict[str, Any] | None] = {}
        self._changed: dict[tuple[Any, ...], dict[str, Any]] = {}
        """by address: what is known of each entry, and the map keys of entries that changed"""
        self._got: dict[tuple[Any, ...], dict[str, Any]] = {}
        """by address: the map keys of entries that were read"""
        self._ahead = False

    def get(self, entry: Record) -> dict[str, Any] | None:
        address, subkey = self._address(entry)
        if self.renews:
            self._got[address] = subkey
        if address not in self._known and not self._ahead:
            self._ahead = True
            self._read_ahead()
        if address not in self._known:
            self._read(self._entries([(self.ordinal, subkey)]), np.array([self.ordinal]))
        found = self._known[address]
        return None if found is None else self.copied(found)

    def put(self, entry: Record, values: Record) -> None:
        address, subkey = self._address(entry)
        self._known[address], self._changed[address] = self.cast_row(values), subkey

    def remove(self, entry: Record) -> None:
        address, subkey = self._address(entry)
        self._known[address], self._changed[address] = None, subkey

    def flush(self) -> None:
        got = [(a[0], subkey) for a, subkey in self._got.items() if a not in self._changed]
        if got:
            self.access.lookup(self._entries(got))
        gone = [(a[0], subkey) for a, subkey in self._changed.items() if self._known[a] is None]
        if gone:
            self.access.delete(self._entries(gone))
        new = [(a, subkey, values) for a, subkey in self._changed.items() if (values := self._known[a]) is not None]
        if new:
            entries = self._entries([(a[0], subkey) for a, subkey, _ in new])
            values = _table([values for *_, values in new], self.value, self.name)
            schema = pa.schema([*entries.schema, *values.schema])
            self.access.put(pa.table([*entries.columns, *values.columns], schema=schema))

    def _address(self, entry: Record) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return an entry's address, unique within the call, and its map key."""
        subkey = self._cast_subkey(entry)
        for field in self._subkey:
            if subkey[field.name] is None and not field.nullable:
                raise _null_error(f"{self.name}: map key {field.name}")
        return (self.ordinal, *map(to_comparable, subkey.values())), subkey

    def _entries(self, entries: list[tuple[int, dict[str, Any]]]) -> pa.Table:
        owners = self.keys.columns.take(pa.array([ordinal for ordinal, _ in entries]))
        subkeys = _table([subkey for _, subkey in entries], self._subkey, self.name)
        return pa.table([*owners.columns, *subkeys.columns], schema=self._schema)

    def _read_ahead(self) -> None:
        """Read the entries that the rows address, if the rows have the map key's columns."""
        if self.rows is None:
            return
        table, names = self.rows.table, self._subkey.names
        if any(n not in table.column_names or table.schema.field(n).type != self._subkey.field(n).type for n in names):
            return
        if any(table.column(field.name).null_count for field in self._subkey if not field.nullable):
            return
        first = np.full(len(table), -1)
        named = self.rows.by(*names)
        first[named.key_index] = self.rows.key_index
        self._read(named.keys.columns, first[: len(named.keys)])

    def _read(self, entries: pa.Table, ordinals: np.ndarray) -> None:
        lookup = self.access.lookup(entries, renews=False)
        subkeys = zip(*(entries.column(name).to_pylist() for name in self._subkey.names), strict=True)
        values = self.read(lookup.values, ordinals)
        found = zip(ordinals.tolist(), subkeys, values, lookup.found, strict=True)
        for ordinal, subkey, values, there in found:
            self._known.setdefault((ordinal, *map(to_comparable, subkey)), values if there else None)


class _List(_View):
    """The key's list."""

    def __init__(self, name: str, variable: ListState, keys: Keys, rows: Rows | None, state: State) -> None:
        super().__init__(name, variable, keys, rows, state)
        self._read: dict[int, list[dict[str, Any]]] | None = None
        self._added: dict[int, list[dict[str, Any]]] = {}
        self._removed: set[int] = set()
        self._got: set[int] = set()

    def get(self) -> list[dict[str, Any]]:
        if self.renews:
            self._got.add(self.ordinal)
        return [self.copied(row) for row in [*self.stored_rows(), *self._added.get(self.ordinal, ())]]

    def append(self, values: Record) -> None:
        self._added.setdefault(self.ordinal, []).append(self.cast_row(values))

    def remove(self) -> None:
        self._removed.add(self.ordinal)
        self._added.pop(self.ordinal, None)

    def flush(self) -> None:
        if got := sorted(self._got - self._removed):
            self.access.get(self.keys.take(np.array(got)))
        if self._removed:
            self.access.delete(self.keys.take(np.array(sorted(self._removed))))
        if added := [(k, row) for k, rows in self._added.items() for row in rows]:
            at = np.array([k for k, _ in added])
            self.add(at, _table([row for _, row in added], self.value, self.name))

    def add(self, at: np.ndarray, rows: pa.Table) -> None:
        """Write the added rows."""
        self.access.append(self.keys, at, rows)

    def stored_rows(self) -> list[dict[str, Any]]:
        """Return the key's rows in state, unless they were removed."""
        if self.ordinal in self._removed:
            return []
        if self._read is None:
            self._read = {}
            at, rows = self.access.get(self.keys, renews=False)
            for k, row in zip(at.tolist(), self.read(rows, at), strict=True):
                self._read.setdefault(k, []).append(row)
        return self._read.get(self.ordinal, [])


class _Window(_List):
    """The key's window."""

    def __init__(self, name: str, variable: WindowState, keys: Keys, rows: Rows | None, state: State) -> None:
        super().__init__(name, variable, keys, rows, state)
        self._order = variable.order
        self._limits: dict[int, Any] = {}

    def get(self) -> list[dict[str, Any]]:
        return sorted(super().get(), key=lambda row: _rank(row[self._order]))

    def insert(self, values: Record) -> None:
        row = self.cast_row(values)
        if row[self._order] is None:
            raise _null_error(f"{self.name}: column {self._order} orders the window and")
        self._added.setdefault(self.ordinal, []).append(row)

    def evict(self, before: Any) -> None:
        """Remove the rows whose order column is less than `before`; null and NaN are less than nothing."""
        before = cast_value(before, self.value.field(self._order), self.name)
        if before is None or to_comparable(before) == NAN:
            return
        known = self._limits.get(self.ordinal)
        self._limits[self.ordinal] = before if known is None else max(known, before, key=_rank)
        if self.ordinal in self._added:  # an earlier, higher limit does not hold for rows inserted after it
            self._added[self.ordinal] = [row for row in self._added[self.ordinal] if self._stays(row, before)]

    def remove(self) -> None:
        super().remove()
        self._limits.pop(self.ordinal, None)

    def stored_rows(self) -> list[dict[str, Any]]:
        limit = self._limits.get(self.ordinal)
        return [row for row in super().stored_rows() if limit is None or self._stays(row, limit)]

    def _stays(self, row: Record, limit: Any) -> bool:
        return _rank(row[self._order]) >= _rank(limit)

    def flush(self) -> None:
        if self._limits:
            keys = self.keys.take(np.array([*self._limits]))
            self.access.evict(keys, pa.array([*self._limits.values()], self.value.field(self._order).type))
        super().flush()

    def add(self, at: np.ndarray, rows: pa.Table) -> None:
        self.access.insert(self.keys, at, rows)


class _Opaque(_View):
    """The object of the key's key group, which its other keys share."""

    def get(self) -> Any:
        return self.access[int(self.keys.key_groups[self.ordinal])]

    def put(self, value: Any) -> None:
        self.access[int(self.keys.key_groups[self.ordinal])] = value


class _Timer(_View):
    """The key's timer."""

    def __init__(self, name: str, variable: Timer, keys: Keys, rows: Rows | None, state: State) -> None:
        super().__init__(name, variable, keys, rows, state)
        self._read: list[datetime | None] | None = None
        self._changed: dict[int, datetime | None] = {}

    def get(self) -> datetime | None:
        if self.ordinal in self._changed:
            return self._changed[self.ordinal]
        if self._read is None:
            self._read = _read_times(self.access.get(self.keys), self.name)
        return self._read[self.ordinal]

    def set(self, at: datetime) -> None:
        """Set it, in place of the one that was set; a time without a zone is UTC."""
        if not isinstance(at, datetime):
            raise UsageError(f"{self.name}: a timer is set to a datetime, not to {at!r}")
        self._changed[self.ordinal] = as_utc(at)

    def clear(self) -> None:
        self._changed[self.ordinal] = None

    def flush(self) -> None:
        if gone := [k for k, at in self._changed.items() if at is None]:
            self.access.clear(self.keys.take(np.array(gone)))
        if new := {k: at for k, at in self._changed.items() if at is not None}:
            self.access.set(self.keys.take(np.array([*new])), pa.array([*new.values()], pa.timestamp("us", "UTC")))


_VIEWS: dict[type, Any] = {
    Timer: _Timer,
    ValueState: _Value,
    MapState: _Map,
    ListState: _List,
    WindowState: _Window,
    OpaqueState: _Opaque,
}


def _table(rows: list[dict[str, Any]], schema: pa.Schema, what: str) -> pa.Table:
    """Make a table of rows that were cast (`RowCast`)."""
    try:
        return pa.table([pa.array([row[f.name] for row in rows], f.type) for f in schema], schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
        wanted = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise UsageError(f"{what}: a value does not fit its column ({wanted}): {error}") from None


def _null_error(what: str) -> BadRow:
    return BadRow(f"{what} is null", advice="drop the row")


def _rank(value: Any) -> Any:
    """Return a value's sort key in the order of a window, in which NaN is last."""
    return (True, 0.0) if isinstance(value, float) and math.isnan(value) else (False, to_comparable(value))
