"""Rows of a step in a file of its task."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow as pa

from siltstone.store.private import open_private


class Spilled:
    """Record batches of one schema in a file, to be read any number of times."""

    def __init__(self, path: Path, batches: Iterable[pa.RecordBatch]) -> None:
        self._path, self._count = path, 0
        left = iter(batches)
        first = next(left, None)
        if first is None:
            return
        with open(path, "wb", opener=open_private) as file, pa.ipc.new_file(file, first.schema) as writer:
            for batch in chain([first], left):
                writer.write_batch(batch)
                self._count += 1

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._count:
            with pa.memory_map(str(self._path)) as file, pa.ipc.open_file(file) as reader:
                for number in range(self._count):
                    yield reader.get_batch(number)
