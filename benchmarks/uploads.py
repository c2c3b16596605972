"""What further techniques of FLIP-158 for uploads would give, on stores that take long to answer (ADR 79).

    sharing   segments of processes that work at the same time: each process stores its own, or hands it to one of them
              over a socket, which stores all of them in one object
    waiting   how long a writer's segment takes by `persist_delay_s`, the time that it waits for others to share with
    chunks    how long a value takes to be written and read in a key-value store, by the size of its chunks

The stores are real servers behind a proxy that delays each request. Ways take turns, in rounds (A B, B A).
"""

import multiprocessing
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.goals import Goal, Report, spread_of, table_of
from benchmarks.rounds import in_turn
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.format.segment import SegmentBuilder
from siltstone.model import KeyGroupRange
from siltstone.store.open import open_store
from siltstone.store.paths import StepPath
from tests.proxy import Fault, Proxy
from tests.redis_server import RedisServer
from tests.servers import versitygw
from tests.store_cases_s3 import fresh_bucket

S3_DELAY_S, REDIS_DELAY_S = 0.05, 0.01
PROCESSES = 8
SEGMENT_KB = (32, 256, 2048)
DELAYS_S = (0.0, 0.01, 0.1)
VALUES_MB, CHUNKS_KB = (1, 8, 64), (256, 1024, 4096, 16384)
OWN, SHARED = "own objects", "one object"


def run(_: Path, *, quick: bool = False) -> Report:
    """Measure each technique."""
    rounds = 5 if quick else 15
    report = Report()
    _measure_sharing(report, rounds)
    _measure_waiting(report, rounds)
    _measure_chunks(report, 3 if quick else 5, VALUES_MB[:2] if quick else VALUES_MB)
    return report


def _measure_sharing(report: Report, rounds: int) -> None:
    title = f"seconds until {PROCESSES} processes have stored a segment each, {S3_DELAY_S * 1000:.0f} ms a request"
    report.tables.append(table := table_of(title, "a segment", OWN, SHARED, f"{SHARED} / {OWN}"))
    with _slow_s3() as url, _workers(url) as workers:
        for size_kb in SEGMENT_KB:
            found: dict[str, list[float]] = {OWN: [], SHARED: []}
            for number in range(rounds + 1):
                for way in in_turn(found, number):
                    began = time.perf_counter()
                    _store_own(workers, size_kb << 10) if way == OWN else _store_shared(workers, size_kb << 10)
                    found[way].append(time.perf_counter() - began)
            own, shared = found[OWN][1:], found[SHARED][1:]  # connections are made in the first round
            ratios = [a / b for a, b in zip(shared, own, strict=True)]
            table.add_row(f"{size_kb} KiB", spread_of(own), spread_of(shared), f"{median(ratios):.2f}")
            report.goals.append(Goal.of_rounds(f"uploads: {SHARED} / {OWN}, {size_kb} KiB", ratios))


def _store_own(workers: Sequence[Connection], size_bytes: int) -> None:
    for worker in workers:
        worker.send(size_bytes)
    for worker in workers:
        worker.recv()


def _store_shared(workers: Sequence[Connection], size_bytes: int) -> None:
    """Each process hands over its bytes, as it would to the one that stores; that one is the last of them."""
    *others, last = workers
    for worker in others:
        worker.send(-size_bytes)
    handed = [worker.recv_bytes() for worker in others]
    last.send(0)
    last.send_bytes(b"".join([*handed, bytes(size_bytes)]))
    last.recv()


def _work(url: str, orders: Connection) -> None:
    """One process: an order is the bytes to store, the bytes to hand over if negative, or 0 to store what comes."""
    uploader = Uploader(open_store(url), UploadOptions(hedging=False))
    while (order := orders.recv()) is not None:
        data = np.random.default_rng(abs(order)).bytes(abs(order))
        if order < 0:
            orders.send_bytes(data)
            continue
        uploader.put(f"bench/{uuid.uuid4().hex}", data or orders.recv_bytes())
        orders.send(True)


@contextmanager
def _workers(url: str) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(PROCESSES)]
    processes = [context.Process(target=_work, args=(url, theirs), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    yield [ours for ours, _ in pipes]
    for (ours, _), process in zip(pipes, processes, strict=True):
        ours.send(None)
        process.join()


def _measure_waiting(report: Report, rounds: int) -> None:
    title = f"seconds until a writer's segment is stored, {S3_DELAY_S * 1000:.0f} ms a request"
    report.tables.append(
        table := table_of(title, "persist_delay_s", "alone, as a task of Spark is", "beside one that is open")
    )
    with _slow_s3() as url:
        alone: dict[float, list[float]] = {delay_s: [] for delay_s in DELAYS_S}
        beside: dict[float, list[float]] = {delay_s: [] for delay_s in DELAYS_S}
        uploaders = {
            delay_s: Uploader(open_store(url), UploadOptions(persist_delay_s=delay_s, hedging=False))
            for delay_s in DELAYS_S
        }
        for number in range(rounds + 1):
            for delay_s in in_turn(DELAYS_S, number):
                for found, awaited in ((alone, ()), (beside, ("another",))):
                    found[delay_s].append(_store_segment(uploaders[delay_s], awaited))
        for delay_s, uploader in uploaders.items():
            uploader.close()
            table.add_row(f"{delay_s:g}", spread_of(alone[delay_s][1:]), spread_of(beside[delay_s][1:]))
        ratios = [a / b for a, b in zip(alone[DELAYS_S[-1]][1:], alone[DELAYS_S[0]][1:], strict=True)]
        report.goals.append(Goal.of_rounds("uploads: a writer alone, persist_delay_s 0.1 / 0", ratios, at_most=1.2))


def _store_segment(uploader: Uploader, awaited: Sequence[str]) -> float:
    """Store a segment as a task does, while other writers of the process are open."""
    builder = SegmentBuilder("bench", 1, KeyGroupRange(0, 8), uploader.checksums)
    builder.add_opaque("value", {0: b"x" * 50_000})
    segment = builder.build()
    for writer in ("mine", *awaited):
        uploader.open_writer(writer)
    began = time.perf_counter()
    placed = uploader.submit(StepPath("bench", 1, 1, 1), segment)
    uploader.close_writer("mine")
    placed.result()
    seconds = time.perf_counter() - began
    for writer in awaited:
        uploader.close_writer(writer)
    return seconds


def _measure_chunks(report: Report, rounds: int, values_mb: Sequence[int]) -> None:
    title = f"seconds for a value in Redis, written and read, {REDIS_DELAY_S * 1000:.0f} ms a request"
    report.tables.append(table := table_of(title, "value", *(f"chunks of {kb} KiB" for kb in CHUNKS_KB)))
    server = RedisServer()
    with Proxy(server.port) as proxy:
        proxy.next(Fault(delay_s=REDIS_DELAY_S), None)
        for size_mb in values_mb:
            data, found = np.random.default_rng(size_mb).bytes(size_mb << 20), {kb: list[float]() for kb in CHUNKS_KB}
            for number in range(rounds + 1):
                for kb in in_turn(CHUNKS_KB, number):
                    store = open_store(f"redis://127.0.0.1:{proxy.port}/0?chunk_bytes={kb << 10}")
                    began = time.perf_counter()
                    stored = store.put(f"bench/{uuid.uuid4().hex}", data)
                    assert store.read(stored).size == len(data)
                    found[kb].append(time.perf_counter() - began)
                    store.delete([stored.name])
            table.add_row(f"{size_mb} MiB", *(spread_of(of[1:]) for of in found.values()))
    server.remove()


@contextmanager
def _slow_s3() -> Iterator[str]:
    """A fresh bucket's URL, of which each request takes `S3_DELAY_S`."""
    _, bucket = fresh_bucket(versitygw())
    with Proxy(int(versitygw().endpoint.rsplit(":", 1)[1])) as proxy:
        proxy.next(Fault(delay_s=S3_DELAY_S), None)
        yield f"s3://{bucket}/state?endpoint=http://127.0.0.1:{proxy.port}&region=us-east-1"
