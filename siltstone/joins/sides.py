"""The two inputs of a join: what is declared of each, and the keys that their rows share."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.joins.kept import MET
from siltstone.rows import Rows
from siltstone.state.access import HEAD, POSITION, TAIL, conform
from siltstone.state.columns import is_micros, read_times
from siltstone.state.hashing import find_distinct, normalise_keys
from siltstone.state.variables import ColumnTypes, schema_of

TIME = pa.timestamp("us", "UTC")
_OWN = frozenset((POSITION, HEAD, TAIL, MET))


@dataclass(frozen=True)
class Side:
    """One input of a join.

    Attributes:
        name: the input.
        at: its column with the event time; None if it has none.
        columns: the columns that are kept and returned.
        shown: the same columns by their names in the output.
        what: how error messages begin.
    """

    name: str
    at: str | None
    columns: pa.Schema
    shown: pa.Schema
    what: str

    @classmethod
    def of(cls, name: str, at: str | None, columns: ColumnTypes, names: Mapping[str, str], what: str) -> "Side":
        """Check what a user gave of an input.

        Raises:
            UsageError: it does not fit.
        """
        of = f"{what}, {name}"
        schema = schema_of(columns, f"columns of {of}")
        if at is not None and at not in schema.names:
            schema = pa.schema([(at, TIME), *schema])
        if at is not None and not is_micros(schema.field(at).type):
            raise UsageError(f"{of}: {at} is {schema.field(at).type}, and the event time: use {TIME}")
        if taken := sorted(_OWN & set(schema.names)):
            raise UsageError(f"{of}: {', '.join(taken)} is a column of the join's state: rename it in the source")
        if unknown := sorted(set(names) - set(schema.names)):
            raise UsageError(
                f"{of}: names renames {', '.join(unknown)}, which it does not return "
                f"(it returns {', '.join(schema.names) or 'nothing'})"
            )
        shown = pa.schema([field.with_name(names.get(field.name, field.name)) for field in schema])
        return cls(name, at, schema, shown, of)

    @property
    def order(self) -> tuple[str, ...]:
        """What to sort rows of a step by, so that they are always in one order: their time, then all other columns."""
        names = self.columns.names if self.at is None else dict.fromkeys([self.at, *self.columns.names])
        return tuple(f"{self.name}.{name}" for name in names)

    @property
    def shown_at(self) -> str | None:
        """The name of the time in the output."""
        return None if self.at is None else self.shown.names[self.columns.names.index(self.at)]

    def read(self, rows: Rows) -> pa.Table:
        """Return the columns of rows, with -0.0 as 0.0, because rows that differ in it alone come in any order.

        Raises:
            UsageError: a column is missing, or of a type that cannot be cast to the declared one.
            BadRow: a value does not fit the declared type.
        """
        if not len(rows):
            return self.columns.empty_table()
        for field in self.columns:
            rows.check_fits(field.name, field.type, f"{self.what}: column {field.name}")
        return normalise_keys(conform(rows.table, self.columns, len(rows), self.what))

    def times(self, table: pa.Table) -> np.ndarray:
        """Return the times of rows (int64[n], microseconds since 1970)."""
        return read_times(table.column(self.at))

    def show(self, table: pa.Table) -> pa.Table:
        """Return the columns of rows by their names in the output."""
        return pa.table(table.select(self.columns.names).columns, schema=self.shown)

    def show_nothing(self, rows: int) -> pa.Table:
        """Return as many rows of the output's columns, all null."""
        return pa.table([pa.nulls(rows, field.type) for field in self.shown], schema=self.shown)


def list_names(key: pa.Schema, *shown: pa.Schema) -> pa.Schema:
    """Return the columns of the output: the key's, then those of each side.

    Raises:
        UsageError: a name is there twice.
    """
    fields = [*key, *(field for schema in shown for field in schema)]
    names = [field.name for field in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"{', '.join(twice)} would be there twice in the output: give one another name, "
            f'names={{INPUT: {{"{twice[0]}": "..."}}}}'
        )
    return pa.schema([(field.name, field.type) for field in fields])


def make_sides(
    what: str,
    reads: Mapping[str, Mapping[str, str]],
    on: Mapping[str, str],
    columns: Mapping[str, ColumnTypes],
    names: Mapping[str, Mapping[str, str]],
) -> tuple[Side, Side]:
    """Make the two sides of a join from its arguments, which have them by input.

    Raises:
        UsageError: they do not fit.
    """
    if not isinstance(reads, Mapping) or len(reads) != 2:
        raise UsageError(f"{what} joins two inputs: give reads as {{LEFT: {{COLUMN: KEY}}, RIGHT: {{COLUMN: KEY}}}}")
    for argument, given in (("on", on), ("columns", columns), ("names", names)):
        if not isinstance(given, Mapping) or (given.keys() - reads.keys()):
            raise UsageError(f"{what}: {argument} is {given!r}: give {{INPUT: ...}}, of {' and '.join(reads)}")
    left, right = (Side.of(one, on.get(one), columns.get(one, {}), names.get(one, {}), what) for one in reads)
    return left, right


def join_keys(left: Rows, right: Rows) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """Return the keys of both sides, each once, and of the keys of each side their ordinals among these (int64[n])."""
    columns = pa.concat_tables([left.keys.columns, right.keys.columns]).combine_chunks()
    first, ordinal = find_distinct(np.concatenate([left.keys.hashes, right.keys.hashes]), columns.columns)
    return columns.take(pa.array(first)), ordinal[: len(left.keys)], ordinal[len(left.keys) :]
