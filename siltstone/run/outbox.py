"""The outbox of one run: outputs are staged with a checkpoint, committed with it, and delivered after it.

    stage      each task writes its output to the store, or hands it to the driver, which stores small ones together
    commit     the transaction that completes the checkpoint makes its outputs outstanding (`catalog.outbox`)
    deliver    in order of checkpoints: check the fence, give the staged rows to the sink, mark the output as delivered
    clean      delete the staged objects of delivered outputs, for several outputs at once; files of a table stay,
               because their delivery makes them a part of it (`sinks.delta`)

A run first delivers outstanding outputs. So the same id always brings a sink the same rows (exactly-once output,
promise 2): the commit decides them, whatever code or parallelism delivers them. A checkpoint that was given up and is
made again has no new output, because its output was decided the first time. Only if its staged output is damaged, too,
is it staged again with the checkpoint, from the same logged steps; later outputs wait for it.

If a process dies between a delivery and its mark, the output is delivered again. A process that freezes in between and
is fenced may deliver it, too, with the same id and rows, but cannot mark it. A sink that skips ids it already has gets
each output exactly once.
"""

import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from siltstone.catalog.records.outbox import Output, OutputRecord
from siltstone.catalog.records.source_entries import LoggedFile
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import uploader_of
from siltstone.errors import CorruptObject, Fenced, Unreachable, UsageError
from siltstone.format.output import read_output
from siltstone.model import StoredObject
from siltstone.run.dead_letters import LETTERS
from siltstone.run.processing import outputs_of
from siltstone.run.staging import StagedOutput
from siltstone.run.task import DeadLetterOrder
from siltstone.store.base import Store
from siltstone.store.paths import CheckpointPath, is_table_file
from siltstone.stream import DEAD_LETTERS, Stream

Give = Callable[[OutputRecord], None]
"""delivers an output to its sink; returns once the sink has stored it"""
INLINE_BYTES = 8 << 20
"""most bytes of subtasks' small outputs that wait in the driver until they are stored"""
CLEAN_AFTER = 20
"""number of deliveries after which staged objects are deleted"""


@dataclass
class _Staged:
    """What tasks staged of one output for one checkpoint."""

    rows: int = 0
    objects: list[StoredObject] = field(default_factory=list)
    inline: list[bytes] = field(default_factory=list)


@dataclass
class CheckpointOutputs:
    """What tasks staged for one checkpoint, until it is stored (`Outbox.add`, `Outbox.stage`).

    Attributes:
        checkpoint: its id.
        staged: by the name of the output.
    """

    checkpoint: int
    staged: dict[str, _Staged] = field(default_factory=dict)


class Outbox:
    """The outputs of one run of a stream.

    Args:
        logged: the checkpoints that were given up and will be made again.
        tables: the sinks that are tables.
        upload: options of the uploads of small outputs.
        keep: how long outputs are kept after their delivery.
    """

    def __init__(
        self,
        stream: Stream,
        place: OpenWarehouse,
        epoch: int,
        logged: Collection[int],
        tables: Collection[str] = (),
        upload: UploadOptions | None = None,
        keep: timedelta = timedelta(0),
    ) -> None:
        self._stream, self._place, self._epoch = stream, place, epoch
        self._store, self._catalog = place.warehouse.store, place.catalog
        self._repeated = frozenset(logged) if stream.sinks else frozenset()
        self.tables = frozenset(tables)
        self.left: Sequence[int] = ()
        """the completed checkpoints of which sinks did not have all outputs at the first `deliver`, ascending"""
        self._upload, self._keep = upload or UploadOptions(), keep
        self._lost: set[tuple[int, str]] = set()
        self._delivered = 0
        self._outstanding: frozenset[tuple[int, str]] | None = None
        self._lock = threading.Lock()
        """held to change it: commits and deliveries may be on different threads"""

    @property
    def outstanding(self) -> list[tuple[int, str]] | None:
        """(checkpoint, output) of all that sinks do not have yet; None before the first `deliver`."""
        return None if self._outstanding is None else sorted(self._outstanding)

    def repeats(self, checkpoint: int) -> bool:
        """Whether a checkpoint was given up before, so that its output is already decided."""
        return checkpoint in self._repeated

    def stages(self, output: str, checkpoint: int) -> bool:
        """Whether an output, or `DEAD_LETTERS`, must be staged with a checkpoint."""
        wanted = not self.repeats(checkpoint) or (checkpoint, output) in self._lost
        return wanted and output in self._stream.sinks

    def order_letters(self, checkpoint: int, offsets: str, files: Sequence[LoggedFile]) -> DeadLetterOrder | None:
        """Return what an operator's step leaves out as dead letters, `files` among it; None if there are none."""
        if not self._stream.dead_letters and not files:  # files were left out, whatever the definition says now
            return None
        staged_with = checkpoint if self.stages(DEAD_LETTERS, checkpoint) else None
        table, rows = DEAD_LETTERS in self.tables, self._stream.sorts_out_rows
        return DeadLetterOrder(staged_with, offsets, table, rows, files)

    def add(self, outputs: CheckpointOutputs, received: Sequence[Acknowledgement]) -> None:
        """Add what subtasks staged in one step to a checkpoint's outputs.

        Raises:
            Unreachable: the store failed on small outputs that are too many to wait in memory.
        """
        for acknowledgement in sorted(received, key=lambda a: a.subtask):
            for name, staged in acknowledgement.outputs.items():
                of = outputs.staged.setdefault(name, _Staged())
                of.rows += staged.rows
                of.inline += [staged.inline] if staged.inline else []
                if staged.objects or sum(map(len, of.inline)) > INLINE_BYTES:
                    self._store_inline(outputs.checkpoint, name, of)  # before what comes later: rows stay in order
                of.objects += staged.objects

    def stage(self, of_checkpoint: CheckpointOutputs) -> list[Output]:
        """Store all outputs of a checkpoint; return those that its commit will make outstanding: those with rows.

        Raises:
            Unreachable: the store failed.
        """
        outputs, checkpoint = [], of_checkpoint.checkpoint
        schemas = outputs_of(self._stream.operators) | {DEAD_LETTERS: LETTERS}
        for name in self._stream.sinks:
            of = of_checkpoint.staged.get(name, _Staged())
            # What was lost has to come again, even with no rows: later deliveries wait for it.
            if not self.stages(name, checkpoint) or not (of.rows or (checkpoint, name) in self._lost):
                continue
            self._store_inline(checkpoint, name, of)
            schema = schemas[name].serialize().to_pybytes()
            outputs.append(Output(name, schema, of.rows, tuple(of.objects)))
        return outputs

    def expect(self, checkpoint: int, outputs: Sequence[Output]) -> None:
        """Record that a checkpoint's outputs are about to become outstanding.

        Before the commit: once that is done, a delivery on another thread may take and mark them at any moment.
        """
        with self._lock:
            if self._outstanding is not None:
                self._outstanding |= {(checkpoint, output.name) for output in outputs}

    def deliver(self, completed: int, sinks: Mapping[str, Give], *, checked: bool = False) -> bool:
        """Deliver outstanding outputs in order of checkpoints, and mark them as delivered.

        Args:
            completed: the newest completed checkpoint.
            sinks: name of the output -> function that delivers it.
            checked: whether this run has written or verified the staged objects; if not, all of them are verified
                first.

        Returns:
            Whether all were; False if some wait for a checkpoint that is to be made again.

        Raises:
            CorruptObject: the staged output of a completed checkpoint is damaged; going back before it stages it again.
            UsageError: an output no longer has a sink.
            Fenced: a newer writer has taken over the stream.
            Exception: the error of a sink; the output stays outstanding.
        """
        if checked and not sinks:
            return True  # nothing is staged; what an earlier run left was looked for when this one began
        outstanding = self._catalog.outbox.list(self._stream.name, outstanding=True)
        if self._outstanding is None:
            self._outstanding = frozenset((output.checkpoint, output.name) for output in outstanding)
            self.left = sorted({checkpoint for checkpoint, _ in self._outstanding if checkpoint <= completed})
        for output in outstanding:
            if output.name not in sinks:
                raise UsageError(
                    f"checkpoint {output.checkpoint} of stream {self._stream.name} has output for the sink of "
                    f"{output.name}, which no longer has a sink: give it one again (a function that does nothing drops "
                    "the rows), run the stream, and then remove it"
                )
        readable = [o for o in outstanding if not o.lost and (checked or self._is_readable(o, completed))]
        self._lost = {(o.checkpoint, o.name) for o in outstanding} - {(o.checkpoint, o.name) for o in readable}
        first_lost = min((checkpoint for checkpoint, _ in self._lost), default=None)
        for output in readable:
            if first_lost is not None and output.checkpoint >= first_lost:
                return False
            self._catalog.runs.check_epoch(self._stream.name, self._epoch)
            sinks[output.name](output)
            self._catalog.outbox.mark_delivered(self._stream.name, self._epoch, output.checkpoint, output.name)
            with self._lock:
                self._outstanding = (self._outstanding or frozenset()) - {(output.checkpoint, output.name)}
            self._delivered += 1
        if self._delivered >= CLEAN_AFTER:
            self.clean()
        return first_lost is None

    def clean(self) -> None:
        """Delete the staged objects of delivered outputs. Errors are ignored, because a sweep finds the rest."""
        self._delivered = 0
        with suppress(Fenced, Unreachable):
            done = self._catalog.outbox.forget_delivered(self._stream.name, self._epoch, self._keep)
            self._store.delete(name for name in done if not is_table_file(name))

    def _is_readable(self, output: OutputRecord, completed: int) -> bool:
        """Whether all staged objects are intact. If not, and the checkpoint will be made again, mark the output lost.

        The objects are checked twice, and the store must prove that it works: it may answer wrongly once.
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

    def _store_inline(self, checkpoint: int, name: str, of: _Staged) -> None:
        if of.inline:
            path, attempt = CheckpointPath(self._stream.name, self._epoch, checkpoint), f"driver-{uuid.uuid4().hex}"
            uploader = uploader_of(self._place.warehouse.store_url, self._upload)
            staged = StagedOutput(uploader, path, name, name in self.tables, name, 0, attempt)
            of.objects += staged.write_inline(of.inline).finish().objects
            of.inline = []


def check_output(store: Store, output: Output) -> None:
    """Read and verify all staged objects of an output.

    Files of a table are compared with their checksums, which tell that they are whole, and not decoded.

    Raises:
        CorruptObject: an object is missing, cut or altered, or has other rows than recorded.
        Unreachable: the store does not answer.
    """
    if output.sink_files:
        for stored in output.objects:
            store.read(stored)
        return
    rows = sum(batch.num_rows for stored in output.objects for batch in read_output(store, stored, output.arrow_schema))
    if rows != output.rows:
        raise CorruptObject(f"the staged output of {output.name} has {rows} rows, not {output.rows}")


def damaged_output(store: Store, catalog: Catalog, stream: str) -> tuple[int, CorruptObject] | None:
    """Find the first checkpoint whose outstanding output is damaged, in two reads, and the error; None if none is."""
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
