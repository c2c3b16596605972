"""What a header records of each table: counts of the backend's own, and the digests of the subtask's key groups."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from siltstone.model import KeyGroupRange
from siltstone.state.schema import TableSchema

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Counts = TypeVar("_Counts")


class _Table(Protocol):
    schema: TableSchema

    @property
    def counts(self) -> "DataclassInstance":
        """The header's data of the table besides its digests."""
        ...

    @property
    def digests(self) -> np.ndarray:
        """uint64[max_parallelism]"""
        ...


def record_tables(tables: Mapping[str, _Table], groups: KeyGroupRange) -> dict[str, dict[str, Any]]:
    """Return table -> its counts and digests, as a header has them under "tables"."""
    found = {}
    for name, table in tables.items():
        held = table.schema.held(groups, len(table.digests))
        found[name] = asdict(table.counts) | {"digests": table.digests[held.start : held.end].tobytes().hex()}
    return found


def record_empty(names: Iterable[str], counts: "DataclassInstance") -> dict[str, dict[str, Any]]:
    """Return table -> these counts, and digests of no rows."""
    return {name: asdict(counts) | {"digests": ""} for name in names}


def load_record(
    header: Mapping[str, Any], name: str, schema: TableSchema, counts: type[_Counts]
) -> tuple[_Counts, np.ndarray]:
    """Return the counts and digests (uint64[max_parallelism]) of a table, of a header with its "groups" and
    "max_parallelism"."""
    fields = dict(header["tables"][name])
    digests = np.zeros(header["max_parallelism"], np.uint64)
    if text := fields.pop("digests"):
        held = schema.held(KeyGroupRange(*header["groups"]), len(digests))
        digests[held.start : held.end] = np.frombuffer(bytes.fromhex(text), np.uint64)
    return counts(**fields), digests
