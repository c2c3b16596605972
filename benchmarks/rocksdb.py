"""Compare the RocksDB backend with rocksdict's own batch calls, on the same data, in alternating rounds.

A table has S rows of an int64 key and four int64 columns. In each round both sides look up a batch of random keys, and
then update it. The backend is given Arrow columns and returns them; an update is a step of its own, which reads the old
rows, keeps before-images, follows digests and changes, and writes the header. rocksdict is given and returns bytes that
are made beforehand, keys in their order: one `get` with all keys; and for an update one more, as the old rows are read,
and one `WriteBatch`. The batch alone, which reads nothing, is told without a bound. Both open RocksDB with the same
options.
"""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from benchmarks.goals import Goal, Report, spread_of, table_of
from benchmarks.tables import BATCH, GROUPS, TABLE, keys_of, look_up, random_values, schema_of, update
from benchmarks.workload import short
from siltstone.model import KeyGroupRange
from siltstone.state.backend import Keys
from siltstone.state.backends.rocksdb.database import Database
from siltstone.state.backends.rocksdb.subtask import RocksDBBackend

ROWS, QUICK_ROWS = 3_000_000, 200_000
ROUNDS = 15
BACKEND, RAW = "the backend", "rocksdict"
LOOK_UPS, UPDATES, WRITES = "look-ups", "updates", "updates / writes that read nothing"


@dataclass
class Seconds:
    """What each round took, per side."""

    look_ups: dict[str, list[float]] = field(default_factory=lambda: {BACKEND: [], RAW: []})
    updates: dict[str, list[float]] = field(default_factory=lambda: {BACKEND: [], RAW: []})
    writes: list[float] = field(default_factory=list)
    """the part of rocksdict's updates that writes"""


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Measure both sides."""
    rows = QUICK_ROWS if quick else ROWS
    batch = min(BATCH, rows)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        found = measure(Path(directory), rows, batch, ROUNDS)
    report = Report([table := table_of("the RocksDB backend beside rocksdict", "", BACKEND, RAW, "ratio")])
    writes = {BACKEND: found.updates[BACKEND], RAW: found.writes}
    for what, seconds in ((LOOK_UPS, found.look_ups), (UPDATES, found.updates), (WRITES, writes)):
        ratios = [raw / own for own, raw in zip(seconds[BACKEND], seconds[RAW], strict=True)]
        rates = {side: batch / median(of) / 1e6 for side, of in seconds.items()}
        table.add_row(f"{what} M/s", f"{rates[BACKEND]:.2f}", f"{rates[RAW]:.2f}", spread_of(ratios))
        said = f"rocksdb: {what} per second / rocksdict's batch calls, {short(rows)} rows"
        report.goals.append(Goal.of_rounds(said, ratios, at_least=None if what == WRITES else 0.8))
        report.numbers[what] = {"million_per_s": rates, "ratios": ratios}
    return report


def measure(directory: Path, rows: int, batch: int, rounds: int) -> Seconds:
    """Fill both sides with the same rows, then take turns."""
    state = RocksDBBackend().open(
        directory / "state", {TABLE: schema_of(pa.int64())}, (), KeyGroupRange(0, GROUPS), GROUPS
    )
    raw, draw, found = Database(directory / "raw"), np.random.default_rng(1), Seconds()
    order = draw.permutation(rows)
    for at in range(0, rows, batch):
        values = random_values(draw, len(order[at : at + batch]))
        update(state, _keys(order[at : at + batch]), values)
        _write_raw(raw, *_bytes(order[at : at + batch], values))
    for turn in range(rounds):
        chosen, values = draw.choice(rows, batch, replace=False), random_values(draw, batch)
        names, packed = _bytes(chosen, values)
        sides = (BACKEND, RAW) if turn % 2 else (RAW, BACKEND)
        for side in sides:
            took = look_up(state, _keys(chosen)) if side == BACKEND else _look_up_raw(raw, names)
            found.look_ups[side].append(took)
        for side in sides:
            if side == BACKEND:
                found.updates[side].append(update(state, _keys(chosen), values))
            else:
                read, wrote = _look_up_raw(raw, names), _write_raw(raw, names, packed)
                found.updates[side].append(read + wrote)
                found.writes.append(wrote)
    state.close()
    raw.close()
    return found


def _keys(numbers: np.ndarray) -> Keys:
    return keys_of(pa.array(numbers, pa.int64()))


def _bytes(numbers: np.ndarray, values: pa.Table) -> tuple[list[bytes], list[bytes]]:
    """The same rows as bytes, in the order of their keys: key group and key; the four columns."""
    order = np.lexsort((numbers, _keys(numbers).key_groups))
    keys = np.empty(len(numbers), [("group", ">u2"), ("key", ">i8")])
    keys["group"], keys["key"] = _keys(numbers).key_groups[order], numbers[order]
    rows = np.stack([column.to_numpy() for column in values.columns], axis=1)[order]
    return [key.tobytes() for key in keys], [row.tobytes() for row in rows]


def _look_up_raw(raw: Database, names: list[bytes]) -> float:
    began = time.perf_counter()
    found = raw.get_many(names)
    seconds = time.perf_counter() - began
    assert None not in found
    return seconds


def _write_raw(raw: Database, names: list[bytes], rows: list[bytes]) -> float:
    began = time.perf_counter()
    changes = raw.changes()
    changes.put(names, rows)
    raw.write(changes)
    return time.perf_counter() - began
