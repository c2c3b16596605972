"""Passes: what each deletion removed, also automatic ones, one row per pass.

The deleted objects are recorded separately, one row each (`catalog.tombstones`). Several transactions may add to a
pass; each adds what it decides to delete, before the deletion.
"""

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart

PASSES_KEPT = timedelta(days=90)
PASSES_MAX = 10_000
"""maximum passes kept per stream"""
RUNS = "records of old runs"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: why it deletes, and who does it."""

    id: str
    what: str
    who: str

    @classmethod
    def begin(cls, what: str, who: str) -> "Pass":
        """Begin a pass that has not removed anything yet."""
        return cls(uuid.uuid4().hex, what, who)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass removed: `checkpoints` marked as deleted, `objects` of `bytes` in total, and other `rows` of the
    catalog, such as steps of the input log. `began_at` is when it first removed something."""

    stream: str
    id: str
    what: str
    who: str
    began_at: datetime
    checkpoints: int
    objects: int
    bytes: int
    rows: int


class Passes(CatalogPart):
    """Passes of deletions."""

    def list(self, stream: str, limit: int | None = None) -> list[PassRecord]:
        """List all passes, or the newest `limit`; oldest first."""
        p = t.deletion_pass.c
        newest = select(t.deletion_pass).where(p.stream == stream).order_by(p.began_at.desc(), p.id).limit(limit)
        with self._transactions.begin_read() as connection:
            return [PassRecord(**row) for row in connection.execute(newest).mappings()][::-1]


def note_pass(
    connection: Connection,
    stream: str,
    by: Pass,
    now: datetime,
    *,
    checkpoints: int = 0,
    objects: int = 0,
    bytes: int = 0,
    rows: int = 0,
) -> None:
    """Add to the counts of a pass, in the transaction that decides to delete; write nothing if all are 0."""
    if not (checkpoints or objects or rows):
        return
    p, counts = t.deletion_pass.c, {"checkpoints": checkpoints, "objects": objects, "bytes": bytes, "rows": rows}
    added = {name: p[name] + count for name, count in counts.items()}
    mine = (p.stream == stream) & (p.id == by.id)
    if connection.execute(update(t.deletion_pass).where(mine).values(added)).rowcount:
        return
    row = {"stream": stream, "id": by.id, "what": by.what, "who": by.who, "began_at": now}
    connection.execute(insert(t.deletion_pass), row | counts)
    by_time = select(p.began_at).where(p.stream == stream).order_by(p.began_at.desc())
    oldest = connection.scalar(by_time.offset(PASSES_MAX - 1).limit(1))
    kept_from = now - PASSES_KEPT if oldest is None else max(oldest, now - PASSES_KEPT)
    connection.execute(delete(t.deletion_pass).where(p.stream == stream, p.began_at < kept_from))
