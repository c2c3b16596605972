"""Partitions of restored state, and the checkpoint of each.

A stream with `Stream.event_days` has one partition per day: the state of the last checkpoint without events after that
day. Any other stream has one for each hour in which a checkpoint was committed. An hour becomes a partition once it is
over, because its contents can still change.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

import dagster as dg

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.repository import Catalog
from siltstone.dagster.names import dagster_name
from siltstone.errors import UnknownCheckpoint, UsageError
from siltstone.stream import Stream

_HOUR = "%Y-%m-%d-%H"
_DAY, _HOUR_LONG = timedelta(days=1), timedelta(hours=1)


class CheckpointGone(UnknownCheckpoint):
    """The checkpoint of a partition was deleted."""


def partitions_of(stream: Stream) -> dg.PartitionsDefinition:
    """Make the partitions definition of one stream's restored state."""
    if stream.event_days is None:
        return dg.DynamicPartitionsDefinition(name=dagster_name(stream.name, "hours"))
    first, last = stream.event_days
    return dg.DailyPartitionsDefinition(start_date=str(first), end_date=str(last + _DAY))


def hours_of(committed: Iterable[datetime]) -> list[str]:
    """List the hourly partitions of commit times, ascending."""
    return sorted({time.astimezone(UTC).strftime(_HOUR) for time in committed})


def past_hours(hours: Iterable[str], now: datetime) -> list[str]:
    """Select the hourly partitions that are over, ascending."""
    return sorted(hour for hour in hours if hour < now.astimezone(UTC).strftime(_HOUR))


def forget_hours(instance: dg.DagsterInstance, stream: Stream, hours: Iterable[str]) -> None:
    """Let hours be no partitions any more: the automation would ask at each tick for those that are never restored.

    Days stay, because they follow from the stream's definition.
    """
    partitions = partitions_of(stream)
    if isinstance(partitions, dg.DynamicPartitionsDefinition) and partitions.name is not None:
        for hour in hours:
            instance.delete_dynamic_partition(partitions.name, hour)


def checkpoint_of(catalog: Catalog, stream: Stream, partition: str) -> int:
    """Find the checkpoint of a partition.

    Raises:
        UsageError: the stream has no such partition.
        UnknownCheckpoint: all checkpoints are later.
        CheckpointGone: its checkpoint was deleted, by retention or by hand.
    """
    try:
        if stream.event_days is not None:
            end = datetime.strptime(partition, "%Y-%m-%d").replace(tzinfo=UTC) + _DAY
            first, last = stream.event_days
            if not first <= (end - _DAY).date() <= last:
                raise UsageError(f"stream {stream.name} has no day {partition}: use {first} to {last}")
            return _find_for_day(catalog, stream.name, partition, end - timedelta(microseconds=1))
        end = datetime.strptime(partition, _HOUR).replace(tzinfo=UTC) + timedelta(hours=1)
    except ValueError:
        form = "a day like 2013-07-04" if stream.event_days else "an hour like 2013-07-04-12"
        raise UsageError(f"{partition!r} is not a partition of stream {stream.name}: use {form} (UTC)") from None
    return _find_for_hour(catalog, stream.name, partition, end - timedelta(microseconds=1))


def _find_for_day(catalog: Catalog, stream: str, partition: str, last: datetime) -> int:
    """Find the last checkpoint without events after `last`.

    The next checkpoint must have later events: otherwise the day's own checkpoint was deleted, and this one is older.
    """
    try:
        found = catalog.checkpoints.as_of(stream, last)
    except UnknownCheckpoint:
        _check_none_deleted(catalog, stream, partition, last, lambda record: record.event_time_max)
        raise
    after = catalog.checkpoints.successor(stream, found)
    if found != catalog.checkpoints.last_id(stream) and not (
        after and after.event_time_max and after.event_time_max > last
    ):
        raise _checkpoint_gone(stream, partition)
    return found


def _find_for_hour(catalog: Catalog, stream: str, partition: str, last: datetime) -> int:
    """Find the last checkpoint committed up to `last`.

    If the next one was deleted, this one must be of the same hour: retention deletes an hour's newest checkpoint last.
    """
    try:
        found = catalog.checkpoints.get(stream, catalog.checkpoints.resolve(stream, last.isoformat()))
    except UnknownCheckpoint:
        _check_none_deleted(catalog, stream, partition, last, lambda record: record.committed_at)
        raise
    after = catalog.checkpoints.successor(stream, found.id)
    of_hour = after is None and found.committed_at > last - _HOUR_LONG
    if found.id != catalog.checkpoints.last_id(stream) and not of_hour and not (after and after.committed_at > last):
        raise _checkpoint_gone(stream, partition)
    return found.id


def _check_none_deleted(
    catalog: Catalog, stream: str, partition: str, last: datetime, time: Callable[[CheckpointRecord], datetime | None]
) -> None:
    """Raise CheckpointGone unless the stream's first checkpoint is later than `last`, or it never had one."""
    if not catalog.checkpoints.last_id(stream):
        return
    first = catalog.checkpoints.successor(stream, 0)
    at = None if first is None else time(first)
    if at is None or at <= last:
        raise _checkpoint_gone(stream, partition)


def _checkpoint_gone(stream: str, partition: str) -> CheckpointGone:
    return CheckpointGone(
        f"{partition} of stream {stream} cannot be restored: its checkpoint was deleted. To keep later ones, use "
        f"`siltstone retention {stream}` or savepoints"
    )
