"""Imports: streams that begin with a checkpoint that was made in another warehouse."""

from dataclasses import dataclass

from sqlalchemy import insert, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.records import fencing
from siltstone.catalog.records.checkpoints import find_newest
from siltstone.catalog.records.commits import CheckpointCommit, add_checkpoint
from siltstone.catalog.records.steps import Step, step_values
from siltstone.errors import UsageError
from siltstone.model import check_name


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a stream that continues elsewhere takes along besides a checkpoint and the steps before it.

    Attributes:
        beginning: where its sources begin, with the files that they have read (`catalog.input_log`).
        sink_offset: sinks know a new checkpoint by its id plus this (`StreamRecord`).
        default_sink: the kind of sink where the definition names none.
    """

    beginning: Step | None
    sink_offset: int
    default_sink: str | None


class Imports(CatalogPart):
    """Imports of exported savepoints."""

    def add(
        self, stream: str, epoch: int, commit: CheckpointCommit, continuation: Continuation, savepoint: str
    ) -> None:
        """Make the first checkpoint of a stream exist, named by a savepoint, with the input position to go on from.

        Everything becomes visible in this one transaction, which is guarded by the writer epoch.

        Raises:
            Fenced: `epoch` is not the stream's newest.
            UsageError: the stream has a checkpoint or has read input already, or the savepoint's name is not valid.
            Unreachable: the outcome is unknown until the catalog answers.
        """
        check_name("savepoint", savepoint)
        with self._transactions.begin_write(f"savepoint {savepoint} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            newest = find_newest(connection, stream, marked=True)
            if newest is not None or commit.id != 1:
                raise UsageError(f"stream {stream} has checkpoints already: import the savepoint under another name")
            now = self._transactions.time(connection)
            add_checkpoint(connection, stream, epoch, commit, None, now)
            if continuation.beginning is not None:
                beginning = {"stream": stream, "checkpoint": 0} | step_values(continuation.beginning)
                connection.execute(insert(t.step), beginning)
            sinks = {"sink_offset": continuation.sink_offset, "default_sink": continuation.default_sink}
            connection.execute(update(t.stream).where(t.stream.c.name == stream).values(sinks))
            named = {"stream": stream, "name": savepoint, "checkpoint": commit.id, "created_at": now}
            connection.execute(insert(t.savepoint), named | {"expires_at": None})
