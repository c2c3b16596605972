"""Measure uploads with and without hedging, on a server on this machine with the latencies of FLIP-158.

    python -m benchmarks.hedging [--requests N] [--clients N] [--json PATH]

FLIP-158 reports the latencies of its store (p50 459 ms, p90 740, p95 833, p99 1039, p99.9 3202), and that hedging
reduced p99.9 by 47 %. This server draws its latencies from that table, scaled down tenfold, log-linear between the
points. It stores an object when its latency is over, if the name is not taken by then. Clients and store are real:
threads, HTTP over loopback, one connection per thread. The two runs follow each other, with the same latencies of first
attempts.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from siltstone.changelog.hedging import Hedger
from siltstone.changelog.upload_metrics import UploadMetrics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import CorruptObject, ObjectExists, Unreachable
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.checksums import DEFAULT, checksum_of

FLIP_S = {0.5: 0.0459, 0.9: 0.074, 0.95: 0.0833, 0.99: 0.1039, 0.999: 0.3202}
"""the FLIP's latencies, scaled down tenfold"""
FLIP_GAIN = -0.47
"""change of the FLIP's p99.9 by hedging"""
LEAST_S, MOST_S, MOST_PART = 0.02, 2.0, 1e-6
SIZE_BYTES = 1000
_HEAD_END = b"\r\n\r\n"


def latencies(count: int, seed: int) -> np.ndarray:
    """Draw latencies (seconds) from the FLIP's table, log-linear in the fraction of slower requests."""
    slower = np.array([1.0, *(1 - np.array(list(FLIP_S))), MOST_PART])
    seconds = np.array([LEAST_S, *FLIP_S.values(), MOST_S])
    drawn = np.maximum(np.random.default_rng(seed).random(count), MOST_PART)
    return np.exp(np.interp(-np.log(drawn), -np.log(slower), np.log(seconds)))


class _Connection(asyncio.Protocol):
    """One client's connection: answers each PUT and GET when its latency is over. All share objects and delays."""

    def __init__(self, objects: dict[str, bytes], delays: dict[bool, Any], seen: set[str]) -> None:
        self._objects, self._delays, self._seen = objects, delays, seen
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(_HEAD_END)
        if not found:
            return
        first, *fields = head.decode().split("\r\n")
        method, name, _ = first.split()
        sizes = [int(field.partition(":")[2]) for field in fields if field.lower().startswith("content-length")]
        if len(rest) < sum(sizes):
            return
        self._received = b""
        if method == "GET":
            self._answer("200 OK" if name in self._objects else "404 Not Found", self._objects.get(name, b""))
            return
        repeated = name in self._seen
        self._seen.add(name)
        asyncio.get_running_loop().call_later(next(self._delays[repeated]), self._store, name, rest)

    def _store(self, name: str, data: bytes) -> None:
        taken = name in self._objects
        self._objects.setdefault(name, data)
        self._answer("412 Precondition Failed" if taken else "201 Created", b"")

    def _answer(self, status: str, body: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def serve(port_to: Connection, requests: int, seed: int) -> None:
    """Serve on a free port until the parent ends; first attempts have the latencies of `seed`, hedges others."""

    async def run() -> None:
        objects: dict[str, bytes] = {}
        seen: set[str] = set()
        delays = {repeated: iter(latencies(requests, seed + repeated).tolist()) for repeated in (False, True)}
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(objects, delays, seen), "127.0.0.1", 0
        )
        port_to.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


class HttpStore:
    """The part of a store that uploads need, over HTTP: create if absent, and read."""

    ranged = True
    checksums = DEFAULT

    def __init__(self, port: int) -> None:
        self._port = port
        self.url = self.label = f"http://127.0.0.1:{port}"
        self._local = threading.local()

    def put(self, name: str, data: bytes) -> StoredObject:
        status, _ = self._call("PUT", name, data)
        if status == http.client.PRECONDITION_FAILED:
            raise ObjectExists(f"object {name} in {self.label} already exists: objects are written once")
        return StoredObject(name, len(data), checksum_of(data))

    def read(self, stored: StoredObject) -> pa.Buffer:
        _, body = self._call("GET", stored.name, None)
        if checksum_of(body) != stored.checksum:
            raise CorruptObject(f"object {stored.name} in {self.label} was altered")
        return pa.py_buffer(body)

    def _call(self, method: str, name: str, body: bytes | None) -> tuple[int, bytes]:
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            self._local.connection.request(method, f"/{name}", body, {"If-None-Match": "*"} if body else {})
            answer = self._local.connection.getresponse()
            return answer.status, answer.read()
        except OSError as error:
            raise Unreachable(f"{self.label} does not answer: {error}", transient=True) from error


def measure(requests: int, clients: int, *, hedging: bool, seed: int) -> dict[str, float]:
    """Store `requests` objects from `clients` threads; return the quantiles in seconds and the number of requests sent.

    The first tenth only lets the hedger learn: it counts for the requests, but not for the quantiles.
    """
    spawn = multiprocessing.get_context("spawn")
    port_of, port_to = spawn.Pipe(duplex=False)
    server = spawn.Process(target=serve, args=(port_to, requests, seed), daemon=True)
    server.start()
    store = HttpStore(port_of.recv())
    metrics = UploadMetrics()
    hedger = Hedger(cast(Store, store), UploadOptions(hedging=hedging, upload_threads=clients), metrics)
    numbers = iter(range(requests))
    seconds = np.zeros(requests)
    data = b"x" * SIZE_BYTES

    def client() -> None:
        for number in numbers:  # a range's iterator is safe for many threads
            began = time.perf_counter()
            hedger.put(f"{number}", data)
            seconds[number] = time.perf_counter() - began

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    taken = metrics.take()
    hedger.close()
    server.terminate()
    server.join()
    measured = seconds[requests // 10 :]
    quantiles = {f"p{100 * part:g}_s": float(np.quantile(measured, part)) for part in FLIP_S}
    return quantiles | {
        "requests": taken.requests + taken.hedges_sent,
        "hedges_won": taken.hedges_won,
        "failures": taken.failures,
        "seconds": took,
    }


def show(without: dict[str, float], with_: dict[str, float]) -> Table:
    """Make a table of both runs and the FLIP's numbers, in ms."""
    table = Table("", "FLIP-158 / 10", "without", "with hedging", "change", "FLIP-158: change", title="One upload, ms")
    for part, flip in FLIP_S.items():
        name = f"p{100 * part:g}"
        before, after = without[f"{name}_s"], with_[f"{name}_s"]
        said = f"{FLIP_GAIN:+.0%}" if part == max(FLIP_S) else ""
        table.add_row(
            name, f"{1e3 * flip:.1f}", f"{1e3 * before:.1f}", f"{1e3 * after:.1f}", f"{after / before - 1:+.1%}", said
        )
    sent = [int(without["requests"]), int(with_["requests"])]
    table.add_row("requests", "", str(sent[0]), str(sent[1]), f"{sent[1] / sent[0] - 1:+.1%}", "")
    return table


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit code does not depend on the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hedging", description="Uploads, hedged and not.")
    parser.add_argument("--requests", type=int, default=22_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    options = parser.parse_args(arguments)
    runs = [measure(options.requests, options.clients, hedging=hedging, seed=158) for hedging in (False, True)]
    Console().print(show(*runs))
    if options.json:
        options.json.write_text(json.dumps({"without": runs[0], "with": runs[1]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
