"""The identity of the warehouse in the catalog: one row, written before the store's object."""

from sqlalchemy import exc as sa
from sqlalchemy import insert, select, update

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.transactions import CatalogPart
from siltstone.catalog.identity_rules import CatalogIdentity

_ROW = 1


class RecordedIdentity(CatalogPart):
    """The identity of the warehouse; `catalog.identity` uses it."""

    def read(self) -> CatalogIdentity:
        """Return the record."""
        w = t.warehouse.c
        with self._transactions.begin_read() as connection:
            found = connection.execute(select(w.identity, w.next).where(w.id == _ROW)).first()
            return CatalogIdentity() if found is None else CatalogIdentity(found.identity, found.next)

    def propose(self, identity: str, *, replacing: str | None = None) -> CatalogIdentity:
        """Record that an identity is about to be written into the store, replacing another (or none).

        Nothing changes if another process's proposal is pending, or if the recorded identity is not `replacing`.

        Returns:
            The record after that; its `next` is the identity to write.
        """
        w = t.warehouse.c
        with self._transactions.begin_write("the identity of the warehouse") as connection:
            try:
                with connection.begin_nested():
                    connection.execute(
                        insert(t.warehouse), {"id": _ROW, "changed_at": self._transactions.time(connection)}
                    )
            except sa.IntegrityError:  # the row exists
                pass
            as_before = (w.id == _ROW) & w.next.is_(None) & w.identity.is_not_distinct_from(replacing)
            connection.execute(
                update(t.warehouse)
                .where(as_before)
                .values(next=identity, changed_at=self._transactions.time(connection))
            )
            found = connection.execute(select(w.identity, w.next).where(w.id == _ROW)).one()
            return CatalogIdentity(found.identity, found.next)

    def settle(self, identity: str) -> CatalogIdentity:
        """Record that the store has the proposed identity, unless another process did; return the record."""
        w = t.warehouse.c
        with self._transactions.begin_write("the identity of the warehouse") as connection:
            proposed = (w.id == _ROW) & (w.next == identity)
            settled = {"identity": identity, "next": None, "changed_at": self._transactions.time(connection)}
            connection.execute(update(t.warehouse).where(proposed).values(settled))
            found = connection.execute(select(w.identity, w.next).where(w.id == _ROW)).one()
            return CatalogIdentity(found.identity, found.next)
