"""Streams for tests on a cluster: the small stream over files that all machines see, and tasks that can be held."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from siltstone.operator import Rows, State
from siltstone.stream import Stream
from tests.arrow_frames import to_arrow
from tests.fault.small_stream import DAILY, PURCHASE, ROWS_A_FILE, SCHEMA, SMALL, Accounts, Places
from tests.spark_streams import read_files, write_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOLD_S = 60.0
"""how long a held task waits at most"""


class HeldAccounts(Accounts):
    """`Accounts`, which notes where each of its calls ran, and waits where it is told to.

    Args:
        shared: a directory that all machines see.
        private: the path of a directory that each machine has for itself.
    """

    def __init__(self, shared: Path, private: Path) -> None:
        super().__init__()
        self.shared, self.private = shared, private

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Note, wait, then take the purchases."""
        file = min(rows.table["sequence"].to_pylist()) // ROWS_A_FILE
        note(self.shared, self.private, file, int(rows.key_groups.min()))
        end = time.monotonic() + HOLD_S
        while hold(self.shared, file).exists() and time.monotonic() < end:
            time.sleep(0.02)
        return super().process(rows, state)


def hold(shared: Path, file: int) -> Path:
    """Return the path of a file: while it exists, calls of `accounts` with this input file's rows wait."""
    return shared / f"hold-{file}"


def release_all(shared: Path) -> None:
    """Let all calls go on."""
    for path in shared.glob("hold-*"):
        path.unlink()


def note(shared: Path, private: Path, file: int, key_group: int) -> None:
    """Append where a call runs: the device of its machine's own tmpfs."""
    line = json.dumps({"file": file, "key_group": key_group, "machine": os.stat(private).st_dev, "pid": os.getpid()})
    handle = os.open(shared / "calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def read_calls(shared: Path) -> list[dict[str, int]]:
    """Read what was noted, oldest first."""
    path = shared / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_shared(
    spark: "SparkSession", options: Mapping[str, str], shared: Path, tables: Sequence[pa.Table]
) -> "DataFrame":
    """Read the tables, a micro-batch each."""
    write_files(shared / "purchases", tables)
    return read_files(spark, shared / "purchases", SCHEMA)


class Delivered:
    """A sink that keeps the rows of each checkpoint in the driver.

    Attributes:
        then: called with each checkpoint once its rows are kept; the stream waits for it.
    """

    def __init__(self) -> None:
        self.rows: dict[int, pa.Table] = {}
        self.then: Callable[[int], None] = lambda _: None

    def deliver(self, rows: "DataFrame", checkpoint: int) -> None:
        """Keep the rows; a second delivery must bring the same."""
        table = to_arrow(rows).sort_by("sequence").cast(PURCHASE)
        assert self.rows.setdefault(checkpoint, table).equals(table)
        self.then(checkpoint)

    def all(self) -> pa.Table:
        """Return the rows of all checkpoints, in order."""
        return pa.concat_tables([self.rows[checkpoint] for checkpoint in sorted(self.rows)])


def cluster_stream(shared: Path, private: Path, sink: Delivered, tables: Sequence[pa.Table]) -> Stream:
    """Make the small stream for a cluster's directories: an operator that reads another's output, and an aggregate."""
    source = partial(read_shared, shared=shared, tables=tables)
    operators = [HeldAccounts(shared, private), DAILY, Places()]
    return replace(SMALL, source=source, operators=operators, sinks={"accounts": sink})
