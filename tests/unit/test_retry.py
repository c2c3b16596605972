"""What is tried again, how often, and what an attempt whose answer was lost comes to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.store.retry import Retrying, RetryPolicy
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


@pytest.mark.parametrize("kind", ["exponential", "fixed"])
def test_a_passing_failure_is_tried_again_and_each_attempt_told(kind) -> None:
    told: list[int] = []
    policy = RetryPolicy(kind=kind, attempts=4, wait_s=0.001)
    assert policy.call(_failing(3, transient=True), lambda: told.append(1)) == "there"
    assert len(told) == 4
    with pytest.raises(Unreachable):
        policy.call(_failing(4, transient=True))


def test_what_will_not_pass_and_what_is_no_failure_of_the_store_is_tried_once() -> None:
    told: list[int] = []
    with pytest.raises(Unreachable):
        QUICK.call(_failing(1, transient=False), lambda: told.append(1))
    with pytest.raises(Unreachable):
        RetryPolicy(kind="none").call(_failing(1, transient=True), lambda: told.append(1))
    with pytest.raises(ZeroDivisionError):
        QUICK.call(lambda: 1 // 0, lambda: told.append(1))
    assert len(told) == 3


def test_no_attempt_begins_after_the_time_limit() -> None:
    told: list[int] = []
    with pytest.raises(Unreachable):
        RetryPolicy(kind="fixed", attempts=1000, wait_s=0.01, total_s=0.05).call(
            _failing(1000, transient=True), lambda: told.append(1)
        )
    assert 2 <= len(told) <= 6


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
