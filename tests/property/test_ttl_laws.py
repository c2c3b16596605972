"""The law of a TTL: after each step, state is what a dictionary says, whatever is restarted, lost or rescaled."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.operator import TTL
from tests.examples import examples
from tests.ttl_streams import AFTER, TABLES, Checked

CLOCKS, RENEWALS = st.sampled_from(["event", "processing"]), st.sampled_from(["write", "read"])
TTLS = st.one_of(st.builds(TTL, st.just(AFTER), CLOCKS, RENEWALS), st.sampled_from([None, TTL(None)]))
ROWS = st.dictionaries(
    st.integers(0, 3),
    st.tuples(st.sampled_from(["put", "put", "read", "drop"]), st.integers(0, 9), st.integers(0, 400)),
)
DEEDS = st.one_of(
    st.tuples(st.just("step"), ROWS),
    st.tuples(st.just("step"), ROWS),
    st.tuples(st.just("advance"), st.integers(0, 200)),
    st.tuples(st.sampled_from(["restart", "crash"]), st.booleans()),
    st.tuples(st.just("rescale"), st.integers(1, 3)),
)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(TABLES, TTLS)),
    st.sampled_from(["heap", "rocksdb"]),
    st.integers(1, 3),
    st.lists(DEEDS, max_size=12),
)
def test_rows_live_as_long_as_their_ttl_says(
    ttls: dict[str, TTL | None], backend: str, every: int, deeds: list[tuple[str, Any]]
) -> None:
    checked = Checked(ttls, backend=backend, parallelism=2, checkpoint_every=every)
    with checked.tester as tester:
        for deed, how in deeds:
            if deed == "step":
                checked.step(how)
            elif deed == "advance":
                checked.advance(how)
            elif deed == "rescale":
                checked.while_stepping(lambda p=how: tester.rescale(p))
            else:
                checked.while_stepping(lambda do=deed, lost=how: getattr(tester, do)(lost=lost))
        checked.model.check(tester)
        tester.replay()
        tester.replay(parallelism=1, backend="heap" if backend == "rocksdb" else "rocksdb")
        checked.advance(10_000)
        for name in TABLES:  # by the time of day, all of it is over
            ttl = ttls[name]
            if ttl is not None and ttl.after is not None and ttl.clock == "processing":
                assert not checked.model.held[name] and not checked.model.tails.get(name)
