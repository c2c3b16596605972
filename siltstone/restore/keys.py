"""Parse operator keys and key groups that people write."""

import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.model import KeyGroupRange
from siltstone.state.hashing import find_distinct, normalise_keys, xxhash64
from siltstone.times import parse_time


def parse_keys(text: str, key: pa.Schema) -> pa.Table:
    """Parse operator keys from a JSON list of objects, such as `[{"origin": "JFK", "dest": "LAX"}]`.

    Numbers and booleans are JSON's (NaN too); a decimal may be a string; dates and timestamps are ISO 8601 strings,
    in UTC unless they name a zone; binary is hexadecimal. A nullable column may be null.

    Raises:
        UsageError: it is not such a list, a column is missing or unknown, or a value does not fit its column's type.
    """
    form = f"[{{{', '.join(f'{json.dumps(name)}: ...' for name in key.names)}}}]"
    try:
        entries = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise UsageError(f"keys are not JSON ({error}): write {form}") from None
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"keys must be a list with at least one key: write {form}")
    for entry in entries:
        named = isinstance(entry, dict) and set(entry) == set(key.names)
        if not named or any(entry[field.name] is None and not field.nullable for field in key):
            raise UsageError(f"{entry} is not a key of this operator: write {form}")
    columns = [_key_column([entry[field.name] for entry in entries], field) for field in key]
    return normalise_keys(pa.table(columns, schema=key))


def parse_key_groups(text: str, max_parallelism: int) -> tuple[KeyGroupRange, ...]:
    """Parse key groups written as "a-b" (b included) or "a".

    Raises:
        UsageError: the text has neither form, or these are not key groups of the stream.
    """
    first, dash, last = text.strip().partition("-")
    last = last if dash else first
    numeric = all(part.isascii() and part.isdigit() and len(part) < 10 for part in (first, last))
    if not numeric or not int(first) <= int(last) < max_parallelism:
        raise UsageError(f"key_groups {text!r}: write FIRST-LAST, from 0 to {max_parallelism - 1}")
    return (KeyGroupRange(int(first), int(last) + 1),)


def rows_of_keys(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """Return the rows that have one of the keys; the keys themselves are compared, not their hashes."""
    both = pa.concat_tables([keys, rows.select(keys.column_names)])
    _, key = find_distinct(xxhash64(both.columns), both.columns)
    return rows.filter(pa.array(np.isin(key[len(keys) :], key[: len(keys)])))


def _key_column(values: list[Any], field: pa.Field) -> pa.Array:
    kind = field.type
    try:
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_string(kind):
            if pa.types.is_integer(kind) and not all(v is None or isinstance(v, int) for v in values):
                raise ValueError("not an integer")
            return pa.array(values, kind)
        if pa.types.is_floating(kind):
            return pa.array([_parse_value(v, float) for v in values], pa.float64()).cast(kind)
        if pa.types.is_decimal(kind):
            return pa.array([_parse_value(v, Decimal) for v in values], kind)
        if pa.types.is_binary(kind):
            return pa.array([_parse_value(v, bytes.fromhex) for v in values], kind)
        if pa.types.is_date32(kind):
            return pa.array([_parse_value(v, date.fromisoformat) for v in values], kind)
        return (
            pa.array([_parse_value(v, parse_time) for v in values], pa.timestamp("us", "UTC"))
            .cast(pa.int64())
            .cast(kind)
        )
    except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError, InvalidOperation) as error:
        raise UsageError(f"keys: {field.name} is {kind}: {str(error).splitlines()[0]}") from None


def _parse_value(value: Any, parse: Callable[[Any], Any]) -> Any:
    return None if value is None else parse(value)
