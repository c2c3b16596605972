"""Kill runs of a stream with timers, at random moments, and compare what its sinks got with a batch computation.

    python -m tests.fault.timed_kills --kills 300 [--seed N] [--directory DIR]

Sessions by a timer, the hours that they ended in by a timer of the operator that reads them, the first row of each user
and hour, counts of each user over sliding windows, and the newest row of each user with a time to live. Each run is a
process of its own and is killed while it starts, runs, fires or completes a checkpoint. Backend, parallelism, steps per
checkpoint and pending checkpoints change from run to run. Once the input is used up, a last run finishes. Then every
row of each output must have been delivered once, nothing timed may be left, and a replay must come to the same digests.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from siltstone.aggregates.functions import Count
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Sliding
from siltstone.deduplicate import Deduplicate
from siltstone.operator import Due, Operator, Rows, State, ValueState
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, replay, restore, run, verify
from siltstone.state.ttl import TTL
from siltstone.stream import Stream
from tests.spark_streams import read_files, write_files
from tests.timed_streams import CLICKS, TIME, Hours, Sessions, at, clicks, sessions_of, timed

FILES, USERS, A_FILE = 40, 30, 40
NAME = "killed"


class SessionsWithHour(Sessions):
    """Sessions with the hour in which they ended, the key of `Hours`."""

    output = pa.schema([*Sessions.output, ("hour", TIME)])

    def on_timer(self, due: Due, state: State) -> pa.Table:
        made = super().on_timer(due, state)
        return made.append_column("hour", pc.floor_temporal(made["ended"], unit="hour"))  # pyright: ignore


class Newest(Operator):
    """Each user's newest click, for a day."""

    name = "newest"
    key = {"user": pa.int64()}  # noqa: RUF012
    row = ValueState({"at": TIME}, ttl=TTL("1 day"))

    def process(self, rows: Rows, state: State) -> None:
        old = state.row.get(rows.keys)
        state.row.put(rows.keys, {"at": rows.max("at", initial=old["at"])})


class Files:
    """A sink that keeps a file per checkpoint; an id that comes again must bring the same rows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, rows: DataFrame, checkpoint: int) -> None:
        table = pa.Table.from_pylist(sorted((_in_utc(row.asDict()) for row in rows.collect()), key=repr))
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{checkpoint}.parquet"
        if path.exists():
            assert pq.read_table(path).equals(table), f"checkpoint {checkpoint} brings other rows"
            return
        pq.write_table(table, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def read(self) -> list[dict[str, Any]]:
        """All rows."""
        return [row for path in self.directory.glob("*.parquet") for row in pq.read_table(path).to_pylist()]


def _in_utc(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.items()}


def inputs(seed: int) -> list[list[tuple[int, float]]]:
    """(user, minute) of each file: an hour each, in any order within three minutes.

    Each user comes in every third file, within eight minutes: so a session is in one file, and is over before the next.
    """
    draw = np.random.default_rng(seed)
    made = []
    for number in range(FILES):
        users = [user for user in range(USERS) if user % 3 == number % 3]
        begins = {user: draw.uniform(60 * number, 60 * number + 50) for user in users}
        rows = [(user, begins[user] + draw.uniform(0, 8)) for user in draw.choice(users, A_FILE)]
        rows.sort(key=lambda row: row[1] + draw.uniform(-1.5, 1.5))
        made.append([(int(user), round(float(minute), 2)) for user, minute in rows])
    return made


def define(directory: Path, seed: int) -> Stream:
    """The stream, whose sinks are below the directory."""
    names = ("sessions", "hours", "once", "counts")
    window = Sliding("20 minutes", every="10 minutes", on="at")
    counts = Aggregate("counts", {"user": pa.int64()}, [Count("clicks")], window=window)
    once = Deduplicate("once", {"user": pa.int64()}, "1 hour", on="at")
    return timed(
        NAME,
        lambda spark, options: read_files(spark, directory / "files", CLICKS),
        delay="4 minutes",
        operators=[SessionsWithHour(), Hours(), once, counts, Newest()],
        sinks={name: Files(directory / "sinks" / name) for name in names},
        max_parallelism=8,
    )


def settings_of(directory: Path, draw: random.Random) -> Settings:
    """Settings of one run."""
    return Settings(
        warehouse=str(directory / "warehouse"),
        backend=draw.choice(["heap", "rocksdb"]),
        parallelism=draw.choice([1, 2, 3]),
        checkpoint_steps=draw.choice([1, 2, 3]),
        max_pending=draw.choice([0, 2]),
    )


def child(directory: Path, seed: int, draw: random.Random) -> None:
    """One run, of a few micro-batches."""
    run(settings_of(directory, draw), define(directory, seed), RunRequest(batches=draw.choice([1, 2, 4])))


def check(directory: Path, seed: int) -> None:
    """Finish the stream, and compare."""
    draw, stream = random.Random(seed), define(directory, seed)
    settings = settings_of(directory, draw)
    run(settings, stream, RunRequest(finish=True))
    rows = [row for batch in inputs(seed) for row in batch]
    sessions, hours, once, counts = (Files(directory / "sinks" / name).read() for name in stream.sinks)
    expected = sessions_of(rows)
    found, wanted = Counter((r["user"], r["clicks"], r["ended"]) for r in sessions), Counter(expected)
    lost, more = list((wanted - found).elements()), list((found - wanted).elements())
    assert not lost and not more, f"{len(lost)} sessions lost, {lost[:3]}, and {len(more)} made, {more[:3]}"
    ends = Counter(ended.replace(minute=0, second=0, microsecond=0) for *_, ended in expected)
    assert {r["hour"]: r["sessions"] for r in hours} == ends and len(hours) == len(ends), "hours"
    windows = Counter((user, at(start)) for user, minute in rows for start in _starts(minute))
    assert {(r["user"], r["window_start"]): r["clicks"] for r in counts} == windows and len(counts) == len(windows)
    assert len({(r["user"], r["at"]) for r in once}) == len(once) and {r["user"] for r in once} == {u for u, _ in rows}
    assert replay(settings, stream).proven and verify(settings, NAME, every=True).proven
    restore(settings, NAME, to=directory / "restored")
    left = [path for path in (directory / "restored").rglob("*.parquet") if pq.read_metadata(path).num_rows]
    assert not left, f"{left} has rows that nothing would ever remove"


def _starts(minute: float) -> list[float]:
    newest = 10 * (minute // 10)
    return [newest - 10, newest]


def main() -> int:
    """Kill runs, one after the other, and check a stream each time its input is used up."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--child", type=int)
    options.add_argument("--directory", type=Path)
    given = options.parse_args()
    if given.child is not None:
        child(given.directory, given.seed, random.Random(given.child))
        return 0
    draw, killed, ended, seed, begun = random.Random(given.seed), 0, 0, given.seed, time.monotonic()
    while killed < given.kills:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(given.directory or scratch) / f"stream-{seed}"
            # Not by the source: a run that is killed between a file and its time of change puts it in another order.
            write_files(directory / "files", [clicks(*rows) for rows in inputs(seed)])
            for number in range(10_000):
                if killed >= given.kills:
                    break
                command = [sys.executable, "-m", "tests.fault.timed_kills", "--child", str(number), "--seed", str(seed)]
                process = subprocess.Popen([*command, "--directory", str(directory)], stderr=subprocess.PIPE, text=True)
                try:
                    _, said = process.communicate(timeout=draw.uniform(4, 12))
                    assert process.returncode == 0, said
                    ended += 1
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    killed += 1
                if number > 2 * FILES:
                    break
            check(directory, seed)
            minutes = (time.monotonic() - begun) / 60
            print(
                f"seed {seed}: {killed} killed and {ended} ended in {minutes:.0f} min, all as it should be", flush=True
            )
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
