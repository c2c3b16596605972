"""Variable-length values, appended only: an Arrow large-binary array that grows in two regions.

A record holds the entry number of a value, so that reading many values is one Arrow `take`.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.state.backends.heap.mapped_array import MappedArray
from siltstone.state.columns import spans

EMPTY = 0
"""the entry that is always there and has no bytes: what dead rows and rows just made point to"""


class Arena:
    """Entries `0 <= i < entries`; entry i is bytes `offsets[i]:offsets[i + 1]`.

    `directory` None keeps everything in memory. Setting `entries` back truncates.
    """

    def __init__(self, directory: Path | None, entries: int = 1) -> None:
        held = entries + 1 if entries > 1 else 0
        self._offsets = MappedArray(directory / "offsets" if directory else None, np.int64, held=held)
        held = int(self._offsets.items[entries]) if entries > 1 else 0
        self._bytes = MappedArray(directory / "bytes" if directory else None, np.uint8, held=held)
        self._offsets.reserve(2)
        self.entries = entries

    def append(self, column: pa.Array) -> np.ndarray:
        """Add a string or binary column (nulls count as empty); returns the uint64 entry of each row."""
        count = len(column)
        if column.null_count:
            column = column.fill_null(b"" if pa.types.is_binary(column.type) else "")
        data, _, lengths = spans(column)
        self._offsets.reserve(self.entries + count + 1)
        start = int(self._offsets.items[self.entries])
        self._bytes.reserve(start + len(data))
        self._bytes.items[start : start + len(data)] = data
        ends = self._offsets.items[self.entries + 1 : self.entries + 1 + count]
        np.cumsum(lengths, dtype=np.int64, out=ends)
        ends += start
        first = self.entries
        self.entries += count
        return np.arange(first, first + count, dtype=np.uint64)

    def take(self, entries: np.ndarray) -> pa.Array:
        """The values of many entries, as a binary array.

        Raises:
            UsageError: they are 2 GiB or more together.
        """
        everything = pa.Array.from_buffers(
            pa.large_binary(),
            self.entries,
            [None, pa.py_buffer(self._offsets.items), pa.py_buffer(self._bytes.items)],
        )
        try:
            return everything.take(pa.array(entries)).cast(pa.binary())
        except pa.ArrowInvalid as error:
            raise UsageError(
                f"the values of {len(entries)} keys in one column exceed 2 GiB: use smaller batches"
            ) from error

    def lengths(self, entries: np.ndarray) -> np.ndarray:
        """How long the values of many entries are: int64[n]."""
        return self._offsets.items[entries + np.uint64(1)] - self._offsets.items[entries]

    @property
    def held_bytes(self) -> int:
        """How long all values are together."""
        return int(self._offsets.items[self.entries])

    @property
    def mean_bytes(self) -> float:
        """How long a value is on average."""
        return self.held_bytes / self.entries

    def close(self) -> None:
        """Let go of the files."""
        self._offsets.close()
        self._bytes.close()
