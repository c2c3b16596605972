"""A time index: the rows of one state table in the order of the time at which they are due.

The table is the only truth. The index is a superset: each live row that has a due time has an entry (due time, primary
key), and an entry counts only if the table has that row, due at that time. So deletes and rollbacks undo nothing here.

    <directory>/<random>.run   an immutable run: entries sorted by (due, hash, key), an Arrow IPC file, memory mapped
    <directory>/runs.json      records: after which step, and for which contents of the table, which runs are the index

A record is valid for exactly the table whose digests it names. Without a valid one the index is rebuilt by a scan, so a
crash needs no repair, and nothing is synced: working state does not outlive a restart of the machine.

A row whose due time was set in a round is seen from the next round on (`TimedTable.begin_round`). A taken row is taken
again only if it is put again, or in a later step if it still has that due time when its step is saved, since a rebuild
finds it, too.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.model import KeyGroupRange
from siltstone.state.backend import Keys, Lookup, StateTable
from siltstone.state.columns import fixed_values, is_micros, null_mask, one_array
from siltstone.state.hashing import find_distinct, normalise_keys
from siltstone.state.protocol import key_batch
from siltstone.state.time_runs import (
    DUE,
    GROUP,
    HASH,
    MERGE_ROWS,
    RUN_BYTES,
    Heads,
    Run,
    RunFiles,
    are_among,
    entry_schema,
    keep_records,
    read_numbers,
    seal,
    split_smaller,
    translate_full_disk,
)
from siltstone.state.wrapped_table import WrappedTable
from siltstone.store.private import make_private_directory

MAX_RUNS = 8
"""files from which on the smaller ones are merged"""
RUN_ROWS = 1 << 22
"""entries that a rebuild sorts at once"""
SPARE_ENTRIES = 1 << 20
"""entries beyond two per live row from which on the index is rebuilt"""
PEEKED = 1 << 6
"""entries that `next_due` reads first"""
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class DueRows:
    """Rows that are due: n distinct `keys`, their `values` (`schema.value`), and `at`, int64[n], when they were due."""

    keys: Keys
    values: pa.Table
    at: np.ndarray

    def take(self, ordinals: np.ndarray) -> "DueRows":
        """Return some of the rows, by ordinal (integers)."""
        return DueRows(self.keys.take(ordinals), self.values.take(pa.array(ordinals)), self.at[ordinals])


@dataclass
class _Seen:
    """The due times of a batch's rows at some mutation: the memo that lets a put after a get read nothing again."""

    mutation: int
    due: np.ndarray
    timed: np.ndarray
    """bool[n]: whether the row is there and has a due time"""


class TimedTable(WrappedTable):
    """A `StateTable` over another one, which notes when its rows are due. All changes of the table must go through it.

    Open it anew after a rollback. `rebuilt_s` and `rebuilt_rows` are the seconds and rows that rebuilding took.
    """

    def __init__(
        self, directory: Path, table: StateTable, column: str, plus_us: int, null_due: int | None = None
    ) -> None:
        schema = table.schema
        kind = schema.rows.field(column).type if column in schema.rows.names else None
        if kind is None or not (is_micros(kind) or pa.types.is_int64(kind)):
            raise UsageError(f"rows cannot be due by column {column!r}: name one of type timestamp[us] or int64")
        super().__init__(table)
        self.rebuilt_s, self.rebuilt_rows = 0.0, 0
        self._column, self._plus, self._null_due = column, plus_us, null_due
        self._entry_schema = entry_schema(schema.primary_key)
        self._files = RunFiles(directory, self._entry_schema)
        self._mutation = 0
        self._runs: list[Run] = []
        self._noted: list[pa.Table] = []
        """entries of this round, not in order"""
        self._taken: list[tuple[Keys, np.ndarray]] = []
        """rows taken in this step and not put again, and when they were due"""
        self._records: list[dict[str, Any]] = []

    @classmethod
    def open(
        cls, directory: Path, table: StateTable, column: str, plus_us: int = 0, null_due: int | None = None
    ) -> Self:
        """Open the index of a table, in a directory that has nothing else: as it was saved for this table, or rebuilt.

        Args:
            column: the value or subkey column that has the time in microseconds: timestamp("us") or int64.
            plus_us: added to it; the sum ends at the bounds of int64.
            null_due: when a row is due where the column is null; None for never.

        Raises:
            UsageError: the table has no such column, or the column has neither of these types.
            Unreachable: the directory cannot be written.
        """
        opened = cls(directory, table, column, plus_us, null_due)
        with translate_full_disk(directory):
            make_private_directory(directory)
            opened._open()
        return opened

    # The table

    def get(self, batch: Keys) -> Lookup:
        """Return the rows of many keys."""
        lookup = self.table.get(batch)
        due, timed = self._due(batch.columns, lookup.values)
        batch.memo[self] = _Seen(self._mutation, due, timed & lookup.found)
        return lookup

    def put(self, batch: Keys, values: pa.Table) -> None:
        """Insert or replace one row per key, and note when they are due."""
        old = self._see(batch) if self.table.rows else None
        self.table.put(batch, values)
        self._mutation += 1
        due, timed = self._due(batch.columns, values)
        fresh = timed if old is None else timed & ~(old.timed & (old.due == due))
        if self._taken:
            fresh |= timed & self._forget_taken(batch)
        if fresh.any():
            self._noted.append(self._entries(batch, due, fresh))
        batch.memo[self] = _Seen(self._mutation, due, timed)

    def delete(self, batch: Keys) -> None:
        """Delete the rows of these keys; keys without a row are skipped."""
        self.table.delete(batch)
        self._mutation += 1
        self._taken = [each for each in self._taken if each[0] is not batch]

    def _see(self, batch: Keys) -> _Seen:
        seen = batch.memo.get(self)
        if seen is None or seen.mutation != self._mutation:
            self.get(batch)
            seen = batch.memo[self]
        return seen

    def _due(self, keys: pa.Table, values: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Return when rows are due (int64[n]), and whether they ever are (bool[n])."""
        of = values if self._column in self.schema.value.names else keys
        column = one_array(of.column(self._column))
        given = ~null_mask(column) if column.null_count else np.ones(len(column), bool)
        due, plus = fixed_values(column), self._plus
        # NumPy has no saturating sum: clipped first, the sum stays within int64.
        due = due.clip(max(_INT64.min, _INT64.min - plus), min(_INT64.max, _INT64.max - plus)) + plus
        if self._null_due is None:
            return due, given
        return np.where(given, due, self._null_due) if column.null_count else due, np.ones(len(column), bool)

    def _entries(self, keys: Keys, due: np.ndarray, which: np.ndarray) -> pa.Table:
        own = [pa.array(due), pa.array(keys.hashes), pa.array(keys.key_groups)]
        entries = pa.Table.from_arrays([*own, *normalise_keys(keys.columns).columns], schema=self._entry_schema)
        return entries if which.all() else entries.filter(pa.array(which))

    def _forget_taken(self, batch: Keys) -> np.ndarray:
        """Return bool[n], which of these rows were taken; they are put again, and so no longer count as taken."""
        was, kept = np.zeros(len(batch), bool), []
        for keys, at in self._taken:
            if keys is batch:
                was[:] = True
                continue
            was |= are_among(batch.hashes, batch.columns, keys.hashes, keys.columns)
            left = np.flatnonzero(~are_among(keys.hashes, keys.columns, batch.hashes, batch.columns))
            if len(left):
                kept.append((keys, at) if len(left) == len(at) else (keys.take(left), at[left]))
        self._taken = kept
        return was

    # What is due

    def begin_round(self) -> None:
        """Let `take` see what was noted until now."""
        runs = [run for run in [*self._runs, *seal(self._noted)] if run.left]
        kept, smaller = split_smaller([run for run in runs if not run.name], MAX_RUNS)
        merged = seal([run.entries.slice(run.start) for run in smaller])
        self._runs, self._noted = [*(run for run in runs if run.name), *kept, *merged], []

    def take(self, upto: int, most: int) -> DueRows:
        """Return the next live rows that are due until `upto`, by (due time, hash, key): `most`, or all that there are.

        They stay in the table: the caller deletes them, or puts them again. How many come does not depend on the
        backend, or on whether the index was rebuilt.
        """
        parts: list[DueRows] = []
        wanted = count = most
        while wanted > 0 and len(heads := Heads(self._runs, count, upto)):
            rows, live = self._read(heads.entries)
            live &= ~self._is_noted(rows.keys, rows.at)
            chosen = np.flatnonzero(live)[:wanted]
            heads.consume(int(chosen[-1]) + 1 if len(chosen) == wanted else len(heads))
            if len(chosen) == len(live):
                parts.append(rows)  # the keys with their memo
            elif len(chosen):
                parts.append(rows.take(chosen))
            wanted -= len(chosen)
            count = max(wanted, min(2 * count, MERGE_ROWS))
        due = _join(parts) if parts else self._nothing()
        due.keys.memo[self] = _Seen(self._mutation, due.at, np.ones(len(due.at), bool))
        if len(due.at):
            self._taken.append((due.keys, due.at))
        return due

    def _nothing(self) -> DueRows:
        keys = Keys(self.schema.primary_key.empty_table(), np.empty(0, np.uint64), np.empty(0, np.uint16))
        return DueRows(keys, self.schema.value.empty_table(), np.empty(0, np.int64))

    def next_due(self) -> int | None:
        """Return the least due time of live rows that are not taken, also of those noted in this round."""
        noted = seal(self._noted)
        self._noted = [run.entries for run in noted]
        firsts = [self._first_due(self._runs), self._first_due(noted)]
        return min((due for due in firsts if due is not None), default=None)

    def _first_due(self, runs: list[Run]) -> int | None:
        """Return the due time of the first live entry, to which the runs are advanced."""
        count = PEEKED
        while len(heads := Heads(runs, count)):
            rows, live = self._read(heads.entries)
            stale = int(live.argmax()) if live.any() else len(live)
            heads.consume(stale)
            if stale < len(live):
                return int(rows.at[stale])
            count = min(2 * count, MERGE_ROWS)
        return None

    def _read(self, entries: pa.Table) -> tuple[DueRows, np.ndarray]:
        """Return the rows of entries, and which are live (bool[n])."""
        columns, at = entries.select(self.schema.primary_key.names), read_numbers(entries, DUE)
        keys = Keys(columns, read_numbers(entries, HASH), read_numbers(entries, GROUP))
        in_order = np.sort(keys.hashes)
        if not (in_order[1:] == in_order[:-1]).any():
            lookup, back = self.table.get(keys), slice(None)
            values = lookup.values
        else:  # a row may have several entries, of which one is live
            first, back = find_distinct(keys.hashes, columns.columns)
            lookup = self.table.get(keys.take(first))
            values = lookup.values.take(pa.array(back))
        due, timed = self._due(columns, values)
        return DueRows(keys, values, at), lookup.found[back] & timed & (due == at)

    def _is_noted(self, keys: Keys, at: np.ndarray) -> np.ndarray:
        """Return bool[n]: which of these live rows had their due time set in this round."""
        noted = np.zeros(len(keys), bool)
        for entries in self._noted:
            which = np.flatnonzero(read_numbers(entries, DUE) <= at[-1])
            if len(which):
                part = entries.take(pa.array(which)).combine_chunks()
                columns = part.select(self.schema.primary_key.names)
                noted |= are_among(keys.hashes, keys.columns, read_numbers(part, HASH), columns)
        return noted

    # Files

    def save(self, step: int, oldest: int) -> None:
        """Save the index as it is after `step`, before the state commits it.

        Args:
            oldest: the records of this step and later ones are kept, and the newest one before it.

        Raises:
            Unreachable: the directory cannot be written; the step must be rolled back.
        """
        with translate_full_disk(self._files.directory):
            for keys, at in self._taken:
                seen = self._see(keys)
                live = seen.timed & (seen.due == at)
                if live.any():
                    self._noted.append(self._entries(keys, at, live))
            self._taken = []
            self.begin_round()
            self._settle()
            record = {"step": step, **self._describe()}
            if self._records and {**self._records[-1], "step": step} == record and self._records[-1]["step"] <= step:
                return
            self._records = [*keep_records(self._records, step, oldest), record]
            self._files.write_records(self._records)
            self._files.sweep(self._records, self._runs)

    def _settle(self) -> None:
        """Bring all entries into files, and few of them: merge them, or rebuild them if too many are stale."""
        runs = [run for run in self._runs if run.left]
        if sum(run.left for run in runs) > 2 * self.table.rows + SPARE_ENTRIES:
            self._rebuild()
            return
        memory, files = [run for run in runs if not run.name], [run for run in runs if run.name]
        if memory:
            files.append(self._files.write(memory))
        self._runs, smaller = split_smaller(files, MAX_RUNS)
        if smaller:
            self._runs.append(self._files.write(smaller))

    def _describe(self) -> dict[str, Any]:
        """Return what a record says besides the step."""
        of = hashlib.blake2b(self.table.digests.tobytes(), digest_size=16)
        of.update(f"{self._column}\0{self._plus}\0{self._null_due}\0{self._entry_schema}".encode())
        runs = [[run.name, run.start, len(run.entries)] for run in self._runs]
        return {"digest": of.hexdigest(), "runs": runs}

    def _open(self) -> None:
        self._records = self._files.read_records()
        digest = self._describe()["digest"]
        for record in reversed([each for each in self._records if each["digest"] == digest]):
            try:
                self._runs = [self._files.load(*run) for run in record["runs"]]
                break
            except (OSError, pa.ArrowException):
                self._records.remove(record)
        else:
            self._rebuild()
        self._files.sweep(self._records, self._runs)

    def _rebuild(self) -> None:
        """Make the runs anew from all rows."""
        begun, self._runs = time.perf_counter(), []
        parts, rows, size, parallelism = [], 0, 0, len(self.table.digests)
        for batch, groups in self.table.scan(KeyGroupRange(0, parallelism), in_order=False):
            keys = key_batch(self.schema, batch, parallelism, groups)
            parts.append(self._entries(keys, *self._due(keys.columns, batch)))
            rows, size = rows + len(parts[-1]), size + parts[-1].nbytes
            self.rebuilt_rows += len(batch)
            if rows >= RUN_ROWS or size >= RUN_BYTES:
                self._runs.append(self._files.write(seal(parts)))
                parts, rows, size = [], 0, 0
        if rows:
            self._runs.append(self._files.write(seal(parts)))
        self.rebuilt_s += time.perf_counter() - begun


def _join(parts: Sequence[DueRows]) -> DueRows:
    if len(parts) == 1:
        return parts[0]
    keys = [part.keys for part in parts]
    columns = pa.concat_tables([each.columns for each in keys]).combine_chunks()
    hashes, groups = (np.concatenate(each) for each in zip(*((k.hashes, k.key_groups) for k in keys), strict=True))
    values = pa.concat_tables([part.values for part in parts]).combine_chunks()
    return DueRows(Keys(columns, hashes, groups), values, np.concatenate([part.at for part in parts]))
