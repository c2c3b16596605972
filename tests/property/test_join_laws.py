"""Joins are what SQL makes of all rows, however a stream is cut, interleaved, idle, stopped and moved."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from siltstone.aggregates.functions import Count
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Tumbling
from siltstone.joins import interval, lookup
from siltstone.joins.interval import HOW
from siltstone.joins.matching import TimeOrder, shift, split_pairs
from siltstone.run import step_order
from siltstone.run.processing import calls
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime
from tests.examples import examples, few_examples
from tests.join_answers import count_refused, join_answer, lookup_answer, newest_versions
from tests.join_streams import (
    BOUNDS,
    DELAY,
    FLOATS,
    SCHEMA,
    Batch,
    batches_of,
    count_rows,
    interval_join,
    joining,
    less,
    lookup_join,
    minutes,
    rows_of,
)
from tests.tester_actions import act, action
from tests.timed_streams import BEGIN

value = st.one_of(st.none(), st.integers(-2, 2))
price = st.sampled_from([None, math.nan, -0.0, -2.0, -1.0, 0.0, 1.0, 2.0])
moment = st.integers(-DELAY, DELAY)
until = st.one_of(st.none(), st.integers(-3, 9))
ahead = st.sampled_from([0, 0, 1, 4, 12])
both = st.one_of(ahead.map(lambda by: (by, by)), st.tuples(ahead, ahead))


def draw_steps(
    keys: Sequence[float | None], *, least: int = 1, most: int = 5, rows: int = 0
) -> st.SearchStrategy[list[Batch]]:
    """Draw `least` to `most` steps, in which each source gives `rows` rows or more, with these keys."""
    key = st.sampled_from(keys)
    asks = st.lists(st.tuples(key, moment, until, value), min_size=rows, max_size=5)
    # Bids of one key at one time are alternatives for a lookup.
    tied = st.tuples(key, moment, st.lists(price, min_size=1, max_size=2))
    bids = st.lists(tied, min_size=rows, max_size=4).map(lambda drawn: [(*bid, b) for *bid, own in drawn for b in own])
    return st.lists(st.tuples(both, asks, bids), min_size=least, max_size=most).map(batches_of)


WHOLE = (0, 1, 2)
steps = draw_steps(WHOLE)
full_steps = draw_steps(WHOLE, least=4, most=6, rows=1)
keyed_steps = st.one_of(
    st.tuples(st.just(pa.int64()), draw_steps([*WHOLE, None])),
    st.tuples(st.just(pa.float64()), draw_steps([0.0, -0.0, 1.5, math.nan, None])),
)
"""the type of the key, and steps: rows whose key is null become dead letters"""
actions = st.lists(
    action,
    min_size=5,
    max_size=5,
)
backends = st.sampled_from(["heap", "rocksdb"])
KEPT = ("left", "left.bounds", "right", "right.bounds")
WAITING = ("waiting", "waiting.bounds", "coming", "coming.bounds")


@contextmanager
def working_in_pieces(size: int) -> Iterator[None]:
    """Let calls, and what joins work on at once, have at most `size` rows; 0 for as they are."""

    def pieces(batches: Iterator[pa.RecordBatch], **_: bool) -> Iterator[pa.Table]:
        for table in calls(batches):
            yield from (table.slice(start, size) for start in range(0, len(table), size))

    with pytest.MonkeyPatch.context() as patch:
        if size:
            patch.setattr(step_order, "calls", pieces)
            for module, limit in ((interval, "PAIRS_A_BATCH"), (interval, "ROWS_A_BATCH"), (lookup, "ROWS_A_BATCH")):
                patch.setattr(module, limit, size)
        yield


def open_tester(stream: Any, key: pa.DataType | None = None, **options: Any) -> StreamTester:
    return StreamTester(stream, schema=FLOATS if key == pa.float64() else SCHEMA, now=BEGIN, **options)


def check_refused(tester: StreamTester, batches: list[Batch], *, has_letters: bool = True) -> None:
    """Check how many rows had no key, and how many were late."""
    bad, late = count_refused(batches)
    assert sum(tester.late.values()) == late
    assert tester.dead_letters.num_rows == (bad + late if has_letters else 0)


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=examples(15), deadline=None)
@given(
    bounds=st.sampled_from(BOUNDS),
    where=st.booleans(),
    backend=backends,
    keyed=keyed_steps,
    actions=actions,
    every=st.integers(1, 2),
    parallelism=st.integers(1, 4),
    size=st.integers(0, 3),
)
def test_an_interval_join_is_that_of_all_rows(
    how: str,
    bounds: tuple[int, int | str],
    where: bool,
    backend: str,
    keyed: tuple[pa.DataType, list[Batch]],
    actions: list[str],
    every: int,
    parallelism: int,
    size: int,
) -> None:
    key, batches = keyed
    join = interval_join(how, bounds, less if where else None, key={"k": key})
    stream, before = joining(join, on_bad_row="dead-letter"), Counter[Any]()
    with open_tester(stream, key, parallelism=parallelism, backend=backend, checkpoint_every=every) as tester:
        with working_in_pieces(size):
            for number, batch in enumerate(batches):
                made = batch.step(tester)["joined"]
                if how == "inner":
                    now = join_answer(batches[: number + 1], how, bounds, where=where)
                    assert rows_of(made) == now - before
                    before = now
                act(tester, actions[number], number, 4)
            tester.finish()
        assert not tester.late
        check_refused(tester, batches)
        assert rows_of(tester.delivered("joined")) == join_answer(batches, how, bounds, where=where)
        assert [tester.state("joined", table).num_rows for table in KEPT] == [0, 0, 0, 0]
        tester.replay(parallelism=1 + every)


@settings(max_examples=examples(40), deadline=None)
@given(
    how=st.sampled_from(["left", "inner"]),
    backend=backends,
    keyed=keyed_steps,
    actions=actions,
    every=st.integers(1, 2),
    parallelism=st.integers(1, 4),
    size=st.integers(0, 3),
)
def test_a_lookup_join_finds_what_was_newest_at_each_rows_time(
    how: str,
    backend: str,
    keyed: tuple[pa.DataType, list[Batch]],
    actions: list[str],
    every: int,
    parallelism: int,
    size: int,
) -> None:
    key, batches = keyed
    stream = joining(lookup_join(how=how, key={"k": key}), on_bad_row="dead-letter")
    with open_tester(stream, key, parallelism=parallelism, backend=backend, checkpoint_every=every) as tester:
        with working_in_pieces(size):
            for number, batch in enumerate(batches):
                batch.step(tester)
                act(tester, actions[number], number, 4)
            tester.finish()
        assert not tester.late
        check_refused(tester, batches)
        assert rows_of(tester.delivered("joined")) == lookup_answer(batches, how)
        assert [tester.state("joined", table).num_rows for table in WAITING] == [0, 0, 0, 0]
        current = tester.state("joined", "current").to_pylist()
        assert count_rows((row["k"], row["at"]) for row in current) == newest_versions(batches)
        tester.replay(parallelism=1 + every)


IDLE = 2
"""after how many minutes without a row a source is idle"""


class Pace:
    """How far two sources have come, by the rules in docs/time.md and docs/joins.md: the watermark of a join of them.

    Args:
        may_idle: the sources that are idle after `IDLE` minutes without a row; others never are.
        now: the time of day of the first step.
    """

    def __init__(self, may_idle: Sequence[str], now: datetime) -> None:
        self.may_idle = may_idle
        self.watermark: datetime | None = None
        self.high = dict[str, datetime]()
        self.seen = dict.fromkeys(SCHEMA, now)

    def begin_step(self, now: datetime) -> list[str]:
        """Move the watermark; return the sources that hold it back: all are not idle, or the last to turn idle."""
        holds = {
            name: seen + minutes(IDLE) if name in self.may_idle else datetime.max.replace(tzinfo=seen.tzinfo)
            for name, seen in self.seen.items()
        }
        holding = [name for name, until in holds.items() if until > now or until == max(holds.values())]
        if all(name in self.high for name in holding):
            reached = min(self.high[name] for name in holding) - minutes(DELAY)
            self.watermark = max(self.watermark or reached, reached)
        return holding

    def hear(self, batch: Batch, now: datetime) -> None:
        """Note the rows of a step."""
        for name, rows in (("asks", batch.asks), ("bids", batch.bids)):
            if rows:
                self.seen[name] = now
                newest = max(row[1] for row in rows)
                self.high[name] = max(newest, self.high.get(name, newest))


def quieten(batches: list[Batch], source: str, begin: int, count: int, *, catches_up: bool) -> None:
    """Take away the rows that a source gives in `count` steps from `begin` on; those may come in the step after."""
    quiet, after = batches[begin : begin + count], batches[begin + count : begin + count + 1]
    missed = [row for batch in quiet for row in getattr(batch, source)]
    for batch in quiet:
        getattr(batch, source).clear()
    for batch in after if catches_up else ():
        getattr(batch, source).extend(missed)


@settings(max_examples=few_examples(60), deadline=None)
@given(
    kind=st.sampled_from([*HOW, "lookup"]),
    bounds=st.sampled_from(BOUNDS),
    late=st.sampled_from(["drop", "dead-letter"]),
    may_idle=st.sampled_from([("asks",), ("bids",), ("asks", "bids")]),
    batches=full_steps,
    quiet=st.tuples(st.sampled_from(["asks", "bids"]), st.integers(0, 2), st.integers(1, 4)),
    catches_up=st.booleans(),
    pauses=st.lists(st.integers(0, IDLE), min_size=6, max_size=6),
    actions=st.lists(action, min_size=6, max_size=6),
    backend=backends,
    every=st.integers(1, 2),
)
def test_what_comes_while_a_source_is_idle_counts_unless_it_is_late(
    kind: str,
    bounds: tuple[int, int | str],
    late: str,
    may_idle: tuple[str, ...],
    batches: list[Batch],
    quiet: tuple[str, int, int],
    catches_up: bool,
    pauses: list[int],
    actions: list[str],
    backend: str,
    every: int,
) -> None:
    quieten(batches, *quiet, catches_up=catches_up)
    join = lookup_join() if kind == "lookup" else interval_join(kind, bounds)
    times = {
        name: EventTime("at", delay=minutes(DELAY), idle_after=minutes(IDLE) if name in may_idle else None)
        for name in SCHEMA
    }
    stream, pace = joining(join, event_time=times, late=late), Pace(may_idle, BEGIN)
    with open_tester(stream, parallelism=2, backend=backend, checkpoint_every=every) as tester:
        for number, (batch, pause) in enumerate(zip(batches, pauses, strict=False)):
            if number:
                tester.advance(minutes(pause))
            holding = pace.begin_step(tester.now)
            batch.step(tester)
            assert tester.watermark == pace.watermark
            event(f"idle: {sorted(set(SCHEMA) - set(holding))}")
            pace.hear(batch, tester.now)
            act(tester, actions[number], number, 4)
        tester.finish()
        check_refused(tester, batches, has_letters=late == "dead-letter")
        event(f"late rows: {bool(tester.late)}")
        wanted = lookup_answer(batches, "left") if kind == "lookup" else join_answer(batches, kind, bounds, where=False)
        assert rows_of(tester.delivered("joined")) == wanted
        kept = WAITING if kind == "lookup" else KEPT
        assert [tester.state("joined", table).num_rows for table in kept] == [0, 0, 0, 0]
        tester.replay(parallelism=1 + every)


@settings(max_examples=examples(40), deadline=None)
@given(kind=st.sampled_from([*HOW, "lookup"]), bounds=st.sampled_from(BOUNDS), batches=steps, time=st.booleans())
def test_no_row_is_late_where_a_join_is_read(
    kind: str, bounds: tuple[int, int | str], batches: list[Batch], time: bool
) -> None:
    join = lookup_join() if kind == "lookup" else interval_join(kind, bounds)
    if kind == "inner" and not isinstance(bounds[1], str):  # either time will do
        join = interval_join(kind, bounds, output_time="at" if time else "bid_at")
    if join.output_time is None:
        assert kind == "full" or isinstance(bounds[1], str)
        return
    window = Tumbling("3 minutes", on=join.output_time)
    counts = Aggregate("counts", {"k": join.key.field("k").type}, [Count("n")], reads="joined", window=window)
    with open_tester(joining(join, counts), parallelism=2) as tester:
        for batch in batches:
            batch.step(tester)
        tester.finish()
        assert not tester.late
        found, wanted = Counter[Any](), Counter[Any]()
        for row in tester.delivered("counts").to_pylist():
            found[row["k"], row["window_start"]] += row["n"]
        for row in tester.delivered("joined").to_pylist():
            at = row[join.output_time]
            wanted[row["k"], at - (at - BEGIN) % (window.size)] += 1
        assert found == wanted


times = st.one_of(st.integers(-5, 5), st.sampled_from([-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1]))
owned = st.lists(st.tuples(st.integers(0, 2), times), max_size=12)


def columns_of(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array([row[n] for row in rows], np.int64) for n in (0, 1))  # pyright: ignore[reportReturnType]


def clipped(time: int) -> int:
    return max(-(2**63), min(2**63 - 1, time))


@settings(max_examples=examples(200), deadline=None)
@given(left=owned, right=owned, lower=times, upper=times, limit=st.integers(1, 5))
def test_ranges_of_time_are_found_up_to_the_ends_of_time(
    left: list[tuple[int, int]], right: list[tuple[int, int]], lower: int, upper: int, limit: int
) -> None:
    owner, at = columns_of(left)
    order = TimeOrder(*columns_of(right))
    first, counts = order.find(owner, shift(at, lower)[0], shift(at, upper)[0])
    found = Counter[tuple[int, int]]()
    for rows, places in split_pairs(first, counts, limit):
        assert len(rows) <= limit or len(set(rows.tolist())) == 1
        found.update(zip(rows.tolist(), order.order[places].tolist(), strict=True))
    assert found == Counter(
        (i, j)
        for i, (key, time) in enumerate(left)
        for j, (other, when) in enumerate(right)
        if key == other and clipped(time + lower) <= when <= clipped(time + upper)
    )
