"""Streams whose second step waits until the test lets it go on, so that signals come in the middle of a step."""

import os
import time
from pathlib import Path

import pyarrow as pa

from siltstone.operator import Rows, State
from siltstone.stream import Stream
from tests.spark_streams import Counts, keyed, source_of

LINGER = "LINGER"
"""names the directory in which step and test meet"""
BATCHES = 60
SECOND = 2


class Lingering(Counts):
    """Counts; its second step says that it is under way, and waits."""

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Count, once the test lets it."""
        if SECOND in rows.table.column("value").to_pylist():
            here = Path(os.environ[LINGER])
            (here / "begun").touch()
            while not (here / "go").exists():
                time.sleep(0.02)
        return super().process(rows, state)


LINGERING = Stream(
    "lingering", source_of([keyed([1], [n]) for n in range(1, BATCHES + 1)]), [Lingering()], max_parallelism=8
)
