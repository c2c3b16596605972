"""`LookupJoin`: each row of an input with what a slowly changing one says of its key, as of the row's event time.

The rows of the second input are versions: each holds from its time until the next one of its key. With W the watermark
of a step, a row is decided once W has passed its time, since no version of its time or before can come any more. Of the
versions at or before W, later rows can need the newest alone: it is the key's `current` one, and others are dropped.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.joins.kept import ROWS_A_BATCH, KeptRows
from siltstone.joins.matching import TimeOrder, sort_rows
from siltstone.joins.sides import list_names, make_sides
from siltstone.operator import Keys, Operator, Rows, State, ValueState
from siltstone.state.columns import one_array
from siltstone.state.time_index import DueRows
from siltstone.state.variables import ColumnTypes, schema_of

__all__ = ["LookupJoin"]

HOW = ("left", "inner")
AS_OF = ("event", "now")
_LONG_AGO = np.iinfo(np.int64).min


class LookupJoin(Operator):
    """Returns each row of the first input with the row of its key in the second one that was newest at its event time.

        LookupJoin(
            "priced",
            key={"currency": pa.string()},
            reads={"orders": {"currency": "currency"}, "rates": {"code": "currency"}},
            on={"orders": "at", "rates": "at"},
            columns={"orders": {"amount": pa.int64()}, "rates": {"rate": pa.float64()}},
        )

    A row waits until the watermark has passed its time, so that no version, a row of the second input, of that time or
    an earlier one can still come. Then it is returned with the newest version that is not later than the row. Of
    versions at the same time the one with the greatest columns counts, compared one after the other, null first. The
    result is that of SQL's lateral join over all rows that are not late, whatever the micro-batches.

    State is the rows that wait, the versions after the watermark, and the newest one before it of each key, which is
    kept for ever. The output has the event time of the first input.

    With `as_of="now"` a row is returned in the step in which it comes, with the newest version that has come so far;
    those of the same step count. What that is depends on micro-batches: it is not what a batch query returns. Nothing
    waits, and no row is late. `on` then has the times of both inputs, that of the second alone, or none: without it, a
    version replaces those of earlier steps, and of several in one step the one with the greatest columns counts.

    Args:
        name, key: see `Operator`. A row whose key is null is a bad row.
        reads: the input and the one with versions -> {its column: the key column}.
        on: input -> its column with the event time, a timestamp.
        columns: input -> the columns that are kept and returned, `{name: type}`; the time is returned in any case.
        how: "left" returns rows for which there is no version with nulls, "inner" leaves them out.
        as_of: "event" or "now".
        names: input -> {column: its name in the output}, where names would be there twice.

    Raises:
        UsageError: an argument is missing or wrong.
    """

    keeps_key: bool = True
    current: ValueState

    def __init__(
        self,
        name: str,
        key: ColumnTypes,
        reads: Mapping[str, Mapping[str, str]],
        on: Mapping[str, str],
        columns: Mapping[str, ColumnTypes] | None = None,
        how: str = HOW[0],
        as_of: str = AS_OF[0],
        names: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        what = f"operator {name}"
        for option, given, choices in (("how", how, HOW), ("as_of", as_of, AS_OF)):
            if given not in choices:
                raise UsageError(f"{what}: {option} is {given!r}: use {' or '.join(map(repr, choices))}")
        self.how: str = how
        self.as_of: str = as_of
        self._rows, self._versions = make_sides(what, reads, on, columns or {}, names or {})
        has_times = self._rows.at is not None, self._versions.at is not None
        if (has_times[0] and not has_times[1]) or (as_of == AS_OF[0] and not all(has_times)):
            raise UsageError(
                f"{what}: on is {on!r}: name the column with the event time of {self._rows.name} and that of "
                f'{self._versions.name} (with as_of="now", that of {self._versions.name} may be alone, or none)'
            )
        for side in (self._rows, self._versions):
            if not side.columns.names:
                raise UsageError(f"{what} returns no column of {side.name}: name some in columns")
        keys = schema_of(key, f"the key of {what}")
        if as_of == AS_OF[0]:
            # Rows that are due are decided before versions are dropped: in the order of the variables.
            self.waiting: Any = KeptRows(self._rows.columns, str(self._rows.at), 1, "lookup")
            self.coming: Any = KeptRows(self._versions.columns, str(self._versions.at), 0, "lookup")
        self.current = ValueState(self._versions.columns)
        try:
            output = list_names(keys, self._rows.shown, self._versions.shown)
        except UsageError as error:
            raise UsageError(f"{what}: {error}") from None
        super().__init__(
            name=name,
            key=keys,
            reads=reads,
            inputs={side.name: tuple(side.columns.names) for side in (self._rows, self._versions)},
            # Versions come before rows, also those without any value, because a step may take several calls.
            order_by=(self._rows.name, *self._versions.order),
            output=output,
            output_time=self._rows.shown_at,
        )

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Keep new rows and versions; or return the rows with the versions known now."""
        asked, versions = rows.of(self._rows.name), rows.of(self._versions.name)
        new, table = self._rows.read(asked), self._versions.read(versions)
        if self.as_of == AS_OF[0]:
            state.waiting.append(asked.keys, asked.key_index, new)
            state.coming.append(versions.keys, versions.key_index, table)
            return None
        if len(versions):
            self._renew(state, versions.keys, versions.key_index, table)
        if not len(asked):
            return None
        known = state.current.lookup(asked.keys)
        return self._return(
            asked.keys.columns.take(pa.array(asked.key_index)),
            new,
            known.values.take(pa.array(asked.key_index)),
            known.found[asked.key_index],
        )

    def time_column(self, name: str) -> str | None:
        return next((side.at for side in (self._rows, self._versions) if side.name == name), None)

    def on_due(self, table: str, take: Callable[[int], DueRows], state: State) -> Iterator[pa.Table]:
        """Return the rows that waited, and then let the newest of the versions that are due be the current ones."""
        access = getattr(state, table)
        while len((due := take(ROWS_A_BATCH)).at):
            keys, rows = access.show_due(due)
            owners, owner = access.find_owners(due)
            if table == "waiting":
                yield self._decide(state, owners, owner, keys, rows)
            else:
                self._renew(state, owners, owner, rows)
            access.drop(due, owners, owner)

    def _decide(self, state: State, owners: Keys, owner: np.ndarray, keys: pa.Table, rows: pa.Table) -> pa.Table:
        """Return rows with the newest versions as of their times; `owner` is the ordinal of their key in `owners`."""
        known, coming = state.current.lookup(owners), state.coming.find(owners)
        there = np.flatnonzero(known.found)
        versions = pa.concat_tables([known.values.take(pa.array(there)), coming.rows]).combine_chunks()
        of = np.concatenate([there, coming.owner])
        order = sort_rows(of, self._order(versions))
        of, versions = of[order], versions.take(pa.array(order))
        at = self._rows.times(rows)
        first, counts = TimeOrder(of, self._versions.times(versions)).find(owner, np.full(len(at), _LONG_AGO), at)
        found = counts > 0
        chosen = pa.array(first + counts - 1, mask=~found)
        return self._return(keys, rows, versions.take(chosen), found)

    def _renew(self, state: State, keys: Keys, owner: np.ndarray, versions: pa.Table) -> None:
        """Let the newest of these versions, and of the current ones, be the current ones of their keys."""
        known = state.current.lookup(keys)
        new = len(versions)
        there = np.flatnonzero(known.found) if self._versions.at is not None else np.empty(0, np.int64)
        table = pa.concat_tables([versions, known.values.take(pa.array(there))]).combine_chunks()
        of = np.concatenate([owner, there])
        order = sort_rows(of, self._order(table))
        newest = order[np.flatnonzero(np.diff(of[order], append=-1))]
        changed = newest[newest < new]
        renewed = keys if len(changed) == len(keys) else keys.take(of[changed])  # one put after the get of all keys
        state.current.put(renewed, table.take(pa.array(changed)))

    def _order(self, versions: pa.Table) -> list[pa.Array]:
        """Return the columns by which versions are ordered, their time first."""
        names = [name.removeprefix(f"{self._versions.name}.") for name in self._versions.order]
        return [one_array(versions.column(name)) for name in names]

    def _return(self, keys: pa.Table, rows: pa.Table, versions: pa.Table, found: np.ndarray) -> pa.Table:
        sides = self._rows.show(rows), self._versions.show(versions)
        columns = [*keys.columns, *sides[0].columns, *sides[1].columns]
        table = pa.table(columns, schema=self.output)
        return table if self.how == "left" else table.filter(pa.array(found))
