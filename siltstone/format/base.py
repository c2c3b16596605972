"""A base form: everything one table holds in one subtask, as plain typed Parquet that any engine can read.

The file has the column `__key_group` (uint16) and then the table's own (`TableSchema.rows`), sorted by key
group and primary key; a row group begins at a key group wherever it can, so that a reader of some key groups
skips the rest by the row groups' statistics. Writing and reading take memory for about a row group, not for
the table.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from siltstone.decoding import decoding
from siltstone.errors import CorruptObject, UsageError
from siltstone.format.coding import KEY_GROUPS_MAX, Bytes
from siltstone.format.parquet import UntrustedParquet, claim, padding
from siltstone.model import KeyGroupRange
from siltstone.state.columns import one_array, row_bytes, split_by_bytes
from siltstone.state.ranks import is_integer_like, ranks
from siltstone.state.schema import TableSchema
from siltstone.store.base import ObjectWriter

KEY_GROUP = "__key_group"
ROW_GROUP_ROWS = 1 << 17
SORTED_ROWS_MAX = 1 << 20
"""a key group with more rows is sorted in pieces of as many, so that memory stays bounded"""
PIECE_BYTES = 256 << 20
"""and so is one with more bytes, which Arrow could not sort from 2 GiB of one string column on"""
SAMPLED_ROWS = 1 << 14
"""from so many first rows it is seen how the values of a column are stored best"""
REPEATING = 1 / 16
"""distinct values a row at most, of a column that is stored by dictionary"""
READ_ROWS = 1 << 16
"""rows a batch that `read_base` yields has at most"""
READ_BYTES = 64 << 20
"""bytes of strings that it has at most, unless one row has more"""
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
    `key_groups` the file has no column for them: it is not a base then, but a table for others to read.

    Raises:
        UsageError: key groups that are not ascending.
    """
    shape = pa.schema([pa.field(KEY_GROUP, pa.uint16(), nullable=False), *schema.rows])
    rows = 0
    pieces = _pieces(shape, batches)
    first = next(pieces, shape.empty_table())
    written = shape if key_groups else schema.rows
    sink, largest = pa.PythonFile(writer, mode="w"), 0
    with pq.ParquetWriter(sink, written, **_encodings(schema, first.slice(0, SAMPLED_ROWS))) as out:
        for piece in chain([first], pieces) if len(first) else ():
            in_order = _in_order(piece, schema.primary_key).select(written.names)
            out.write_table(in_order, row_group_size=ROW_GROUP_ROWS)
            rows += len(piece)
            groups = (in_order.slice(start, ROW_GROUP_ROWS) for start in range(0, len(piece), ROW_GROUP_ROWS))
            largest = max(largest, *map(claim, groups))
        # Between row groups and footer, where no reader looks.
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
    """The rows of `groups` (None: all key groups) in batches: (table, key groups uint16[rows], ascending).

    The tables have `columns` (None: all) in the order of `schema.rows`; a value column that the file lacks,
    because it was added to the schema later, is null. Row groups that hold none of `groups` are not read, and of a file
    only the columns that are needed. Nothing is verified here: `data` is (`store.blocks`, promise 6).

    Args:
        rows: how many the base is recorded to have, those of other key groups included; None does not compare.

    Raises:
        UsageError: `columns` names one that the schema does not have.
        CorruptObject: no Parquet file, or not one of this table; `name` says where it came from.
    """
    unknown = sorted(set(columns or ()) - set(schema.rows.names))
    if unknown:
        raise UsageError(f"there is no column {unknown[0]}: there are {', '.join(schema.rows.names)}")
    wanted = pa.schema([field for field in schema.rows if columns is None or field.name in columns])
    with decoding(f"object {name}", "Parquet (it was cut or altered)"):
        file = UntrustedParquet(data)
        stored = file.schema
        _check_shape(stored, schema, name)
        if rows is not None and file.metadata.num_rows != rows:
            raise CorruptObject(f"object {name} holds {file.metadata.num_rows} rows, where {rows} are recorded")
        present = [KEY_GROUP, *(field.name for field in wanted if field.name in stored.names)]
        file.select(present)
        chosen = [i for i in range(file.metadata.num_row_groups) if groups is None or _overlaps(file, i, groups)]
        last, needed = -1, {KEY_GROUP, *schema.primary_key.names}
        # A row group at a time: what is decoded together is then bounded in bytes too, as it was when it was written.
        for batch, texts in (found for i in chosen for found in _batches(file, i, present)):
            last = _check_batch(batch, needed, last)
            owners = batch.column(0).to_numpy()
            bounds = [0, KEY_GROUPS_MAX] if groups is None else [groups.start, groups.end]
            start, end = np.searchsorted(owners, bounds).tolist()
            for part in split_by_bytes(texts[start:end], READ_BYTES):
                rows_of = slice(start + part.start, start + part.stop)
                yield _shaped(batch[rows_of], wanted), owners[rows_of]


def _batches(file: UntrustedParquet, row_group: int, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """The rows of a row group, validated, and how many bytes of text and binary values each has.

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
    """Key group -> bytes of an opaque variable's full snapshot, a small table of `schema`.

    Raises:
        CorruptObject: no Parquet file, or another table.
    """
    with decoding(f"object {name}", "Parquet (it was cut or altered)"):
        file = UntrustedParquet(data)
        if not file.schema.equals(schema) or file.metadata.num_rows > KEY_GROUPS_MAX:
            raise ValueError("it is no table of opaque values")
        values: dict[int, bytes] = {}
        file.select(schema.names)
        for batch in (b for i in range(file.metadata.num_row_groups) for b in file.batches(i, READ_ROWS)):
            batch.validate(full=True)
            _check_columns(batch, set(schema.names))  # in any order: state keeps opaque values as they came
            values.update(zip(*map(_shared, batch.columns), strict=True))
        return values


def _shared(column: pa.Array) -> list[Any]:
    """The values of a column, one that repeats itself once in memory."""
    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()
    entries = column.dictionary.to_pylist()
    return [entries[i] for i in column.indices.to_pylist()]


def _check_columns(batch: pa.RecordBatch, needed: Collection[str]) -> None:
    """ValueError unless the columns `needed` of a valid batch have no nulls."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.name in needed and column.null_count:
            raise ValueError(f"column {field.name} has nulls")


def _check_batch(batch: pa.RecordBatch, needed: Collection[str], last: int) -> int:
    """The last of the key groups in the first column of a valid batch, which go on from `last`.

    Raises:
        ValueError: it is not what a base holds.
    """
    _check_columns(batch, needed)
    owners = batch.column(0).to_numpy()
    if len(owners) and (int(owners[0]) < last or (owners[1:] < owners[:-1]).any()):
        raise ValueError("its key groups do not ascend")
    return int(owners[-1]) if len(owners) else last


def _encodings(schema: TableSchema, sample: pa.Table) -> dict[str, Any]:
    """A value column that repeats itself in the sample is stored by dictionary; integers else, and integer keys always,
    as differences, which take a quarter of the time that a dictionary takes before it is given up; then zstd.
    """
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
    """The rows with their key groups, in pieces of about `ROW_GROUP_ROWS` that end where a key group does."""
    waiting: list[pa.Table] = []
    rows, size, last = 0, 0, 0
    for table, owners in batches:
        if not len(table):
            continue
        if owners[0] < last or (owners[1:] < owners[:-1]).any():
            raise UsageError("the rows of a base must come in the order of their key groups")
        last = owners[-1]
        columns = [pa.array(owners, pa.uint16()), *(table.column(name) for name in shape.names[1:])]
        waiting.append(pa.table(columns, schema=shape))
        rows, size = rows + len(table), size + table.nbytes
        if rows < ROW_GROUP_ROWS and size < PIECE_BYTES:
            continue
        # The newest key group may go on in the next batch: keep its rows, unless they are too many.
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
    """Sizes of about a mebibyte that add up to `size`."""
    for start in range(0, size, _PADDING_BYTES):
        yield min(_PADDING_BYTES, size - start)


def _in_order(piece: pa.Table, keys: pa.Schema) -> pa.Table:
    """The rows by key group and then primary key."""
    rank = ranks(one_array(piece.column(0)).to_numpy(), piece.column(1)) if len(keys) == 1 else None
    if rank is not None:
        ordered = (rank[1:] >= rank[:-1]).all()
        return piece if ordered else piece.take(pa.array(np.argsort(rank, kind="stable")))
    order = [(name, "ascending") for name in (KEY_GROUP, *keys.names)]
    return piece.take(pc.sort_indices(piece, sort_keys=order))


def _check_shape(stored: pa.Schema, schema: TableSchema, name: str) -> None:
    if len(set(stored.names)) < len(stored.names):
        raise CorruptObject(f"{name} is no base of this table: two columns have one name")
    missing = {KEY_GROUP, *schema.primary_key.names} - set(stored.names)
    if missing:
        raise CorruptObject(f"{name} is no base of this table: it lacks column {min(missing)}")
    for field in [pa.field(KEY_GROUP, pa.uint16()), *schema.rows]:
        if field.name in stored.names and stored.field(field.name).type != field.type:
            raise CorruptObject(
                f"{name} is no base of this table: "
                f"column {field.name} is {stored.field(field.name).type}, not {field.type}"
            )


def _overlaps(file: UntrustedParquet, row_group: int, groups: KeyGroupRange) -> bool:
    """May a row group hold rows of `groups`? Yes where it has no statistics."""
    statistics = file.column(row_group, KEY_GROUP).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return statistics.min < groups.end and statistics.max >= groups.start


def _shaped(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.Table:
    columns = [
        one_array(batch.column(field.name)) if field.name in batch.schema.names else pa.nulls(len(batch), field.type)
        for field in wanted
    ]
    return pa.table(columns, schema=wanted) if columns else pa.table({"": pa.nulls(len(batch))}).select([])
