"""NEXMark's events and queries: answers are those of SQL over all events, whatever the micro-batches and restarts."""

import random
from collections import Counter
from datetime import datetime, timedelta
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from siltstone.testing import StreamTester
from siltstone.times import to_us
from streams.nexmark import QUERIES
from streams.nexmark.events import EPOCH, KINDS, PER_EPOCH, SLOTS, Events
from tests.nexmark_answers import ANSWERS, NEWEST, answer_of, as_rows

EPOCHS = 60
EVENTS = Events(seed=7, rate=100, out_of_order=100)
"""half a minute"""


def events(kind: str, first: int, last: int) -> pa.Table:
    """Those of a kind in some epochs; of the side table all rows, in the first."""
    if kind == "side":
        return EVENTS.make(kind, np.arange(0 if first else SLOTS))
    return EVENTS.make(kind, np.arange(first * PER_EPOCH[kind], last * PER_EPOCH[kind]))


def run(number: int, chance: random.Random) -> pa.Table:
    """A query's output over the events in random micro-batches, with restarts, some of which lose the working state."""
    query = QUERIES[number]
    schema = {kind: KINDS[kind] for kind in query.source_names}
    cuts = sorted({0, EPOCHS, *chance.sample(range(1, EPOCHS), chance.randrange(1, 12))})
    with StreamTester(
        query, parallelism=chance.choice([1, 3]), schema=schema, checkpoint_every=chance.choice([1, 3])
    ) as tester:
        for first, last in pairwise(cuts):
            tester.step({kind: events(kind, first, last) for kind in query.source_names})
            if chance.random() < 0.2:
                tester.restart(lost=chance.random() < 0.5)
        tester.finish()
        tester.advance("1 minute")
        tester.checkpoint()
        tester.replay()
        return tester.delivered(query.operators[-1].name)


@pytest.mark.parametrize("number", sorted(ANSWERS))
def test_a_query_answers_what_sql_does_whatever_the_micro_batches(number: int) -> None:
    rows = run(number, random.Random(number)).to_pylist()
    if number in NEWEST:
        rows = list({tuple(row[name] for name in NEWEST[number]): row for row in rows}.values())
    expected = answer_of(number, {kind: events(kind, 0, EPOCHS) for kind in KINDS})
    assert expected and as_rows(rows) == as_rows(expected)


@pytest.mark.parametrize("fires", [True, False], ids=["timers first", "rows first"])
def test_bids_are_counted_in_the_ten_seconds_of_their_steps(fires: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though rows come when timers are due that have not fired."""
    query, expected = QUERIES[12], Counter[tuple[int, datetime]]()
    with StreamTester(query, parallelism=2, schema={"bids": KINDS["bids"]}) as tester:
        for epoch in range(EPOCHS):
            rows = events("bids", epoch, epoch + 1)
            end = tester.now.replace(microsecond=0) - timedelta(seconds=tester.now.second % 10) + timedelta(seconds=10)
            expected.update((bidder, end) for bidder in rows["bidder"].to_pylist())
            tester.step({"bids": rows})
            if fires:
                tester.advance("3 seconds")
            else:
                monkeypatch.setattr(tester, "_now_us", to_us(tester.now) + 3_000_000)
        tester.advance("1 minute")
        tester.checkpoint()
        found = tester.delivered(query.operators[-1].name).to_pylist()
    assert len(found) == len(expected)
    assert {(row["bidder"], row["window_end"]): row["bids"] for row in found} == dict(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_depends_on_its_number_alone(kind: str) -> None:
    whole = EVENTS.make(kind, np.arange(5000))
    some = np.random.default_rng(1).choice(5000, 700, replace=False)
    assert EVENTS.make(kind, some).equals(whole.take(pa.array(some)).combine_chunks())
    if kind != "side":
        assert not Events(seed=8, rate=100, out_of_order=100).make(kind, np.arange(5000)).equals(whole)


def test_events_have_the_proportions_and_times_of_the_benchmark() -> None:
    count = 200
    events = Events(rate=1000)
    made = {kind: events.make(kind, np.arange(count * each)) for kind, each in PER_EPOCH.items()}
    assert {kind: len(table) / count for kind, table in made.items()} == {"persons": 1, "auctions": 3, "bids": 46}
    for kind, table in made.items():
        at = table["date_time"].cast(pa.int64()).to_numpy()
        assert len(set(at.tolist())) == len(at) and not (np.diff(at) > 0).all(), kind
        assert (np.maximum.accumulate(at) - at).max() <= 1_000_000, "a delay of a second is enough"
        assert abs((at.max() - at.min()) / 1e6 - count * EPOCH / events.rate) < 2
    ids = made["auctions"]["id"].to_pylist()
    assert sorted(ids) == list(range(1000, 1000 + len(ids)))
    hot = Counter(id % 100 == 0 for id in made["bids"]["auction"].to_pylist())
    assert 0.45 < hot[True] / hot.total() < 0.55
    hot = Counter(id % 100 == 1 for id in made["bids"]["bidder"].to_pylist())
    assert 0.7 < hot[True] / hot.total() < 0.8
    lasts = [
        b - a
        for a, b in zip(made["auctions"]["date_time"].to_pylist(), made["auctions"]["expires"].to_pylist(), strict=True)
    ]
    assert min(lasts) > timedelta(0)
