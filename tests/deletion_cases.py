"""The warehouse that tests of deletions delete from: two operators, whose bases fall at different checkpoints."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.format.manifests import read_manifests
from siltstone.stream import Stream
from tests import catalog_cases, sums
from tests.region_run import RegionRun
from tests.sums import NAME, POLICY, Counted, stream_of

CHECKPOINTS = 12
IDS = [1, 2, 3, 4, 5, 8, 9]
"""some to delete: with bases of both operators among them, and two that wait"""


def stream(*names: str) -> Stream:
    """The stream of sums with operators of these names."""
    return stream_of(*(Counted(name=name) for name in names))


rows = partial(sums.rows, keys=200, changed=20)


def write_checkpoints(root: Path) -> Path:
    """A warehouse with 12 checkpoints; operator `new` begins at the third, so that bases fall at different ones."""
    with OpenWarehouse.open_writable(str(root)) as place:
        run = RegionRun(place, stream("old"), POLICY)
        for n in (1, 2):
            run.step(rows(n))
        run = RegionRun(place, stream("old", "new"), POLICY, parallelism=2)
        for n in range(3, CHECKPOINTS + 1):
            run.step(rows(1 if n == 3 else n))
        firsts = [
            {op: min(of["first"] for of in tables.values()) for op, tables in manifest.chains.items()}
            for c in place.catalog.checkpoints.list(NAME)
            for manifest in read_manifests(place.warehouse.store, [c.manifest]).values()
        ]
        assert [f["old"] for f in firsts] == [1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9]
        assert [f["new"] for f in firsts[2:]] == [3, 3, 3, 3, 7, 7, 7, 7, 11, 11]
    return root


def needed(first: dict[int, int], visible: Iterable[int]) -> set[int]:
    """The checkpoints in the chains of those that are to be seen."""
    return {c for id in visible for c in range(first[id], id + 1)}


def firsts(place: OpenWarehouse) -> dict[int, int]:
    """Checkpoint -> the first of its chain."""
    return catalog_cases.firsts(place.catalog, NAME)
