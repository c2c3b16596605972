"""What a store holds of its streams."""

from collections.abc import Iterator

from siltstone.store.base import Store


def stream_objects(store: Store) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every object of a stream, in name order; what the warehouse keeps for itself is left out."""
    return ((name, size) for name, size in store.list("") if not name.startswith("_"))
