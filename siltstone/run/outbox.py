"""The outbox of one run: outputs are staged with a checkpoint, committed with it, and delivered after it.

    stage      each task writes its output to the store, or hands it to the driver, which stores small ones together
    commit     the transaction that makes the checkpoint exist makes its outputs outstanding (`catalog.outbox`)
    deliver    in order of checkpoints: look at the fence, hand the rows over from what is staged, mark the output
    clean      what outputs staged that are marked goes, some of them at a time

A run delivers first what is outstanding. So the same id always brings a sink the same rows (promise 2): they are
decided by the commit, whatever code or parallelism delivers them. A checkpoint that is made again, since it was given
up, brings nothing: its output was decided the first time. Only where what was staged is damaged, too, does it come
again with the checkpoint, of the same logged steps; what comes after it waits for that.

A process that dies between a delivery and its mark delivers once more. One that is frozen there, and is fenced
meanwhile, may do so beside the new writer, with the same id and rows; it can mark nothing. A sink that skips ids it
has has each exactly once.
"""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from siltstone.catalog.outbox import Output, OutputRecord
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import CorruptObject, Fenced, Unreachable, UsageError
from siltstone.format.output import OutputWriter, read_output
from siltstone.model import StoredObject
from siltstone.run.dead_letters import LETTERS
from siltstone.run.processing import output_schema
from siltstone.store.base import Store
from siltstone.store.paths import CheckpointPath
from siltstone.stream import DEAD_LETTERS, Stream

Give = Callable[[OutputRecord], None]
"""hands an output to its sink; returns once the sink has it for good"""
INLINE_BYTES = 8 << 20
"""so much that subtasks handed over waits in the driver, at most, until it is stored"""
CLEAN_AFTER = 20
"""so many deliveries are cleaned up after together"""


@dataclass
class _Gathered:
    """What tasks staged of one output since the last checkpoint."""

    rows: int = 0
    objects: list[StoredObject] = field(default_factory=list)
    inline: list[bytes] = field(default_factory=list)


class Outbox:
    """The outputs of one run of a stream.

    Args:
        logged: the checkpoints that were given up and are to be made again.
    """

    def __init__(self, stream: Stream, place: OpenWarehouse, epoch: int, logged: Collection[int]) -> None:
        self._stream, self._place, self._epoch = stream, place, epoch
        self._store, self._catalog = place.warehouse.store, place.catalog
        self._repeated = frozenset(logged) if stream.sinks else frozenset()
        self._lost: set[tuple[int, str]] = set()
        self._gathered: dict[str, _Gathered] = {}
        self._delivered = 0

    def repeats(self, checkpoint: int) -> bool:
        """Whether a checkpoint was given up, so that its output is decided."""
        return checkpoint in self._repeated

    def stages(self, output: str, checkpoint: int) -> bool:
        """Whether an operator's output, or `DEAD_LETTERS`, is to be staged with a checkpoint."""
        wanted = not self.repeats(checkpoint) or (checkpoint, output) in self._lost
        return wanted and output in self._stream.sinks

    def add(self, checkpoint: int, received: Sequence[Acknowledgement]) -> None:
        """Take what subtasks staged in one step, to be part of a checkpoint.

        Raises:
            Unreachable: the store does not take what is too much to wait in memory.
        """
        for acknowledgement in sorted(received, key=lambda a: a.subtask):
            for name, staged in acknowledgement.outputs.items():
                of = self._gathered.setdefault(name, _Gathered())
                of.rows += staged.rows
                of.inline += [staged.inline] if staged.inline else []
                if staged.objects or sum(map(len, of.inline)) > INLINE_BYTES:
                    self._store_inline(checkpoint, name, of)  # before what comes later: rows stay in order
                of.objects += staged.objects

    def stage(self, checkpoint: int, *, had_input: bool) -> list[Output]:
        """Make sure that all outputs of a checkpoint are in the store; what its commit is to make outstanding.

        Args:
            had_input: whether the checkpoint holds a micro-batch: then each sink hears of it, even with no rows;
                that of dead letters only if there are some.

        Raises:
            Unreachable: the store does not take it.
        """
        outputs = []
        schemas = {op.name: output_schema(op) for op in self._stream.operators} | {DEAD_LETTERS: LETTERS}
        for name in self._stream.sinks:
            of = self._gathered.setdefault(name, _Gathered())
            if not (had_input and self.stages(name, checkpoint)):
                continue
            if name == DEAD_LETTERS and not of.rows and (checkpoint, name) not in self._lost:
                continue  # what was lost has to come again, even with no rows: later deliveries wait for it
            self._store_inline(checkpoint, name, of)
            outputs.append(Output(name, schemas[name].serialize().to_pybytes(), of.rows, tuple(of.objects)))
        return outputs

    def committed(self) -> None:
        """The checkpoint exists: the next interval begins."""
        self._gathered = {}

    def deliver(self, completed: int, sinks: Mapping[str, Give], *, checked: bool = False) -> None:
        """Deliver what is outstanding, in order of checkpoints, and mark it.

        Args:
            completed: the newest completed checkpoint.
            sinks: by the name of the output.
            checked: this run has verified or written what is staged; else all of it is verified before anything is
                handed over.

        Raises:
            CorruptObject: what a completed checkpoint staged is damaged; to go back behind it brings it again.
            UsageError: no sink takes an output any more.
            Fenced: a newer writer has taken the stream over.
            Exception: what a sink failed with; the output stays outstanding.
        """
        if checked and not sinks:
            return  # nothing is staged; what an earlier run left was looked for when this one began
        outstanding = self._catalog.outbox.list(self._stream.name, outstanding=True)
        for output in outstanding:
            if output.name not in sinks:
                raise UsageError(
                    f"checkpoint {output.checkpoint} of stream {self._stream.name} has output for the sink of "
                    f"{output.name}, which has none any more: give it one again (a function that does nothing drops "
                    "the rows), run the stream, and then take it away"
                )
        readable = [o for o in outstanding if not o.lost and (checked or self._readable(o, completed))]
        self._lost = {(o.checkpoint, o.name) for o in outstanding} - {(o.checkpoint, o.name) for o in readable}
        first_lost = min((checkpoint for checkpoint, _ in self._lost), default=None)
        for output in readable:
            if first_lost is not None and output.checkpoint >= first_lost:
                return
            self._catalog.runs.check_epoch(self._stream.name, self._epoch)
            sinks[output.name](output)
            self._catalog.outbox.mark_delivered(self._stream.name, self._epoch, output.checkpoint, output.name)
            self._delivered += 1
        if self._delivered >= CLEAN_AFTER:
            self.clean()

    def clean(self) -> None:
        """Delete what delivered outputs staged. A sweep finds what stays, so nothing here fails a run."""
        self._delivered = 0
        with suppress(Fenced, Unreachable):
            self._store.delete(self._catalog.outbox.forget_delivered(self._stream.name, self._epoch))

    def _readable(self, output: OutputRecord, completed: int) -> bool:
        """Whether what is staged is all there; if not, and its checkpoint is to be made again, it comes again with it.

        It is looked at twice, and the store has to show what must be there: a store may answer wrongly once.
        """
        try:
            with suppress(CorruptObject):
                check_output(self._store, output)
                return True
            self._place.confirm_store()
            check_output(self._store, output)
        except CorruptObject:
            self._place.confirm_store()
            if output.checkpoint <= completed or not self.repeats(output.checkpoint):
                raise
            self._catalog.outbox.mark_lost(self._stream.name, self._epoch, output.checkpoint, output.name)
            return False
        return True

    def _store_inline(self, checkpoint: int, name: str, of: _Gathered) -> None:
        if of.inline:
            path, attempt = CheckpointPath(self._stream.name, self._epoch, checkpoint), uuid.uuid4().hex

            def named(n: int) -> str:
                return path.output(name, 0, f"driver-{attempt}-{n}")

            of.objects += OutputWriter.of(self._store, named, of.inline).finish().objects
            of.inline = []


def check_output(store: Store, output: Output) -> None:
    """Read all that an output has staged.

    Raises:
        CorruptObject: something is missing, cut or altered, or holds other rows than it should.
        Unreachable: the store does not answer.
    """
    rows = sum(batch.num_rows for stored in output.objects for batch in read_output(store, stored))
    if rows != output.rows:
        raise CorruptObject(f"the staged output of {output.name} holds {rows} rows, not {output.rows}")


def damaged_output(store: Store, catalog: Catalog, stream: str) -> tuple[int, CorruptObject] | None:
    """The first checkpoint whose outstanding output is damaged, looked at twice, and how; None where there is none."""
    newest = catalog.checkpoints.last_id(stream)
    for output in catalog.outbox.list(stream, outstanding=True):
        if output.lost or output.checkpoint > newest:
            continue
        try:
            with suppress(CorruptObject):  # a store may return wrong bytes once
                check_output(store, output)
                continue
            check_output(store, output)
        except CorruptObject as error:
            if output in catalog.outbox.list(stream, outstanding=True):  # else a run has delivered it meanwhile
                return output.checkpoint, error
    return None
