"""Batching: what shares an object, for how long it is waited, how much may be under way, what a failure touches."""

import math
import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from siltstone.changelog.upload_metrics import Histogram, UploadMetrics, UploadStatistics, bucket_of, openmetrics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Placed, Uploader, uploader_of
from siltstone.errors import StateError, Unreachable, UsageError
from siltstone.format.block import encode_block
from siltstone.format.segment import INDEX_HANDLE, Section, Segment, SegmentBuilder
from siltstone.model import KeyGroupRange
from siltstone.store.base import Store
from siltstone.store.checksums import checksum_of
from siltstone.store.paths import CheckpointPath
from siltstone.store.retry import Retrying, RetryPolicy
from tests.examples import examples
from tests.hooked_store import Failing, HookedStore

GROUPS = KeyGroupRange(0, 64)
PATH = CheckpointPath("s", 1, 2)
NEVER_S = 30.0


def opaque(number: int, size_bytes: int = 100) -> Segment:
    """A segment of one opaque variable that does not compress."""
    builder = SegmentBuilder(f"o{number}", 2, GROUPS)
    builder.add_opaque("x", {0: random.Random(number).randbytes(size_bytes)})
    return builder.build()


def table(number: int) -> Segment:
    """A segment of one table."""
    builder = SegmentBuilder(f"o{number}", 2, GROUPS)
    block = encode_block(pa.table({"k": range(number)}), np.zeros(number, np.uint16))
    builder.add_delta("t", block, 1, 0, digest=number)
    return builder.build()


def check_reads(store: Store, segment: Segment, placed: Placed) -> None:
    """Every handle reads the segment's own bytes, from objects that it names."""
    sections = {handle.variable: handle for handle in placed.handles}
    assert INDEX_HANDLE in sections
    for handle in placed.handles:
        data = memoryview(store.read_range(handle.object, handle.offset, handle.length))
        assert checksum_of(data) == handle.checksum
    assert {o.name for o in placed.objects} == {handle.object for handle in placed.handles}
    if "x" in sections:
        handle = sections["x"]
        assert store.read_range(handle.object, handle.offset, handle.length).to_pybytes() == segment.non


@pytest.mark.slow
def test_a_thousand_segments_of_many_threads_become_few_objects(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    segments = [opaque(i, 10_000) for i in range(1000)]
    futures: list[Future[Placed]] = [Future() for _ in segments]
    with Uploader(store, UploadOptions(persist_delay_s=0.1)) as uploader:

        def submit(thread: int) -> None:
            for i in range(thread, len(segments), 8):
                futures[i] = uploader.submit(PATH, segments[i])

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for segment, future in zip(segments, futures, strict=True):
            check_reads(store, segment, future.result(30))
        taken = uploader.metrics.take()
    assert len(store.names) == taken.objects <= 20
    assert taken.batch_segments.sum == 1000
    assert all(name.startswith(PATH.prefix) and name.endswith(".segment") for name in store.names)
    for name, size in store.list(""):  # handles leave no byte out
        mine = {h for f in futures for h in f.result().handles if h.object == name}
        assert sum(h.length for h in mine) == size


def test_a_key_value_store_gets_the_sections_of_a_batch_apart_index_last(tmp_path: Path) -> None:
    store = HookedStore(tmp_path, ranged=False)
    segments = [opaque(1), table(2), opaque(3)]
    with Uploader(store, UploadOptions(persist_delay_s=NEVER_S), log="log") as uploader:
        futures = [uploader.submit(PATH, segment) for segment in segments]
        uploader.flush()
        placed = [future.result(10) for future in futures]
    assert store.puts == [PATH.segment("log-1", section.value) for section in Section]
    for segment, where in zip(segments, placed, strict=True):
        check_reads(store, segment, where)
    assert [len(where.objects) for where in placed] == [2, 2, 2]  # one has no INCR, the other no NON
    read = {
        s: b"".join(memoryview(store.read_range(n, 0, z)) for n, z in store.list("") if n.endswith(s)) for s in Section
    }
    assert read[Section.NON] == b"".join(segment.non for segment in segments)


def test_a_section_that_all_leave_empty_is_no_object(tmp_path: Path) -> None:
    store = HookedStore(tmp_path, ranged=False)
    empty = SegmentBuilder("o", 2, GROUPS).build()
    with Uploader(store, UploadOptions(persist_delay_s=0), log="log") as uploader:
        for segment in (table(1), empty):
            check_reads(store, segment, uploader.submit(PATH, segment).result(10))
    assert store.names == [
        PATH.segment(log, s) for log, s in (("log-1", "INCR"), ("log-1", "INDEX"), ("log-2", "INDEX"))
    ]


def test_a_lone_writer_never_waits_and_two_wait_for_each_other(tmp_path: Path) -> None:
    with Uploader(HookedStore(tmp_path), UploadOptions(persist_delay_s=NEVER_S)) as uploader:

        def store(number: int, writer: str) -> "Future[Placed]":
            future = uploader.submit(PATH, opaque(number))
            uploader.close_writer(writer)
            return future

        uploader.open_writer("a")
        store(1, "a").result(10)
        uploader.open_writer("a")
        uploader.open_writer("b")
        first = store(2, "a")
        time.sleep(0.1)
        assert not first.done()
        second = store(3, "b")
        assert first.result(10).objects == second.result(10).objects
        uploader.open_writer("b")
        third = store(4, "a")
        time.sleep(0.1)
        assert not third.done()
        uploader.close_writer("b")  # it had nothing to store
        third.result(10)


@pytest.mark.parametrize("opened", [True, False])
def test_what_nobody_joins_goes_off_after_the_delay(tmp_path: Path, opened: bool) -> None:
    with Uploader(HookedStore(tmp_path), UploadOptions(persist_delay_s=0.2)) as uploader:
        if opened:
            uploader.open_writer("idle")
        began = time.monotonic()
        uploader.submit(PATH, opaque(1)).result(10)
        assert time.monotonic() - began >= 0.2


def test_checkpoints_share_no_object_and_a_full_batch_waits_for_nobody(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    other = CheckpointPath("s", 1, 3)
    with Uploader(store, UploadOptions(persist_delay_s=NEVER_S, size_threshold_bytes=1000)) as uploader:
        futures = [uploader.submit(path, opaque(i, 400)) for path in (PATH, other) for i in range(3)]
        where = [future.result(10).objects for future in futures]
    assert where[0] == where[1] == where[2] != where[3] == where[4] == where[5]
    assert sorted(name.rpartition("/")[0] + "/" for name in store.names) == [PATH.prefix, other.prefix]


@settings(max_examples=examples(15))
@given(sizes=st.lists(st.integers(1, 900), min_size=1, max_size=20), limit=st.integers(600, 3000), data=st.data())
def test_no_more_than_the_limit_is_under_way_but_for_one_that_is_larger(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, data: st.DataObject
) -> None:
    store = HookedStore(tmp_path_factory.mktemp("store"), before=lambda _: time.sleep(0.001))
    segments = [opaque(i, size) for i, size in enumerate(sizes)]
    threads = data.draw(st.integers(1, 4))
    options = UploadOptions(persist_delay_s=0.002, in_flight_bytes=limit, size_threshold_bytes=1000)
    with Uploader(store, options) as uploader:

        def submit(thread: int) -> None:
            for segment in segments[thread::threads]:
                check_reads(store, segment, uploader.submit(PATH, segment).result(20))

        running = [threading.Thread(target=submit, args=(i,)) for i in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(30)
            assert not thread.is_alive()
        taken = uploader.metrics.take()
    largest = max(len(segment.pack()) for segment in segments)
    assert taken.in_flight_high_water_bytes <= max(limit, largest)
    assert taken.batch_segments.sum == len(segments)


def test_a_writer_waits_while_the_limit_is_reached(tmp_path: Path) -> None:
    go = threading.Event()
    store = HookedStore(tmp_path, before=lambda _: go.wait(20) and None)
    with Uploader(store, UploadOptions(persist_delay_s=0, in_flight_bytes=1500)) as uploader:
        first = uploader.submit(PATH, opaque(1, 1000))
        second: list[Future[Placed]] = []
        blocked = threading.Thread(target=lambda: second.append(uploader.submit(PATH, opaque(2, 1000))))
        blocked.start()
        blocked.join(0.2)
        assert blocked.is_alive() and not first.done()
        go.set()
        blocked.join(10)
        assert first.result(10).objects and second[0].result(10).objects
        assert uploader.metrics.take().back_pressure_s >= 0.1


def test_a_failure_fails_its_batch_and_no_other(tmp_path: Path) -> None:
    store = HookedStore(tmp_path, before=Failing(1))
    with Uploader(store, UploadOptions(persist_delay_s=NEVER_S)) as uploader:
        failed = [uploader.submit(PATH, opaque(i)) for i in range(3)]
        uploader.flush()
        for future in failed:
            with pytest.raises(Unreachable, match="the test says so"):
                future.result(10)
        good = uploader.submit(PATH, opaque(4))
        uploader.flush()
        check_reads(store, opaque(4), good.result(10))
        taken = uploader.metrics.take()
    assert (taken.requests, taken.failures, taken.objects) == (2, 1, 1)
    assert len(store.names) == 1


def test_a_passing_failure_is_tried_again(tmp_path: Path) -> None:
    store = HookedStore(tmp_path, before=Failing(2, transient=True))
    retrying = Retrying(store, RetryPolicy(kind="fixed", attempts=3, wait_s=0.001))
    with Uploader(retrying, UploadOptions(persist_delay_s=0)) as uploader:
        check_reads(store, opaque(1), uploader.submit(PATH, opaque(1)).result(10))
        taken = uploader.metrics.take()
    assert (taken.requests, taken.attempts, taken.retries, taken.failures) == (1, 3, 2, 0)
    assert taken.upload_attempts.count == 1 and round(taken.upload_attempts.quantile(1.0)) == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_of_a_batch_whose_index_cannot_be_stored_nothing_stays(tmp_path: Path, when: str) -> None:
    store = HookedStore(tmp_path, ranged=False)
    setattr(store, when, Failing(suffix="INDEX"))
    with (
        Uploader(store, UploadOptions(persist_delay_s=0)) as uploader,
        pytest.raises(Unreachable, match="the test says so"),
    ):
        uploader.submit(PATH, opaque(1)).result(10)
    assert len(store.puts) == 2
    assert store.names == []


def test_discarded_objects_go_with_the_last_that_shares_them(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with Uploader(store, UploadOptions(persist_delay_s=NEVER_S)) as uploader:
        futures = [uploader.submit(PATH, opaque(i)) for i in range(2)]
        uploader.flush()
        first, second = (future.result(10) for future in futures)
        uploader.discard(first)
        check_reads(store, opaque(1), second)
        uploader.discard(second)
        assert store.names == []


def test_closing_sends_what_waits_and_then_takes_nothing(tmp_path: Path) -> None:
    uploader = Uploader(HookedStore(tmp_path), UploadOptions(persist_delay_s=NEVER_S))
    future = uploader.submit(PATH, opaque(1))
    uploader.close()
    assert future.result(0).objects
    with pytest.raises(UsageError, match="closed"):
        uploader.submit(PATH, opaque(2))


def _upload_in_child(url: str, parent_log: str, answer: Callable[[object], None]) -> None:
    uploader = uploader_of(url, UploadOptions())
    uploader.submit(PATH, opaque(9)).result(10)
    answer(uploader.log != parent_log)


def test_a_process_has_one_uploader_for_a_store_and_a_forked_one_its_own(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    uploader = uploader_of(url, UploadOptions())
    assert uploader_of(url, UploadOptions()) is uploader
    assert uploader_of(url, UploadOptions(upload_threads=1)) is not uploader
    assert uploader_of((tmp_path / "other").as_uri(), UploadOptions()) is not uploader
    uploader.submit(PATH, opaque(1)).result(10)  # it has threads, which the fork will not have
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe()
    child = fork.Process(target=_upload_in_child, args=(url, uploader.log, send.send))
    child.start()
    assert receive.poll(20) and receive.recv() is True
    child.join(10)
    assert child.exitcode == 0


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=200), st.floats(0.001, 1))
@settings(max_examples=examples(100))
def test_quantiles_are_within_one_percent(values: list[float], part: float) -> None:
    counts: dict[int, int] = {}
    for value in values:
        counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
    exact = sorted(values)[math.ceil(part * len(values)) - 1]
    assert Histogram(counts, sum(values)).quantile(part) == pytest.approx(exact, rel=0.0101)


def measured(seed: int) -> UploadStatistics:
    rng, metrics = random.Random(seed), UploadMetrics()
    for _ in range(rng.randint(0, 50)):
        metrics.count("requests")
        metrics.count_stored(rng.randint(1, 1 << 24), rng.expovariate(20), 1)
        metrics.count_batch(rng.randint(1, 300))
    metrics.note_level(rng.randint(0, 9), rng.randint(0, 1000))
    metrics.count_wait(rng.random())
    return metrics.take()


@given(st.integers(0, 1000), st.integers(0, 1000))
@settings(max_examples=examples(30))
def test_statistics_merge_and_travel(one: int, other: int) -> None:
    a, b = measured(one), measured(other)
    merged = a.merge(b)
    assert merged == b.merge(a)
    assert UploadStatistics.from_json(a.to_json()) == a
    assert merged.objects == a.objects + b.objects == merged.latency_s.count
    assert merged.queue_high_water == max(a.queue_high_water, b.queue_high_water)
    assert a.merge(UploadStatistics()) == a
    low, high = sorted((a.quantile(0.99), b.quantile(0.99)))
    assert low <= merged.quantile(0.99) <= high or not (a.objects and b.objects)


def test_what_is_taken_is_taken_once_and_summarised() -> None:
    metrics = UploadMetrics()
    metrics.count_stored(1000, 0.25, 1)
    metrics.count_batch(7)
    summary = metrics.take().summary()
    assert summary["latency_p999_s"] == summary["latency_p50_s"] == pytest.approx(0.25, rel=0.01)
    assert (summary["objects"], summary["batch_max_segments"]) == (1, 7)
    assert metrics.take() == UploadStatistics()
    with pytest.raises(StateError, match="statistics"):
        UploadStatistics.from_json({"latency_s": {"sum": 1}})
    with pytest.raises(StateError, match="statistics"):
        UploadStatistics.from_json({"unknown": 1})


def test_openmetrics_text_is_read_by_a_strict_parser() -> None:
    statistics = measured(3)
    text = openmetrics(statistics, {"stream": 'a "quoted" one'})
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {s.name: s for family in families.values() for s in family.samples if "le" not in s.labels}
    assert samples["siltstone_upload_bytes_total"].value == statistics.bytes
    assert samples["siltstone_upload_latency_seconds_count"].value == statistics.objects
    assert samples["siltstone_upload_bytes_total"].labels == {"stream": 'a "quoted" one'}
    assert families["siltstone_upload_in_flight_high_water_bytes"].unit == "bytes"
