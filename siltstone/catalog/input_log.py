"""The part of the catalog that holds the input log: where a stream's sources begin, and what was read of them since.

    step 0       batch -1, of no checkpoint: where the sources begin, recorded before the first batch is processed
    step 1 ...   what each step read, recorded with the checkpoint that it is part of

A source that begins at "latest" says something else each time it is asked. Step 0 holds its first answer, and every
writer epoch begins with that one until a checkpoint says how far the stream has come.
"""

from sqlalchemy import Connection, insert, select

from siltstone.catalog import fencing, rows
from siltstone.catalog import tables as t
from siltstone.catalog.records import InputPosition, Step, StepRecord
from siltstone.catalog.transactions import Transactions

NO_ENTRIES = "{}"
"""`Step.sources` of a step that added nothing to any source's log"""


class InputLog(Transactions):
    """Where sources begin, and the steps that were recorded."""

    def steps(self, stream: str, upto: int, after: int = 0) -> list[StepRecord]:
        """The input log: the steps of every checkpoint after `after`, up to and with `upto`, in order.

        Those of deleted checkpoints are among them.
        """
        within = t.step.c.checkpoint.between(min(after, rows.ID_END - 2) + 1, min(upto, rows.ID_END - 1))
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            query = select(t.step).where(t.step.c.stream == stream, within).order_by(t.step.c.step)
            return [rows.to_step(row) for row in connection.execute(query)]

    def record_beginning(self, stream: str, epoch: int, beginning: Step) -> None:
        """Record where a stream's sources begin, guarded by the writer epoch; to be done before the first batch is
        processed. What is recorded stays: a second call changes nothing.

        Raises:
            Fenced
        """
        with self._writing(f"the initial offsets of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            if _beginning(connection, stream) is None:
                place = {"stream": stream, "checkpoint": 0, "step": 0, "batch_id": beginning.batch_id}
                connection.execute(insert(t.step), place | {"offsets": beginning.offsets, "sources": beginning.sources})

    def input_position(self, stream: str, upto: int) -> InputPosition:
        """What a query needs to read on after checkpoint `upto`; 0 is before the first."""
        s = t.step.c
        steps = select(t.step).where(s.stream == stream, s.checkpoint.between(1, upto))
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            found = [rows.to_step(row) for row in connection.execute(steps.order_by(s.step))]
            entries = [step for step in found if step.sources != NO_ENTRIES]
            return InputPosition(_beginning(connection, stream), entries, found[-2:])


def _beginning(connection: Connection, stream: str) -> Step | None:
    s = t.step.c
    row = connection.execute(select(t.step).where(s.stream == stream, s.step == 0)).first()
    return None if row is None else rows.to_step(row)
