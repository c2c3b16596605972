"""Makes new catalogs by the statements of the first one, not by Alembic each time: hundreds of tests begin with one.

What is executed, its order and its transaction are the same. Suites of migrations themselves turn it off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, event

from siltstone.catalog.database import upgrade

READS = ("SELECT", "PRAGMA")
Statement = tuple[str, Any]

_recorded: dict[tuple[str, str, str], list[Statement]] = {}
"""(dialect, revision, directory of migrations) -> what made the first catalog"""
_alembic = upgrade.make_tables


@contextmanager
def recorded_migrations() -> Iterator[None]:
    """Replay migrations of databases without a catalog, once this process has seen one of that dialect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upgrade, "make_tables", _make_tables)
        yield


def _make_tables(connection: Connection) -> None:
    key = (connection.dialect.name, upgrade.REVISION, str(upgrade.MIGRATIONS))
    if key in _recorded:
        for statement, parameters in _recorded[key]:
            connection.exec_driver_sql(statement, parameters)
    else:
        made: list[Statement] = []

        def record(_: Connection, __: Any, statement: str, parameters: Any, *___: Any) -> None:
            if not statement.lstrip().startswith(READS):
                made.append((statement, parameters or None))

        event.listen(connection.engine, "before_cursor_execute", record)
        try:
            _alembic(connection)
        finally:
            event.remove(connection.engine, "before_cursor_execute", record)
        _recorded[key] = made
