"""Windows are what a computation by hand makes of the same rows, however a stream is cut, stopped and moved."""

from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.testing import StreamTester
from tests.examples import examples
from tests.tester_actions import act, action
from tests.windowed_streams import CASES, DELAY, ByHand, read_windows, table_of, times_of, windowed

row = st.tuples(st.integers(0, 2), st.integers(-14, 14), st.one_of(st.none(), st.integers(-9, 9)))
batches = st.lists(st.lists(row, max_size=8), min_size=2, max_size=4)
actions = st.lists(action, min_size=4, max_size=4)


@settings(max_examples=examples(30), deadline=None)
@given(
    name=st.sampled_from(list(CASES)),
    backend=st.sampled_from(["heap", "rocksdb"]),
    given=batches,
    actions=actions,
    every=st.integers(1, 2),
    map_side=st.booleans(),
)
def test_windows_close_with_what_was_accepted(
    name: str, backend: str, given: list[Any], actions: list[str], every: int, map_side: bool
) -> None:
    window, begin, unit = CASES[name]
    by_hand, rows = ByHand(window), times_of(given, begin, unit)
    stream = windowed(window, DELAY * unit, map_side=map_side and name != "session")
    with StreamTester(stream, parallelism=2, backend=backend, checkpoint_every=every) as tester:
        for number, batch in enumerate(rows):
            before = tester.watermark
            tester.step(table_of(batch))
            by_hand.step(batch, before, tester.watermark)
            act(tester, actions[number], number, 3)
            by_hand.step([], None, tester.watermark)
        tester.finish()
        by_hand.close(datetime.max.replace(tzinfo=UTC))
        made = read_windows(tester.delivered("a"))
        assert len(made) == len(dict(made)) and dict(made) == by_hand.totals
        assert tester.state("a", "totals").num_rows == 0
        tester.replay(parallelism=1 + every)


@settings(max_examples=examples(12), deadline=None)
@given(name=st.sampled_from([name for name in CASES if name != "session"]), given=batches, lost=st.booleans())
def test_the_last_update_of_a_window_is_the_window(name: str, given: list[Any], lost: bool) -> None:
    window, begin, unit = CASES[name]
    by_hand, rows, last = ByHand(window), times_of(given, begin, unit), dict[Any, Any]()
    with StreamTester(windowed(window, DELAY * unit, "update", map_side=not lost), parallelism=2) as tester:
        for batch in rows:
            before = tester.watermark
            made = read_windows(tester.step(table_of(batch))["a"])
            assert len(made) == len(dict(made))
            last |= made
            by_hand.step(batch, before, tester.watermark)
            tester.restart(lost=lost)
        assert tester.finish()["a"].num_rows == 0
        assert last == by_hand.totals
        assert tester.state("a", "totals").num_rows == 0
        tester.replay()
