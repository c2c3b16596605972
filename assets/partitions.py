"""Partitions of restored state, and the checkpoint that each of them shows.

A stream that says which days its events are of (`Stream.event_days`) has one partition a day: the state after the last
checkpoint whose events are all of that day or before. Any other has one for each hour in which a checkpoint was
committed, once it is over: before that, what it shows would not be what it comes to show.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import dagster as dg

from assets.names import dagster_name
from siltstone.catalog.repository import Catalog
from siltstone.errors import UsageError
from siltstone.stream import Stream

_HOUR = "%Y-%m-%d-%H"
_DAY = timedelta(days=1)


def partitions_of(stream: Stream) -> dg.PartitionsDefinition:
    """How one stream's restored state is cut."""
    if stream.event_days is None:
        return dg.DynamicPartitionsDefinition(name=dagster_name(stream.name, "hours"))
    first, last = stream.event_days
    return dg.DailyPartitionsDefinition(start_date=str(first), end_date=str(last + _DAY))


def hours_of(committed: Iterable[datetime]) -> list[str]:
    """The partitions of some times, ascending."""
    return sorted({time.astimezone(UTC).strftime(_HOUR) for time in committed})


def hours_over(hours: Iterable[str], now: datetime) -> list[str]:
    """Those of some hourly partitions in which nothing will be committed any more, ascending."""
    return sorted(hour for hour in hours if hour < now.astimezone(UTC).strftime(_HOUR))


def checkpoint_of(catalog: Catalog, stream: Stream, partition: str) -> int:
    """The checkpoint that a partition shows.

    Raises:
        UsageError: it is no partition of the stream.
        UnknownCheckpoint: there is no checkpoint as early as that.
    """
    try:
        if stream.event_days is not None:
            end = datetime.strptime(partition, "%Y-%m-%d").replace(tzinfo=UTC) + _DAY
            first, last = stream.event_days
            if not first <= (end - _DAY).date() <= last:
                raise UsageError(f"{partition} is no day of stream {stream.name}: use {first} to {last}")
            return catalog.as_of(stream.name, end - timedelta(microseconds=1))
        end = datetime.strptime(partition, _HOUR).replace(tzinfo=UTC) + timedelta(hours=1)
    except ValueError:
        form = "a day like 2013-07-04" if stream.event_days else "an hour like 2013-07-04-12"
        raise UsageError(f"{partition!r} is no partition of stream {stream.name}: use {form} (UTC)") from None
    return catalog.resolve(stream.name, (end - timedelta(microseconds=1)).isoformat())
