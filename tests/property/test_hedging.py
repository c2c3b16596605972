"""Hedging: its rule under any requests and on the FLIP's latencies; its threads on stores that are slow or fail."""

import itertools
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.changelog.hedging import WINDOW, Hedger, HedgeRule
from siltstone.changelog.upload_metrics import UploadMetrics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import ObjectExists, Unreachable
from siltstone.store.retry import Retrying, RetryPolicy
from tests.examples import examples
from tests.hooked_store import Failing, HookedStore

SMALL = 10_000


def flip_latencies(rng: np.random.Generator, count: int) -> np.ndarray:
    """Seconds drawn from the table in FLIP-158, scaled down tenfold, log-linear in the part that is slower."""
    slower = [1.0, 0.5, 0.1, 0.05, 0.01, 0.001, 1e-6]
    seconds = [0.02, 0.0459, 0.074, 0.0833, 0.1039, 0.3202, 2.0]
    drawn = np.maximum(rng.random(count), 1e-6)
    return np.exp(np.interp(-np.log(drawn), -np.log(slower), np.log(seconds)))


def simulate(rule: HedgeRule, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, int]:
    """Seconds of each request, hedged by `rule`, one after the other; how many hedges were sent."""
    seconds, hedges = first.copy(), 0
    for i, alone in enumerate(first.tolist()):
        delay = rule.begin(SMALL)
        if delay is not None and alone > delay and rule.spend():
            hedges += 1
            seconds[i] = min(alone, delay + second[i])
        rule.end(SMALL, seconds[i])
    return seconds, hedges


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_defaults_meet_the_goal_on_the_latencies_of_the_flip(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rule = HedgeRule()
    alone = flip_latencies(rng, 30_000)
    hedged, hedges = simulate(rule, alone, flip_latencies(rng, len(alone)))
    assert np.quantile(hedged, 0.999) <= 0.53 * np.quantile(alone, 0.999)
    assert hedges <= 0.05 * len(alone)
    assert np.quantile(hedged, 0.5) <= np.quantile(alone, 0.5)


@given(
    st.fractions(0, 1, max_denominator=100),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=300),
)
@settings(max_examples=examples(100))
def test_no_prefix_has_more_hedges_than_the_budget(budget: Fraction, events: list[tuple[bool, int]]) -> None:
    rule = HedgeRule(0.5, float(budget), 1)
    exact = Fraction(str(float(budget)))
    requests = hedges = 0
    for begins, wanted in events:
        if begins:
            rule.begin(SMALL)
            requests += 1
        hedges += sum(rule.spend() for _ in range(wanted))
        assert hedges <= exact * requests


def test_a_long_good_time_does_not_save_up_for_a_storm() -> None:
    rule = HedgeRule(0.9, 0.05, 1)
    for _ in range(10_000):
        rule.begin(SMALL)
    assert sum(rule.spend() for _ in range(1000)) == 20


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_the_delay_is_the_quantile_of_what_was_seen(seconds: list[float], quantile: float) -> None:
    rule = HedgeRule(quantile, 0.05, 10)
    for i, value in enumerate(seconds):
        assert (rule.begin(SMALL) is None) == (i < 10)
        rule.end(SMALL, value)
    if len(seconds) >= 10:
        delay = rule.begin(SMALL)
        assert delay is not None
        assert sum(value < delay for value in seconds) <= quantile * len(seconds)
        assert sum(value <= delay for value in seconds) > quantile * len(seconds)


def test_old_requests_are_forgotten_and_sizes_kept_apart() -> None:
    rule = HedgeRule(0.5, 0.05, 10)
    for value in [5.0] * WINDOW + [1.0] * WINDOW:
        rule.end(SMALL, value)
    assert rule.begin(SMALL) == 1.0
    assert rule.begin(256 << 10) == 1.0
    assert rule.begin(1 << 20) is None


def test_the_delay_stays_where_it_is_though_hedges_cut_the_tail() -> None:
    rng = np.random.default_rng(5)
    rule = HedgeRule(0.96, 0.05, 100)
    simulate(rule, flip_latencies(rng, 20_000), flip_latencies(rng, 20_000))
    delay = rule.begin(SMALL)
    assert delay == pytest.approx(np.quantile(flip_latencies(rng, 100_000), 0.96), rel=0.08)


def test_the_delay_follows_a_store_that_becomes_slower() -> None:
    rng = np.random.default_rng(6)
    rule = HedgeRule(0.96, 0.05, 100)
    simulate(rule, flip_latencies(rng, 3000), flip_latencies(rng, 3000))
    simulate(rule, 4 * flip_latencies(rng, 3000), 4 * flip_latencies(rng, 3000))
    delay = rule.begin(SMALL)
    assert delay is not None and delay > 0.25


def ready(
    store: HookedStore, metrics: UploadMetrics, policy: RetryPolicy | None = None, threads: int | None = None
) -> Hedger:
    """A hedger that has seen enough requests, each of 50 ms by its clock, which is its delay."""
    rule = HedgeRule(budget=1.0, min_samples=20)
    ticks = itertools.count()
    retrying = Retrying(store, policy or RetryPolicy(kind="none"))
    hedger = Hedger(retrying, UploadOptions(), metrics, rule, threads=threads, clock=lambda: next(ticks) * 0.05)
    for i in range(20):
        hedger.put(f"warm/{i}", b"x")
    metrics.take()
    store.puts.clear()
    return hedger


class Stuck:
    """A hook in which the first put of a name hangs until it is let go."""

    def __init__(self, then: Exception | None = None) -> None:
        self.go = threading.Event()
        self.then = then
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            first = name not in self._seen
            self._seen.add(name)
        if first:
            assert self.go.wait(20)
            if self.then is not None:
                raise self.then


def late(metrics: UploadMetrics) -> int:
    """How many late twins were counted, once there is one."""
    for _ in range(500):
        if found := metrics.take().hedges_late:
            return found
        time.sleep(0.01)
    return 0


@pytest.mark.parametrize("then", [None, Unreachable("cut", transient=True)])
def test_a_hedge_answers_for_a_request_that_hangs_and_the_loser_leaves_nothing(
    tmp_path: Path, then: Exception | None
) -> None:
    store, metrics = HookedStore(tmp_path), UploadMetrics()
    hedger = ready(store, metrics)
    store.before = stuck = Stuck(then)
    stored = hedger.put("a/b", b"data")
    assert stored.bytes == 4 and bytes(store.read(stored)) == b"data"
    taken = metrics.take()
    assert (taken.requests, taken.objects, taken.hedges_sent, taken.hedges_won) == (1, 1, 1, 1)
    stuck.go.set()
    assert late(metrics) == 1
    hedger.close()
    assert store.puts == ["a/b", "a/b"]
    assert [name for name in store.names if name.startswith("a/")] == ["a/b"]
    assert list(store.list_unfinished()) == []


def test_a_request_whose_answer_is_lost_is_answered_by_its_hedge_that_finds_the_object(tmp_path: Path) -> None:
    store, metrics = HookedStore(tmp_path), UploadMetrics()
    hedger = ready(store, metrics)
    store.after = stuck = Stuck()  # it is stored, but the answer does not come
    assert hedger.put("a/b", b"data").name == "a/b"
    stuck.go.set()
    assert late(metrics) == 1
    hedger.close()


@pytest.mark.parametrize("hang", [False, True])
def test_a_name_that_somebody_else_took_is_an_error_hedged_or_not(tmp_path: Path, hang: bool) -> None:
    store, metrics = HookedStore(tmp_path), UploadMetrics()
    hedger = ready(store, metrics)
    store.put("a/b", b"other")
    if hang:
        store.before = stuck = Stuck()
        threading.Timer(0.2, stuck.go.set).start()
    with pytest.raises(ObjectExists, match="a/b"):
        hedger.put("a/b", b"data")
    assert metrics.take().failures == 1
    hedger.close()


@pytest.mark.slow
def test_a_hedge_that_fails_leaves_the_request_to_its_retries(tmp_path: Path) -> None:
    store, metrics = HookedStore(tmp_path), UploadMetrics()
    hedger = ready(store, metrics, RetryPolicy(kind="fixed", attempts=3, wait_s=0.5))
    store.before = Failing(2, transient=True)
    assert hedger.put("a/b", b"data").bytes == 4
    hedger.close()
    taken = metrics.take()
    assert (taken.hedges_sent, taken.hedges_won, taken.failures, taken.retries) == (1, 0, 0, 1)


def test_both_fail_and_the_error_is_the_requests_own(tmp_path: Path) -> None:
    store, metrics = HookedStore(tmp_path), UploadMetrics()
    hedger = ready(store, metrics)
    stuck = Stuck(Unreachable("the request's own"))

    def before(name: str) -> None:
        stuck(name)
        raise Unreachable("the hedge's")

    store.before = before
    threading.Timer(0.3, stuck.go.set).start()
    with pytest.raises(Unreachable, match="the request's own"):
        hedger.put("a/b", b"data")
    assert store.puts == ["a/b", "a/b"]
    hedger.close()


def test_without_hedging_or_budget_nothing_is_sent_twice(tmp_path: Path) -> None:
    off, at_once = UploadOptions(hedging=False), HedgeRule(budget=1.0, min_samples=1)
    for i, (options, rule) in enumerate([(off, at_once), (UploadOptions(), HedgeRule(budget=0, min_samples=1))]):
        store, metrics = HookedStore(tmp_path / str(i)), UploadMetrics()
        hedger = Hedger(store, options, metrics, rule)
        hedger.put("a/1", b"x")
        store.before = lambda _: time.sleep(0.05)
        hedger.put("a/2", b"x")
        assert store.puts == ["a/1", "a/2"]
        assert metrics.take().hedges_sent == 0
        hedger.close()


def test_requests_go_on_though_all_threads_hang(tmp_path: Path) -> None:
    store, metrics = HookedStore(tmp_path), UploadMetrics()
    hedger = ready(store, metrics, threads=2)
    stuck = Stuck()
    store.before = lambda name: stuck(name) if name == "a/hangs" else None
    hedger.put("a/hangs", b"x")
    for i in range(5):  # one thread hangs still
        assert hedger.put(f"a/{i}", b"x").bytes == 1
    stuck.go.set()
    hedger.close()
