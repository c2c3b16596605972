"""The base form: all rows of one table in one subtask, as plain typed Parquet that any engine can read.

The file has the column `__key_group` (uint16) and then the table's own (`TableSchema.rows`), sorted by key
group and primary key. A row group begins at a key group if possible, so that a reader of some key groups skips
the rest by the row groups' statistics. Writing and reading take memory for about a row group, not for the table.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from siltstone.decoding import translate_decode_errors
from siltstone.errors import CorruptObject, UsageError
from siltstone.format.coding import KEY_GROUPS_MAX, Bytes
from siltstone.format.parquet import UntrustedParquet, claim, padding
from siltstone.model import KeyGroupRange
from siltstone.state.columns import one_array, row_bytes, split_by_bytes
from siltstone.state.nested import nested_columns
from siltstone.state.ordering import stable_order
from siltstone.state.ranks import is_integer_like, ranks
from siltstone.state.schema import TableSchema
from siltstone.store.base import ObjectWriter

KEY_GROUP = "__key_group"
ROW_GROUP_ROWS = 1 << 17
SORTED_ROWS_MAX = 1 << 20
"""a key group with more rows is sorted in pieces of this many, so that memory stays bounded"""
PIECE_BYTES = 256 << 20
"""a key group with more bytes is also sorted in pieces: Arrow cannot sort 2 GiB of a string column"""
SAMPLED_ROWS = 1 << 14
"""the first rows that determine how a column's values are stored"""
REPEATING = 1 / 16
"""a column is stored by dictionary if it has at most this many distinct values per row"""
READ_ROWS = 1 << 16
"""maximum rows of a batch that `read_base` yields"""
READ_BYTES = 64 << 20
"""maximum bytes of strings in such a batch, unless one row has more"""
_PADDING_BYTES = 1 << 20


def write_base(
    writer: ObjectWriter | BinaryIO,
    schema: TableSchema,
    batches: Iterable[tuple[pa.Table, np.ndarray]],
    *,
    key_groups: bool = True,
) -> int:
    """Write all rows of a table and return how many there are.

    `batches` yields (`schema.rows` table, key groups uint16[rows]), key groups ascending over all of them. Without
    `key_groups` the file has no column for them: it is then not a base, but a table for others to read, in which nested
    columns are shown as such.

    Raises:
        UsageError: the key groups are not ascending.
    """
    shape = pa.schema([pa.field(KEY_GROUP, pa.uint16(), nullable=False), *schema.rows])
    rows = 0
    pieces = _pieces(shape, batches)
    first = next(pieces, shape.empty_table())
    written = shape if key_groups else schema.shown_rows
    sink, largest = pa.PythonFile(writer, mode="w"), 0
    with pq.ParquetWriter(sink, written, **_encodings(schema, first.slice(0, SAMPLED_ROWS))) as out:
        for piece in chain([first], pieces) if len(first) else ():
            in_order = _in_order(piece, schema.primary_key).select(written.names)
            if not key_groups:
                in_order = nested_columns(in_order, schema.nested)
            out.write_table(in_order, row_group_size=ROW_GROUP_ROWS)
            rows += len(piece)
            groups = (in_order.slice(start, ROW_GROUP_ROWS) for start in range(0, len(piece), ROW_GROUP_ROWS))
            largest = max(largest, *map(claim, groups))
        # Between row groups and footer, where readers ignore it.
        for size in _parts(padding(largest, sink.tell())):
            sink.write(b"\0" * size)
    return rows


def read_base(
    data: Bytes | pa.NativeFile,
    schema: TableSchema,
    groups: KeyGroupRange | None = None,
    columns: Sequence[str] | None = None,
    *,
    name: str = "a base",
    rows: int | None = None,
) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yield the rows of `groups` (None: all key groups) in batches: (table, key groups uint16[rows], ascending).

    The tables have `columns` (None: all) in the order of `schema.rows`; a value column that was added to the schema
    later, and is missing in the file, is null. Row groups without any of `groups`, and unneeded columns of a file, are
    not read. `data` must be verified already (`store.blocks`).

    Args:
        rows: the recorded number of rows, including other key groups; None does not compare.

    Raises:
        UsageError: the schema does not have one of `columns`.
        CorruptObject: it is not a Parquet file, or not one of this table; the message contains `name`.
    """
    unknown = sorted(set(columns or ()) - set(schema.rows.names))
    if unknown:
        raise UsageError(f"column {unknown[0]} does not exist: there are {', '.join(schema.rows.names)}")
    wanted = pa.schema([field for field in schema.rows if columns is None or field.name in columns])
    with translate_decode_errors(f"object {name}", "Parquet (it was cut or altered)"):
        file = UntrustedParquet(data)
        stored = file.schema
        _check_shape(stored, schema, name)
        if rows is not None and file.metadata.num_rows != rows:
            raise CorruptObject(f"object {name} has {file.metadata.num_rows} rows, but {rows} are recorded")
        present = [KEY_GROUP, *(field.name for field in wanted if field.name in stored.names)]
        file.select(present)
        chosen = [i for i in range(file.metadata.num_row_groups) if groups is None or _overlaps(file, i, groups)]
        last, needed = -1, {KEY_GROUP, *(field.name for field in schema.primary_key if not field.nullable)}
        # One row group at a time, so that the bytes decoded together are bounded, as when it was written.
        for batch, texts in (found for i in chosen for found in _batches(file, i, present)):
            last = _check_batch(batch, needed, last)
            owners = batch.column(0).to_numpy()
            bounds = [0, KEY_GROUPS_MAX] if groups is None else [groups.start, groups.end]
            start, end = np.searchsorted(owners, bounds).tolist()
            for part in split_by_bytes(texts[start:end], READ_BYTES):
                rows_of = slice(start + part.start, start + part.stop)
                yield _cast_columns(batch[rows_of], wanted), owners[rows_of]


def _batches(file: UntrustedParquet, row_group: int, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Yield the validated rows of a row group, and the bytes of text and binary values of each row.

    Raises:
        pa.ArrowInvalid, ValueError: it is not valid Arrow data, or takes more memory than a file of this length may.
    """
    became, kinds = 0, [file.schema.field(name).type for name in columns]
    width = sum(kind.bit_width for kind in kinds if not (pa.types.is_string(kind) or pa.types.is_binary(kind))) // 8
    for batch in file.batches(row_group, READ_ROWS):
        batch.validate(full=True)
        texts = row_bytes(batch)
        became += int(texts.sum()) + len(batch) * width
        if became > file.room:
            raise ValueError(f"the rows of a row group would become {became} bytes or more")
        yield batch, texts


def read_snapshot_values(data: Bytes, schema: pa.Schema, *, name: str) -> dict[int, bytes]:
    """Read an opaque variable's full snapshot, a small table of `schema`, as key group -> bytes.

    Raises:
        CorruptObject: it is not a Parquet file, or another table.
    """
    with translate_decode_errors(f"object {name}", "Parquet (it was cut or altered)"):
        file = UntrustedParquet(data)
        if not file.schema.equals(schema) or file.metadata.num_rows > KEY_GROUPS_MAX:
            raise ValueError("it is not a table of opaque values")
        values: dict[int, bytes] = {}
        file.select(schema.names)
        for batch in (b for i in range(file.metadata.num_row_groups) for b in file.batches(i, READ_ROWS)):
            batch.validate(full=True)
            _check_columns(batch, set(schema.names))  # in any order: state keeps opaque values in order of arrival
            values.update(zip(*map(_share_values, batch.columns), strict=True))
        return values


def _share_values(column: pa.Array) -> list[Any]:
    """Return a column's values; repeated values share memory."""
    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()
    entries = column.dictionary.to_pylist()
    return [entries[i] for i in column.indices.to_pylist()]


def _check_columns(batch: pa.RecordBatch, needed: Collection[str]) -> None:
    """Raise ValueError if one of the columns `needed` of a valid batch has nulls."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.name in needed and column.null_count:
            raise ValueError(f"column {field.name} has nulls")


def _check_batch(batch: pa.RecordBatch, needed: Collection[str], last: int) -> int:
    """Check that the key groups in the first column of a valid batch continue after `last`; return the last of them.

    Raises:
        ValueError: they do not ascend, or a needed column has nulls.
    """
    _check_columns(batch, needed)
    owners = batch.column(0).to_numpy()
    if len(owners) and (int(owners[0]) < last or (owners[1:] < owners[:-1]).any()):
        raise ValueError("its key groups do not ascend")
    return int(owners[-1]) if len(owners) else last


def _encodings(schema: TableSchema, sample: pa.Table) -> dict[str, Any]:
    """Choose column encodings: a dictionary for value columns with few distinct values in the sample, differences for
    other integers and all integer keys (a quarter of the time of a dictionary that is given up); then zstd."""
    repeating = [
        name
        for name in schema.rows.names
        if name not in schema.primary_key.names or not is_integer_like(schema.rows.field(name).type)
        if pc.count_distinct(sample.column(name)).as_py() <= REPEATING * len(sample)  # pyright: ignore[reportAttributeAccessIssue]
    ]
    differences = [f.name for f in schema.rows if f.name not in repeating and is_integer_like(f.type)]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "write_page_index": True,
        "write_page_checksum": True,
        "use_dictionary": [KEY_GROUP, *repeating],
        "column_encoding": dict.fromkeys(differences, "DELTA_BINARY_PACKED"),
    }


def _pieces(shape: pa.Schema, batches: Iterable[tuple[pa.Table, np.ndarray]]) -> Iterator[pa.Table]:
    """Yield the rows with their key groups, in pieces of about `ROW_GROUP_ROWS` that end with a key group."""
    waiting: list[pa.Table] = []
    rows, size, last = 0, 0, 0
    for table, owners in batches:
        if not len(table):
            continue
        if owners[0] < last or (owners[1:] < owners[:-1]).any():
            raise UsageError("the rows of a base must be in the order of their key groups")
        last = owners[-1]
        columns = [pa.array(owners, pa.uint16()), *(table.column(name) for name in shape.names[1:])]
        waiting.append(pa.table(columns, schema=shape))
        rows, size = rows + len(table), size + table.nbytes
        if rows < ROW_GROUP_ROWS and size < PIECE_BYTES:
            continue
        # The last key group may continue in the next batch: keep its rows, unless they are too many.
        whole = pa.concat_tables(waiting)
        cut = int(np.searchsorted(whole.column(0).to_numpy(), last))
        if not cut and (rows >= SORTED_ROWS_MAX or size >= PIECE_BYTES):
            cut = rows
        if cut:
            yield whole.slice(0, cut)
            waiting, rows = [whole.slice(cut)], rows - cut
            size = waiting[0].nbytes
    if rows:
        yield pa.concat_tables(waiting)


def _parts(size: int) -> Iterator[int]:
    """Yield sizes of about a mebibyte that add up to `size`."""
    for start in range(0, size, _PADDING_BYTES):
        yield min(_PADDING_BYTES, size - start)


def _in_order(piece: pa.Table, keys: pa.Schema) -> pa.Table:
    """Sort the rows by key group and then primary key."""
    rank = ranks(one_array(piece.column(0)).to_numpy(), piece.column(1)) if len(keys) == 1 else None
    if rank is not None:
        ordered = (rank[1:] >= rank[:-1]).all()
        return piece if ordered else piece.take(pa.array(stable_order(rank)))
    order = [(name, "ascending") for name in (KEY_GROUP, *keys.names)]
    return piece.take(pc.sort_indices(piece, sort_keys=order))


def _check_shape(stored: pa.Schema, schema: TableSchema, name: str) -> None:
    if len(set(stored.names)) < len(stored.names):
        raise CorruptObject(f"{name} is not a base of this table: two columns have one name")
    missing = {KEY_GROUP, *schema.primary_key.names} - set(stored.names)
    if missing:
        raise CorruptObject(f"{name} is not a base of this table: it lacks column {min(missing)}")
    for field in [pa.field(KEY_GROUP, pa.uint16()), *schema.rows]:
        if field.name in stored.names and not schema.reads(field, stored.field(field.name).type):
            raise CorruptObject(
                f"{name} is not a base of this table: "
                f"column {field.name} is {stored.field(field.name).type}, not {field.type}"
            )


def _overlaps(file: UntrustedParquet, row_group: int, groups: KeyGroupRange) -> bool:
    """Whether a row group may have rows of `groups`; True if it has no statistics."""
    statistics = file.column(row_group, KEY_GROUP).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return statistics.min < groups.end and statistics.max >= groups.start


def _cast_columns(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.Table:
    columns = [
        one_array(batch.column(field.name)).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(len(batch), field.type)
        for field in wanted
    ]
    return pa.table(columns, schema=wanted) if columns else pa.table({"": pa.nulls(len(batch))}).select([])
