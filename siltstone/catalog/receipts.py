"""Find out whether a transaction was committed whose COMMIT got no answer.

Each writing transaction first inserts a row with a unique id, its receipt: the receipt exists if and only if the rest
of the transaction was committed. The check inserts the same row, which waits for an open transaction that has it, even
if its client is gone. So the answer, once there, stays true. If a database lost the transaction in a failover, the
receipt is lost with it; the database's own transaction numbers (`pg_xact_status`) would be used again there, for
another transaction.

SQLite needs no receipts: its COMMIT is a call in this process, which returns or dies with it.
"""

import uuid
from collections import deque
from datetime import timedelta

from sqlalchemy import Connection, Engine, delete, func, insert
from sqlalchemy import exc as sa

from siltstone.catalog import tables as t

_KEPT = timedelta(days=1)
"""how long the receipt of a dead client stays; no client asks for an older one"""


class Receipts:
    """The receipts of one client. Safe for many threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._used: deque[str] = deque()

    def begin(self, connection: Connection) -> str:
        """Insert the receipt of a transaction that has just begun, and delete receipts that are no longer needed."""
        receipt = uuid.uuid4().hex
        used = [self._used.popleft() for _ in range(len(self._used))]
        r = t.receipt.c
        old = delete(t.receipt).where(r.id.in_(used) | (r.written_at < func.now() - _KEPT))
        connection.execute(insert(t.receipt).values(id=receipt, written_at=func.now()).add_cte(old.cte("old")))
        return receipt

    def end(self, receipt: str) -> None:
        """Note that the transaction was committed, so that its receipt may be deleted."""
        self._used.append(receipt)

    def committed(self, receipt: str) -> bool:
        """Whether the transaction was committed; waits while it is open."""
        with self._engine.connect() as connection:
            connection.begin()
            try:
                connection.execute(insert(t.receipt).values(id=receipt, written_at=func.now()))
            except sa.IntegrityError:
                return True
            finally:
                connection.rollback()
            return False
