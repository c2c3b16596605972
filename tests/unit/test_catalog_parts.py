"""Every public method of every part of the catalog is one call, made again as a whole while the database is away."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from sqlalchemy import Connection

from siltstone.catalog.database.engine import open_engine, parse_url
from siltstone.catalog.database.transactions import CatalogPart, Transactions
from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.errors import Unreachable
from tests.catalog_cases import commit_of, stored


class AnsweredError(Exception):
    """The database answers again: the call has come a second time."""


class AwayOnce(Transactions):
    """A database that is away at the first transaction of a call."""

    away = True

    @contextmanager
    def begin_read(self) -> Iterator[Connection]:
        if self.away:
            self.away = False
            raise Unreachable("away", transient=True)
        raise AnsweredError
        yield

    @contextmanager
    def begin_write(self, what: str) -> Iterator[Connection]:
        with self.begin_read() as connection:
            yield connection


def empty() -> Catalog:
    engine = open_engine(parse_url("sqlite:////nowhere/catalog.db"), create=False, timeout_s=1)
    return Catalog(AwayOnce(engine, None, outage_s=60))


def methods() -> list[tuple[str, str]]:
    """Part, method: of all parts, all public methods."""
    parts = {name: type(part) for name, part in vars(empty()).items() if isinstance(part, CatalogPart)}
    return [(part, name) for part, kind in parts.items() for name in vars(kind) if not name.startswith("_")]


EXAMPLES: dict[Any, Any] = {
    str: "flights",
    int: 1,
    float: 1.0,
    bool: True,
    datetime: datetime(2013, 7, 4, tzinfo=UTC),
    timedelta: timedelta(hours=1),
    Step: Step(1, 0, "v1\n{}\n1"),
}


def example(hint: Any) -> Any:
    """A value that a parameter of this type takes."""
    if hint in EXAMPLES:
        return EXAMPLES[hint]
    if getattr(hint, "__name__", "") == "CheckpointCommit":
        return commit_of(1)
    if getattr(hint, "__name__", "") == "StoredObject":
        return stored(1, "m.arrow")
    if get_origin(hint) is not None and type(None) in get_args(hint):
        return None
    if "Callable" in str(hint):
        return lambda *_: ()
    return {} if "Mapping" in str(hint) else []


@pytest.mark.parametrize(("part", "name"), methods())
def test_a_call_that_finds_the_database_away_is_made_again(part: str, name: str) -> None:
    method: Callable[..., Any] = getattr(getattr(empty(), part), name)
    hints = get_type_hints(inspect.unwrap(method))
    required = {
        parameter.name: example(hints[parameter.name])
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is inspect.Parameter.empty
    }
    with pytest.raises(AnsweredError):
        method(**required)


def test_there_are_all_parts_and_many_methods() -> None:
    assert {"streams", "checkpoints", "leases", "outbox"} <= {part for part, _ in methods()}
    assert len(methods()) > 60
