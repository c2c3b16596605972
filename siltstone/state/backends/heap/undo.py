"""Before-images of one step, in an append-only file of frames.

A frame is 48 bytes - step, table, rows, bytes of ids, bytes of records, and the checksum (xxh3-64 of these
five and of what follows), each a little-endian u64 - then row ids (u32) and the old records of those rows.
`rows` is the maximum number of rows after the mutation. The first frame has table `HEADER`, and contains the
header file from before the step.

A frame is written before the mutation it undoes. The page cache keeps what a killed process wrote, so if a frame
is cut, or belongs to another step (files are reused), its mutation never began.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from siltstone.errors import Unreachable
from siltstone.store.private import open_private

HEADER = 0xFFFFFFFF
_FIELDS = struct.Struct("<QQQQQ")
_CHECKSUM = struct.Struct("<Q")
_HEAD_BYTES = _FIELDS.size + _CHECKSUM.size
_WRITE_BYTES = 1 << 30


@dataclass(frozen=True)
class Frame:
    """One frame: `ids` uint32[n], `records` the bytes of n records (or the header), `end` where the next one begins."""

    table: int
    rows: int
    ids: np.ndarray
    records: np.ndarray
    end: int


class UndoWriter:
    """Appends frames for `step`; overwrites the file's old contents, since its pages are in memory."""

    def __init__(self, path: Path, step: int, header: bytes) -> None:
        self.path = path
        self._step = step
        self._tail = 0
        self._file = open_private(path, os.O_RDWR | os.O_CREAT)
        self.append(HEADER, 0, np.zeros(0, np.uint32), np.frombuffer(header, np.uint8))

    def append(self, table: int, rows: int, ids: np.ndarray, records: np.ndarray) -> None:
        """Write one frame; once this returns, killing the process does not lose it.

        Raises:
            Unreachable: the disk is full or the file cannot be written; nothing may be mutated then.
        """
        parts = [np.ascontiguousarray(part).view(np.uint8).data for part in (ids, records)]
        fields = _FIELDS.pack(self._step, table, rows, *(len(part) for part in parts))
        head = fields + _CHECKSUM.pack(_checksum(fields, *parts))
        try:
            for part in [memoryview(head), *parts]:
                self._write(part)
        except OSError as error:
            raise Unreachable(f"cannot write {self.path}: {error.strerror}; free some space") from error

    def _write(self, data: memoryview) -> None:
        while len(data):
            written = os.pwrite(self._file, data[:_WRITE_BYTES], self._tail)
            self._tail += written
            data = data[written:]

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_frames(path: Path, step: int, at: int = 0) -> Iterator[Frame]:
    """Yield the complete frames of `step` from byte `at` on, in the order they were written."""
    if path.stat().st_size == 0:
        return
    data = np.memmap(path, np.uint8, mode="r")
    while at + _HEAD_BYTES <= len(data):
        fields = data[at : at + _FIELDS.size].tobytes()
        of_step, table, rows, ids_bytes, records_bytes = _FIELDS.unpack(fields)
        start = at + _HEAD_BYTES
        end = start + ids_bytes + records_bytes
        if of_step != step or end > len(data):
            return
        (checksum,) = _CHECKSUM.unpack(data[at + _FIELDS.size : start].tobytes())
        ids, records = data[start : start + ids_bytes], data[start + ids_bytes : end]
        if checksum != _checksum(fields, ids.data, records.data):
            return
        # The ids are copied, because a frame need not begin at a multiple of four.
        yield Frame(table, rows, np.frombuffer(ids.tobytes(), np.uint32), records, end)
        at = end


def _checksum(fields: bytes, ids: memoryview, records: memoryview) -> int:
    state = xxhash.xxh3_64(fields)
    state.update(ids)
    state.update(records)
    return state.intdigest()
