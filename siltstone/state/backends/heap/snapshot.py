"""Read a heap at one version, in any process, while later steps change it in place (docs/adr/0045).

A record is written after the frame with its before-image is. So a reader copies records first and then looks for
frames of later steps: a record that was written meanwhile, or half written, has a frame by then, and the oldest one
has the record as it was. Arenas only grow while a pin exists, and records never move within a generation.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.model import KeyGroupRange
from siltstone.state.backend import StateSnapshot, TableSnapshot
from siltstone.state.backends.heap.arena import Arena
from siltstone.state.backends.heap.header import parse
from siltstone.state.backends.heap.layout import Layout
from siltstone.state.backends.heap.mapped_array import MappedArray
from siltstone.state.backends.heap.opaque import read_opaque
from siltstone.state.backends.heap.pins import later_steps
from siltstone.state.backends.heap.records import Records
from siltstone.state.backends.heap.scan import scan_records
from siltstone.state.backends.heap.table import HeapCounts
from siltstone.state.backends.heap.undo import HEADER, read_frames
from siltstone.state.backends.pins import remove_pin, snapshot_gone_error
from siltstone.state.backends.table_records import load_record
from siltstone.state.digest import group_sums
from siltstone.state.schema import TableSchema


class HeapSnapshot(StateSnapshot):
    """Implements `StateSnapshot`. The owner has `lock`; other processes read it by `HeapSnapshot(path)`."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        """Open a pinned version.

        Raises:
            StateError: the pin is gone.
        """
        self.path = path
        self._lock = lock
        try:
            header = parse((path / "header").read_bytes(), path / "header")
            self.version: int = header["version"]
            self.groups = KeyGroupRange(*header["groups"])
            self.opaque = {name: {} for name in header["opaque"]}
            self.opaque |= {name: read_opaque(path / "opaque" / name) for name in header["opaque_steps"]}
            tables = {
                name: HeapTableSnapshot(path, header, ordinal, name) for ordinal, name in enumerate(header["schemas"])
            }
        except FileNotFoundError as error:
            raise snapshot_gone_error(path) from error
        self.tables: Mapping[str, TableSnapshot] = tables

    def release(self) -> None:
        """Let the files of this version go; idempotent. A process that does not own the snapshot only closes it."""
        self.tables = {}
        if self._lock is not None:
            remove_pin(self.path)
            os.close(self._lock)
            self._lock = None


class HeapTableSnapshot:
    """Implements `TableSnapshot`."""

    def __init__(self, pin: Path, header: dict[str, Any], ordinal: int, name: str) -> None:
        self.schema = TableSchema.from_json(header["schemas"][name])
        counts, self.digests = load_record(header, name, self.schema, HeapCounts)
        self.rows = counts.live
        self._name, self._pin = name, pin
        layout = Layout(self.schema)
        images = _Images(pin, layout, ordinal, name, counts)
        self._records = _PinnedRecords(layout, pin / "tables" / name, counts, images)

    def scan(self, groups: KeyGroupRange) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield all rows of `groups` at this version, as `StateTable.scan` does.

        Raises:
            StateError: the snapshot is gone, or the rows' digests are not the version's; what was yielded is void.
        """
        sums = np.zeros_like(self.digests)
        for block, rows in scan_records(self._records, self.schema, groups):
            sums += group_sums(block["digest"], block["group"], len(sums))
            yield rows, block["group"].copy()
        own = slice(groups.start, groups.end)
        if not np.array_equal(sums[own], self.digests[own]):
            raise snapshot_gone_error(self._pin)


class _PinnedRecords(Records):
    """Records at the pinned version; they have no index."""

    def __init__(self, layout: Layout, home: Path, counts: HeapCounts, images: "_Images") -> None:
        self.layout, self.rows, self._images = layout, counts.rows, images
        self.arena = Arena(home, counts.entries)
        self._region = MappedArray(home / "rows", layout.dtype, held=counts.rows, scattered=True)

    def column(self, name: str) -> np.ndarray:
        """Return one field of all records, as a copy."""
        values = super().column(name).copy()
        self._images.find()
        ids = self._images.list_changed()
        if len(ids):
            block = np.empty(len(ids), self.layout.dtype)
            self._images.put(ids, block)
            values[ids] = block[name]
        return values

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Return copies of many records."""
        block = super().take(ids)
        self._images.find()
        self._images.put(ids, block)
        return block


class _Images:
    """The oldest before-image of each record that changed since the version, found in the pin's undo files."""

    def __init__(self, pin: Path, layout: Layout, ordinal: int, name: str, counts: HeapCounts) -> None:
        self._pin, self._layout, self._ordinal, self._name = pin, layout, ordinal, name
        self._generation = counts.generation
        self._number = np.zeros(counts.rows, np.uint32)
        """per record, the number of its image, counted from 1; 0 for none"""
        self._first: list[int] = []
        """the number of the first image of each block"""
        self._blocks: list[tuple[np.ndarray, np.ndarray]] = []
        """records of a frame, and which of them are the oldest images of their rows"""
        self._images = 0
        self._read: dict[Path, int] = {}
        """undo file -> bytes read; -1 if it is of a later generation"""

    def find(self) -> None:
        """Read the frames that were written since the last call.

        Raises:
            StateError: the pin is gone.
        """
        try:
            steps = later_steps(self._pin)
            for step, path in steps:
                at = self._read.get(path, 0)
                if at < 0:
                    continue
                for frame in read_frames(path, step, at):
                    self._read[path] = frame.end
                    if frame.table == HEADER:
                        header = parse(frame.records.tobytes(), path)
                        if header["tables"][self._name]["generation"] != self._generation:
                            self._read[path] = -1
                            break
                    elif frame.table == self._ordinal:
                        self._add(frame.ids, frame.records)
        except FileNotFoundError as error:
            raise snapshot_gone_error(self._pin) from error

    def _add(self, ids: np.ndarray, records: np.ndarray) -> None:
        which = np.flatnonzero(ids < len(self._number))
        which = which[self._number[ids[which]] == 0]
        if not len(which):
            return
        self._first.append(self._images + 1)
        self._blocks.append((np.frombuffer(records, self._layout.opaque), which))
        self._number[ids[which]] = np.arange(self._images + 1, self._images + 1 + len(which))
        self._images += len(which)

    def list_changed(self) -> np.ndarray:
        """Return the ids of records that have an image."""
        return np.flatnonzero(self._number)

    def put(self, ids: np.ndarray, block: np.ndarray) -> None:
        """Replace those records of a block that have an image by it."""
        number = self._number[ids]
        at = np.flatnonzero(number)
        owner = np.searchsorted(self._first, number[at], "right") - 1
        opaque = block.view(self._layout.opaque)
        for each in np.unique(owner):
            here = at[owner == each]
            records, which = self._blocks[each]
            opaque[here] = records[which[number[here] - self._first[each]]]
