"""Choose how rows are staged: as objects of the outbox or, for a sink that is a table, as files of that table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from siltstone.format.output import OutputWriter, Puts
from siltstone.format.table_file import TableWriter
from siltstone.store.paths import CheckpointPath


@dataclass(frozen=True)
class StagedOutput:
    """The objects of one output that one process stages with a checkpoint.

    Attributes:
        sink: the name of the sink, an operator's or `DEAD_LETTERS`.
        table: whether the sink is a table.
        output: as `CheckpointPath.output` takes it.
        attempt: unique to the process, the step and the output, within the writer epoch.
    """

    store: Puts
    path: CheckpointPath
    sink: str
    table: bool
    output: str
    subtask: int
    attempt: str

    def write(self, schema: pa.Schema, inline_bytes: int) -> OutputWriter:
        """Return a writer of rows with this schema, of which at most `inline_bytes` are returned inline."""
        return self._writer(self.store, self._name, schema, inline_bytes)

    def write_inline(self, parts: Sequence[bytes]) -> OutputWriter:
        """Return a writer with all rows of several inline parts, to be stored as objects.

        Raises:
            StateError: one of the parts is damaged.
        """
        return self._writer.of(self.store, self._name, parts)

    @property
    def _writer(self) -> type[OutputWriter]:
        return TableWriter if self.table else OutputWriter

    @property
    def _name(self) -> Callable[[int], str]:
        def name(n: int) -> str:
            attempt = f"{self.attempt}-{n}"
            if self.table:
                return self.path.table_file(self.sink, self.output, self.subtask, attempt)
            return self.path.output(self.output, self.subtask, attempt)

        return name
