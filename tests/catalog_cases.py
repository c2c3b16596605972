"""A catalog's clock, and commits of stream flights, for the suites over every database."""

from siltstone.catalog.commits import CheckpointCommit
from siltstone.catalog.repository import Catalog
from siltstone.catalog.steps import Step
from siltstone.model import Form, StoredObject
from tests.clock import NOON, Clock

__all__ = ["NOON", "Clock", "add", "commit_of", "commit_one", "names", "stored"]


def stored(id: int, file: str, size: int = 10) -> StoredObject:
    return StoredObject(f"flights/00000001/{id:012d}/{file}", size, f"{size:032x}")


def commit_of(id: int, **changes: object) -> CheckpointCommit:
    values: dict = {
        "id": id,
        "manifest": stored(id, f"manifest.{changes.pop('tag', 'a')}.arrow"),
        "digest": f"{id:032x}",
        "rows": 7 * id,
        "bytes": 100 * id,
        "forms": {"aircraft": Form.DELTA if id > 1 else Form.BASE},
    }
    return CheckpointCommit(**(values | changes))


def add(catalog: Catalog, count: int, **changes: object) -> None:
    for id in range(1, count + 1):
        catalog.commits.add("flights", 1, commit_of(id, **changes))


def names(catalog: Catalog, *ids: int) -> list[str]:
    return [o.name for o in catalog.objects.list("flights", ids)]


def commit_one(catalog: Catalog) -> None:
    """Make stream flights in a catalog that holds nothing, and one checkpoint of it."""
    catalog.streams.register("flights", 128, {})
    manifest = StoredObject("flights/1/1/manifest.arrow", 1, "0" * 32)
    commit = CheckpointCommit(1, manifest, "0" * 32, 1, 1, {"a": Form.BASE}, steps=[Step(1, 0, "x")])
    catalog.commits.add("flights", catalog.runs.begin("flights", "me"), commit)
