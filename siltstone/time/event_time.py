"""`EventTime`: which column of a source holds the time of an event, and how its watermark follows from it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from siltstone.errors import UsageError
from siltstone.times import parse_duration

SOURCE_WIDE = "source"
ON_IDLE = ("wait", "advance")
LATE = ("drop", "dead-letter", "process")
"""what may happen to late rows"""
_OPTIONS = ("delay", "idle_after", "max_ahead")


@dataclass(frozen=True)
class EventTime:
    """The event time of a source's rows, and its watermark.

    The watermark W says that no row with an earlier event time is expected. It is the highest event time so far minus
    `delay`, and never goes back. It moves between steps: that of a step follows from the rows of the steps before it.

    A row whose event time is null, or more than `max_ahead` after the step's time of day, is a bad row
    (`Stream.on_bad_row`): a single wrong clock would make all other rows late.

        EventTime("at", delay="10 minutes", idle_after="5 minutes")

    Args:
        at: the column, a timestamp.
        delay: how much later than a newer row a row may come and still count: "10 minutes", or a timedelta.
        idle_after: a partition without a row for this long no longer holds the watermark back; None for never.
        per: "source", or the column, or columns, that tell the parts of the source whose rows come in order of their
            own, such as "partition" of Kafka. The watermark is then that of the part that lags most. At most 1,024.
        on_idle: what the watermark does once all parts are idle: "wait", or "advance" with the time of day, so that
            windows close although nothing comes.
        max_ahead: how far an event time may be ahead of the time of day.

    Raises:
        UsageError: an option is wrong; the message says which.
    """

    at: str
    delay: Any = timedelta(0)
    idle_after: Any = None
    per: str | Sequence[str] = SOURCE_WIDE
    on_idle: str = ON_IDLE[0]
    max_ahead: Any = timedelta(days=1)

    def __post_init__(self) -> None:
        if not isinstance(self.at, str) or not self.at:
            raise UsageError(f"EventTime is of {self.at!r}: name the column of the source that holds event time")
        for option in _OPTIONS:
            given = getattr(self, option)
            if given is None and option == "idle_after":
                continue
            try:
                object.__setattr__(self, option, parse_duration(given))
            except UsageError as error:
                raise UsageError(f"EventTime {self.at}: {option}: {error}") from None
        if self.on_idle not in ON_IDLE:
            raise UsageError(f"EventTime {self.at}: on_idle is {self.on_idle!r}: use 'wait' or 'advance'")
        if self.on_idle == "advance" and self.idle_after is None:
            raise UsageError(
                f"EventTime {self.at}: on_idle='advance' needs idle_after: say after how long, '5 minutes'"
            )
        names = [self.per] if isinstance(self.per, str) else list(self.per)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise UsageError(f"EventTime {self.at}: per is {self.per!r}: use 'source', or columns of the source")
        object.__setattr__(self, "per", self.per if isinstance(self.per, str) else tuple(names))

    @property
    def partition(self) -> tuple[str, ...]:
        """The columns that tell the parts of the source; empty if it has one."""
        if self.per == SOURCE_WIDE:
            return ()
        return (self.per,) if isinstance(self.per, str) else tuple(self.per)


@dataclass(frozen=True)
class RowTimes:
    """How the rows that an operator reads tell their event time.

    Attributes:
        column: the column with it.
        partition: the columns that tell the source's partitions.
        is_checked: whether a row without a time is a bad row.
        max_ahead_us: how far a time may be ahead of the step's time of day, in microseconds; None for any.
        late: what happens to late rows, one of `LATE`; None if the operator has none.
    """

    column: str
    partition: tuple[str, ...] = ()
    is_checked: bool = False
    max_ahead_us: int | None = None
    late: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read for it."""
        return (self.column, *self.partition)


def partition_prefix(columns: Sequence[str]) -> str:
    """Return how the names of a source's partitions begin that are told by these columns; one without is called "".

    No prefix begins as another one does.
    """
    return json.dumps(list(columns), separators=(",", ":")) if columns else ""


def partition_name(columns: Sequence[str], values: Iterable[object]) -> str:
    """Return the name of the partition with these values of the columns: no two have the same."""
    shown = [None if value is None else str(value) for value in values]
    return partition_prefix(columns) + json.dumps(shown, separators=(",", ":"))
