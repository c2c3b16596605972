"""Encode rows as records of Kafka: keys and values in JSON or Avro, and timestamps, column by column."""

from collections.abc import Iterator, Sequence
from time import time_ns

import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import UsageError
from siltstone.sinks.kafka_avro import AvroFormat
from siltstone.state.json_rows import json_rows, json_texts

Columns = str | Sequence[str] | None
"""a column, whose value is taken as it is; several, or all (None), as one JSON object or Avro record"""
Record = tuple[bytes | str | None, bytes | str | None, int]
"""key, value, and milliseconds since 1970; 0 is the time at which it is sent"""
PART_ROWS = 20_000
"""rows that are encoded at once"""
FORMATS = ("json", "avro")
_KEY, _VALUE = "Key", "Value"
"""names of Avro's records"""


def check_columns(schema: pa.Schema, key: Columns, value: Columns, what: str, avro: AvroFormat | None = None) -> None:
    """Check that rows of this schema have the columns of the key and of the value, and that these can be written.

    Args:
        avro: how to write Avro; None for JSON.

    Raises:
        UsageError: they lack one, or Avro has not its name or its type; `what` begins the message.
    """
    for part, columns in (("key", key), ("value", value)):
        named = [columns] if isinstance(columns, str) else list(columns or ())
        for name in named:
            if schema.get_field_index(name) < 0:
                raise UsageError(
                    f"{what}: {part} names the column {name!r}, which its output does not have once: use "
                    f"{', '.join(schema.names)}"
                )
    if avro is not None:
        for columns, part in ((() if key is None else key, _KEY), (schema.names if value is None else value, _VALUE)):
            if not (isinstance(columns, str) and _is_raw(schema.field(columns).type)):
                avro.check(schema, columns, part)


def encode_records(
    batch: pa.RecordBatch, key: Columns, value: Columns, time: str | None, avro: AvroFormat | None = None
) -> Iterator[list[Record]]:
    """Yield the records of a batch's rows, in order, some at a time.

    Args:
        key: the columns of the key; None for records without one.
        value: the columns of the value; None for all.
        time: the timestamp column of the records' timestamps; None for the time at which they are sent.
        avro: how to write Avro; None for JSON.

    Raises:
        StateError: a value has no Avro; see `AvroFormat.encode`.
    """
    for start in range(0, batch.num_rows, PART_ROWS):
        rows = pa.Table.from_batches([batch.slice(start, PART_ROWS)])
        keys = [None] * rows.num_rows if key is None else _encode(rows, key, avro, _KEY)
        values = _encode(rows, rows.column_names if value is None else value, avro, _VALUE)
        times = [0] * rows.num_rows if time is None else _milliseconds(rows.column(time))
        yield list(zip(keys, values, times, strict=True))


def _encode(
    rows: pa.Table, columns: str | Sequence[str], avro: AvroFormat | None, part: str
) -> Sequence[bytes | str | None]:
    """Encode one column as it is if it is text or bytes, and else in the format; several as one object or record.

    If `columns` is one column, a null in it becomes None: a record without a key, or without a value.
    """
    if isinstance(columns, str) and _is_raw(rows.schema.field(columns).type):
        column = rows.column(columns)
        if pa.types.is_string_view(column.type):
            column = column.cast(pa.large_string())
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())  # whatever its bytes are
        return column.to_pylist()
    if avro is not None:
        return avro.encode(rows, columns, part)
    if not isinstance(columns, str):
        return json_rows(rows.select(list(columns)))
    column = rows.column(columns)
    return pc.if_else(column.is_valid(), json_texts(column), None).to_pylist()


def _is_raw(kind: pa.DataType) -> bool:
    """Whether values of the type are keys and values as they are."""
    types = pa.types
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return is_text or is_bytes or types.is_fixed_size_binary(kind)


def _milliseconds(column: pa.ChunkedArray) -> list[int]:
    """Convert times to a record's timestamps; a null is the time of sending.

    Kafka takes them from 1970 on. Brokers refuse what is more than an hour ahead (`message.timestamp.after.max.ms`), as
    the end of a day is that `--finish` closes: no timestamp is later than now.
    """
    whole = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    bounded = pc.min_element_wise(
        pc.max_element_wise(whole, 1, skip_nulls=False), time_ns() // 1_000_000, skip_nulls=False
    )
    return pc.fill_null(bounded, 0).to_pylist()
