"""Simulate the duration of a checkpoint of 500 writers of 5 MB, from the latencies of single requests.

A checkpoint begins in all writers at once and takes as long as the slowest of its requests. The writers are spread over
processes, each of which sends at most `threads` requests at a time (`UploadOptions.upload_threads`) and hedges by the
uploader's `HedgeRule`, one per process; a hedge takes no thread from other requests, as in the uploader. Checkpoints
follow each other, and the rules keep what they learned. Latencies are drawn independently, as from a store that 500
requests at a time do not slow down. The milliseconds before and after the uploads are left out. The first tenth of the
checkpoints only lets the rules learn.

Latencies come from the FLIP's table (`benchmarks.hedging.latencies`), and from puts of 5 MB to the S3 server on this
machine, one at a time. FLIP-158 reports p50 1000 ms and p99 1700 ms for 500 x 5 MB on its own store.
"""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks import hedging
from benchmarks.goals import Goal, Report, table_of
from benchmarks.stores import fresh_bucket
from benchmarks.summary import MB
from siltstone.changelog.hedging import HedgeRule
from siltstone.changelog.upload_options import UploadOptions
from siltstone.store.open import open_store

WRITERS = 500
SIZE_BYTES = 5 * MB
FLIP_S = {"p50": 1.0, "p90": None, "p99": 1.7}
"""quantiles of a checkpoint's seconds; the FLIP does not give the p90"""
SCALED_DOWN = 10
"""factor by which `hedging.latencies` are shorter than those of the FLIP's store"""
_LEARNING = 0.1

Draw = Callable[[], float]


@dataclass(frozen=True)
class Deployment:
    """Writers spread over processes, and the number of requests that each process sends at a time."""

    writers: int
    processes: int
    threads: int

    @property
    def concurrency(self) -> int:
        """Requests at a time of all processes together, without hedges."""
        return min(self.writers, self.processes * self.threads)


class _Process:
    """One process's requests and hedges; `at` schedules an event of the simulation."""

    def __init__(self, draw: Draw, options: UploadOptions, threads: int, at: Callable[[float, Callable], None]) -> None:
        self.rule = HedgeRule()
        self.requests = self.hedges = 0
        self.ended = 0.0
        self._draw, self._hedging, self._threads, self._at = draw, options.hedging, threads, at
        self._left = 0

    def checkpoint(self, now: float, requests: int) -> None:
        """Begin all requests of a checkpoint."""
        self._left = requests
        for _ in range(min(self._threads, requests)):
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._left -= 1
        self.requests += 1
        delay = self.rule.begin(SIZE_BYTES) if self._hedging else None
        took = self._draw()
        if delay is None or took <= delay:
            self._at(now + took, lambda at: self._end(now, at))
        else:
            self._at(now + delay, lambda at: self._hedge(now, at, took))

    def _hedge(self, began: float, now: float, took: float) -> None:
        first = began + took
        if self.rule.spend():
            self.hedges += 1
            first = min(first, now + self._draw())
        self._at(first, lambda at: self._end(began, at))

    def _end(self, began: float, now: float) -> None:
        self.ended = now
        if self._hedging:
            self.rule.end(SIZE_BYTES, now - began)
        if self._left:
            self._begin(now)


def simulate(
    draw: Callable[[int], np.ndarray], deployment: Deployment, checkpoints: int, *, hedged: bool
) -> tuple[np.ndarray, float]:
    """Return the seconds of each counted checkpoint, and hedges per request; `draw(n)` gives n latencies (seconds)."""
    drawn = iter(draw(2 * checkpoints * deployment.writers).tolist())
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order = count()
    options = UploadOptions(hedging=hedged)
    processes = [
        _Process(
            lambda: next(drawn),
            options,
            deployment.threads,
            lambda at, what: heapq.heappush(events, (at, next(order), what)),
        )
        for _ in range(deployment.processes)
    ]
    shares = [len(part) for part in np.array_split(np.arange(deployment.writers), deployment.processes)]
    seconds = np.zeros(checkpoints)
    now = 0.0
    for i in range(checkpoints):
        for process, share in zip(processes, shares, strict=True):
            process.checkpoint(now, share)
        while events:
            at, _, what = heapq.heappop(events)
            what(at)
        ended = max(process.ended for process in processes)
        seconds[i], now = ended - now, ended
    sent = sum(process.hedges for process in processes) / sum(process.requests for process in processes)
    return seconds[int(_LEARNING * checkpoints) :], sent


def measured_latencies(requests: int) -> tuple[str, np.ndarray]:
    """Put objects of 5 MB one after the other; return the S3 server's name and the seconds of each."""
    name, _, url = fresh_bucket()
    store = open_store(url)
    data = np.random.default_rng(1).bytes(SIZE_BYTES)
    seconds = []
    for number in range(requests + 5):
        began = time.perf_counter()
        store.put(f"{number}", data)
        seconds.append(time.perf_counter() - began)
        store.delete([f"{number}"])
    return name, np.array(seconds[5:])


def run(*, quick: bool = False) -> Report:
    """Simulate both sources of latencies and two deployments, with and without hedging."""
    checkpoints = 60 if quick else 800
    server, measured = measured_latencies(40 if quick else 200)
    draws: dict[str, Callable[[int], np.ndarray]] = {
        "FLIP-158's table": lambda n: SCALED_DOWN * hedging.latencies(n, 158),
        f"measured on {server}": lambda n: np.random.default_rng(158).choice(measured, n),
    }
    heads = (
        "one request",
        "at a time",
        "hedging",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "hedges",
        "request p50",
        "request p99",
    )
    table = table_of(f"a checkpoint of {WRITERS} writers of 5 MB, {checkpoints} simulated", *heads, left=3)
    table.add_row("FLIP-158, as reported", "", "yes", *("" if s is None else f"{1e3 * s:.0f}" for s in FLIP_S.values()))
    report = Report([table])
    for where, draw in draws.items():
        request = [f"{1e3 * q:.0f}" for q in np.quantile(draw(100_000), [0.5, 0.99])]
        for deployment in (Deployment(WRITERS, 100, 5), Deployment(WRITERS, 20, 5)):
            for hedged in (False, True):
                seconds, sent = simulate(draw, deployment, checkpoints, hedged=hedged)
                found = dict(zip(FLIP_S, np.quantile(seconds, [0.5, 0.9, 0.99]).tolist(), strict=True))
                cells = [f"{1e3 * s:.0f}" for s in found.values()]
                table.add_row(
                    where, str(deployment.concurrency), "yes" if hedged else "no", *cells, f"{sent:.1%}", *request
                )
                report.numbers[f"{where}, {deployment.concurrency}, {'' if hedged else 'not '}hedged"] = found
                if hedged and deployment.concurrency == WRITERS:
                    # No bound: the FLIP's numbers are of another machine and another store.
                    report.goals += [
                        Goal(f"checkpoint of 500 x 5 MB, {where}: {name} / FLIP-158's", found[name] / said)
                        for name, said in FLIP_S.items()
                        if said is not None
                    ]
    return report
