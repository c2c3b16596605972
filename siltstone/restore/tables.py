"""Read the tables of a chain: their rows after the last of its deltas, in order of key group."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.errors import CorruptObject
from siltstone.format.base import read_base
from siltstone.format.block import OpenBlock
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.restore.files import FileSets, file_sets
from siltstone.restore.live_rules import replaces
from siltstone.restore.merge import Batch, Changes, Delta
from siltstone.restore.plan_rules import Read
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.schema import DELETED, TableSchema
from siltstone.store.blocks import BlockReader, Wanted

PART_SHARE = 0.5
"""a base is read in parts if at most this share of it is wanted"""
WHOLE_BYTES = 64 << 20
"""a larger base is always read in parts, so that memory stays bounded"""


def merged_tables(
    reads: Sequence[Read],
    schemas: Mapping[str, TableSchema],
    reader: BlockReader,
    groups: KeyGroupRange,
    max_parallelism: int,
    scratch: Path | None = None,
    files: FileSets | None = None,
) -> Iterator[tuple[str, Iterator[Batch]]]:
    """Yield each table of some key groups with its live rows, key groups ascending; consume one before the next.

    Args:
        reads: blocks of tables in the order in which they apply; tables not in `schemas` are ignored.
        scratch: see `Changes`.
        files: those that the caller opens and closes.

    Raises:
        CorruptObject: a block is missing, cut or altered.
    """
    with nullcontext(files) if files else FileSets(reader) as opened:
        yield from _merge_tables(reads, schemas, reader, opened, groups, max_parallelism, scratch)


def _merge_tables(
    reads: Sequence[Read],
    schemas: Mapping[str, TableSchema],
    reader: BlockReader,
    files: FileSets,
    groups: KeyGroupRange,
    max_parallelism: int,
    scratch: Path | None,
) -> Iterator[tuple[str, Iterator[Batch]]]:
    changes = {name: Changes(schema, max_parallelism, scratch) for name, schema in schemas.items()}
    deltas = [read for read in reads[::-1] if read.handle.form is Form.DELTA]
    for read, block in zip(deltas, reader.blocks(map(wanted_block, deltas)), strict=True):
        assert isinstance(block, pa.Buffer), "only bases are read in parts"
        if read.handle.variable in changes:
            name = read.handle.variable
            changes[name].add(*decode_changes(read.handle, schemas[name], read.key_groups, block))
    for name in schemas:
        own = [read for read in reads if replaces(read.handle) and read.handle.variable == name]
        held = schemas[name].held(groups, max_parallelism)
        yield name, changes.pop(name).merge(_base_rows(schemas[name], own, reader, files), held)


def _base_rows(schema: TableSchema, reads: Sequence[Read], reader: BlockReader, files: FileSets) -> Iterator[Batch]:
    """Yield the rows of bases and files, key groups ascending: the ranges of several may alternate."""
    sources = [[read] for read in reads if read.handle.form is Form.BASE] + [*file_sets(reads).values()]
    pieces = sorted((part, i) for i, of in enumerate(sources) for part in of[0].key_groups)
    ordered = [[Read(r.checkpoint, r.handle, (part,)) for r in sources[i]] for part, i in pieces]
    bases = (of[0] for of in ordered if of[0].handle.form is Form.BASE)
    blocks = reader.blocks(map(wanted_block, bases))
    for of in ordered:
        handle, part = of[0].handle, of[0].key_groups[0]
        if handle.form is Form.FILES:
            yield from files.open([read.handle for read in of]).rows(handle.variable, schema, part)
        else:
            yield from read_base(next(blocks), schema, part, name=handle.object, rows=handle.rows)


def add_digests(batches: Iterable[Batch], found: np.ndarray) -> Iterator[Batch]:
    """Yield the same batches and add their digests to `found` (uint64[max_parallelism])."""
    for rows, owners in batches:
        found += group_sums(row_digests(rows), owners, len(found))
        yield rows, owners


def split_reads(reads: Sequence[Read]) -> tuple[list[Read], list[Read]]:
    """Return (the reads of tables, the others), each in the same order."""
    tables = [read for read in reads if read.handle.kind is Kind.INCREMENTAL]
    return tables, [read for read in reads if read.handle.kind is not Kind.INCREMENTAL]


def wanted_block(read: Read) -> Wanted:
    """Decide how to read a block: only the pages of the wanted key groups, if it is a base and that pays."""
    handle = read.handle
    base = handle.form is Form.BASE and handle.kind is Kind.INCREMENTAL
    share = sum(map(len, read.key_groups)) / max(len(handle.key_groups), 1)
    return Wanted(handle, in_parts=base and (share <= PART_SHARE or handle.length > WHOLE_BYTES))


def decode_changes(
    handle: Handle, schema: TableSchema, groups: Sequence[KeyGroupRange], block: pa.Buffer
) -> tuple[pa.Table, np.ndarray]:
    """Decode a delta's changes of some key groups (`schema.changes`) and their key groups (uint16), ascending.

    Raises:
        CorruptObject: it is not a block of changes, or not of as many as recorded.
    """
    delta = open_changes(handle, schema, groups, block)
    return delta.rows(), delta.key_groups


def open_changes(handle: Handle, schema: TableSchema, groups: Sequence[KeyGroupRange], block: pa.Buffer) -> Delta:
    """Decode the keys of a delta's changes of some key groups, and the rest once it is asked for.

    Raises:
        CorruptObject: it is not a block of changes, or not of as many as recorded.
    """
    opened = OpenBlock(block, f"{handle.variable} in object {handle.object}", handle.rows)
    _check_shape(opened.fields, schema, handle)
    key_groups, wanted = opened.key_groups, np.zeros(len(opened.key_groups), bool)
    for part in groups:
        wanted |= (key_groups >= part.start) & (key_groups < part.end)
    some = None if wanted.all() else pa.array(wanted)

    def decode(names: Sequence[str]) -> pa.Table:
        found = opened.decode(names)
        _check_nulls(found, schema, handle)
        return found if some is None else found.filter(some)

    keys = decode(schema.primary_key.names)
    rest = [name for name in schema.changes.names if name not in keys.column_names]

    @cache
    def rows() -> pa.Table:
        return _assemble({**_columns(keys), **_columns(decode(rest))}, schema.changes, len(keys))

    return Delta(keys.select(schema.primary_key.names), key_groups if some is None else key_groups[wanted], rows)


def _check_shape(fields: pa.Schema, schema: TableSchema, handle: Handle) -> None:
    """Refuse changes of another table; a value column may be missing, narrower, or not be wanted.

    Raises:
        CorruptObject: the changes do not fit the schema.
    """
    needed = {DELETED, *schema.primary_key.names}
    for field in schema.changes:
        at = fields.get_field_index(field.name)
        if (at >= 0 or field.name in needed) and (at < 0 or not schema.reads(field, fields.field(at).type)):
            raise _misfit_error(handle, field, "no such column" if at < 0 else f"{fields.field(at).type}")


def _check_nulls(changes: pa.Table, schema: TableSchema, handle: Handle) -> None:
    """Refuse a null in a key column that is not nullable, or instead of whether a change deletes.

    Raises:
        CorruptObject: there is one.
    """
    for field in [*schema.primary_key, schema.changes.field(DELETED)]:
        nulls = changes.column(field.name).null_count if field.name in changes.column_names else 0
        if nulls and not field.nullable:
            raise _misfit_error(handle, field, f"{field.type} with {nulls} nulls")


def _misfit_error(handle: Handle, field: pa.Field, what: str) -> CorruptObject:
    return CorruptObject(
        f"object {handle.object} is not of table {handle.variable}: of {field.name} it has {what}, "
        f"where {field.type} is recorded"
    )


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _assemble(columns: Mapping[str, pa.ChunkedArray], schema: pa.Schema, rows: int) -> pa.Table:
    """Return the columns of `schema`, null where an older definition did not have them, wider where that was narrow."""
    made = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(rows, f.type) for f in schema]
    return pa.table(made, schema=schema)
