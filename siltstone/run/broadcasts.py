"""The rows of broadcast inputs in a step of one subtask: apart from the others, and into their tables before these.

Each such row is sent to every subtask, which the column `TO` names; it is null in the rows that a key sends to one.
All subtasks put the same rows into their copies of the tables, and each logs those of its key groups. What is counted
and digested of such rows, and set aside, is that of subtask 0.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import BadRow, StateError
from siltstone.operator import Operator, State
from siltstone.rows import split_input, spread
from siltstone.run.inputs import TO
from siltstone.run.task import StepTask
from siltstone.state.backend import SubtaskState
from siltstone.state.columns import find_broken, find_misfits, null_mask, one_array
from siltstone.state.json_rows import broken_reason
from siltstone.state.variables import BroadcastState


class BroadcastRows:
    """Keeps the rows of broadcast inputs that come to one subtask.

    Attributes:
        rows: how many came that are counted here, and are not bad.
    """

    def __init__(self, task: StepTask, subtask: int) -> None:
        self._task, self._subtask = task, subtask
        self._kept: dict[str, list[pa.Table]] = {name: [] for name in task.operator.broadcasts}
        """variable -> rows for it"""
        self.rows = 0

    def take(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Take the rows of broadcast inputs out of a step's, and yield the others.

        With dead letters, subtask 0 yields those that are bad, too, and all rows have the columns for them.

        Raises:
            BadRow: a row has no key or order, or a value that does not fit, and the stream has no dead letters.
        """
        task = self._task
        dropped = [TO] if task.sorts_out else [TO, *task.operator.broadcast_inputs]
        for batch in batches:
            if not task.operator.broadcasts or TO not in batch.schema.names:
                yield batch
                continue
            ours = null_mask(batch.column(TO))
            if not ours.all():
                bad = self._keep(pa.Table.from_batches([batch.filter(pa.array(~ours))]))
                ours[np.flatnonzero(~ours)[bad]] = self._subtask == 0
            others = batch if ours.all() else batch.filter(pa.array(ours))
            yield others.drop_columns([name for name in dropped if name in others.schema.names])

    def _keep(self, table: pa.Table) -> np.ndarray:
        """Keep the good rows, and return which are bad (bool[n])."""
        bad = np.zeros(len(table), bool)
        for rows, reason in find_unfit(self._task, table):
            if not self._task.sorts_out:
                raise BadRow(
                    f"{reason} in {int(rows.sum())} rows",
                    advice='mend the input, or let the stream set such rows aside (on_bad_row="dead-letter")',
                    rows=rows,
                    reason=reason,
                )
            bad |= rows
        for variable, name in self._task.operator.broadcasts.items():
            places, rows = _rows_for(self._task, table, variable, name)
            self._kept[variable].append(rows.filter(pa.array(~bad[places])))
        self.rows += int((~bad).sum()) if self._subtask == 0 else 0
        return bad

    def apply(self, bound: State) -> None:
        """Put the rows into the tables of a step that has begun."""
        for variable, parts in self._kept.items():
            rows = pa.concat_tables(parts) if parts else None
            if rows:
                getattr(bound, variable).take(rows)


def find_unfit(task: StepTask, table: pa.Table) -> Iterator[tuple[np.ndarray, str]]:
    """Find the rows that broadcast tables cannot take: (bool[n], why); a row may be there twice."""
    operator, tables = task.operator, task.operator.tables()
    for variable, name in operator.broadcasts.items():
        if name not in table.column_names:
            continue
        places, rows = _rows_for(task, table, variable, name)
        if not len(places):
            continue
        schema, by = tables[variable], _variable(operator, variable).by
        for field in schema.shown_rows:
            what = f"broadcast table {operator.name}.{variable}: {field.name}"
            column = one_array(rows.column(field.name))
            found = [(find_broken(column), f"{what} {broken_reason(column.type)}")]
            if field.name in (*schema.key.names, by):
                found.append((null_mask(column), f"{what} is null"))
            found.append((find_misfits(column, field.type), f"{what} does not fit {field.type}"))
            for bad, reason in found:
                if bad.any():
                    yield spread(bad, places, len(table)), reason


def _variable(operator: Operator, name: str) -> BroadcastState:
    """Return a variable that is known to be a broadcast table."""
    variable = operator.variables()[name]
    assert isinstance(variable, BroadcastState), "Operator.broadcasts lists them"
    return variable


def _rows_for(task: StepTask, table: pa.Table, variable: str, name: str) -> tuple[np.ndarray, pa.Table]:
    """Return the rows of an input with the columns of a broadcast table: their places (int64[n]), and them."""
    places, rows = split_input(table, name, ())
    return places, rows.select(task.operator.tables()[variable].rows.names)


def digest_tables(state: SubtaskState) -> dict[str, int]:
    """Return broadcast table -> the digest of all its rows."""
    shared = {name: table for name, table in state.tables.items() if table.schema.broadcast}
    return {name: int(table.digests.sum(dtype=np.uint64)) for name, table in shared.items()}


def check_same_tables(operator: str, received: Sequence[Acknowledgement]) -> None:
    """Check that the broadcast tables are the same in all subtasks after a step, as each row of it was logged by one.

    Raises:
        StateError: they are not.
    """
    for table in received[0].broadcast if received else ():
        logged = np.concatenate([a.digests[table] for a in received]).sum(dtype=np.uint64)
        if any(a.broadcast.get(table) != int(logged) for a in received):
            raise StateError(
                f"broadcast table {operator}.{table} is not the same in all subtasks after the step",
                advice="run the stream again: it goes on from its newest checkpoint; and report it with its input",
            )
