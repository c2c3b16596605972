"""The warehouse that tests of retention truncate, the rules they truncate it by, and the time it is meanwhile."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.retention.retention_rules import RetentionOptions
from tests.catalog_cases import firsts
from tests.clock import Clock
from tests.places import place_at
from tests.region_run import RegionRun
from tests.sums import NAME, POLICY, STREAM, rows

MONDAY = datetime(2013, 7, 1, tzinfo=UTC)
CHECKPOINTS = 14
LAST = RetentionOptions(keep_last=2)
"""keeps 13 and 14"""
DAILY = RetentionOptions(keep_daily=3)
"""keeps 9, 12 and 14: those of Wednesday, Thursday, Friday"""


def write_checkpoints(root: Path) -> Path:
    """A warehouse with 14 checkpoints, one every eight hours from Monday midnight on; bases at 1, 5, 9 and 13."""
    clock = Clock(MONDAY)
    with place_at(root, clock) as place:
        run = RegionRun(place, STREAM, POLICY)
        for n in range(1, CHECKPOINTS + 1):
            run.step(rows(n))
            clock.move(hours=8)
        assert [*firsts(place.catalog, NAME).values()] == [1] * 4 + [5] * 4 + [9] * 4 + [13] * 2
    return root


def friday() -> Clock:
    """Friday, 16:00: eight hours after the newest checkpoint."""
    return Clock(MONDAY + timedelta(hours=8 * CHECKPOINTS))


def visible(place: OpenWarehouse) -> list[int]:
    """The checkpoints that are to be seen."""
    return [c.id for c in place.catalog.checkpoints.list(NAME)]
