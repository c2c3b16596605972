"""Measure the changelog: objects and seconds of many small segments, bytes that a restore reads, bytes of an index.

    batching   1,000 subtasks with a delta of 10 KB each, through one process's uploader, and each stored by itself on
               the same threads
    restore    one variable of ten of about 1 MB each, from a base and deltas: all bytes read from the store, including
               manifests and headers, over the bytes of its own blocks
    index      bytes per entry of the whole index, and of the four fields that US 9471438 defines with fixed widths: 9
               bytes for a base (form, offset), 25 for a delta (two more fields of 8)

Checkpoints of 500 writers are in `benchmarks.checkpoints`.
"""

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import checkpoints
from benchmarks.goals import Goal, Report, table_of
from benchmarks.stores import fresh_bucket
from benchmarks.summary import MB
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.format.block import encode_block
from siltstone.format.index import IndexEntry, encode_index, field_bytes
from siltstone.format.manifests import read_manifests
from siltstone.format.segment import Segment, SegmentBuilder
from siltstone.model import Form, KeyGroupRange, StoredObject
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.restore.export import restore_unit, unit_tasks
from siltstone.store.base import Store
from siltstone.store.keyvalue.chunked import ChunkedStore
from siltstone.store.keyvalue.protocol import Get, Keys, Values
from siltstone.store.open import open_store
from siltstone.store.paths import CheckpointPath
from siltstone.store.retry import Retrying
from siltstone.stream import Stream
from tests.redis_server import RedisServer
from tests.region_run import RegionRun

SUBTASKS = 1000
SEGMENT_BYTES = 10_000
OBJECTS_AT_MOST = 20
VARIABLES = 10
DELTAS = 4
READ_AT_MOST = 1.1
PATENT_BYTES = {Form.BASE: 9, Form.DELTA: 25}
_ROW_BYTES = 16


@contextmanager
def warehouses(scratch: Path) -> Iterator[dict[str, str]]:
    """Start each kind of store; yield name -> URL of an empty warehouse."""
    with ExitStack() as stack:
        s3_name, s3_url = fresh_bucket()[::2]
        server = RedisServer()
        stack.callback(server.remove)
        yield {
            "filesystem": str(scratch / "files"),
            s3_name: f"{s3_url}&local={scratch}/s3",
            "Redis": server.url(f"local={scratch}/redis"),
            "RocksDB": f"rocksdb://{scratch}/rocksdb",
        }


# --- batching --------------------------------------------------------------------------------------------------------


def segments(count: int, size_bytes: int) -> list[Segment]:
    """Make one segment per subtask, each with one delta block of about `size_bytes` that do not compress."""
    found = []
    for subtask in range(count):
        numbers = np.random.default_rng(subtask).integers(-(1 << 62), 1 << 62, (2, size_bytes // _ROW_BYTES))
        changes = pa.table({"key": numbers[0], "value": numbers[1]})
        block = encode_block(changes, np.full(len(changes), subtask, np.uint16))
        builder = SegmentBuilder("sums", 2, KeyGroupRange(subtask, subtask + 1))
        builder.add_delta("totals", block, 1, 0, digest=subtask)
        found.append(builder.build())
    return found


def store_segments(store: Store, parts: list[Segment], options: UploadOptions, epoch: int) -> dict[str, float]:
    """Store segments; return the seconds until all are durable, and the numbers of objects and requests."""
    path = CheckpointPath("bench", epoch, 2)
    with Uploader(store, options) as uploader:
        writers = [f"{i}" for i in range(len(parts))]
        for writer in writers:
            uploader.open_writer(writer)
        began = time.perf_counter()
        futures = []
        for writer, part in zip(writers, parts, strict=True):
            futures.append(uploader.submit(path, part))
            uploader.close_writer(writer)
        objects = {stored.name for future in futures for stored in future.result().objects}
        took = time.perf_counter() - began
        said = uploader.metrics.take()
    store.delete(objects)
    return {"seconds": took, "objects": len(objects), "requests": said.requests + said.hedges_sent}


def measure_batching(scratch: Path, count: int, rounds: int) -> Report:
    """Measure the default options, and a threshold that every segment exceeds."""
    parts, order = segments(count, SEGMENT_BYTES), random.Random(1)
    options = {"batched": UploadOptions(), "each by itself": UploadOptions(size_threshold_bytes=1)}
    size = np.mean([len(part.pack()) for part in parts])
    table = table_of(
        f"{count} segments of {size / 1000:.1f} KB, stored by one process",
        "store",
        "how",
        "objects",
        "requests",
        "seconds",
        "best",
        left=2,
    )
    report = Report([table])
    stores = {"filesystem": str(scratch / "batches")}
    name, _, url = fresh_bucket()
    epoch = 0
    for where, at in (stores | {name: url}).items():
        store = open_store(at)
        runs: dict[str, list[dict[str, float]]] = {how: [] for how in options}
        for _ in range(rounds):
            for how in order.sample(list(options), len(options)):
                epoch += 1
                runs[how].append(store_segments(store, parts, options[how], epoch))
        for how, found in runs.items():
            most = {key: max(run[key] for run in found) for key in ("objects", "requests")}
            seconds = [run["seconds"] for run in found]
            counts = [f"{most['objects']:.0f}", f"{most['requests']:.0f}"]
            table.add_row(where, how, *counts, f"{median(seconds):.3f}", f"{min(seconds):.3f}")
            if how == "batched":
                what = f"objects of {count} segments of 10 KB, {where}"
                report.goals.append(Goal(what, most["objects"], at_most=OBJECTS_AT_MOST))
        gain = median(a["seconds"] / b["seconds"] for b, a in zip(*runs.values(), strict=True))
        report.goals.append(Goal(f"seconds, each by itself / batched, {where}", gain))
        report.numbers[where] = runs
    return report


# --- restoring one variable ------------------------------------------------------------------------------------------


class Ten(Operator):
    """Ten variables, each with one number per key; a step writes all of them."""

    name = "ten"
    key = {"k": pa.int64()}  # noqa: RUF012
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9 = (ValueState(value={f"x{i}": pa.int64()}) for i in range(VARIABLES))

    def process(self, rows: Rows, state: State) -> None:
        first = np.zeros(len(rows.keys), np.int64)
        first[rows.key_index] = np.arange(len(rows))
        for i in range(VARIABLES):
            values = rows.table.column(f"x{i}").take(pa.array(first))
            getattr(state, f"v{i}").put(rows.keys, {f"x{i}": values})


class Counting:
    """A `Store` that counts the bytes read from it; of a key-value store, those of its values."""

    def __init__(self, store: Store) -> None:
        self.bytes = 0
        self.by_part = store.url.startswith("redis")
        """whether the server sends only the requested part of a value; RocksDB reads whole values"""
        inner: Any = store.once if isinstance(store, Retrying) else store
        if isinstance(inner, ChunkedStore):
            self._store: Any = ChunkedStore(_CountingValues(inner.driver, self), inner.policy)  # type: ignore[arg-type]
            self._own = False
        else:
            self._store, self._own = inner, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, stored: StoredObject) -> pa.Buffer:
        return self._counted(self._store.read(stored))

    def read_range(self, name: str, offset: int, length: int) -> pa.Buffer:
        return self._counted(self._store.read_range(name, offset, length))

    def _counted(self, data: pa.Buffer) -> pa.Buffer:
        self.bytes += data.size if self._own else 0
        return data


class _CountingValues:
    def __init__(self, driver: Any, counting: Counting) -> None:
        self._driver, self._counting = driver, counting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    @contextmanager
    def open_entry(self, entry: str, key: bytes = b"") -> Iterator[Get]:
        with self._driver.open_entry(entry, key) as get:
            yield _CountingGet(get, self._counting)


class _CountingGet:
    def __init__(self, get: Get, counting: Counting) -> None:
        self._get, self._counting = get, counting

    def __call__(self, keys: Keys, most: int) -> Values:
        values = self._get(keys, most)
        self._counting.bytes += sum(len(value) for value in values if isinstance(value, bytes))
        return values

    def part(self, key: bytes, start: int, stop: int) -> tuple[int, bytes] | None:
        found = self._get.part(key, start, stop)
        if found is not None:
            self._counting.bytes += len(found[1]) if self._counting.by_part else found[0]
        return found


def restore_one(url: str, catalog: Path, keys: int, changed: int, deltas: int) -> dict[str, float]:
    """Write a base and deltas of all ten variables and restore one; return its own bytes and the bytes read."""
    stream = Stream("bench", source=lambda spark, options: spark.sql(""), operators=[Ten()], max_parallelism=128)
    random_numbers = np.random.default_rng(1)
    with OpenWarehouse.open_writable(url, f"sqlite:///{catalog}") as warehouse:
        region = RegionRun(
            warehouse, stream, policy_by_name("adjust-d", PolicyOptions(d0=deltas, d_max=deltas)), parallelism=2
        )
        for step in range(1 + deltas):
            wanted = np.arange(keys) if not step else random_numbers.choice(keys, changed, replace=False)
            values = random_numbers.integers(-(1 << 62), 1 << 62, (VARIABLES, len(wanted)))
            region.step(pa.table({"k": wanted} | {f"x{i}": values[i] for i in range(VARIABLES)}))
        newest = warehouse.catalog.checkpoints.list(stream.name)[-1].id
        store = Counting(warehouse.warehouse.store)
        stored = warehouse.catalog.chains.list_manifests(stream.name, newest)
        manifests = read_manifests(store, stored)  # type: ignore[arg-type]
        of_manifests = store.bytes
        began = time.perf_counter()
        tasks, own = unit_tasks(manifests, newest, 2, None, {("ten", "v3")})
        rows = sum(restore_unit(store, task).rows for task in tasks)  # type: ignore[arg-type]
        took = time.perf_counter() - began
        whole = unit_tasks(manifests, newest, 2, None)[1]
    assert rows == keys, "the chain does not hold every key"
    return {
        "checkpoints": len(stored),
        "whole_bytes": whole,
        "own_bytes": own,
        "read_bytes": store.bytes,
        "manifest_bytes": of_manifests,
        "seconds": took,
    }


def measure_restore(scratch: Path, keys: int) -> Report:
    """Measure every store, with deltas of a tenth and of a hundredth of the keys."""
    heads = ("store", "deltas", "chain", "all ten MB", "own MB", "read MB", "of it manifests KB", "read / own", "ms")
    table = table_of("restoring one variable out of ten", *heads, left=2)
    report = Report([table])
    for share in (10, 100):
        folder = scratch / f"restore-{share}"
        folder.mkdir()
        with warehouses(folder) as urls:
            for number, (where, url) in enumerate(urls.items()):
                found = restore_one(url, folder / f"{number}.db", keys, keys // share, DELTAS)
                ratio = found["read_bytes"] / found["own_bytes"]
                sizes = [f"{found[name] / MB:.2f}" for name in ("whole_bytes", "own_bytes", "read_bytes")]
                manifests = f"{found['manifest_bytes'] / 1000:.1f}"
                cells = [
                    f"{found['checkpoints']:.0f}",
                    *sizes,
                    manifests,
                    f"{ratio:.3f}",
                    f"{1e3 * found['seconds']:.0f}",
                ]
                table.add_row(where, f"1/{share}", *cells)
                what = f"one of ten variables, deltas of 1/{share}, {where}: read / own bytes"
                report.goals.append(Goal(what, ratio, at_most=READ_AT_MOST))
                report.numbers[f"{where}, 1/{share}"] = found
        shutil.rmtree(folder, ignore_errors=True)
    return report


# --- index -----------------------------------------------------------------------------------------------------------


def entries(form: Form, variables: int, groups: KeyGroupRange, seed: int) -> list[IndexEntry]:
    """Make an index as of checkpoint 1000: one form, contiguous blocks, a random number of changes.

    One variable in ten was not written at checkpoint 999 but at 998.
    """
    draw = np.random.default_rng(seed)
    found, end = [], 0
    delta = form is Form.DELTA
    for i in range(variables):
        rows = draw.poisson(1000 / variables + 10, len(groups))
        length = int(rows.sum()) * 9 + 60
        found.append(
            IndexEntry(
                variable=f"variable_{i}",
                form=form,
                offset=end if delta else 0,
                previous_checkpoint=(998 if i % 10 == 9 else 999) if delta else 0,
                previous_entry=i if delta else 0,
                length=length,
                rows=int(rows.sum()),
                checksum=f"sha-256:{draw.bytes(32).hex()}",
                digest=int(draw.integers(0, 1 << 63)),
                source="" if delta else f"flights/00000007/000000001000/base-{i}-{draw.bytes(8).hex()}.parquet",
                first_key_group=groups.start if delta else 0,
                key_group_offsets=np.concatenate(([0], np.cumsum(rows))).astype(np.uint32)
                if delta
                else np.zeros(1, np.uint32),
            )
        )
        end += length if delta else 0
    return found


def measure_indexes(max_parallelism: int = 128) -> Report:
    """Measure the indexes of all subtasks of one checkpoint together, in bytes per entry."""
    heads = ("form", "variables", "subtasks", "whole index", "the patent's fields", "the patent: fixed")
    table = table_of("index, bytes an entry", *heads)
    report = Report([table])
    for form, fixed in PATENT_BYTES.items():
        worst = 0.0
        for variables in (1, 10, 100):
            for subtasks in (1, 64):
                split = KeyGroupRange(0, max_parallelism).split(subtasks)
                coded = [encode_index(1000, entries(form, variables, g, i)) for i, g in enumerate(split)]
                count = variables * subtasks
                fields = sum(sum(field_bytes(data).values()) for data in coded) / count
                whole = sum(map(len, coded)) / count
                table.add_row(
                    str(form.value), str(variables), str(subtasks), f"{whole:.1f}", f"{fields:.2f}", str(fixed)
                )
                report.numbers[f"{form.value}, {variables}, {subtasks}"] = {"whole": whole, "fields": fields}
                worst = max(worst, fields)
        report.goals.append(Goal(f"index: the patent's fields, bytes an entry, {form.value}", worst, at_most=fixed))
    return report


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Run all measurements."""
    whole = Report()
    parts = {
        "batching": lambda: measure_batching(scratch, SUBTASKS, 1 if quick else 3),
        "checkpoints": lambda: checkpoints.run(quick=quick),
        "restore": lambda: measure_restore(scratch, 20_000 if quick else 100_000),
        "index": measure_indexes,
    }
    for name, part in parts.items():
        report = part()
        whole.tables += report.tables
        whole.goals += report.goals
        whole.numbers[name] = report.numbers
    return whole
