"""What a checkpoint that people asked for records beside itself: an edit, and the parallelism of runs to come."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime

import pytest

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.edits import Edit, EditRecord
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, UnknownStream, UsageError
from siltstone.model import Form, StoredObject

NOON = datetime(2013, 7, 4, 12, tzinfo=UTC)
EDIT = Edit("aircraft", "totals", 2**40, 3, "/data/rows.parquet", "0" * 32, "host:1")


def commit_of(id: int, edit: Edit | None = None, parallelism: int | None = None) -> CheckpointCommit:
    manifest = StoredObject(f"flights/00000001/{id:012d}/manifest.arrow", 10, f"{id:032x}")
    forms = {"aircraft": Form.BASE}
    return CheckpointCommit(id, manifest, "d", 1, 10, forms, details=CommitDetails(edit=edit, parallelism=parallelism))


@pytest.fixture
def flights(catalog_url: str) -> Iterator[Catalog]:
    """A catalog with stream flights in writer epoch 1 and one checkpoint."""
    with open_catalog(catalog_url, now=lambda: NOON) as catalog:
        catalog.streams.register("flights", 128, {})
        catalog.runs.begin("flights", "host:1")
        catalog.commits.add("flights", 1, commit_of(1))
        yield catalog


def test_an_edit_is_part_of_its_checkpoint(flights: Catalog) -> None:
    assert flights.edits.list("flights") == []
    flights.commits.add("flights", 1, commit_of(2, edit=EDIT))
    frame = Edit("aircraft", "totals", 0, 1, "a DataFrame", None, "host:2")
    flights.commits.add("flights", 1, commit_of(3, edit=frame))
    assert flights.edits.list("flights") == [
        EditRecord(**asdict(edit), stream="flights", checkpoint=checkpoint, epoch=1, edited_at=NOON)
        for checkpoint, edit in ((2, EDIT), (3, frame))
    ]
    flights.deletions.mark("flights", 1, [2])
    assert [e.checkpoint for e in flights.edits.list("flights")] == [2, 3]
    with pytest.raises(UnknownStream, match="fligths"):
        flights.edits.list("fligths")


def test_a_checkpoint_sets_the_parallelism_of_runs_to_come(flights: Catalog) -> None:
    assert flights.streams.get("flights").parallelism is None
    flights.streams.register("bids", 128, {})
    flights.commits.add("flights", 1, commit_of(2, parallelism=8))
    flights.commits.add("flights", 1, commit_of(3))
    assert (flights.streams.get("flights").parallelism, flights.streams.get("bids").parallelism) == (8, None)
    assert flights.streams.register("flights", 128, {}).parallelism == 8


@pytest.mark.parametrize("refused", ["fenced", "out of order"])
def test_of_a_commit_that_is_refused_nothing_is_recorded(flights: Catalog, refused: str) -> None:
    if refused == "fenced":
        flights.runs.begin("flights", "host:2")
    with pytest.raises(Fenced if refused == "fenced" else UsageError):
        flights.commits.add("flights", 1, commit_of(2 if refused == "fenced" else 4, edit=EDIT, parallelism=8))
    assert (flights.edits.list("flights"), flights.streams.get("flights").parallelism) == ([], None)
