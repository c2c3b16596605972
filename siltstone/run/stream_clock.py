"""The clock of a run's steps, kept on the driver: decides it before each step, and notes what the step has heard."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from siltstone.catalog.records.steps import Step, StepKind
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import UsageError
from siltstone.log import get_logger
from siltstone.operator import Operator
from siltstone.stream import Stream
from siltstone.time.clock_rules import (
    FOREVER,
    OperatorClock,
    SourceClock,
    StepClock,
    decide_clock,
    decode_clock,
    encode_clock,
    hear,
    repeat_clock,
)
from siltstone.times import to_us

SKEW_MAX = timedelta(minutes=5)
"""how far the driver's time of day may be off the catalog's"""
_LOG = get_logger(__name__)


def time_us() -> int:
    """Return this machine's time of day, in microseconds since 1970."""
    return time.time_ns() // 1000


def check_time_of_day(stream: str, here_us: int, catalog: datetime) -> None:
    """Check the time of day of this machine, by which a stream's timers fire.

    Raises:
        UsageError: it is too far off the catalog's.
    """
    off = timedelta(microseconds=here_us - to_us(catalog))
    if abs(off) > SKEW_MAX:
        way = "ahead of" if off > timedelta(0) else "behind"
        raise UsageError(
            f"the clock of this machine is {abs(off)} {way} that of the catalog, and stream {stream} has timers, "
            "which it would fire at the wrong time: set the machine's clock, such as by NTP"
        )


def clock_of(stream: Stream, operator: Operator, clock: StepClock | None) -> OperatorClock | None:
    """Return what an operator sees of a step's clock: the least of the watermarks of its inputs, if all have event
    time. One that is an operator passes on its own watermark, less what it holds back."""
    if clock is None:
        return None
    seen = {name: SourceClock(one.watermark, one.before) for name, one in clock.sources.items()}
    for each in stream.sort_operators():
        inputs = [seen[name] for name in each.keyed_inputs if name in seen]
        told = len(inputs) == len(each.keyed_inputs)
        own = SourceClock(_least(one.watermark for one in inputs), _least(one.before for one in inputs))
        if each.name == operator.name:
            return OperatorClock(clock.now, own.watermark, own.before) if told else OperatorClock(clock.now)
        for name in each.output_times if told else ():
            held = each.holds_back // timedelta(microseconds=1)
            seen[name] = SourceClock(_hold_back(own.watermark, held), _hold_back(own.before, held))
    raise KeyError(operator.name)


def _least(watermarks: Iterable[int | None]) -> int | None:
    """Return the least watermark: there is none where an input has none yet."""
    found = list(watermarks)
    return None if None in found else min((each for each in found if each is not None), default=None)


def _hold_back(watermark: int | None, held_us: int) -> int | None:
    return watermark if watermark is None or watermark == FOREVER else max(-FOREVER, watermark - held_us)


class StreamClock:
    """The clock of a run's steps.

    Args:
        time_us: returns the driver's time of day, in microseconds since 1970.
    """

    def __init__(self, stream: Stream, time_us: Callable[[], int] = time_us) -> None:
        self._stream, self._time_us = stream, time_us
        self._newest: StepClock | None = None
        self._fires = True
        self._due: dict[str, Mapping[str, int] | None] = {op.name: {} for op in stream.operators}
        """operator -> clock -> when its next timer is due; None if that is not known"""

    @property
    def text(self) -> str:
        """The newest step's clock, as it is recorded."""
        return "" if self._newest is None else encode_clock(self._newest)

    @property
    def watermark(self) -> datetime | None:
        """The least of the sources' watermarks in the newest step (`OperatorClock.watermark`)."""
        sources = {} if self._newest is None else self._newest.sources
        known = [sources[name].watermark for name in self._stream.event_times if name in sources]
        return OperatorClock(0, _least(known)).watermark

    def resume(self, text: str, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from a checkpoint.

        Args:
            text: the clock of its last step.
            statistics: operator -> its statistics at the checkpoint.

        Raises:
            StateError: the clock is damaged.
        """
        self._newest = decode_clock(text)
        self._due = {op.name: statistics.get(op.name, {}).get("due") for op in self._stream.operators}
        ended = [] if self._newest is None else [n for n, s in self._newest.sources.items() if s.watermark == FOREVER]
        if ended and self._stream.is_timed:
            _LOG.warning("the stream was finished: every further row is late", stream=self._stream.name)

    def begin(self, step: Step, *, finishes: bool = False) -> Step:
        """Return the next step with its clock: that which is recorded with it, or one that is decided now.

        In a change of the stream between two runs the clock stands still, and nothing fires.

        Args:
            finishes: whether the sources have ended, so that all that waits for event time is due.
        """
        self._fires = step.kind is not StepKind.CHANGE
        if step.clock:
            recorded = decode_clock(step.clock)
            self._newest = recorded and repeat_clock(self._newest, recorded, self._stream.event_times)
        elif self._fires:
            self._newest = self._decide(finishes=finishes)
        return replace(step, clock=self.text)

    def _decide(self, *, finishes: bool = False) -> StepClock:
        return decide_clock(self._newest, self._stream.event_times, self._time_us(), finishes=finishes)

    def of(self, operator: Operator) -> OperatorClock | None:
        """Return what an operator sees of the newest step's clock; None if nothing may fire."""
        return clock_of(self._stream, operator, self._newest) if self._fires else None

    def hear(self, operator: str, received: Sequence[Acknowledgement]) -> None:
        """Note what the subtasks of an operator have heard of the sources in the newest step, and what is due next.

        Raises:
            UsageError: a source has too many partitions.
        """
        for source, heard in ((source, heard) for each in received for source, heard in each.heard.items()):
            if self._newest is not None:
                self._newest = hear(self._newest, source, heard)
        self._due[operator] = earliest_due(received)

    def is_due(self) -> bool:
        """Whether a step without rows would fire something now, or may, since what is due is not known."""
        if not self._stream.is_timed:
            return False
        clock = self._decide()
        for operator in self._stream.operators:
            if not operator.clocks:
                continue
            due, own = self._due[operator.name], clock_of(self._stream, operator, clock)
            if due is None or own is None:
                return True
            if any((upto := own.upto(name)) is not None and at <= upto for name, at in due.items()):
                return True
        return False


def earliest_due(received: Sequence[Acknowledgement]) -> dict[str, int] | None:
    """Return clock -> when the next timer of an operator is due by it; None if some subtask does not know."""
    found: dict[str, int] = {}
    for each in received:
        if each.due is None:
            return None
        for clock, at in each.due.items():
            found[clock] = min(at, found.get(clock, at))
    return found
