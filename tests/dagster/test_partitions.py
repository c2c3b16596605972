"""Which checkpoint a partition of restored state shows, and that none is shown in place of one that is gone."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.assets.restored_state import _evaluation
from siltstone.dagster.names import asset_key
from siltstone.dagster.partitions import CheckpointGone, checkpoint_of
from siltstone.errors import UnknownCheckpoint, UsageError
from siltstone.pipes.parts import RESTORED_STATE
from siltstone.restore.series import NOTE
from siltstone.stream import Stream
from tests.catalog_cases import commit_of
from tests.clock import Clock
from tests.places import place_at
from tests.sums import Sums

HOURS = Stream("flights", None, [Sums(name="by_key")], event_time="t")
DAYS = replace(HOURS, event_days=(date(2013, 7, 1), date(2013, 7, 31)))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    """Eight checkpoints, one each twenty minutes from noon on, each with events up to a day later than the last."""
    clock = Clock()
    with place_at(tmp_path / "w", clock) as place:
        place.catalog.streams.register("flights", 8, {})
        epoch = place.catalog.runs.begin("flights", "a test")
        for id in range(1, 9):
            place.catalog.commits.add(
                "flights", epoch, commit_of(id, event_time_max=clock.time + timedelta(days=id - 1))
            )
            clock.move(minutes=20)
        yield place


def delete(place: OpenWarehouse, *ids: int) -> None:
    place.catalog.deletions.mark("flights", 1, ids)
    place.catalog.deletions.forget("flights", 1, ids, [o.name for o in place.catalog.objects.list("flights", ids)])


def test_a_day_shows_its_own_checkpoint_or_says_that_it_is_gone(place: OpenWarehouse) -> None:
    def find_checkpoint(day: int) -> int:
        return checkpoint_of(place.catalog, DAYS, f"2013-07-{day:02d}")

    assert [find_checkpoint(day) for day in (4, 5, 6, 11, 20)] == [1, 2, 3, 8, 8]
    with pytest.raises(UnknownCheckpoint, match="no checkpoint of events up to") as none:
        find_checkpoint(3)
    assert not isinstance(none.value, CheckpointGone), "there never was one"
    delete(place, 1, 2, 4, 5)
    for day in (3, 4, 5, 7, 8):
        with pytest.raises(
            CheckpointGone, match=rf"2013-07-{day:02d} of stream flights .* deleted.* retention flights"
        ):
            find_checkpoint(day)
    with pytest.raises(CheckpointGone):  # 3 may be the last of that day, or not: nobody knows any more
        find_checkpoint(6)
    assert [find_checkpoint(day) for day in (9, 10, 11, 20)] == [6, 7, 8, 8]


def test_one_that_is_marked_only_is_known_by_its_time(place: OpenWarehouse) -> None:
    place.catalog.deletions.mark("flights", 1, [4])
    assert checkpoint_of(place.catalog, DAYS, "2013-07-06") == 3
    with pytest.raises(CheckpointGone):
        checkpoint_of(place.catalog, DAYS, "2013-07-07")


def test_an_hour_shows_its_newest_that_retention_kept_or_says_that_it_is_gone(place: OpenWarehouse) -> None:
    def find_checkpoint(hour: int) -> int:
        return checkpoint_of(place.catalog, HOURS, f"2013-07-04-{hour}")

    assert [find_checkpoint(hour) for hour in (12, 13, 14, 20)] == [3, 6, 8, 8]
    delete(place, 1, 2, 4, 5, 7)  # as keep_hourly does
    assert [find_checkpoint(hour) for hour in (12, 13, 14, 20)] == [3, 6, 8, 8]
    delete(place, 6)
    assert find_checkpoint(12) == 3
    with pytest.raises(CheckpointGone, match="2013-07-04-13"):
        find_checkpoint(13)


@pytest.mark.parametrize("key", ["../../../../other", "{}/other", "..", "a/b", ".series-1"])
def test_a_partition_leads_nowhere_else(place: OpenWarehouse, tmp_path: Path, key: str) -> None:
    """All users of the page can add a partition of any name, and launch its check."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / NOTE).write_text('{"checkpoint": 3, "digest": "another\'s", "rows": 1}')
    key = key.format(tmp_path)
    with pytest.raises(UsageError, match="is not a label"):
        _evaluation(place, HOURS, asset_key(HOURS.name, RESTORED_STATE), key)
