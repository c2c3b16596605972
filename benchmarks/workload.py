"""Make the input of the step benchmark: int64 keys loaded once, then steps of distinct random keys.

Every system reads the same Parquet files, `FILES_A_STEP` per micro-batch, in the order of their modification times:
first the load (every key once, shuffled, at most `LOAD_ROWS` per micro-batch), then the steps.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES_A_STEP = 2
"""one for each core"""
LOAD_ROWS = 1_000_000
KEY, VALUE = "key", "value"
VALUE_LIMIT = 1_000_000
_FIRST_MTIME_S = 1_700_000_000


@dataclass(frozen=True)
class Workload:
    """`state_rows` keys; `warm_up` and then `measured` steps, each of `step_rows` distinct random keys."""

    state_rows: int
    step_rows: int
    warm_up: int
    measured: int
    seed: int = 1

    @property
    def name(self) -> str:
        """Such as `3M, 100k`."""
        return f"{short(self.state_rows)}, {short(self.step_rows)}"

    @property
    def load_steps(self) -> int:
        """Number of micro-batches of the load."""
        return -(-self.state_rows // LOAD_ROWS)

    @property
    def first_measured(self) -> int:
        """Batch id of the first measured step."""
        return self.load_steps + self.warm_up

    @property
    def batches(self) -> int:
        """Total number of micro-batches."""
        return self.first_measured + self.measured

    def write(self, directory: Path) -> None:
        """Write the input files."""
        directory.mkdir(parents=True)
        number = 0
        for keys, values in self.draw():
            for part in np.array_split(np.arange(len(keys)), FILES_A_STEP):
                path = directory / f"{number:06d}.parquet"
                pq.write_table(pa.table({KEY: keys[part], VALUE: values[part]}), path)
                # A file source reads files in the order of their times.
                os.utime(path, (_FIRST_MTIME_S + number, _FIRST_MTIME_S + number))
                number += 1

    def draw(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        random = np.random.default_rng(self.seed)
        everything = random.permutation(self.state_rows)
        loads = np.array_split(everything, self.load_steps)
        steps = (random.choice(self.state_rows, self.step_rows, replace=False) for _ in range(self.batches))
        for keys in [*loads, *(next(steps) for _ in range(self.batches - self.load_steps))]:
            yield keys, random.integers(-VALUE_LIMIT, VALUE_LIMIT, len(keys))


def short(count: int) -> str:
    """Format 300000 as `300k`, 3000000 as `3M`."""
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)
