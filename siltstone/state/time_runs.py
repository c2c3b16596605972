"""Sorted runs of a time index, in memory or in immutable files, merged as they are read; and records that name them.

An entry has three columns of its own, when it is due and the key's hash and key group, and the primary key's. A run is
sorted by (due time, hash, key), and has an entry once.
"""

import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.errors import StateError, Unreachable
from siltstone.state.columns import fixed_values, one_array
from siltstone.state.hashing import find_distinct
from siltstone.state.ordering import stable_order
from siltstone.store.files import draft_beside
from siltstone.store.private import open_private, replace_file

MERGE_ROWS = 1 << 18
"""entries that are merged at once"""
RUN_BYTES = 1 << 30
"""size of entries that are sorted at once: Arrow cannot gather 2 GiB of one string column"""
NEVER_AFTER = int(np.iinfo(np.int64).max)
_RECORDS = "runs.json"
_NAME = re.compile(r"[0-9a-f]{32}\.run")
DUE, HASH, GROUP = "__due", "__hash", "__group"
_OWN = [(DUE, pa.int64()), (HASH, pa.uint64()), (GROUP, pa.uint16())]


def entry_schema(key: pa.Schema) -> pa.Schema:
    """Return the columns of entries, given those of the primary key."""
    return pa.schema([*(pa.field(name, kind, nullable=False) for name, kind in _OWN), *key])


@dataclass
class Run:
    """Sorted entries, of which those before `start` are consumed; `name` is its file's, or empty while in memory."""

    name: str
    entries: pa.Table
    start: int = 0

    @property
    def left(self) -> int:
        return len(self.entries) - self.start

    def is_due(self, upto: int) -> bool:
        """Whether an entry that is left is due."""
        return self.left > 0 and self.entries.column(DUE)[self.start].as_py() <= upto


class Heads:
    """The first `count` entries of several runs that are due until `upto`, without repetitions, in order."""

    def __init__(self, runs: Sequence[Run], count: int, upto: int = NEVER_AFTER) -> None:
        runs = [run for run in runs if run.is_due(upto)]
        # A run has an entry once, so each repetition of the first ones is among the first of its run, too.
        parts = [run.entries.slice(run.start, min(count, run.left)) for run in runs]
        dues = [read_numbers(part, DUE) for part in parts]
        if sum(map(len, dues)) > count:
            upto = min(upto, int(np.partition(np.concatenate(dues), count - 1)[count - 1]))
        ends = [int(np.searchsorted(due, upto, side="right")) for due in dues]
        parts = [_check_part(part.slice(0, end), run) for part, end, run in zip(parts, ends, runs, strict=True) if end]
        self._runs = runs
        owner = np.repeat(np.arange(len(runs)), ends)
        if len(parts) <= 1:
            self.entries = parts[0] if parts else pa.table({DUE: pa.array([], pa.int64())})
            self._owner, self._kept = owner, np.arange(len(owner))
            return
        entries = pa.concat_tables(parts).combine_chunks()
        order, repeated = _sort(entries)
        end = min(count, len(order))
        while end < len(order) and repeated[end]:
            end += 1
        self._owner = owner[order[:end]]
        self._kept = np.flatnonzero(~repeated[:end])
        self.entries = entries.take(pa.array(order[self._kept]))

    def __len__(self) -> int:
        return len(self.entries)

    def consume(self, count: int) -> None:
        """Advance the runs past the first `count` entries and their repetitions."""
        end = int(self._kept[count]) if count < len(self._kept) else len(self._owner)
        for run, used in zip(self._runs, np.bincount(self._owner[:end], minlength=len(self._runs)), strict=True):
            run.start += int(used)


def read_numbers(entries: pa.Table, name: str) -> np.ndarray:
    """Return one of the entries' own columns."""
    return fixed_values(one_array(entries.column(name)))


def seal(parts: Sequence[pa.Table]) -> list[Run]:
    """Sort entries, into one run unless they are large."""
    runs, group, size = [], [], 0
    for i, part in enumerate(parts):
        group.append(part)
        size += part.nbytes
        if size >= RUN_BYTES or i == len(parts) - 1:
            entries = pa.concat_tables(group).combine_chunks()
            order, repeated = _sort(entries)
            runs.append(Run("", entries.take(pa.array(order[~repeated]))))
            group, size = [], 0
    return runs


def split_smaller(runs: Sequence[Run], most: int) -> tuple[list[Run], list[Run]]:
    """Return runs that stay, and smaller ones to merge if there are more than `most`.

    Those are the two smallest, and further ones while none is larger than those before it together, so that an entry is
    seldom merged.
    """
    if len(runs) <= most:
        return list(runs), []
    runs = sorted(runs, key=lambda run: run.left)
    merged, size = 2, runs[0].left + runs[1].left
    while merged < len(runs) and runs[merged].left <= size:
        size += runs[merged].left
        merged += 1
    return runs[merged:], runs[:merged]


class RunFiles:
    """A directory of runs, and of records of which steps they are."""

    def __init__(self, directory: Path, schema: pa.Schema) -> None:
        self.directory, self.schema = directory, schema

    def write(self, runs: Sequence[Run]) -> Run:
        """Merge what is left of runs into a file, in bounded memory; the runs stay as they are.

        Raises:
            OSError: it cannot be written.
        """
        path, sources = self.directory / f"{uuid.uuid4().hex}.run", [replace(run) for run in runs]
        with draft_beside(path) as draft:
            with open(draft, "xb", opener=open_private) as file, pa.ipc.new_file(file, self.schema) as writer:
                while len(heads := Heads(sources, MERGE_ROWS)):
                    writer.write_table(heads.entries)
                    heads.consume(len(heads))
            os.replace(draft, path)
        return self.load(path.name)

    def load(self, name: str, start: int = 0, length: int | None = None) -> Run:
        """Map a file, which has `length` entries if that is given.

        Raises:
            OSError, pa.ArrowException: it is missing or damaged.
        """
        with pa.memory_map(str(self.directory / name)) as source:
            entries = pa.ipc.open_file(source).read_all()
        if not entries.schema.equals(self.schema) or length not in (None, len(entries)):
            raise pa.ArrowInvalid(f"{name} has other columns or another length")
        entries.validate()
        return Run(name, entries, start)

    def read_records(self) -> list[dict[str, Any]]:
        """Return the records by step; none if their file is missing or damaged."""
        try:
            records = json.loads((self.directory / _RECORDS).read_bytes())
            return sorted(map(_check_record, records), key=lambda record: record["step"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return []

    def write_records(self, records: Sequence[dict[str, Any]]) -> None:
        """Replace the records."""
        replace_file(self.directory / _RECORDS, json.dumps(records).encode())

    def sweep(self, records: Sequence[dict[str, Any]], runs: Sequence[Run]) -> None:
        """Remove files that are neither named by a record nor of these runs."""
        named = {run[0] for record in records for run in record["runs"]} | {run.name for run in runs} | {_RECORDS}
        for path in self.directory.iterdir():
            if path.name not in named:
                path.unlink(missing_ok=True)


def _check_record(record: Any) -> dict[str, Any]:
    """Return a record as it was written.

    Raises:
        ValueError, TypeError, KeyError: it is not one.
    """
    runs = [[name, int(start), int(length)] for name, start, length in record["runs"]]
    if not all(_NAME.fullmatch(name) and 0 <= start < length for name, start, length in runs):
        raise ValueError("not runs")
    return {"step": int(record["step"]), "digest": str(record["digest"]), "runs": runs}


def keep_records(records: Sequence[dict[str, Any]], step: int, oldest: int) -> list[dict[str, Any]]:
    """Return the records before `step` that are kept: from `oldest` on, and the newest one before."""
    earlier = [each for each in records if each["step"] < step]
    return [
        *[each for each in earlier if each["step"] < oldest][-1:],
        *(each for each in earlier if each["step"] >= oldest),
    ]


@contextmanager
def translate_full_disk(directory: Path) -> Iterator[None]:
    """Translate an OSError in a `with` block that writes to a directory into Unreachable."""
    try:
        yield
    except OSError as error:
        raise Unreachable(f"cannot write {directory}: {error.strerror}; free some space") from error


def are_among(hashes: np.ndarray, keys: pa.Table, other_hashes: np.ndarray, others: pa.Table) -> np.ndarray:
    """Return bool[n]: which keys are among other keys."""
    found = np.isin(hashes, other_hashes)
    rows = np.flatnonzero(found)
    if len(rows):
        others = others.take(pa.array(np.flatnonzero(np.isin(other_hashes, hashes[rows]))))
        columns = [
            pa.chunked_array([one_array(a.take(pa.array(rows))), one_array(b)], a.type)
            for a, b in zip(keys.columns, others.columns, strict=True)
        ]
        group = find_distinct(np.zeros(len(columns[0]), np.uint64), columns)[1]
        found[rows] = np.isin(group[: len(rows)], group[len(rows) :])
    return found


def _sort(entries: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of entries (int64[n]), and which of them in that order repeat the one before (bool[n])."""
    due, hashes = read_numbers(entries, DUE), read_numbers(entries, HASH)
    if not len(due):
        return np.zeros(0, np.int64), np.zeros(0, bool)
    # One word is sorted ten times as fast as two columns: the due time, and as many bits of the hash as have room.
    after = due.view(np.uint64) - due.min().view(np.uint64)
    bits = int(after.max()).bit_length()
    word = hashes if not bits else after if bits == 64 else after << np.uint64(64 - bits) | hashes >> np.uint64(bits)
    order = np.argsort(word)
    repeated = np.zeros(len(order), bool)
    tied = _find_tied(word[order])
    if len(tied):
        those = order[tied]
        order[tied] = those = those[stable_order(due[those], hashes[those])]
        equal = _find_tied(due[those], hashes[those])
        if len(equal):
            order[tied[equal]], repeated[tied[equal]] = _sort_by_key(entries, those[equal])
    return order, repeated


def _find_tied(*columns: np.ndarray) -> np.ndarray:
    """Return which of sorted values equal a neighbour (int64[m])."""
    same = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    return np.flatnonzero(np.append(same, False) | np.append(False, same))


def _sort_by_key(entries: pa.Table, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort rows that have the due time and hash of another one; return which of them repeat the one before, too."""
    part = entries.take(pa.array(rows)).drop_columns([GROUP]).combine_chunks()
    order = pc.sort_indices(part, [(name, "ascending") for name in part.column_names]).to_numpy()
    part = part.take(pa.array(order))
    group = find_distinct(np.zeros(len(part), np.uint64), part.columns)[1]
    return rows[order], np.append(False, group[1:] == group[:-1])


def _check_part(part: pa.Table, run: Run) -> pa.Table:
    """Return entries that are read, if text in a file is safe to use.

    Raises:
        StateError: it is not.
    """
    try:
        if run.name:
            part.validate(full=True)
    except pa.ArrowInvalid as error:
        raise StateError(
            f"{run.name} is damaged: {error}", advice="delete this working state and restore it"
        ) from error
    return part
