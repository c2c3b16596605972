"""Joins are what a join by hand of all rows is, however a stream is cut, interleaved, stopped and moved."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
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
from tests.examples import examples
from tests.join_streams import (
    BOUNDS,
    DELAY,
    SCHEMA,
    Batch,
    batches_of,
    interval_join,
    joined_by_hand,
    joining,
    less,
    looked_up_by_hand,
    lookup_join,
    rows_of,
)
from tests.tester_actions import act, action
from tests.timed_streams import BEGIN

value = st.one_of(st.none(), st.integers(-2, 2))
moment = st.integers(-DELAY, DELAY)
ask = st.tuples(st.integers(0, 2), moment, st.one_of(st.none(), st.integers(-3, 9)), value)
bid = st.tuples(st.integers(0, 2), moment, value)
ahead = st.sampled_from([0, 0, 1, 4, 12])
both = st.one_of(ahead.map(lambda by: (by, by)), st.tuples(ahead, ahead))
step = st.tuples(both, st.lists(ask, max_size=5), st.lists(bid, max_size=5))
steps = st.lists(step, min_size=1, max_size=5).map(batches_of)
actions = st.lists(
    action,
    min_size=5,
    max_size=5,
)
backends = st.sampled_from(["heap", "rocksdb"])
KEPT = ("left", "left.bounds", "right", "right.bounds")


@contextmanager
def working_in_pieces(size: int) -> Iterator[None]:
    """Let calls, and what joins work on at once, have at most `size` rows; 0 for as they are."""

    def pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for table in calls(batches):
            yield from (table.slice(start, size) for start in range(0, len(table), size))

    with pytest.MonkeyPatch.context() as patch:
        if size:
            patch.setattr(step_order, "calls", pieces)
            for module, limit in ((interval, "PAIRS_A_BATCH"), (interval, "ROWS_A_BATCH"), (lookup, "ROWS_A_BATCH")):
                patch.setattr(module, limit, size)
        yield


def open_tester(stream: Any, **options: Any) -> StreamTester:
    return StreamTester(stream, schema=SCHEMA, now=BEGIN, **options)


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=examples(15), deadline=None)
@given(
    bounds=st.sampled_from(BOUNDS),
    where=st.booleans(),
    backend=backends,
    batches=steps,
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
    batches: list[Batch],
    actions: list[str],
    every: int,
    parallelism: int,
    size: int,
) -> None:
    stream = joining(interval_join(how, bounds, less if where else None))
    with open_tester(stream, parallelism=parallelism, backend=backend, checkpoint_every=every) as tester:
        with working_in_pieces(size):
            for number, batch in enumerate(batches):
                made = batch.step(tester)["joined"]
                if how == "inner":
                    before, now = (joined_by_hand(batches[:n], how, bounds, where=where) for n in (number, number + 1))
                    assert rows_of(made) == now - before
                act(tester, actions[number], number, 4)
            tester.finish()
        assert not tester.late
        assert rows_of(tester.delivered("joined")) == joined_by_hand(batches, how, bounds, where=where)
        assert [tester.state("joined", table).num_rows for table in KEPT] == [0, 0, 0, 0]
        tester.replay(parallelism=1 + every)


@settings(max_examples=examples(40), deadline=None)
@given(
    how=st.sampled_from(["left", "inner"]),
    backend=backends,
    batches=steps,
    actions=actions,
    every=st.integers(1, 2),
    parallelism=st.integers(1, 4),
    size=st.integers(0, 3),
)
def test_a_lookup_join_finds_what_was_newest_at_each_rows_time(
    how: str, backend: str, batches: list[Batch], actions: list[str], every: int, parallelism: int, size: int
) -> None:
    stream = joining(lookup_join(how=how))
    with open_tester(stream, parallelism=parallelism, backend=backend, checkpoint_every=every) as tester:
        with working_in_pieces(size):
            for number, batch in enumerate(batches):
                batch.step(tester)
                act(tester, actions[number], number, 4)
            tester.finish()
        assert not tester.late
        assert rows_of(tester.delivered("joined")) == looked_up_by_hand(batches, how)
        for table in ("waiting", "waiting.bounds", "coming", "coming.bounds"):
            assert tester.state("joined", table).num_rows == 0
        bids = [row for batch in batches for row in batch.bids]
        newest = {key: max(at for of, at, _ in bids if of == key) for key, _, _ in bids}
        assert {row["k"]: row["at"] for row in tester.state("joined", "current").to_pylist()} == newest
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
