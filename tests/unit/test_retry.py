"""What is tried again, how often, and what an attempt whose answer was lost comes to."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.store.retry import Retrying, RetryPolicy
from tests.clock import Seconds
from tests.hooked_store import Failing, HookedStore

QUICK = RetryPolicy(attempts=4, wait_s=0.001, wait_max_s=0.002)


def _failing(times: int, *, transient: bool) -> Callable[[], str]:
    left = [times]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise Unreachable("away", transient=transient)
        return "there"

    return call


class Watcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.retries: list[tuple[int, float]] = []
        self.given_up = 0

    def note_retry(self, error: Unreachable, attempts: int, seconds: float) -> None:
        self.retries.append((attempts, seconds))

    def note_given_up(self) -> None:
        self.given_up += 1


@pytest.mark.parametrize("kind", ["exponential", "fixed"])
def test_a_passing_failure_is_tried_again_and_each_retry_told(kind) -> None:
    watcher = Watcher()
    policy = RetryPolicy(kind=kind, attempts=4, wait_s=0.001, watcher=watcher)
    assert policy.call(_failing(3, transient=True)) == "there"
    assert [attempts for attempts, _ in watcher.retries] == [1, 2, 3] and not watcher.given_up
    with pytest.raises(Unreachable):
        policy.call(_failing(4, transient=True))
    assert len(watcher.retries) == 6 and watcher.given_up == 1


def test_what_will_not_pass_and_what_is_no_failure_of_the_store_is_tried_once() -> None:
    watcher = Watcher()
    policy = replace(QUICK, watcher=watcher)
    with pytest.raises(Unreachable):
        policy.call(_failing(1, transient=False))
    with pytest.raises(Unreachable):
        replace(policy, kind="none").with_timeout(600, "option").call(_failing(1, transient=True))
    with pytest.raises(ZeroDivisionError):
        policy.call(lambda: 1 // 0)
    assert not watcher.retries


@pytest.mark.parametrize("kind", ["exponential", "fixed"])
@pytest.mark.parametrize("total_s", [0.05, 2.0, 600.0])
def test_attempts_go_on_until_shortly_before_the_time_limit_and_not_beyond(kind, total_s: float) -> None:
    clock, watcher = Seconds(), Watcher()
    policy = RetryPolicy(kind=kind, watcher=watcher, now_s=clock.now_s, sleep=clock.sleep)
    with pytest.raises(Unreachable, match=r"away; tried \d+ times in \d+ s; raise upload.wait_s") as raised:
        policy.with_timeout(total_s, "upload.wait_s").call(_failing(1 << 30, transient=True))
    assert not raised.value.transient  # nobody who called it starts again
    assert 0.8 * total_s <= clock.at_s <= total_s
    waits = np.diff([0.0, *(seconds for _, seconds in watcher.retries), clock.at_s])
    assert waits.max() <= policy.wait_max_s and len(waits) < 20_000


def test_a_put_whose_answer_was_lost_has_succeeded(tmp_path: Path) -> None:
    store = Retrying(HookedStore(tmp_path, after=Failing(1, transient=True)), QUICK)
    stored = store.put("s/1/a", b"mine")
    assert store.read(stored).to_pybytes() == b"mine"


def test_a_name_that_somebody_else_took_meanwhile_is_taken(tmp_path: Path) -> None:
    other = HookedStore(tmp_path)
    failing = Failing(1, transient=True)

    def before(name: str) -> None:
        if failing.times:
            other.put(name, b"theirs")
        failing(name)

    with pytest.raises(ObjectExists, match="other contents"):
        Retrying(HookedStore(tmp_path, before=before), QUICK).put("s/1/a", b"mine")
    with pytest.raises(ObjectExists):
        Retrying(HookedStore(tmp_path), QUICK).put("s/1/a", b"theirs")


def test_a_corrupt_object_is_not_read_again(tmp_path: Path) -> None:
    store = Retrying(HookedStore(tmp_path), QUICK)
    stored = store.put("s/1/a", b"mine")
    store.delete(["s/1/a"])
    with pytest.raises(CorruptObject):
        store.read(stored)
