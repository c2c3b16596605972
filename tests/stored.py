"""What a store holds of its streams."""

from collections.abc import Iterator
from typing import Any

from siltstone.store.base import Store


def stream_objects(store: Store) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every object of a stream, in name order; what the warehouse keeps for itself is left out."""
    return ((name, size) for name, size in store.list("") if not name.startswith("_"))


def bare_statistics(*operators: str, rows: int = 0, parallelism: int = 1) -> dict[str, Any]:
    """The least that a checkpoint's manifest says of itself and each operator."""
    counts = {"rows_in": rows, "state_rows": rows}
    each = {operator: {**counts, "bytes": 0, "seconds": {}, "tables": {}} for operator in operators}
    return {**counts, "parallelism": parallelism, "operators": each}
