"""Partitions of restored state, and the checkpoint that each of them shows.

A stream that says which days its events are of (`Stream.event_days`) has one partition a day: the state after the last
checkpoint whose events are all of that day or before. Any other has one for each hour in which a checkpoint was
committed, once it is over: before that, what it shows would not be what it comes to show.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

import dagster as dg

from siltstone.catalog.checkpoints import CheckpointRecord
from siltstone.catalog.repository import Catalog
from siltstone.dagster.names import dagster_name
from siltstone.errors import UnknownCheckpoint, UsageError
from siltstone.stream import Stream

_HOUR = "%Y-%m-%d-%H"
_DAY, _HOUR_LONG = timedelta(days=1), timedelta(hours=1)


class CheckpointGone(UnknownCheckpoint):
    """What a partition would show was deleted."""


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
        CheckpointGone: there was one, and retention did not keep it, or somebody deleted it.
    """
    try:
        if stream.event_days is not None:
            end = datetime.strptime(partition, "%Y-%m-%d").replace(tzinfo=UTC) + _DAY
            first, last = stream.event_days
            if not first <= (end - _DAY).date() <= last:
                raise UsageError(f"{partition} is no day of stream {stream.name}: use {first} to {last}")
            return _of_day(catalog, stream.name, partition, end - timedelta(microseconds=1))
        end = datetime.strptime(partition, _HOUR).replace(tzinfo=UTC) + timedelta(hours=1)
    except ValueError:
        form = "a day like 2013-07-04" if stream.event_days else "an hour like 2013-07-04-12"
        raise UsageError(f"{partition!r} is no partition of stream {stream.name}: use {form} (UTC)") from None
    return _of_hour(catalog, stream.name, partition, end - timedelta(microseconds=1))


def _of_day(catalog: Catalog, stream: str, partition: str, last: datetime) -> int:
    """The checkpoint of the last event up to `last`, if the next one has later events: no older one in its place."""
    try:
        found = catalog.checkpoints.as_of(stream, last)
    except UnknownCheckpoint:
        _check_none_was(catalog, stream, partition, last, lambda record: record.event_time_max)
        raise
    after = catalog.checkpoints.successor(stream, found)
    if found != catalog.checkpoints.last_id(stream) and not (
        after and after.event_time_max and after.event_time_max > last
    ):
        raise _gone(stream, partition)
    return found


def _of_hour(catalog: Catalog, stream: str, partition: str, last: datetime) -> int:
    """The last commit up to `last`. Where the next one is gone, it is this one only if it is of this very hour: of an
    hour's checkpoints the newest is the last that retention deletes."""
    try:
        found = catalog.checkpoints.get(stream, catalog.checkpoints.resolve(stream, last.isoformat()))
    except UnknownCheckpoint:
        _check_none_was(catalog, stream, partition, last, lambda record: record.committed_at)
        raise
    after = catalog.checkpoints.successor(stream, found.id)
    of_hour = after is None and found.committed_at > last - _HOUR_LONG
    if found.id != catalog.checkpoints.last_id(stream) and not of_hour and not (after and after.committed_at > last):
        raise _gone(stream, partition)
    return found.id


def _check_none_was(
    catalog: Catalog, stream: str, partition: str, last: datetime, time: Callable[[CheckpointRecord], datetime | None]
) -> None:
    """CheckpointGone unless the stream's first checkpoint is later than `last`, or there is none."""
    if not catalog.checkpoints.last_id(stream):
        return
    first = catalog.checkpoints.successor(stream, 0)
    at = None if first is None else time(first)
    if at is None or at <= last:
        raise _gone(stream, partition)


def _gone(stream: str, partition: str) -> CheckpointGone:
    return CheckpointGone(
        f"{partition} of stream {stream} cannot be restored: its checkpoint was deleted. What later checkpoints are to "
        f"be kept, `siltstone retention {stream}` and savepoints say"
    )
