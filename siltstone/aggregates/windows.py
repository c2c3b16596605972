"""Windows of event time: which rows belong to which, as pure functions over many times at once.

Times are int64 microseconds since 1970 (UTC). Aligned windows (`Tumbling`, `Sliding`, `Cumulative`) are made of panes:
pane k is [b(k), b(k + 1)), where the boundary b(k) is k widths after 1970-01-01T00:00 plus the offset. A window is all
panes from one ordinal up to another, its end, so a row is kept once, in its pane, however many windows it is in.

In a time zone, boundaries are times on the clocks there, so a day has 23 to 25 hours. Of a time that clocks show twice,
the first counts; for one that they skip, it is the moment of the change. So a pane may be longer than others, or empty.
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute

from siltstone.errors import UsageError
from siltstone.state.ordering import stable_order
from siltstone.times import parse_duration

_compute: Any = pyarrow.compute
_US = timedelta(microseconds=1)
_DAY = timedelta(days=1)
_LONGEST = timedelta(days=36525)
PANES_MAX = 1440
"""most panes of a window, and so most windows of a row"""
_FAR = 1 << 59
"""times further from 1970, by some 18,000 years, count as this far, so that no sum leaves int64"""


@dataclass(frozen=True)
class Panes:
    """The arithmetic of aligned windows.

    Args:
        width_us: the length of a pane.
        length: panes of a window; of a cumulative one, of the longest.
        stride: panes from the start of a window to that of the next.
        is_cumulative: whether windows of 1, 2, ... up to `length` panes have the same start.
    """

    width_us: int
    length: int
    stride: int
    is_cumulative: bool = False
    zone: str | None = None
    offset_us: int = 0

    @property
    def is_single(self) -> bool:
        """Whether a window is one pane."""
        return self.length == 1

    @property
    def layout(self) -> str:
        """What state by pane depends on, as text."""
        how = "cumulative" if self.is_cumulative else f"every {self.stride}"
        where = f"{self.zone or 'UTC'} + {self.offset_us}us"
        return f"panes of {self.width_us}us in {where}, windows of {self.length}, {how}"

    @property
    def end_step(self) -> int:
        """The difference of the ends of a pane's windows."""
        return 1 if self.is_cumulative else self.stride

    def index(self, at: np.ndarray) -> np.ndarray:
        """Return the panes that contain these times: for each the largest k with b(k) <= at."""
        at = np.clip(np.atleast_1d(at), -_FAR, _FAR)
        if self.zone is None:
            return (at - self.offset_us) // self.width_us
        shown = _compute.local_timestamp(pa.array(at, pa.timestamp("us", self.zone))).cast(pa.int64()).to_numpy()
        low = (shown - self.offset_us) // self.width_us
        # Where clocks show a time again, the boundaries of the first pass count: the row is in one of its last panes.
        again = np.flatnonzero(self._instants(shown) < at)
        if not len(again):
            return low
        low, some = low.copy(), at[again]
        least = low[again]
        most = (shown[again] + some - self._instants(shown[again]) - self.offset_us) // self.width_us
        while (least < most).any():
            middle = (least + most + 1) // 2
            fits = self.boundary(middle) <= some
            least, most = np.where(fits, middle, least), np.where(fits, most, middle - 1)
        low[again] = least
        return low

    def boundary(self, k: np.ndarray) -> np.ndarray:
        """Return b(k), when panes start."""
        times = k * self.width_us + self.offset_us
        return times if self.zone is None else self._instants(times)

    def _instants(self, shown: np.ndarray) -> np.ndarray:
        local = pa.array(shown, pa.timestamp("us"))
        there = _compute.assume_timezone(local, self.zone, ambiguous="earliest", nonexistent="latest")
        return there.cast(pa.int64()).to_numpy()

    def first_end(self, k: np.ndarray) -> np.ndarray:
        """Return the end of the first window that contains each pane."""
        if self.is_cumulative:
            return k + 1
        return ((k - self.length) // self.stride + 1) * self.stride + self.length

    def last_end(self, k: np.ndarray) -> np.ndarray:
        """Return the end of the last window that contains each pane."""
        return (k // self.stride) * self.stride + self.length

    def start(self, end: np.ndarray) -> np.ndarray:
        """Return the first panes of the windows with these ends."""
        return (end - 1) // self.length * self.length if self.is_cumulative else end - self.length

    def ends_after(self, k: np.ndarray, us: np.ndarray | int) -> np.ndarray:
        """Return the least end after a time among those of each pane's windows; it may be beyond `last_end`."""
        first, after = self.first_end(k), self.index(np.asarray(us, np.int64)) + 1
        return first + np.maximum(-(-(after - first) // self.end_step), 0) * self.end_step

    def ends_until(self, k: np.ndarray, us: np.ndarray | int) -> np.ndarray:
        """Return the greatest end at or before a time among those of each pane's windows, of which there is one."""
        first, last = self.first_end(k), self.last_end(k)
        return first + (np.minimum(last, self.index(np.asarray(us, np.int64))) - first) // self.end_step * self.end_step

    def new_due(self, k: np.ndarray, before_us: int | None) -> np.ndarray:
        """Return when panes that have no state are due first: at the first end that the watermark had not reached.

        If it had reached all, that is the first of all: such rows are late, and were to be processed.
        """
        first = self.first_end(k)
        if before_us is None:
            return self.boundary(first)
        after = self.ends_after(k, before_us)
        return self.boundary(np.where(after > self.last_end(k), first, after))

    def find_late(self, at: np.ndarray, before_us: int) -> np.ndarray:
        """Return which rows are late (bool[n]): all their windows ended at or before the watermark `before_us`."""
        late = at < before_us
        old = np.flatnonzero(late)
        if len(old):
            late[old] = self.boundary(self.last_end(self.index(at[old]))) <= before_us
        return late


class Window(ABC):
    """Windows of the event time `on`."""

    on: str

    @property
    def what(self) -> str:
        """How error messages begin."""
        return f"window {type(self).__name__}"

    def _check_on(self) -> None:
        if not isinstance(self.on, str) or not self.on:
            raise UsageError(f"{self.what}: on is {self.on!r}: name the column with the event time")

    def _read_length(self, option: str) -> timedelta:
        """Replace an option by a length of time."""
        try:
            length = parse_duration(getattr(self, option))
        except UsageError as error:
            raise UsageError(f"{self.what}: {option}: {error}") from None
        if not timedelta(0) < length <= _LONGEST:
            raise UsageError(f"{self.what}: {option} is {length}: use more than 0, and at most 100 years")
        object.__setattr__(self, option, length)
        return length


@dataclass(frozen=True, kw_only=True)
class AlignedWindow(Window):
    """Windows that start at the same times for all keys; the options are described by `Tumbling`."""

    size: Any
    on: str
    zone: str | None = None
    offset: Any = timedelta(0)

    @cached_property
    def panes(self) -> Panes:
        """Their arithmetic."""
        width = self._width()
        return self._panes(width // _US, self.size // width)

    @abstractmethod
    def _width(self) -> timedelta: ...

    @abstractmethod
    def _panes(self, width_us: int, length: int) -> Panes: ...

    def _check(self, *lengths: str) -> None:
        """Check the options.

        Raises:
            UsageError: one is wrong.
        """
        self._check_on()
        read = [self._read_length(option) for option in lengths]
        try:
            object.__setattr__(self, "offset", parse_duration(self.offset))
        except UsageError as error:
            raise UsageError(f"{self.what}: offset: {error}") from None
        if self.offset >= self.size:
            raise UsageError(f"{self.what}: offset is {self.offset}: use less than the size")
        if any(length > self.size for length in read):
            raise UsageError(f"{self.what}: every is more than the size, so rows would be in no window: use less")
        if self.size // self._width() > PANES_MAX:
            raise UsageError(
                f"{self.what}: {self.size} in pieces of {self._width()} are more than {PANES_MAX:,}: use fewer windows"
            )
        if self.zone is None:
            return
        try:
            ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError, TypeError):
            raise UsageError(f"{self.what}: zone is {self.zone!r}: use a name like 'Europe/Berlin'") from None
        if uneven := [str(length) for length in read if length % _DAY and _DAY % length]:
            raise UsageError(
                f"{self.what}: {uneven[0]} is neither whole days nor a part of one, so it cannot keep to the days of "
                f"{self.zone}: use such a length, or leave out zone"
            )


@dataclass(frozen=True)
class Tumbling(AlignedWindow):
    """Windows of one size, each right after the one before.

        st.Tumbling("10 minutes", on="at")
        st.Tumbling("1 day", on="at", zone="Europe/Berlin")
        st.Tumbling("7 days", on="at", offset="4 days")  # from Monday to Sunday

    Args:
        size: the length: "10 minutes", or a timedelta.
        on: the column with the event time: that of the stream's `EventTime`, or the `output_time` of the operator that
            is read.
        zone: a time zone, such as "Europe/Berlin", whose clocks windows go by: days begin at its midnights, and have 23
            or 25 hours where clocks change. The size is then whole days, or a part of one. None for UTC.
        offset: how long after 1970-01-01T00:00 windows are counted from, less than the size. That day was a Thursday.

    Raises:
        UsageError: an option is wrong; the message says which.
    """

    size: Any

    def __post_init__(self) -> None:
        self._check("size")

    def _width(self) -> timedelta:
        return self.size

    def _panes(self, width_us: int, length: int) -> Panes:
        return Panes(width_us, 1, 1, zone=self.zone, offset_us=self.offset // _US)


@dataclass(frozen=True)
class Sliding(AlignedWindow):
    """Windows of one size that overlap: one begins every so often, and a row counts in each that contains it.

        st.Sliding("1 hour", every="10 minutes", on="at")

    Rows are kept once, in pieces that the windows have in common. A window has at most 1,440 of them.

    Args:
        size: the length: "1 hour", or a timedelta.
        every: from the beginning of one window to that of the next; at most the size.
        on, zone, offset: see `Tumbling`; in a zone, this goes for `every`, too.

    Raises:
        UsageError: an option is wrong; the message says which.
    """

    size: Any
    every: Any

    def __post_init__(self) -> None:
        self._check("size", "every")

    def _width(self) -> timedelta:
        return int(np.gcd(self.size // _US, self.every // _US)) * _US

    def _panes(self, width_us: int, length: int) -> Panes:
        stride = self.every // self._width()
        return Panes(width_us, length, stride, zone=self.zone, offset_us=self.offset // _US)


@dataclass(frozen=True)
class Cumulative(AlignedWindow):
    """Windows that grow: those with one beginning end `every`, 2 * `every`, ... up to `size` after it.

        st.Cumulative("1 day", every="1 hour", on="at")  # the day so far, each hour

    Args:
        size: the length of the longest, after which the next begins: "1 day", or a timedelta.
        every: by how much they grow; the size is a multiple of it, at most 1,440 times as long.
        on, zone, offset: see `Tumbling`; in a zone, this goes for `every`, too.

    Raises:
        UsageError: an option is wrong; the message says which.
    """

    size: Any
    every: Any

    def __post_init__(self) -> None:
        self._check("size", "every")
        if self.size % self.every:
            raise UsageError(f"{self.what}: {self.size} is not a multiple of {self.every}: use one")

    def _width(self) -> timedelta:
        return self.every

    def _panes(self, width_us: int, length: int) -> Panes:
        return Panes(width_us, length, length, True, self.zone, self.offset // _US)


@dataclass(frozen=True)
class Session(Window):
    """Windows of activity, per key: a session lasts until there was no row for the gap.

        st.Session("30 minutes", on="at")

    As with Spark's `session_window`, a row opens [at, at + gap), and what overlaps or touches is one session.

    Args:
        gap: the length of the pause that ends a session: "30 minutes", or a timedelta.
        on: see `Tumbling`.

    Raises:
        UsageError: an option is wrong; the message says which.
    """

    gap: Any
    _: KW_ONLY
    on: str

    def __post_init__(self) -> None:
        self._check_on()
        self._read_length("gap")

    @property
    def gap_us(self) -> int:
        """The gap in microseconds."""
        return self.gap // _US

    def begins(self, at: np.ndarray) -> np.ndarray:
        """Return when the sessions that rows open begin."""
        return np.clip(at, -_FAR, _FAR)

    def find_late(self, at: np.ndarray, before_us: int) -> np.ndarray:
        """Return which rows are late (bool[n]): a session of the row alone had been over by the watermark.

        It is over once the watermark is after its end, since a row at its end would still be part of it.
        """
        return self.begins(at) + self.gap_us < before_us


def merge_sessions(owner: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the session that each interval [start, end) is part of (int64[n]), numbered by (owner, start).

    Intervals of one owner that overlap or touch are one session.
    """
    if not len(owner):
        return np.empty(0, np.int64)
    order = stable_order(owner, start)
    own, begin = owner[order], start[order]
    ends, rank = np.unique(end[order], return_inverse=True)
    highest = np.maximum.accumulate(own * len(ends) + rank) % len(ends)  # per owner, since owners ascend
    new = np.r_[True, (own[1:] != own[:-1]) | (begin[1:] > ends[highest[:-1]])]
    session = np.empty(len(owner), np.int64)
    session[order] = np.cumsum(new) - 1
    return session
