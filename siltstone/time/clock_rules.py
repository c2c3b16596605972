"""The clock of a step: the time of day, and a watermark per source. Pure functions over values.

The driver decides a step's clock before the step, from the steps before it, and records it with the step. A step that
is run again, for whatever reason, has the clock that was recorded. So what a step does depends on its rows, its state
and its clock, and on nothing else.

All times are microseconds since 1970. W is a step's watermark, W' that of the step before it:

    W       what is due at or before W fires in the step
    W'      rows are late if all that they could change had fired by W'

A row at W' itself is not late. Spark cuts by `<=`: without a window, it drops such a row. Flink moves its watermark
between rows, so that what is late depends on timing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from siltstone.decoding import check_integer, check_object, parse_json, translate_decode_errors
from siltstone.errors import StateError, UsageError
from siltstone.time.event_time import EventTime, partition_prefix
from siltstone.times import EPOCH, show_us

FOREVER = (1 << 63) - 1
"""the watermark of a source that has ended"""
PARTITIONS_MAX = 1024
"""most partitions of a source"""
_LEAST = -FOREVER
_US = timedelta(microseconds=1)


@dataclass(frozen=True)
class PartitionClock:
    """One partition of a source: its highest valid event time, and when rows of it were last seen (`now`)."""

    high: int
    seen: int


@dataclass(frozen=True)
class SourceClock:
    """One source's part of a clock.

    Attributes:
        watermark: W; None while no row has come.
        before: W'.
        partitions: what has been seen of each, the step's own rows included once it is acknowledged.
        since: while nothing has been seen of any: since when that is waited for, a time of day, if not for ever.
    """

    watermark: int | None = None
    before: int | None = None
    partitions: Mapping[str, PartitionClock] = field(default_factory=dict)
    since: int | None = None


@dataclass(frozen=True)
class StepClock:
    """A step's clock: the time of day `now`, which never goes back, and the clock of each source with event time."""

    now: int
    sources: Mapping[str, SourceClock] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorClock:
    """What one operator sees of a step's clock.

    Attributes:
        now_us: the step's time of day.
        watermark_us: W; None while there is none.
        before_us: W'.
    """

    now_us: int
    watermark_us: int | None = None
    before_us: int | None = None

    @property
    def now(self) -> datetime:
        """The step's time of day (UTC); never earlier than that of the step before it."""
        return EPOCH + self.now_us * _US

    @property
    def watermark(self) -> datetime | None:
        """No earlier event time is expected (UTC). None before the first row, or if the stream has no event time;
        the year 9999 once the source has ended (`siltstone run --finish`), and the year 1 for what is before it."""
        if self.watermark_us is None:
            return None
        try:
            return EPOCH + self.watermark_us * _US
        except OverflowError:
            return (datetime.max if self.watermark_us > 0 else datetime.min).replace(tzinfo=EPOCH.tzinfo)

    def upto(self, clock: str) -> int | None:
        """Return the time up to which things are due by a clock, "event" or "processing"."""
        return self.watermark_us if clock == "event" else self.now_us


def decide_clock(
    previous: StepClock | None, event_times: Mapping[str, EventTime], now: int, *, finishes: bool = False
) -> StepClock:
    """Decide the clock of the step after `previous`, which is acknowledged.

    A source that is idle follows those that were active when it had turned idle: its watermark is at least the least
    of theirs, whenever steps are taken.

    Args:
        event_times: source -> its event time.
        now: the driver's time of day.
        finishes: whether the sources have ended, so that everything in event time is due.
    """
    now = now if previous is None else max(now, previous.now)
    known = {} if previous is None else previous.sources
    sources = {name: replace(one, before=one.watermark) for name, one in known.items() if name not in event_times}
    active_until = dict[str, int]()
    for name, event_time in event_times.items():
        one = known.get(name, SourceClock())
        parts, since = _known_parts(one, event_time), now if one.since is None else one.since
        waits = None if parts or event_time.idle_after is None else since
        watermark = FOREVER if finishes else _advance(one, event_time, now)
        sources[name] = SourceClock(watermark, one.watermark, parts, waits)
        active_until[name] = max(
            _active_until(seen, event_time) for seen in [p.seen for p in parts.values()] or [since]
        )
    # The last to turn idle first, since others follow what it comes to. One that advances by itself holds nobody back.
    for name, until in sorted(active_until.items(), key=lambda one: -one[1]) if not finishes else ():
        others = [
            sources[other].watermark
            for other, end in active_until.items()
            if other != name and (end > until or event_times[other].on_idle == "advance")
        ]
        if until <= now and others:
            sources[name] = replace(sources[name], watermark=_follow(sources[name].watermark, others))
    return StepClock(now, sources)


def _active_until(seen: int, event_time: EventTime) -> int:
    """Return until when a source, or a part of it, holds the watermark back that was seen then."""
    return FOREVER if event_time.idle_after is None else seen + event_time.idle_after // _US


def _follow(watermark: int | None, others: Sequence[int | None]) -> int | None:
    """Return the watermark of a source that is idle, where `others` are not."""
    least = [each for each in others if each is not None]
    if len(least) < len(others):
        return watermark
    return max(min(least), _LEAST if watermark is None else watermark)


def repeat_clock(previous: StepClock | None, recorded: StepClock, event_times: Mapping[str, EventTime]) -> StepClock:
    """Return the clock of a step that is taken again, after `previous`: what was decided is as it was recorded.

    What its rows will tell is left out: the stream may measure their event times in another way by now. A source that
    had no event time then has the clock that is decided for it now.
    """
    decided = decide_clock(previous, event_times, recorded.now).sources
    known = {
        name: replace(one, partitions=decided[name].partitions if name in decided else one.partitions)
        for name, one in recorded.sources.items()
    }
    return StepClock(recorded.now, {**decided, **known})


def is_repeated(recorded: StepClock, clock: StepClock) -> bool:
    """Whether a clock is, in what was decided, that which was recorded; of the sources that both have."""
    both = [(one, clock.sources[name]) for name, one in recorded.sources.items() if name in clock.sources]
    return clock.now == recorded.now and all((a.watermark, a.before) == (b.watermark, b.before) for a, b in both)


def _advance(source: SourceClock, event_time: EventTime, now: int) -> int | None:
    """Return a source's next watermark."""
    delay = event_time.delay // _US
    parts = _known_parts(source, event_time).values()
    if not parts:
        return source.watermark
    active = [p for p in parts if _active_until(p.seen, event_time) > now]
    if not active and event_time.on_idle == "advance":
        reached = now - delay
    else:  # once all are idle it stays, at what it would have been had a step come in time
        reached = min(p.high for p in active or parts) - delay
    return max(_LEAST if source.watermark is None else source.watermark, reached)


def _known_parts(source: SourceClock, event_time: EventTime) -> dict[str, PartitionClock]:
    """Return the partitions without those that `EventTime.per` told apart in an earlier definition."""
    prefix = partition_prefix(event_time.partition)
    parts = source.partitions.items()
    return {name: one for name, one in parts if (name.startswith(prefix) if prefix else not name)}


def hear(clock: StepClock, source: str, heard: Mapping[str, int]) -> StepClock:
    """Note the highest event time of each partition in the step's rows.

    Raises:
        UsageError: there are too many partitions.
    """
    if not heard:
        return clock
    one = clock.sources[source]
    parts = dict(one.partitions)
    for name, high in heard.items():
        known = parts.get(name)
        parts[name] = PartitionClock(max(high, _LEAST if known is None else known.high), clock.now)
    check_partitions(len(parts))
    return replace(clock, sources={**clock.sources, source: replace(one, partitions=parts, since=None)})


def check_partitions(count: int) -> None:
    """Check the number of a source's partitions.

    Raises:
        UsageError: there are too many.
    """
    if count > PARTITIONS_MAX:
        raise UsageError(
            f"the source has more than {PARTITIONS_MAX:,} partitions by the column that EventTime names in per: "
            "name one with fewer values"
        )


def encode_clock(clock: StepClock) -> str:
    """Encode a clock as text."""
    sources = {
        name: [
            *(one.watermark, one.before, {part: [p.high, p.seen] for part, p in sorted(one.partitions.items())}),
            *(() if one.since is None else (one.since,)),
        ]
        for name, one in clock.sources.items()
    }
    return json.dumps([clock.now, sources], separators=(",", ":"))


def decode_clock(text: str) -> StepClock | None:
    """Decode what `encode_clock` returned; None of an empty text.

    Raises:
        StateError: the text is damaged.
    """
    if not text:
        return None
    with translate_decode_errors("a step of the input log in the catalog", "a clock", StateError):
        now, sources = parse_json(text)
        found = {name: _decode_source(of) for name, of in check_object(sources, "sources").items()}
        return StepClock(_check_time(now), found)


def _decode_source(of: Any) -> SourceClock:
    watermark, before, parts, *since = of
    if len(since) > 1:
        raise ValueError("a source's clock has more than it may have")
    if len(parts) > PARTITIONS_MAX:
        raise ValueError(f"{len(parts)} partitions")
    return SourceClock(
        None if watermark is None else _check_time(watermark),
        None if before is None else _check_time(before),
        {
            part: PartitionClock(_check_time(high), _check_time(seen))
            for part, (high, seen) in check_object(parts, "partitions").items()
        },
        _check_time(since[0]) if since else None,
    )


def _check_time(value: object) -> int:
    return check_integer(value, _LEAST, FOREVER, "a time")


def describe_watermark(watermark: int | None) -> str:
    """Describe a watermark for people."""
    if watermark is None:
        return "none yet"
    return "the end" if watermark == FOREVER else show_us(watermark)
