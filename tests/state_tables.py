"""Tables of a subtask, as the suites over every state backend use them."""

from collections.abc import Callable

import pyarrow as pa

from siltstone.state.backend import Keys, StateTable, SubtaskState
from siltstone.state.schema import TableSchema
from tests.state_model import batch_of, changed, contents

LONG = TableSchema(
    pa.schema([pa.field("k", pa.int64(), nullable=False)]), pa.schema([]), pa.schema([("v", pa.int64())])
)
TEXT = TableSchema(
    pa.schema([("k", pa.string()), ("year", pa.int16())]),
    pa.schema([("position", pa.int64())]),
    pa.schema([("note", pa.string()), ("blob", pa.binary()), ("flag", pa.bool_())]),
)
Open = Callable[..., SubtaskState]


def longs(*keys: int) -> Keys:
    return batch_of(LONG, pa.table({"k": pa.array(keys, pa.int64())}))


def values(*numbers: int | None) -> pa.Table:
    return pa.table({"v": pa.array(numbers, pa.int64())}, schema=LONG.value)


def put(state: SubtaskState, **rows: int | None) -> None:
    """Put rows named k<number>."""
    state.tables["t"].put(longs(*(int(name[1:]) for name in rows)), values(*rows.values()))


def now(table: StateTable) -> dict[int, int | None]:
    return {int(key[0]): None if row[0] == "None" else int(row[0]) for key, row in contents(table).items()}


def told(table: StateTable) -> dict[int, int | None]:
    return {int(key[0]): None if row is None else int(row[0]) for key, row in changed(table).items()}
