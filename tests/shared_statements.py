"""Lets all SQLite catalogs of a run share what SQLAlchemy compiled: it keeps that for each engine by itself, and
hundreds of tests open a catalog of their own to execute the same statements.

What is executed is the same; a statement is compiled once, not once a test. PostgreSQL's few tests do without.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from sqlalchemy import Dialect, Engine, create_engine

from siltstone.catalog.database import engine as catalog_engine


@contextmanager
def shared_statements() -> Iterator[None]:
    """Open SQLite catalogs over one dialect and one cache of compiled statements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog_engine, "create_engine", _create_engine)
        yield


def _create_engine(*args: Any, **options: Any) -> Engine:
    made = create_engine(*args, **options)
    if made.dialect.name == "sqlite":
        made.dialect, compiled = _shared()  # the dialect is part of what a compiled statement is found by
        made.update_execution_options(compiled_cache=compiled)
    return made


@cache
def _shared() -> tuple[Dialect, dict[Any, Any]]:
    """A dialect that has seen a connection, and what was compiled for it."""
    seen = create_engine("sqlite://")
    seen.connect().close()
    seen.dispose()
    return seen.dialect, {}
