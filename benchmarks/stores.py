"""Compare large values through each store with its raw client: MB/s, written and read.

    filesystem   open, write, fsync; open, read
    S3           boto3's put_object and upload_fileobj; get_object (versitygw, or moto if that is not installed)
    Redis        redis-py's SET and GET
    RocksDB      rocksdict's put, synced, and get, in a database that stays open

A store does more with the same bytes: it hashes them, creates only absent objects, and makes an object visible at once.
Both sides of a contest take turns in random order, with the same bytes over the same server; the result is the median
of the ratios of these pairs.
"""

import io
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import boto3
import numpy as np
from rocksdict import Options, Rdict, WriteOptions

from benchmarks.goals import Goal, Report, table_of
from benchmarks.summary import MB
from siltstone.model import StoredObject
from siltstone.store.base import Store
from siltstone.store.open import open_store
from tests import servers
from tests.redis_server import RedisServer

SIZE_BYTES = 64 * MB
ROUNDS = 9
AT_LEAST = 0.9
"""least speed, as a fraction of the raw client's"""


@dataclass(frozen=True)
class Contest:
    """Two functions to compare, each called with the number of the round; `after` removes what they wrote."""

    store: str
    what: str
    ours: Callable[[int], Any]
    raw: Callable[[int], Any]
    after: Callable[[int], Any] = lambda _: None


@dataclass(frozen=True)
class Outcome:
    """Seconds of each round, in pairs."""

    store: str
    what: str
    size_bytes: int
    ours_s: list[float]
    raw_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """The store's speed over the raw client's, of each pair."""
        return [raw / ours for ours, raw in zip(self.ours_s, self.raw_s, strict=True)]

    @property
    def best_ratio(self) -> float:
        """The store's highest speed over the raw client's highest, which other load on the machine affects least."""
        return min(self.raw_s) / min(self.ours_s)


def run_contest(contest: Contest, size_bytes: int, rounds: int, seed: int = 1) -> Outcome:
    """Run both sides in random order, `rounds` times after one that does not count."""
    order = random.Random(seed)
    outcome = Outcome(contest.store, contest.what, size_bytes, [], [])
    for number in range(rounds + 1):
        sides = [(contest.ours, outcome.ours_s), (contest.raw, outcome.raw_s)]
        order.shuffle(sides)
        for call, seconds in sides:
            began = time.perf_counter()
            call(number)
            took = time.perf_counter() - began
            if number:
                seconds.append(took)
        contest.after(number)
    return outcome


@contextmanager
def filesystem(scratch: Path, data: bytes) -> Iterator[list[Contest]]:
    """Compare with plain files in the same directory."""
    store = open_store(str(scratch / "objects"))
    raw = scratch / "raw"
    raw.mkdir()

    def write(number: int) -> None:
        with open(raw / f"{number}", "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    def remove(number: int) -> None:
        (raw / f"{number}").unlink()
        store.delete([f"put/{number}"])

    (raw / "read").write_bytes(data)
    yield [
        Contest("filesystem", "write", lambda n: store.put(f"put/{n}", data), write, remove),
        Contest("filesystem", "read", _reader(store, data), lambda _: (raw / "read").read_bytes()),
    ]


@contextmanager
def s3(scratch: Path, data: bytes) -> Iterator[list[Contest]]:
    """Compare with boto3 with its defaults, on the same server."""
    name, client, url = fresh_bucket()
    bucket = url.removeprefix("s3://").partition("/")[0]
    store = open_store(url)
    client.put_object(Bucket=bucket, Key="read", Body=data)

    def remove(number: int) -> None:
        store.delete([f"put/{number}"])
        client.delete_object(Bucket=bucket, Key=f"raw/{number}")

    def put(number: int) -> None:
        client.put_object(Bucket=bucket, Key=f"raw/{number}", Body=data)

    def upload(number: int) -> None:
        client.upload_fileobj(io.BytesIO(data), bucket, f"raw/{number}")

    def get(_: int) -> bytes:
        return client.get_object(Bucket=bucket, Key="read")["Body"].read()

    yield [
        Contest(name, "write / put_object", lambda n: store.put(f"put/{n}", data), put, remove),
        Contest(name, "write / upload_fileobj", lambda n: store.put(f"put/{n}", data), upload, remove),
        Contest(name, "read / get_object", _reader(store, data), get),
    ]
    store.delete(["read"])
    client.delete_object(Bucket=bucket, Key="read")


@contextmanager
def redis(scratch: Path, data: bytes) -> Iterator[list[Contest]]:
    """Compare with SET and GET of the whole value, on a server without persistence, to leave out its disk."""
    server = RedisServer("--appendonly", "no")
    client: Any = server.client()
    store = open_store(server.url("prefix=bench"))
    client.set("read", data)

    def remove(number: int) -> None:
        store.delete([f"put/{number}"])
        client.delete(f"raw-{number}")

    yield [
        Contest(
            "Redis", "write", lambda n: store.put(f"put/{n}", data), lambda n: client.set(f"raw-{n}", data), remove
        ),
        Contest("Redis", "read", _reader(store, data), lambda _: client.get("read")),
    ]
    server.remove()


@contextmanager
def rocksdb(scratch: Path, data: bytes) -> Iterator[list[Contest]]:
    """Compare with a database that stays open, with synced writes."""
    store = open_store(f"rocksdb://{scratch}/entries")
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    raw: Any = Rdict(str(scratch / "raw-database"), options)
    synced = WriteOptions()
    synced.sync = True
    raw.put(b"read", data, synced)

    def remove(number: int) -> None:
        store.delete([f"put-{number}/value"])
        raw.delete(b"%d" % number)

    yield [
        Contest(
            "RocksDB",
            "write",
            lambda n: store.put(f"put-{n}/value", data),
            lambda n: raw.put(b"%d" % n, data, synced),
            remove,
        ),
        Contest("RocksDB", "read", _reader(store, data), lambda _: raw.get(b"read")),
    ]
    raw.close()


def fresh_bucket() -> tuple[str, Any, str]:
    """Make a bucket; return the S3 server's name, a plain client, and the URL of an empty store."""
    real = servers.versitygw_binary() is not None
    server = servers.versitygw() if real else servers.moto()
    client: Any = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
    bucket = f"bench-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    url = f"s3://{bucket}/warehouse?endpoint={server.endpoint}&region=us-east-1"
    return f"S3 ({'versitygw' if real else 'moto'})", client, url


def _reader(store: Store, data: bytes) -> Callable[[int], Any]:
    stored: StoredObject = store.put("one/read", data)
    return lambda _: store.read(stored)


STORES = (filesystem, s3, redis, rocksdb)


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Run all contests; `quick` uses smaller values and fewer rounds."""
    size_bytes, rounds = (8 * MB, 3) if quick else (SIZE_BYTES, ROUNDS)
    data = np.random.default_rng(1).bytes(size_bytes)
    outcomes: list[Outcome] = []
    for of_store in STORES:
        folder = scratch / of_store.__name__
        folder.mkdir(parents=True)
        with of_store(folder, data) as contests:
            outcomes += [run_contest(contest, size_bytes, rounds) for contest in contests]
        shutil.rmtree(folder, ignore_errors=True)
    title = f"values of {size_bytes // MB} MB through each store and its raw client, MB/s (median, best)"
    table = table_of(title, "store", "what", "Siltstone", "best", "raw", "best", "ratio", "best", left=2)
    for outcome in outcomes:
        speeds = [outcome.size_bytes / MB / f(s) for s in (outcome.ours_s, outcome.raw_s) for f in (median, min)]
        ratios = [f"{median(outcome.ratios):.2f}", f"{outcome.best_ratio:.2f}"]
        table.add_row(outcome.store, outcome.what, *(f"{speed:.0f}" for speed in speeds), *ratios)
    goals = [Goal.of_rounds(f"{o.store}, {o.what}: Siltstone / raw", o.ratios, at_least=AT_LEAST) for o in outcomes]
    return Report([table], goals, {"contests": [vars(outcome) for outcome in outcomes]})
