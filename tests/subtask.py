"""One subtask of an operator over the heap backend, stepped by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.operator import Operator, Rows, State
from siltstone.state.backend import SubtaskState
from siltstone.state.backends.heap import HeapBackend


class Subtask:
    """Runs steps of one operator; `state` is its working state."""

    def __init__(self, operator: Operator, state: SubtaskState) -> None:
        self.operator, self.state = operator, state

    def rows(self, columns: dict[str, Any] | pa.Table) -> Rows:
        """Rows as the engine would hand them to the operator."""
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        return Rows.make(self.operator, table, None, self.state.max_parallelism)

    def run(self, work: Callable[[State], Any]) -> Any:
        """Do something with the bound state, as one step."""
        self.state.begin(self.state.version + 1, tracking=True)
        bound = State(self.operator, self.state)
        result = work(bound)
        bound.flush()
        self.state.commit()
        return result

    def process(self, columns: dict[str, Any] | pa.Table) -> Any:
        """Run the operator on some rows, as one step."""
        return self.run(lambda state: self.operator.process(self.rows(columns), state))

    def dump(self, table: str) -> list[dict[str, Any]]:
        """Every live row of a state table."""
        return [r for rows, _ in self.state.tables[table].scan(self.state.groups) for r in rows.to_pylist()]


@contextmanager
def subtask(operator: Operator, max_parallelism: int = 8) -> Iterator[Subtask]:
    """A subtask that owns all key groups, in a directory that goes at the end."""
    with TemporaryDirectory() as directory:
        groups = KeyGroupRange(0, max_parallelism)
        state = HeapBackend().open(
            Path(directory) / "state", operator.tables(), operator.opaque_variables(), groups, max_parallelism
        )
        try:
            yield Subtask(operator, state)
        finally:
            state.close()
