"""The catalog as a repository of streams and checkpoints; every method is one transaction.

    identities   which warehouse it is of
    streams      streams and their runs
    definitions  what checkpoints were made under
    retaining    savepoints and deletion
    leases       who is at work on checkpoints
    audit        what was deleted from the store
    rewinding    checkpoints that were given up, and their input
    input_log    where sources begin, and what was read of them since
    outbox       outputs of checkpoints, and whether sinks have them
    forking      streams that began as a checkpoint of another
    here         checkpoints and what they refer to

Writes that belong to a run are guarded by its writer epoch (`fencing`). A checkpoint exists from the end of
`Catalog.commit` on: before it nothing is visible, after it everything is. Safe for use by many threads.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from siltstone.catalog import fencing, rows
from siltstone.catalog import tables as t
from siltstone.catalog.audit import Audit
from siltstone.catalog.definitions import Definitions, record_definition
from siltstone.catalog.forking import Forking
from siltstone.catalog.identities import Identities
from siltstone.catalog.input_log import InputLog
from siltstone.catalog.leases import Leases
from siltstone.catalog.materializations import Materializations, chain_materializations, followed
from siltstone.catalog.outbox import Outbox, insert_outputs
from siltstone.catalog.passes import Passes
from siltstone.catalog.records import (
    CheckpointCommit,
    CheckpointRecord,
    EditRecord,
    ObjectKind,
    ObjectRecord,
    SnapshotRecord,
    as_utc,
    parse_time,
)
from siltstone.catalog.retaining import Retaining
from siltstone.catalog.rewinding import Rewindings, settle_log
from siltstone.catalog.streams import Streams
from siltstone.errors import UnknownCheckpoint, UsageError
from siltstone.model import LATEST, StoredObject
from siltstone.store.paths import check_object_name


class Catalog(
    Identities,
    Streams,
    Definitions,
    Retaining,
    Leases,
    Audit,
    Passes,
    Materializations,
    Forking,
    Rewindings,
    InputLog,
    Outbox,
):
    """What exists and who refers to it. Any method may raise Unreachable; UnknownStream if it takes one."""

    # Checkpoints

    def commit(self, stream: str, epoch: int, commit: CheckpointCommit) -> dict[str, int]:
        """Make a checkpoint exist, whole, in one transaction guarded by the writer epoch (promise 5).

        Its time is the database's own. Where clocks jump, that may be before the time of the checkpoint it follows. Its
        highest event time never is. What the input log held for it gives way to its own steps (`catalog.rewinding`).

        Returns:
            operator -> the checkpoint its chain begins with: later than `commit.first` says, where a materialization
            has been completed meanwhile.

        Raises:
            Fenced: `epoch` is not the stream's newest.
            UsageError: the id does not follow the newest, or an object, step or dependency does not fit.
            StateError: its output is decided already, and it would bring other rows (`catalog.outbox`).
            Unreachable: whether it exists is known when the catalog answers again.
        """
        with self._writing(f"checkpoint {commit.id} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            newest = rows.newest(connection, stream)
            last = newest.id if newest else 0
            if commit.id != last + 1:
                raise UsageError(f"checkpoint {commit.id} of stream {stream} does not follow the newest, {last}")
            first = followed(connection, stream, newest, commit.forms, commit.first)
            settle_log(connection, stream, commit)
            now = self._time(connection)
            rows.insert_checkpoint(connection, stream, epoch, commit, newest, now, first)
            record_definition(connection, stream, commit, now)
            insert_outputs(connection, stream, epoch, commit.id, commit.outputs)
            return first

    def last_id(self, stream: str) -> int:
        """The newest checkpoint's id; 0 where there is none."""
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            newest = rows.newest(connection, stream)
            return newest.id if newest else 0

    def latest(self, stream: str) -> CheckpointRecord:
        """The newest checkpoint.

        Raises:
            UnknownCheckpoint: there is none yet.
        """
        return self._newest(stream, "no latest checkpoint")

    def checkpoint(self, stream: str, id: int) -> CheckpointRecord:
        """One checkpoint; a deleted one too, while it is kept for those that build on it (`deleted_at`).

        Raises:
            UnknownCheckpoint: says which there are.
        """
        return self._newest(stream, f"no checkpoint {id}", rows.is_(id), marked=True)

    def checkpoints(self, stream: str, limit: int | None = None, *, marked: bool = False) -> list[CheckpointRecord]:
        """All checkpoints, or the newest `limit`; oldest first.

        With `marked`, deleted ones that are kept for those that build on them are among them.
        """
        query = rows.checkpoints_of(stream, marked=marked).limit(limit)
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            return [rows.to_checkpoint(row) for row in connection.execute(query)][::-1]

    def checkpoints_after(self, stream: str, id: int, limit: int) -> list[CheckpointRecord]:
        """The `limit` oldest checkpoints later than `id`, oldest first; none where there is no such stream."""
        later = rows.checkpoints_of(stream).where(t.checkpoint.c.id > id).order_by(None).order_by(t.checkpoint.c.id)
        with self._reading() as connection:
            return [rows.to_checkpoint(row) for row in connection.execute(later.limit(limit))]

    def resolve(self, stream: str, at: str) -> int:
        """The id that `at` means: `latest`, an id, a savepoint, or a time (ISO 8601, UTC): the last commit by then.

        That is the one of the highest id among those that bear that time or an earlier one. Ids say the order of
        commits; their times do too unless a clock was wrong.

        Raises:
            UnknownCheckpoint: none answers to it; says which there are.
        """
        if at == LATEST:
            return self.latest(stream).id
        if at.isascii() and at.isdigit():
            id = int(at) if len(at) < 20 else rows.ID_END
            return self._newest(stream, f"no checkpoint {id}", rows.is_(id)).id
        try:
            time = parse_time(at)
        except UsageError:
            named = {savepoint.name: savepoint.checkpoint for savepoint in self.savepoints(stream)}
            if at in named:
                return self._newest(stream, f"no checkpoint {named[at]}", rows.is_(named[at])).id
            names = f" ({', '.join(named)})" if named else ""
            use = f"use latest, an id, a savepoint{names}, or an ISO time (UTC)"
            raise UnknownCheckpoint(f"{at!r} is no checkpoint: {use}") from None
        missing = f"no checkpoint as old as {time.isoformat()}"
        return self._newest(stream, missing, t.checkpoint.c.committed_at <= time).id

    def as_of(self, stream: str, event_time: datetime) -> int:
        """The id of the last checkpoint whose highest event time is not later than `event_time`.

        Raises:
            UnknownCheckpoint: there is none; says which there are.
        """
        time = as_utc(event_time)
        missing = f"no checkpoint of events up to {time.isoformat()}"
        return self._newest(stream, missing, t.checkpoint.c.event_time_max <= time).id

    def successor(self, stream: str, id: int) -> CheckpointRecord | None:
        """The checkpoint after `id`, even if it is marked as deleted; None if it is gone, or there is none yet."""
        with self._reading() as connection:
            found = rows.newest(connection, stream, rows.is_(id + 1), marked=True)
            return None if found is None else rows.to_checkpoint(found)

    def _newest(self, stream: str, missing: str, *where: ColumnElement[bool], marked: bool = False) -> CheckpointRecord:
        with self._reading() as connection:
            found = rows.newest(connection, stream, *where, marked=marked)
            if found is None:
                raise rows.unknown_checkpoint(connection, stream, missing)
            return rows.to_checkpoint(found)

    def chain(self, stream: str, id: int) -> list[int]:
        """Every checkpoint whose objects a restore of `id` may read, itself included; ids ascending.

        Those it builds on may be deleted ones that are kept for it; itself may not.

        Raises:
            UnknownCheckpoint
        """
        with self._reading() as connection:
            return self._chain(connection, stream, id)

    def chain_manifests(self, stream: str, id: int) -> list[StoredObject]:
        """The manifests that a restore of `id` reads, as things stand at one moment: of every checkpoint of its chain,
        oldest first, and of the materializations that its chains begin with.

        Raises:
            UnknownCheckpoint
        """
        with self._reading() as connection:
            chain = self._chain(connection, stream, id)
            query = rows.checkpoints_of(stream, marked=True).where(t.checkpoint.c.id.between(chain[0], id))
            manifests = [rows.to_checkpoint(row).manifest for row in connection.execute(query)][::-1]
            begun = chain_materializations(connection, stream, id)
            self._check_visible(connection, stream, id)
            return manifests + [StoredObject(m.manifest, m.manifest_bytes, m.manifest_checksum) for m in begun]

    def _chain(self, connection: Connection, stream: str, id: int) -> list[int]:
        chain = rows.chain(connection, stream, id) if 0 < id < rows.ID_END else []
        self._check_visible(connection, stream, id)
        return chain

    def _check_visible(self, connection: Connection, stream: str, id: int) -> None:
        """Last of all: of a checkpoint that is not marked now, what was read before is whole."""
        if rows.newest(connection, stream, rows.is_(id)) is None:
            raise rows.unknown_checkpoint(connection, stream, f"no checkpoint {id}")

    def record_proof(
        self,
        stream: str,
        id: int,
        proven: bool,
        reason: str | None = None,
        *,
        epoch: int | None = None,
        restore_s: float | None = None,
        restore_bytes: int | None = None,
    ) -> None:
        """Note the outcome of a proof, in place of the one before; `reason` says why it failed.

        A proof that restored this checkpoint alone also says what that took and read (`restore_s`,
        `restore_bytes`), in place of what was measured before; one that did not leaves that as it is.

        Args:
            epoch: the writer epoch of what was proven: given up and made again meanwhile, it is another's.

        Raises:
            UnknownCheckpoint
        """
        values: dict[str, Any] = {"proof": None if proven else reason or "failed"}
        if restore_s is not None:
            values |= {"restore_s": restore_s, "restore_bytes": restore_bytes}
        with self._writing(f"the proof of checkpoint {id} of stream {stream}") as connection:
            at = update(t.checkpoint).where(t.checkpoint.c.stream == stream, rows.is_(id))
            at = at if epoch is None else at.where(t.checkpoint.c.epoch == epoch)
            values["proven_at"] = self._time(connection) if proven else None
            if connection.execute(at.values(values)).rowcount == 0:
                raise rows.unknown_checkpoint(connection, stream, f"no checkpoint {id}")

    # What checkpoints refer to

    def objects(self, stream: str, checkpoints: Iterable[int] | None = None) -> list[ObjectRecord]:
        """The objects these checkpoints wrote (all, for None), by checkpoint and name."""
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            if checkpoints is None:
                return rows.objects(connection, stream, None)
            parts = rows.parts(id for id in checkpoints if 0 < id < rows.ID_END)
            return [found for part in parts for found in rows.objects(connection, stream, part)]

    def edits(self, stream: str) -> list[EditRecord]:
        """What was changed by hand, oldest checkpoint first; of checkpoints that are no more, too."""
        e = t.edit.c
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            found = connection.execute(select(t.edit).where(e.stream == stream).order_by(e.checkpoint, e.epoch))
            return [EditRecord(**row) for row in found.mappings()]

    def add_snapshot(
        self, stream: str, epoch: int, checkpoint: int, objects: Sequence[StoredObject], snapshot_rows: int
    ) -> None:
        """Record a full snapshot of the state at a checkpoint, guarded by the writer epoch.

        A process other than the run passes the epoch it saw in `stream(name).epoch` when it began.

        Raises:
            UsageError: an object name that could leave the store, or the checkpoint has a snapshot already.
            Fenced, UnknownCheckpoint
        """
        for stored in objects:
            check_object_name(stored.name)
        with self._writing(f"the snapshot of checkpoint {checkpoint} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            if rows.newest(connection, stream, t.checkpoint.c.id == checkpoint) is None:
                raise rows.unknown_checkpoint(connection, stream, f"no checkpoint {checkpoint}")
            at = (t.snapshot.c.stream == stream) & (t.snapshot.c.checkpoint == checkpoint)
            if connection.scalar(select(t.snapshot.c.checkpoint).where(at)) is not None:
                raise UsageError(f"checkpoint {checkpoint} of {stream} has a snapshot already")
            size = sum(stored.bytes for stored in objects)
            values = {"stream": stream, "checkpoint": checkpoint, "rows": snapshot_rows, "bytes": size}
            connection.execute(insert(t.snapshot), values | {"taken_at": self._time(connection)})
            kinds = [(ObjectKind.SNAPSHOT, stored) for stored in objects]
            rows.insert_objects(connection, stream, epoch, checkpoint, kinds)

    def drop_snapshot(self, stream: str, epoch: int, checkpoint: int) -> None:
        """Forget the full snapshot of a checkpoint, if there is one, guarded by the writer epoch.

        Its objects belong to nothing from here on; sweeps delete them.

        Raises:
            Fenced
        """
        with self._writing(f"the snapshot of checkpoint {checkpoint} of stream {stream}") as connection:
            fencing.hold(connection, stream, epoch)
            s, o = t.snapshot.c, t.object_.c
            connection.execute(delete(t.snapshot).where(s.stream == stream, s.checkpoint == checkpoint))
            of_it = (o.stream == stream) & (o.checkpoint == checkpoint) & (o.kind == ObjectKind.SNAPSHOT)
            connection.execute(delete(t.object_).where(of_it))

    def snapshots(self, stream: str) -> list[SnapshotRecord]:
        """All full snapshots, oldest checkpoint first."""
        with self._reading() as connection:
            rows.get_stream(connection, stream)
            return rows.snapshots(connection, stream)
