"""Definitions belong to checkpoints: recorded with the first made under them, gone with it, carried by forks."""

import pytest

from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced
from tests.catalog_cases import commit_of

OLD, NEW = {"operators": {"old": {}}}, {"operators": {"new": {}}}


def made(catalog: Catalog) -> None:
    """Checkpoints 1 and 2 under the old definition, 3 and 4 under the new one, which dropped something."""
    first = {"aircraft": 1}
    catalog.commits.add("flights", 1, commit_of(1, definition=OLD, first=first))
    catalog.commits.add("flights", 1, commit_of(2, first=first))
    catalog.commits.add("flights", 1, commit_of(3, definition=NEW, dropped=["old.gone"], first=first))
    catalog.commits.add("flights", 1, commit_of(4, first=first))


def found(catalog: Catalog, stream: str = "flights") -> list[tuple[int, object, tuple[str, ...]]]:
    return [(one.checkpoint, one.definition, one.dropped) for one in catalog.definitions.list(stream)]


def test_a_definition_holds_from_the_first_checkpoint_made_under_it_on(flights: Catalog) -> None:
    before = flights.streams.get("flights").definition
    assert found(flights) == [] and flights.definitions.get("flights", 1) == before
    made(flights)
    assert found(flights) == [(1, OLD, ()), (3, NEW, ("old.gone",))]
    assert [flights.definitions.get("flights", c) for c in (1, 2, 3, 4)] == [OLD, OLD, NEW, NEW]
    assert flights.streams.get("flights").definition == NEW


def test_a_commit_that_is_refused_leaves_no_definition(flights: Catalog) -> None:
    made(flights)
    flights.runs.begin("flights", "other")
    with pytest.raises(Fenced):
        flights.commits.add("flights", 1, commit_of(5, definition={"operators": {}}))
    assert flights.streams.get("flights").definition == NEW and len(found(flights)) == 2


def test_a_rollback_brings_back_the_definition_of_its_checkpoint(flights: Catalog) -> None:
    made(flights)
    flights.rollbacks.roll_back("flights", flights.runs.begin("flights", "other"), 2, "damaged", "a test")
    assert found(flights) == [(1, OLD, ())]
    assert flights.streams.get("flights").definition == OLD
    again = flights.runs.list("flights")[-1].epoch
    flights.commits.add("flights", again, commit_of(3, definition=NEW, tag="b", first={"aircraft": 1}))
    assert found(flights)[1:] == [(3, NEW, ())]


def test_a_fork_has_the_definition_of_its_checkpoint(flights: Catalog) -> None:
    made(flights)
    flights.forks.create("flights", "earlier", 2)
    flights.forks.create("flights", "later", 4)
    assert flights.streams.get("earlier").definition == OLD and found(flights, "earlier") == [(1, OLD, ())]
    assert flights.streams.get("later").definition == NEW and found(flights, "later") == found(flights)
