"""The laws of a step's clock: it never goes back, waits for what lags and is not idle, and survives being recorded."""

from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.errors import StateError, UsageError
from siltstone.time.clock_rules import (
    FOREVER,
    PARTITIONS_MAX,
    StepClock,
    decide_clock,
    decode_clock,
    encode_clock,
    hear,
    is_repeated,
    repeat_clock,
)
from siltstone.time.event_time import EventTime, partition_name, partition_prefix

DELAY, IDLE = 10, 30
WAITS = EventTime("at", timedelta(microseconds=DELAY), timedelta(microseconds=IDLE), per="part")
ADVANCES = EventTime("at", timedelta(microseconds=DELAY), timedelta(microseconds=IDLE), per="part", on_idle="advance")
PART_A, PART_B, PART_C = (partition_name(["part"], [name]) for name in "abc")
TIMES = st.integers(-200, 200)
NAMES = st.lists(st.text('a",:[]', max_size=3), min_size=1, max_size=2).map(tuple)
STEPS = st.lists(st.tuples(TIMES, st.dictionaries(st.sampled_from([PART_A, PART_B, PART_C]), TIMES)), max_size=12)


def taken(steps: list[tuple[int, dict[str, int]]], event_time: EventTime) -> list[StepClock]:
    """The clocks of steps: the driver's time of day before each, which may jump, and what each has heard."""
    clocks: list[StepClock] = []
    for now, heard in steps:
        clock = decide_clock(clocks[-1] if clocks else None, {"source": event_time}, now)
        clocks.append(hear(clock, "source", heard))
    return clocks


@given(STEPS, st.sampled_from([WAITS, ADVANCES]))
def test_the_time_of_day_and_the_watermark_never_go_back(
    steps: list[tuple[int, dict[str, int]]], event_time: EventTime
) -> None:
    clocks = taken(steps, event_time)
    for before, after in pairwise(clocks):
        old, new = before.sources["source"], after.sources["source"]
        assert after.now >= before.now and new.before == old.watermark
        assert old.watermark is None or (new.watermark is not None and new.watermark >= old.watermark)


@given(STEPS)
def test_the_watermark_follows_from_earlier_steps_and_waits_for_every_part_that_is_not_idle(
    steps: list[tuple[int, dict[str, int]]],
) -> None:
    heard: dict[str, tuple[int, int]] = {}
    watermark = None
    for clock, (_, found) in zip(taken(steps, WAITS), steps, strict=True):
        active = [high for high, seen in heard.values() if seen + IDLE > clock.now]
        if heard:
            reached = min(active or [high for high, _ in heard.values()]) - DELAY
            watermark = reached if watermark is None else max(watermark, reached)
        assert clock.sources["source"].watermark == watermark
        for part, high in found.items():
            heard[part] = (max(high, heard.get(part, (high, 0))[0]), clock.now)


@given(STEPS, st.sampled_from([WAITS, ADVANCES]))
def test_a_clock_that_was_recorded_decides_as_before(
    steps: list[tuple[int, dict[str, int]]], event_time: EventTime
) -> None:
    for clock in taken(steps, event_time):
        again = decode_clock(encode_clock(clock))
        assert again == clock
        times = {"source": event_time}
        assert decide_clock(again, times, 500) == decide_clock(clock, times, 500)


def test_once_all_are_idle_it_advances_with_the_time_of_day_if_asked() -> None:
    for event_time, expected in ((WAITS, 90), (ADVANCES, 1000 - DELAY)):
        [clock] = taken([(100, {PART_A: 100})], event_time)
        source = decide_clock(clock, {"source": event_time}, 1000).sources["source"]
        assert source.watermark == expected


def test_at_the_end_everything_is_due() -> None:
    [clock] = taken([(0, {PART_A: 0})], WAITS)
    end = decide_clock(clock, {"source": WAITS}, 1, finishes=True)
    assert end.sources["source"].watermark == FOREVER
    later = decide_clock(end, {"source": WAITS}, 2)
    assert later.sources["source"].watermark == FOREVER == later.sources["source"].before


def test_parts_that_a_definition_no_longer_tells_apart_hold_nothing_back() -> None:
    [clock] = taken([(0, {PART_A: 0, PART_B: 100})], WAITS)
    whole = EventTime("at", timedelta(microseconds=DELAY))
    after = hear(decide_clock(clock, {"source": whole}, 1), "source", {"": 500})
    assert decide_clock(after, {"source": whole}, 2).sources["source"].watermark == 490


@given(st.lists(st.tuples(NAMES, NAMES), min_size=2, max_size=2, unique=True))
def test_no_partition_has_the_name_of_another(pairs: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
    (columns, values), (others, other_values) = pairs
    name, other = partition_name(columns, values), partition_name(others, other_values)
    assert (name == other) == ((columns, values) == (others, other_values))
    assert name.startswith(partition_prefix(others)) == (columns == others)


@given(STEPS, STEPS)
def test_a_step_that_is_taken_again_is_decided_as_before_and_hears_anew(
    steps: list[tuple[int, dict[str, int]]], others: list[tuple[int, dict[str, int]]]
) -> None:
    recorded, heard = taken(steps, WAITS), [found for _, found in steps]
    again: list[StepClock] = []
    for clock, found in zip(recorded, heard, strict=True):
        repeated = repeat_clock(again[-1] if again else None, clock, {"source": WAITS})
        again.append(hear(repeated, "source", found))
    assert again == recorded
    for clock, other in zip(recorded, taken(others, ADVANCES), strict=False):
        repeated = repeat_clock(None, clock, {"source": ADVANCES})
        assert is_repeated(clock, repeated) and is_repeated(StepClock(clock.now), clock)
        assert is_repeated(clock, other) == (
            clock.now == other.now
            and clock.sources["source"].watermark == other.sources["source"].watermark
            and clock.sources["source"].before == other.sources["source"].before
        )


def test_a_source_has_a_bounded_number_of_parts() -> None:
    [clock] = taken([(0, {partition_name(["part"], [n]): n for n in range(PARTITIONS_MAX)})], WAITS)
    with pytest.raises(UsageError, match="more than 1,024 partitions"):
        hear(clock, "source", {PART_A: 0})


@pytest.mark.parametrize(
    "text", ["{", "[]", "[1]", '["a",{}]', '[1,{"s":1}]', '[1,{"s":[1,2,{"p":[1]}]}]', "[1e99,{}]"]
)
def test_a_damaged_clock_is_one_error(text: str) -> None:
    with pytest.raises(StateError, match="cannot be read as a clock"):
        decode_clock(text)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"at": ""}, "name the column"),
        ({"delay": "soon"}, "EventTime at: delay: 'soon' is not a length of time"),
        ({"delay": None}, "delay: None is not"),
        ({"on_idle": "stop"}, "use 'wait' or 'advance'"),
        ({"on_idle": "advance"}, "needs idle_after"),
        ({"per": ()}, "per is"),
    ],
)
def test_a_wrong_option_is_said(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        EventTime(**{"at": "at", **options})  # pyright: ignore[reportArgumentType]
