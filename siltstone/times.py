"""Times as text and as values. All times are UTC."""

from datetime import UTC, datetime

from siltstone.errors import UsageError


def as_utc(time: datetime) -> datetime:
    """Convert a time to UTC; a time without a zone is UTC already."""
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def parse_time(text: str) -> datetime:
    """Parse an ISO 8601 date or time, in UTC unless it names another zone.

    Raises:
        UsageError: it is not one.
    """
    try:
        return as_utc(datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a time: write it like 2013-07-04T12:00:00 (UTC)") from None
