"""Digest the rows that an operator reads of the source in one step, as they come.

Rows that are combined before the shuffle are digested there. The digest travels with the combined rows: the column
`READ` of one of them has it, and is null in the others. Each combined row reaches one subtask once, even if Spark makes
rows again, so the sum over the subtasks is the digest of all. If `combine` leaves no row, a row of nulls is sent with
the digest, and the subtask drops it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from siltstone.operator import Operator
from siltstone.rows import split_input
from siltstone.run.inputs import HASH, READ, TO, original_column
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.processing import combine
from siltstone.state.columns import null_mask, one_array
from siltstone.state.rows_digest import DigestedRows, describe_columns

_FEW_ROWS = 1024
"""a batch that has fewer tells little about how wide rows are"""
_ROW, _NO_ROW = b"r", b"-"
"""what the value in `READ` begins with: whether it is of a combined row, or only carries the digest"""


def combined_schema(operator: Operator, *, of_source: bool = True) -> pa.Schema:
    """Return the columns of combined rows on their way, all nullable; of rows of a source with `READ`."""
    fields = [f.with_nullable(True) for f in operator.combined or ()]
    return pa.schema([*fields, pa.field(READ, pa.binary())] if of_source else fields)


def combine_all(
    operator: Operator, batches: Iterator[pa.RecordBatch], *, of_source: bool = True
) -> Iterator[pa.RecordBatch]:
    """Combine rows batch by batch (`combined_schema`).

    Args:
        batches: the rows, of a source with `HASH`, the hash of the key.
        of_source: whether they are of a source of the stream.

    Raises:
        SiltstoneError, OperatorFailed: as `processing.combine`.
    """
    schema, read = combined_schema(operator, of_source=of_source), DigestedRows()
    for batch in batches:
        table = pa.Table.from_batches([batch])
        if not of_source:
            yield from combine(operator, table).cast(schema).to_batches()
            continue
        read += digest_read(operator, batch)
        made = combine(operator, table.drop_columns([HASH]))
        if made.num_rows:
            carried = pa.array([_ROW + _encode(read), *[None] * (made.num_rows - 1)], pa.binary())
            yield from made.append_column(READ, carried).cast(schema).to_batches()
            read = DigestedRows()
    if read.rows:
        nulls = [pa.nulls(1, f.type) for f in list(schema)[:-1]]
        yield pa.record_batch([*nulls, pa.array([_NO_ROW + _encode(read)], pa.binary())], schema=schema)


def _encode(read: DigestedRows) -> bytes:
    return json.dumps(read.to_json()).encode()


def digest_read(
    operator: Operator, rows: pa.Table | pa.RecordBatch, sources: Sequence[str] | None = None
) -> DigestedRows:
    """Digest rows of the sources: of several inputs each row with the name of its own, so that it matters of which.

    Args:
        sources: the inputs that are sources of the stream; None for all.
    """
    if not operator.reads_several:
        return _digest_input(operator, rows)
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    read = DigestedRows()
    sources = operator.input_names if sources is None else sources
    for name in sources:
        places, own = split_input(table, name, operator.key.names if operator.key_columns(name) else ())
        own = own.append_column(HASH, one_array(table.column(HASH)).take(places))
        found = _digest_input(operator, own.append_column(READ, pa.repeat(name, len(places))))
        # Those of all inputs together have columns that no one has, whichever have rows.
        read += DigestedRows(found.rows, found.digest, "")
    originals = {original_column(name) for name in operator.key.names}
    kinds = pa.schema(
        pa.field(f"{name}.{each.name}", each.type)
        for name in sorted(sources)
        if name in table.column_names
        for each in table.schema.field(name).type
        if each.name not in originals
    )
    return DigestedRows(read.rows, read.digest, describe_columns(kinds)) if read.rows else read


def _digest_input(operator: Operator, rows: pa.Table | pa.RecordBatch) -> DigestedRows:
    """Digest rows of one input: the hash of the key for its columns, and all others.

    The hash does not tell which columns of a key are null, so those that may be are digested, too. Where a key could
    not be cast to its type, its original value counts; that there is a column for it depends on whether the stream has
    dead letters.
    """
    originals = {original_column(name): name for name in operator.key.names}
    hashed = {field.name for field in operator.key if not field.nullable or len(operator.key) == 1}
    told = [name for name in rows.schema.names if name not in originals and name not in hashed]
    chosen: dict[str, Any] = {name: rows.column(name) for name in told}
    for original, name in originals.items():
        if original in rows.schema.names and rows.column(name).null_count:
            given, null = one_array(rows.column(original)), pa.array(null_mask(rows.column(name)))
            chosen[original] = pc.if_else(null, given, pa.scalar(None, given.type))
    return DigestedRows.of(pa.table(chosen), told)


class ReadRows:
    """Digests the rows of one subtask.

    Args:
        sources: the inputs of the operator that are sources of the stream.
        subtask: rows that come to every subtask count in the first.

    Attributes:
        read: those that came so far; None for an operator that reads no source.
        counts: source -> number of its rows, of an operator that reads several inputs.
        row_bytes: the bytes of a row, as `Acknowledgement` tells them.
    """

    def __init__(self, operator: Operator, sources: Sequence[str], subtask: int = 0) -> None:
        self.read: DigestedRows | None = DigestedRows() if sources else None
        self.counts = dict.fromkeys(sources, 0) if operator.reads_several else {}
        self.row_bytes = 0.0
        self._operator, self._sources, self._subtask = operator, sources, subtask

    def watch(self, batches: Iterator[pa.RecordBatch], clock: PhaseTimer) -> Iterator[pa.RecordBatch]:
        """Yield the rows, without `READ`, and digest them; this is the phase `digest`."""
        for batch in batches:
            self.row_bytes = max(self.row_bytes, batch.nbytes / max(batch.num_rows, _FEW_ROWS))
            with clock.phase("digest"):
                rows = batch if self.read is None else self._take(self.read, batch)
            yield rows

    def _take(self, before: DigestedRows, batch: pa.RecordBatch) -> pa.RecordBatch:
        if READ not in batch.schema.names:
            own = batch
            if self._subtask and TO in batch.schema.names:
                own = batch.filter(pc.is_null(batch.column(TO)))  # pyright: ignore[reportAttributeAccessIssue]
            self.read = before + digest_read(self._operator, own, self._sources)
            for name in self.counts:
                if name in own.schema.names:
                    self.counts[name] += own.num_rows - own.column(name).null_count
            return batch
        carried = batch.column(READ).drop_null().to_pylist()
        self.read = sum((DigestedRows.from_json(json.loads(value[1:])) for value in carried), before)
        if any(value.startswith(_NO_ROW) for value in carried):
            batch = batch.filter(pc.fill_null(pc.starts_with(batch.column(READ), _ROW), fill_value=True))
        return batch.drop_columns([READ])
