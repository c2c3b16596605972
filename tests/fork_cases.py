"""The stream that tests fork, and what its warehouse holds."""

from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from tests.catalog_cases import firsts
from tests.orphans import filesystem, write
from tests.stored import stream_objects
from tests.sums import NAME

NEW = "what-if"


def write_parent(root: Path) -> Path:
    """A warehouse with checkpoints 1 to 5 of a stream, by two runs, bases at 1 and 5."""
    with filesystem(root) as place:
        write(place)
        assert [*firsts(place.catalog, NAME).values()] == [1, 1, 1, 1, 5]
    return root / "w"


def stored(place: OpenWarehouse) -> dict[str, int]:
    """Every object there is, and its bytes."""
    return dict(stream_objects(place.warehouse.store))


def names_of(place: OpenWarehouse, *streams: str) -> set[str]:
    """What these streams refer to."""
    return {o.name for stream in streams for o in place.catalog.objects.list(stream)}
