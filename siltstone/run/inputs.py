"""The inputs of an operator: which columns of each it takes, and how the rows of several come together.

A row that a subtask gets has the key's columns, `HASH`, and then

    of one input        the columns that the operator reads of it
    of several          one column per input, named after it: a struct of the columns that the operator reads of it,
                        null in the rows of the others

so that columns of equal names may have unequal types. The column of an input may be missing if it has no row.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.operator import Operator
from siltstone.state.columns import null_mask, one_array
from siltstone.state.hashing import normalise_keys, xxhash64
from siltstone.time.event_time import RowTimes

HASH = "__hash"
READ = "__read"
TO = "__to"
"""the subtask that a row of a broadcast input goes to; null in other rows"""


def hash_keys(rows: pa.Table, operator: Operator) -> np.ndarray:
    """Return the hashes of the keys of rows as Spark makes them (uint64[n])."""
    return xxhash64(normalise_keys(rows.select(operator.key.names)).columns)


def original_column(key: str) -> str:
    """Return the name of the column with a key column's original values, before the cast to the key's type."""
    return f"__original_{key}"


def misfit_reason(operator: Operator, key: str) -> str:
    """Say why rows are refused whose value of a key column cannot be cast to the column's type."""
    return f"operator {operator.name}: key column {key} cannot be cast to {operator.key.field(key).type}"


def internal_names(operator: Operator) -> list[str]:
    """List the column names that the engine itself uses in the rows of a subtask."""
    return [HASH, READ, TO, *(original_column(name) for name in operator.key.names)]


def list_columns(operator: Operator, name: str, every: Sequence[str], times: RowTimes | None) -> list[str]:
    """List the columns that a step of the operator takes of an input besides those of the key: those that it names, or
    `every` one if it does not say which; those that it is ordered by; and those with the event time.

    Raises:
        UsageError: one has the name of a key column that is another column of the input.
    """
    of_key = operator.key_columns(name)
    chosen = operator.columns_of(name) or [column for column in every if column not in of_key.values()]
    # Rows that are combined before the shuffle are ordered by columns of the combined rows, and have no event time.
    further = [*order_columns(operator, name), *(times.columns if times else ())] if operator.combined is None else []
    wanted = list(dict.fromkeys([*chosen, *further]))
    if taken := [each for each in wanted if of_key.get(each, each) != each]:
        raise UsageError(
            f"operator {operator.name} reads the column {taken[0]} of {name}, and has a key column of that name, which "
            "is another column there: rename the key column, or leave the column out of what it reads (inputs)"
        )
    return [column for column in wanted if column not in operator.key.names or not of_key]


def order_columns(operator: Operator, name: str) -> list[str]:
    """List the columns of an input by which its operator's rows are sorted, besides the input itself."""
    if not operator.reads_several:
        return list(operator.order_by)
    split = (each.partition(".") for each in operator.order_by if each not in operator.key.names)
    return [column for source, _, column in split if source == name and column]


def check_columns(
    operator: Operator, name: str, taken: Sequence[str], wanted: Sequence[str], given: Sequence[str]
) -> None:
    """Check the columns that a step of the operator takes of an input.

    Args:
        taken: those of them that have a name of the engine's own.
        given: those that the input has.

    Raises:
        UsageError: some are taken, or missing.
    """
    if taken:
        raise UsageError(
            f"operator {operator.name} reads {', '.join(taken)}, a name that Siltstone uses itself: rename the column"
        )
    if missing := [column for column in wanted if column not in given]:
        raise UsageError(
            f"operator {operator.name} reads {', '.join(missing)}, which {name} does not have "
            f"(it has {', '.join(given) or 'none'})"
        )


def read_column(
    operator: Operator, name: str, rows: pa.Table | pa.RecordBatch, column: str
) -> tuple[np.ndarray | None, pa.Array]:
    """Return a column of an input's rows.

    Returns:
        The places of the rows of the input among all (int64[n]), None if they are all, and the column's values in them.
    """
    if not operator.reads_several:
        return None, one_array(rows.column(column))
    if name not in rows.schema.names:
        return np.empty(0, np.int64), pa.nulls(0, pa.timestamp("us"))
    own = one_array(rows.column(name))
    places = np.flatnonzero(~null_mask(own))
    return places, (one_array(rows.column(column)) if column in operator.key.names else own.field(column)).take(places)
