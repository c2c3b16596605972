"""Append-only storage of variable-length values: an Arrow large-binary array that grows in two mapped arrays.

A record has the entry number of a value, so that reading many values is one Arrow `take`.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.state.backends.heap.mapped_array import MappedArray
from siltstone.state.columns import spans

EMPTY = 0
"""the entry that always exists and has no bytes; dead and new rows point to it"""


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
        """Append a string or binary column (nulls as empty values), and return the uint64 entry of each row."""
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
        """Return the values of many entries, as a binary array.

        Raises:
            UsageError: their total is 2 GiB or more.
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
        """Return the lengths of many entries: int64[n], in bytes."""
        return self._offsets.items[entries + np.uint64(1)] - self._offsets.items[entries]

    @property
    def held_bytes(self) -> int:
        """The total bytes of all values."""
        return int(self._offsets.items[self.entries])

    @property
    def mean_bytes(self) -> float:
        """The average bytes of a value."""
        return self.held_bytes / self.entries

    def close(self) -> None:
        """Close the files."""
        self._offsets.close()
        self._bytes.close()
