"""Definitions belong to checkpoints: recorded with the first made under them, gone with it, carried by forks."""

from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from siltstone.catalog.engine import parse_url
from siltstone.catalog.open import open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.catalog.upgrade import run_migrations
from siltstone.catalog.upgrading import upgrade_catalog
from siltstone.errors import Fenced
from tests.catalog_cases import NOON, commit_of

OLD, NEW = {"operators": {"old": {}}}, {"operators": {"new": {}}}


def made(catalog: Catalog) -> None:
    """Checkpoints 1 and 2 under the old definition, 3 and 4 under the new one, which dropped something."""
    first = {"aircraft": 1}
    catalog.commit("flights", 1, commit_of(1, definition=OLD, first=first))
    catalog.commit("flights", 1, commit_of(2, first=first))
    catalog.commit("flights", 1, commit_of(3, definition=NEW, dropped=["old.gone"], first=first))
    catalog.commit("flights", 1, commit_of(4, first=first))


def found(catalog: Catalog, stream: str = "flights") -> list[tuple[int, object, tuple[str, ...]]]:
    return [(one.checkpoint, one.definition, one.dropped) for one in catalog.definitions(stream)]


def test_a_definition_holds_from_the_first_checkpoint_made_under_it_on(flights: Catalog) -> None:
    before = flights.stream("flights").definition
    assert found(flights) == [] and flights.definition_at("flights", 1) == before
    made(flights)
    assert found(flights) == [(1, OLD, ()), (3, NEW, ("old.gone",))]
    assert [flights.definition_at("flights", c) for c in (1, 2, 3, 4)] == [OLD, OLD, NEW, NEW]
    assert flights.stream("flights").definition == NEW


def test_a_commit_that_is_refused_leaves_no_definition(flights: Catalog) -> None:
    made(flights)
    flights.new_epoch("flights", "other")
    with pytest.raises(Fenced):
        flights.commit("flights", 1, commit_of(5, definition={"operators": {}}))
    assert flights.stream("flights").definition == NEW and len(found(flights)) == 2


def test_a_rewinding_brings_back_the_definition_of_where_it_goes(flights: Catalog) -> None:
    made(flights)
    flights.rewind("flights", flights.new_epoch("flights", "other"), 2, "damaged", "a test")
    assert found(flights) == [(1, OLD, ())]
    assert flights.stream("flights").definition == OLD
    again = flights.runs("flights")[-1].epoch
    flights.commit("flights", again, commit_of(3, definition=NEW, tag="b", first={"aircraft": 1}))
    assert found(flights)[1:] == [(3, NEW, ())]


def test_a_fork_has_the_definition_of_its_checkpoint(flights: Catalog) -> None:
    made(flights)
    flights.fork("flights", "earlier", 2)
    flights.fork("flights", "later", 4)
    assert flights.stream("earlier").definition == OLD and found(flights, "earlier") == [(1, OLD, ())]
    assert flights.stream("later").definition == NEW and found(flights, "later") == found(flights)


def test_streams_of_0_1_keep_theirs_for_all_of_their_checkpoints(catalog_url: str, tmp_path: Path) -> None:
    engine = create_engine(parse_url(catalog_url))
    with engine.begin() as connection:
        run_migrations(connection, "0001")
        columns = "name, max_parallelism, definition, epoch, created_at"
        values = {"at": NOON, "definition": '{"operators": {"old": {}}}'}
        connection.execute(text(f"INSERT INTO stream ({columns}) VALUES ('flights', 128, :definition, 7, :at)"), values)
    engine.dispose()
    upgrade_catalog(catalog_url, tmp_path)
    with open_catalog(catalog_url, create=False) as migrated:
        assert found(migrated) == [(0, OLD, ())]
        assert migrated.definition_at("flights", 9) == OLD
