"""The catalog's time, as a test sets it."""

from datetime import UTC, datetime, timedelta

NOON = datetime(2013, 7, 4, 12, tzinfo=UTC)


class Clock:
    """Time that stands still until moved."""

    def __init__(self, time: datetime = NOON) -> None:
        self.time = time

    def __call__(self) -> datetime:
        return self.time

    def move(self, minutes: float = 0, *, hours: float = 0, seconds: float = 0) -> None:
        self.time += timedelta(hours=hours, minutes=minutes, seconds=seconds)


class Seconds:
    """A clock in seconds that only sleeping moves."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds
