"""Uploads while the store is away, hangs, or answers late: how long they are tried, and what they leave."""

import itertools
import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from siltstone.changelog.hedging import Hedger, HedgeRule
from siltstone.changelog.streamed_upload import HELD_BYTES
from siltstone.changelog.upload_metrics import UploadMetrics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.errors import ObjectExists, Unreachable
from siltstone.store.filesystem import FilesystemStore, FileWriter
from siltstone.store.ranged import RangedFile, create_ranged
from siltstone.store.retry import Retrying, RetryPolicy
from tests.clock import Seconds
from tests.hooked_store import Failing, HookedStore

LARGE = random.Random(1).randbytes(HELD_BYTES + (3 << 20) + 17)
BRIEFLY_S = 0.2
"""a real time, for what hangs until the test ends"""


class Away:
    """A hook by which a store is away until a time, and again from another on."""

    def __init__(self, clock: Seconds, until_s: float) -> None:
        self.clock, self.until_s = clock, until_s

    def __call__(self, name: str) -> None:
        if self.clock.at_s < self.until_s:
            raise Unreachable(f"cannot write object {name}: the test says so", transient=True)


class Cutting(FilesystemStore):
    """A store that meets a fault whenever a streamed object has so many bytes; it keeps no pieces to send again."""

    def __init__(self, root: Path, at_bytes: int, error: Exception | None = None) -> None:
        super().__init__(root)
        self.at_bytes, self.error = at_bytes, error
        self.go = threading.Event()

    @contextmanager
    def create(self, name: str) -> Iterator[FileWriter]:
        with super().create(name) as out:
            yield _Cut(out, self)


class _Cut:
    def __init__(self, out: FileWriter, store: Cutting) -> None:
        self.out, self.store = out, store

    def write(self, data: memoryview) -> int:
        if self.out.bytes + len(data) > self.store.at_bytes:
            if self.store.error is not None:
                raise self.store.error
            assert self.store.go.wait(30)
        return self.out.write(data)

    @property
    def stored(self):
        return self.out.stored


def patient(store: HookedStore, clock: Seconds, metrics: UploadMetrics, timeout_s: float = 600.0) -> Hedger:
    """A hedger whose uploads are tried by `clock`; other calls of its store make two attempts."""
    retrying = Retrying(store, RetryPolicy(attempts=2, now_s=clock.now_s, sleep=clock.sleep))
    return Hedger(retrying, UploadOptions(checkpoint_timeout_s=timeout_s), metrics)


def test_an_upload_outlives_an_outage_of_minutes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, metrics = Seconds(), UploadMetrics()
    store = HookedStore(tmp_path, before=Away(clock, 300.0))
    hedger = patient(store, clock, metrics)
    with caplog.at_level(logging.WARNING):
        stored = hedger.put("a/b", b"data")
    hedger.close()
    assert store.read(stored).to_pybytes() == b"data"
    assert 300 <= clock.at_s < 310
    taken = metrics.take()
    assert (taken.requests, taken.objects, taken.failures) == (1, 1, 0)
    assert taken.attempts == taken.retries + 1 == len(store.puts) > 30
    said = [record.getMessage() for record in caplog.records]
    assert 8 <= sum("uploads fail, trying again" in line for line in said) <= 12
    assert sum("uploads succeed again" in line for line in said) == 1


def test_what_fails_for_a_moment_is_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, store = Seconds(), HookedStore(tmp_path, before=Failing(3, transient=True))
    hedger = patient(store, clock, UploadMetrics())
    with caplog.at_level(logging.WARNING):
        hedger.put("a/b", b"data")
    hedger.close()
    assert not caplog.records


def test_an_upload_is_given_up_after_the_timeout_and_then_all_are_sooner_until_one_succeeds(tmp_path: Path) -> None:
    clock, metrics = Seconds(), UploadMetrics()
    store = HookedStore(tmp_path, before=Away(clock, 1e9))
    hedger = patient(store, clock, metrics, timeout_s=60.0)
    with pytest.raises(Unreachable, match=r"tried \d+ times in [56]\d s; raise upload.checkpoint_timeout_s") as raised:
        hedger.put("a/b", b"data")
    assert not raised.value.transient
    assert 50 <= clock.at_s <= 60
    store.puts.clear()
    with pytest.raises(Unreachable):
        hedger.put("a/c", b"data")
    assert len(store.puts) == 2
    taken = metrics.take()
    assert (taken.requests, taken.objects, taken.failures) == (2, 0, 2)
    store.before = Away(clock, clock.at_s)  # it is back
    hedger.put("a/d", b"data")
    store.before = Away(clock, clock.at_s + 50)
    hedger.put("a/e", b"data")
    hedger.close()
    assert store.names == ["a/d", "a/e"]


@pytest.mark.parametrize("error", [Unreachable("no permission"), ObjectExists("taken"), ValueError("what?")])
def test_what_does_not_pass_fails_an_upload_at_once(tmp_path: Path, error: Exception) -> None:
    def refuse(_: str) -> None:
        raise error

    clock, store = Seconds(), HookedStore(tmp_path, before=refuse)
    hedger = patient(store, clock, UploadMetrics())
    with pytest.raises(type(error), match=str(error).rstrip("?")):
        hedger.put("a/b", b"data")
    hedger.close()
    assert len(store.puts) == 1 and clock.at_s == 0


def test_nothing_waits_longer_than_the_timeout_for_a_store_that_hangs(tmp_path: Path) -> None:
    go = threading.Event()

    def hang(_: str) -> None:
        assert go.wait(30)

    store, metrics = HookedStore(tmp_path, before=hang), UploadMetrics()
    options = UploadOptions(checkpoint_timeout_s=BRIEFLY_S, upload_threads=1)
    hedger = Hedger(store, options, metrics, HedgeRule(min_samples=1))
    for number in range(6):  # more than it has threads for hedges
        with pytest.raises(Unreachable, match=r"does not answer for 0.2 s.*raise upload.checkpoint_timeout_s"):
            hedger.put(f"a/{number}", b"data")
    taken = metrics.take()
    assert (taken.requests, taken.failures, taken.objects) == (6, 6, 0)
    go.set()
    hedger.close()


@pytest.mark.parametrize("size_bytes", [0, 5, HELD_BYTES, len(LARGE)])
def test_a_base_is_stored_whole_and_counted_whether_it_is_streamed_or_not(tmp_path: Path, size_bytes: int) -> None:
    store, data = FilesystemStore(tmp_path), LARGE[:size_bytes]
    with Uploader(store, UploadOptions()) as uploader:
        with create_ranged(uploader, "s/1/base") as out:
            for start in range(0, size_bytes, 100_003):
                out.write(data[start : start + 100_003])
        taken = uploader.metrics.take()
    assert out.stored is not None
    assert store.read(out.stored).to_pybytes() == data
    assert RangedFile(store, out.stored).read() == data
    assert (taken.requests, taken.attempts, taken.objects, taken.bytes) == (1, 1, 1, size_bytes)


def test_a_base_that_fits_is_tried_again_and_hedged_like_a_segment(tmp_path: Path) -> None:
    clock, store, metrics = Seconds(), HookedStore(tmp_path), UploadMetrics()
    retrying = Retrying(store, RetryPolicy(now_s=clock.now_s, sleep=clock.sleep))
    # Each request counts as half a second, however long it took: it is hedged after as long, and comes first even on a
    # machine that has much else to do.
    seconds = itertools.count(step=0.5)
    hedger = Hedger(retrying, UploadOptions(), metrics, HedgeRule(budget=1, min_samples=1), clock=lambda: next(seconds))
    hedger.put("warm", b"x")
    store.before = Away(clock, 200.0)
    with hedger.create("s/1/first") as out:
        out.write(b"data")
    assert clock.at_s >= 200 and metrics.take().retries > 20
    go, first = threading.Event(), threading.Lock()

    def hang_once(name: str) -> None:
        # The hedge of the object before may still be on its way.
        if name == "s/1/second" and first.acquire(blocking=False):
            assert go.wait(30)

    store.before = hang_once
    with hedger.create("s/1/second") as out:
        out.write(b"data")
    taken = metrics.take()
    assert (taken.requests, taken.objects, taken.hedges_sent, taken.hedges_won) == (1, 1, 1, 1)
    assert out.stored is not None and store.read(out.stored).to_pybytes() == b"data"
    go.set()
    hedger.close()


@pytest.mark.parametrize("at_bytes", [100, HELD_BYTES + 1, len(LARGE) - 1])
def test_of_a_base_that_was_cut_off_nothing_is_seen_and_it_can_be_written_again(tmp_path: Path, at_bytes: int) -> None:
    store = Cutting(tmp_path, at_bytes, Unreachable("the disk is full"))
    with Uploader(store, UploadOptions()) as uploader:
        with pytest.raises(Unreachable, match="full"), create_ranged(uploader, "s/1/base") as out:
            out.write(LARGE)
        taken = uploader.metrics.take()
        assert (taken.requests, taken.failures, taken.objects) == (1, 1, 0)
        assert list(store.list("")) == [] and list(store.list_unfinished()) == []
        store.at_bytes = len(LARGE)
        with create_ranged(uploader, "s/1/base") as again:
            again.write(LARGE)
    assert again.stored is not None and store.read(again.stored).to_pybytes() == LARGE


def test_a_base_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    with Uploader(store, UploadOptions()) as uploader:
        for size_bytes in (5, len(LARGE)):
            with pytest.raises(ZeroDivisionError), create_ranged(uploader, "s/1/base") as out:
                out.write(LARGE[:size_bytes])
                _ = 1 // 0
        taken = uploader.metrics.take()
    assert list(store.list("")) == [] and list(store.list_unfinished()) == []
    assert (taken.requests, taken.failures) == (1, 1)  # the small one was never sent


@pytest.mark.parametrize("at_bytes", [100, len(LARGE) - 1])
def test_a_large_base_waits_no_longer_than_the_timeout_for_a_store_that_hangs(tmp_path: Path, at_bytes: int) -> None:
    store = Cutting(tmp_path, at_bytes)
    uploader = Uploader(store, UploadOptions(checkpoint_timeout_s=BRIEFLY_S))
    with pytest.raises(Unreachable, match=r"does not answer for 0\.2 s"), create_ranged(uploader, "s/1/base") as out:
        out.write(LARGE)
        out.write(LARGE)
    assert list(store.list("")) == []
    store.go.set()
    uploader.close()
