"""Run a step without the rows that its operator cannot process, and make dead letters of these rows.

An operator may find bad rows in the middle of a step, when it has changed state. Then the step is rolled back and run
again without these rows, as often as needed. The state and the output are those of a step that never had the rows.
Until the step has succeeded, its rows and its output are kept in files of the task. This is done only for streams with
`on_bad_row="dead-letter"`. With `on_bad_file="dead-letter"`, a file that Spark cannot read is a dead letter, too
(`spark.unreadable_files`).

A dead letter is the same each time the step runs, and is an output like any other (`run.outbox`): it is staged,
committed with the checkpoint, and delivered after it, exactly once. Its columns:

    operator        the operator that could not process the row; "source" for a file
    reason          why
    row             the columns that the operator reads, as a JSON object; keys as the source had them; of a file
                    {"file": its URL, "modified_ms": when it was modified, in milliseconds since 1970}
    checkpoint_id   the checkpoint that would have included the row
    step            the step
    offsets         the offsets that the step read, as a JSON object: {"batch": Spark's number of the micro-batch, null
                    for a step without one, "from": [one offset per source], "to": [one offset per source]}, or, if
                    Spark's record names the sources, {name: offset}; null for a source without offsets
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.catalog.records.source_entries import LoggedFile
from siltstone.errors import BadRow, UsageError
from siltstone.operator import SOURCE, Rows, State
from siltstone.rows import split_input
from siltstone.run.broadcasts import BroadcastRows, find_unfit
from siltstone.run.event_times import find_bad_times, find_late
from siltstone.run.firing import StepTimers
from siltstone.run.inputs import HASH, misfit_reason, original_column, read_column
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.processing import Taken, call, calls, find_broken_rows, rows_of
from siltstone.run.read_rows import digest_read
from siltstone.run.spilled import Spilled
from siltstone.run.step_order import whole_step
from siltstone.run.task import StepTask
from siltstone.state.backend import SubtaskState
from siltstone.state.columns import find_misfits, null_mask
from siltstone.state.json_rows import json_rows
from siltstone.state.rows_digest import DigestedRows

LETTERS = pa.schema(
    {
        "operator": pa.string(),
        "reason": pa.string(),
        "row": pa.string(),
        "checkpoint_id": pa.int64(),
        "step": pa.int64(),
        "offsets": pa.string(),
    }
)
LETTERS_A_BATCH = 4096
"""rows that are text at once: it takes far more room than the rows"""


def file_letters(files: Sequence[LoggedFile], checkpoint: int, step: int, offsets: str) -> pa.RecordBatch:
    """Make the dead letters (`LETTERS`) of files that a step was run without."""
    shown = [json.dumps({"file": file.path, "modified_ms": file.modified_ms}, ensure_ascii=False) for file in files]
    reasons = [f"the file cannot be read: {file.unread}" for file in files]
    return _letters(SOURCE, reasons, shown, checkpoint, step, offsets)


def _letters(
    operator: str, reasons: Sequence[str], rows: Sequence[str], checkpoint: int, step: int, offsets: str
) -> pa.RecordBatch:
    same = [[value] * len(rows) for value in (operator, checkpoint, step, offsets)]
    columns = [same[0], reasons, rows, *same[1:]]
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, LETTERS, strict=True)], schema=LETTERS)


class _Refused(Exception):
    """An operator cannot take some rows (bool[n]) of a call."""

    def __init__(self, call: int, rows: np.ndarray, reason: str) -> None:
        super().__init__(reason)
        self.call, self.rows, self.reason = call, rows, reason


class SortedOut:
    """Runs one step of one subtask without its bad rows.

    Args:
        held: its rows.
        shared: those of broadcast inputs.
        scratch: a directory on the disk of the working state.
    """

    def __init__(self, task: StepTask, held: Spilled, shared: BroadcastRows, clock: PhaseTimer, scratch: Path) -> None:
        self._task, self._clock, self._scratch, self._shared = task, clock, scratch, shared
        self._held = held
        self._bad: dict[int, list[tuple[np.ndarray, str]]] = {}
        """call -> which of its rows (bool[n]) are bad, or late, and why; no row is there twice"""
        self._dropped: dict[int, np.ndarray] = {}
        """call -> its rows that are left out, and no dead letters"""
        self.late = 0
        """number of late rows"""
        for number, table in enumerate(calls(iter(self._held))):
            self._bad[number] = list(_unfit_rows(task, table))
            for found, reason in find_late(task, table):
                late = found & self._find_left(number, len(found))
                self.late += int(late.sum())
                if task.late == "dead-letter":
                    self._bad[number].append((late, reason))
                elif task.late == "drop":
                    self._dropped[number] = late | self._dropped.get(number, False)

    @property
    def count(self) -> int:
        """Number of rows that become dead letters."""
        return sum(int(rows.sum()) for found in self._bad.values() for rows, _ in found)

    def run(self, state: SubtaskState, timers: StepTimers) -> tuple[Iterator[pa.RecordBatch], Taken]:
        """Run the step, begun in `state`, again until it finds no more bad rows.

        Returns:
            Its output (`step_schema`), and the counts of what the operator processed.

        Raises:
            BadRow: the operator does not say which rows are bad.
            SiltstoneError, OperatorFailed: see `processing.call`.
        """
        while True:
            taken = Taken(late=self.late, left_out=sum(int(rows.sum()) for rows in self._dropped.values()))
            try:
                calls = partial(self._calls, taken)
                step = whole_step(self._task, state, timers, self._shared, calls, taken, self._clock)
                return iter(Spilled(self._scratch / "output.arrow", step)), taken
            except _Refused as refused:
                self._refuse(refused)
                state.rollback()
                state.begin(self._task.step, tracking=self._task.tracked)

    def digest(self) -> DigestedRows:
        """Digest the bad rows as they were read: a letter's text depends on columns and types that may be added."""
        made = DigestedRows()
        for number, table in enumerate(calls(iter(self._held))):
            left = self._find_left(number, table.num_rows)
            if not left.all():
                made += digest_read(self._task.operator, table.filter(pa.array(~left)))
        return made

    def letters(self, checkpoint: int, offsets: str) -> Iterator[pa.RecordBatch]:
        """Make the dead letters (`LETTERS`), in the order of the rows."""
        for number, table in enumerate(calls(iter(self._held))):
            reasons = {int(row): reason for rows, reason in self._bad[number] for row in np.flatnonzero(rows)}
            ordinals = sorted(reasons)
            for start in range(0, len(ordinals), LETTERS_A_BATCH):
                piece = ordinals[start : start + LETTERS_A_BATCH]
                rows = _as_json(self._task, table.take(pa.array(piece)))
                why = [reasons[row] for row in piece]
                yield _letters(self._task.operator.name, why, rows, checkpoint, self._task.step, offsets)

    def _calls(self, taken: Taken, bound: State) -> Iterator[pa.RecordBatch]:
        for number, table in enumerate(calls(iter(self._held))):
            left = self._find_left(number, table.num_rows)
            if number in self._dropped:
                left &= ~self._dropped[number]
            if not left.any():
                continue
            rows = rows_of(self._task, table if left.all() else table.filter(pa.array(left)))
            try:
                yield from call(self._task, bound, rows, taken, self._clock)
            except BadRow as error:
                if not self._task.sorts_out:
                    raise
                raise _Refused(number, _find_bad_rows(error, rows), error.reason) from error

    def _find_left(self, number: int, count: int) -> np.ndarray:
        left = np.ones(count, bool)
        for rows, _ in self._bad[number]:
            left &= ~rows
        return left

    def _refuse(self, refused: _Refused) -> None:
        """Note bad rows, told by their places among those that were left of their call."""
        found = self._bad[refused.call]
        dropped = self._dropped.get(refused.call)
        known = [rows for rows, _ in found] + ([] if dropped is None else [dropped])
        whole = np.zeros(len(known[0]) if known else len(refused.rows), bool)
        left = self._find_left(refused.call, len(whole))
        if dropped is not None:
            left &= ~dropped
        whole[np.flatnonzero(left)[refused.rows]] = True
        found.append((whole, refused.reason))


def _unfit_rows(task: StepTask, table: pa.Table) -> Iterator[tuple[np.ndarray, str]]:
    """Rows that the operator cannot be given, and why; no row twice.

    Raises:
        BadRow: there are some, and the stream fails on bad rows.
    """
    found = np.zeros(table.num_rows, bool)
    errors = chain(find_broken_rows(task.operator, table), find_bad_times(task, table))
    if not task.sorts_out:
        for error in errors:
            raise error
        return
    broken = ((error.rows, error.reason) for error in errors)
    for rows, reason in chain(find_unfit(task, table), _without_key(task, table), broken):
        if (fresh := rows & ~found).any():
            found |= fresh
            yield fresh, reason


def _without_key(task: StepTask, table: pa.Table) -> Iterator[tuple[np.ndarray, str]]:
    """Rows whose key is null where it must not be, or was not what the operator declares."""
    for field in task.operator.key:
        if field.name not in table.column_names:
            continue
        column = table.column(field.name)
        if column.type == field.type and not column.null_count:
            continue
        null = null_mask(column)
        what = f"operator {task.operator.name}: key column {field.name}"
        given = _find_given(task, table, field.name, null)
        misfit = (null & given) | find_misfits(column, field.type)
        yield null & ~given & (not field.nullable), f"{what} is null"
        yield misfit, misfit_reason(task.operator, field.name)


def _find_given(task: StepTask, table: pa.Table, key: str, null: np.ndarray) -> np.ndarray:
    """In which rows a key column was given, whatever came of it (bool[n]); `null` are those in which it is null now."""
    given, original = ~null, original_column(key)
    if original in table.column_names:
        return ~null_mask(table.column(original))
    for name in task.operator.input_names if task.operator.reads_several else ():
        if name in table.column_names and table.schema.field(name).type.get_field_index(original) >= 0:
            places, column = read_column(task.operator, name, table, original)
            given[places] = ~null_mask(column)
    return given


def _find_bad_rows(error: BadRow, rows: Rows) -> np.ndarray:
    """Which rows of a call an error is about: bool[n]."""
    if error.rows is None:
        raise error
    bad = np.asarray(error.rows)
    if error.keys is not None and not (_same_memory(error.at, rows) and np.array_equal(error.keys, rows.hashes)):
        # Entries in another order than the rows may be of the same keys all the same.
        bad = np.isin(rows.hashes, np.asarray(error.keys)[bad])
    if bad.dtype != bool or bad.shape != (len(rows),):
        raise UsageError(
            f"{error}: its rows are {bad.dtype}{list(bad.shape)}, not bool[{len(rows)}], one value per row of the call"
        ) from error
    if not bad.any():
        raise error
    return bad


def _same_memory(at: Any, rows: Rows) -> bool:
    """Whether entries were given with the ordinals or key columns of a call's rows themselves, not with equal ones."""
    if not isinstance(at, pa.Table):
        return at is rows.key_index
    given = [chunk for column in at.columns for chunk in column.chunks]
    own = [chunk for name in at.column_names for chunk in rows.table.column(name).chunks]
    return [_place(chunk) for chunk in given] == [_place(chunk) for chunk in own]


def _place(array: pa.Array) -> tuple[Any, ...]:
    """Where the values of an array lie in memory."""
    return array.offset, len(array), *(buffer and buffer.address for buffer in array.buffers())


def _as_json(task: StepTask, table: pa.Table) -> list[str]:
    """Each row as a JSON object; a key column as the source had it. A row of one of several inputs is the only field of
    its object, under the name of the input."""
    operator = task.operator
    if operator.reads_several:
        shown = np.empty(table.num_rows, object)
        for name in operator.input_names:
            of_key = operator.key_columns(name)
            places, own = split_input(table, name, operator.key.names if of_key else ())
            called = of_key | {original_column(key): column for key, column in of_key.items()}
            columns = {str(called.get(c, c)): own.column(c) for c in own.column_names}  # an original comes last
            shown[places] = [f"{{{json.dumps(name)}: {row}}}" for row in json_rows(pa.table(columns))]
        return shown.tolist()
    given = {original_column(field.name): field.name for field in operator.key}
    originals = {name: given[name] for name in table.column_names if name in given}
    shown = [name for name in table.column_names if name != HASH and name not in originals.values()]
    table = table.select(shown).rename_columns([originals.get(name, name) for name in shown])
    return json_rows(table)
