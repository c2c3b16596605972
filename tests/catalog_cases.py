"""A catalog's clock, and commits of stream flights, for the suites over every database."""

from collections.abc import Mapping

from sqlalchemy import Engine, create_engine

from siltstone.catalog.database.engine import parse_url
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.chains.due import find_beginnings
from siltstone.model import Form, StoredObject
from tests.clock import NOON, Clock

__all__ = ["NOON", "Clock", "add", "beginnings", "commit_of", "commit_one", "engine_of", "firsts", "names", "stored"]


def engine_of(catalog_url: str) -> Engine:
    """Return an engine of a catalog's database, without what an open catalog checks."""
    return create_engine(parse_url(catalog_url))


def stored(id: int, file: str, size: int = 10) -> StoredObject:
    return StoredObject(f"flights/00000001/{id:012d}/{file}", size, f"{size:032x}")


def commit_of(id: int, *, first: Mapping[str, int] | None = None, **changes: object) -> CheckpointCommit:
    """Checkpoint `id`; `first` is where the chain of each operator begins, by default there."""
    changes = {"oldest_needed": min(first.values()) if first else id} | changes
    values: dict = {
        "id": id,
        "manifest": stored(id, f"manifest.{changes.pop('tag', 'a')}.arrow"),
        "digest": f"{id:032x}",
        "rows": 7 * id,
        "bytes": 100 * id,
        "forms": {"aircraft": Form.DELTA if id > 1 else Form.BASE},
    }
    details = {key: changes.pop(key) for key in CommitDetails.__dataclass_fields__ if key in changes}
    return CheckpointCommit(**(values | changes), details=CommitDetails(**details))


def add(catalog: Catalog, count: int, **changes: object) -> None:
    for id in range(1, count + 1):
        catalog.commits.add("flights", 1, commit_of(id, **changes))


def names(catalog: Catalog, *ids: int) -> list[str]:
    return [o.name for o in catalog.objects.list("flights", ids)]


def firsts(catalog: Catalog, stream: str) -> dict[int, int]:
    """Checkpoint that is not marked -> the oldest that a restore of it reads from."""
    return {c.id: catalog.chains.list_checkpoints(stream, c.id)[0] for c in catalog.checkpoints.list(stream)}


def beginnings(catalog: Catalog, stream: str, id: int) -> dict[str, int]:
    """Operator -> the checkpoint that its chain at checkpoint `id` begins with."""
    return find_beginnings(catalog, catalog.checkpoints.get(stream, id))


def commit_one(catalog: Catalog) -> None:
    """Make stream flights in a catalog that holds nothing, and one checkpoint of it."""
    catalog.streams.register("flights", 128, {})
    manifest = StoredObject("flights/1/1/manifest.arrow", 1, "xxh3-128:" + "0" * 32)
    details = CommitDetails([Step(1, 0, "x")])
    commit = CheckpointCommit(1, manifest, "0" * 32, 1, 1, {"a": Form.BASE}, details=details)
    catalog.commits.add("flights", catalog.runs.begin("flights", "me"), commit)
