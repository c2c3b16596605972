"""Times and lengths of time, as text and as values. All times are UTC."""

import re
from datetime import UTC, datetime, timedelta

from siltstone.errors import UsageError

_DURATION = re.compile(r"([0-9]+) ?(s|m|h|d|w|(?:second|minute|hour|day|week)s?)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LONGEST = timedelta(days=365_000)
"""the longest time that state can be kept for"""


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


def parse_duration(text: object) -> timedelta:
    """Parse a length of time, a whole number with its unit: 90s, 15m, 12h, 7d, 4w, or "15 minutes".

    Raises:
        UsageError: it is not one, or longer than 2.7 million years.
    """
    if isinstance(text, timedelta) and text >= timedelta(0):
        return text
    understood = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    try:
        if understood:
            return timedelta(**{_UNITS[understood[2][0]]: int(understood[1])})
    except (OverflowError, ValueError):
        pass
    raise UsageError(f"{text!r} is not a length of time: write it like 90s, 15m, 12h, 7d, 4w or '15 minutes'")


def to_us(time: datetime) -> int:
    """Return the microseconds from 1970 to a time, which may be negative."""
    return (as_utc(time) - EPOCH) // timedelta(microseconds=1)


def show_us(us: int) -> str:
    """Return a time in microseconds since 1970 as ISO 8601 text, or as a number if Python has no such time."""
    try:
        return (EPOCH + timedelta(microseconds=us)).isoformat()
    except OverflowError:
        return f"{us} microseconds after 1970"
