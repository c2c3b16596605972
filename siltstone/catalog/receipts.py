"""Tells whether a transaction was committed whose COMMIT got no answer.

Each transaction that writes first inserts a row with an id of its own, its receipt: the receipt is there if and only
if all else that the transaction wrote is. To look is to insert the same row: a database lets that wait for a
transaction that has it and has not ended, as one may whose client is gone. So once the look has an answer, the answer
stays true. Where a database lost the transaction in its failover, the receipt is lost with it; its own transaction
numbers (`pg_xact_status`) would be given out anew there, and tell of another one.

SQLite needs none: its COMMIT is a call in this process, which returns or dies with it.
"""

import uuid
from collections import deque
from datetime import timedelta

from sqlalchemy import Connection, Engine, delete, func, insert
from sqlalchemy import exc as sa

from siltstone.catalog import tables as t

_KEPT = timedelta(days=1)
"""how long the receipt of a client that died stays; no client asks for one so old"""


class Receipts:
    """The receipts of one client. Safe for many threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._used: deque[str] = deque()

    def begin(self, connection: Connection) -> str:
        """Insert the receipt of a transaction that has just begun; those that nobody asks for any more go."""
        receipt = uuid.uuid4().hex
        used = [self._used.popleft() for _ in range(len(self._used))]
        r = t.receipt.c
        old = delete(t.receipt).where(r.id.in_(used) | (r.written_at < func.now() - _KEPT))
        connection.execute(insert(t.receipt).values(id=receipt, written_at=func.now()).add_cte(old.cte("old")))
        return receipt

    def end(self, receipt: str) -> None:
        """Its transaction is known to have been committed."""
        self._used.append(receipt)

    def committed(self, receipt: str) -> bool:
        """Whether its transaction was committed; waits while that is open."""
        with self._engine.connect() as connection:
            connection.begin()
            try:
                connection.execute(insert(t.receipt).values(id=receipt, written_at=func.now()))
            except sa.IntegrityError:
                return True
            finally:
                connection.rollback()
            return False
