"""A growable array in a memory-mapped file, or in plain memory."""

import ctypes
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

import numpy as np

from siltstone.errors import StateError, Unreachable
from siltstone.store.private import open_private

_GRAIN_BYTES = 1 << 16
_GROWTH = 1 / 16
_MAPPED_BYTES = 1 << 30
_MAPPED_FACTOR = 16
"""length of a mapping in bytes: at least, and per byte of its file"""
_KEPT_MAPPINGS = 256
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python's mmap does not name it"""
_MOST_PAGES = 2
"""items per page from which on random writes touch nearly all pages"""
_POPULATED_BYTES = 4 << 20
"""bytes made writable in one call, since other threads of the process cannot map memory meanwhile"""

# A subtask opens and closes its files at every step, and the first write to each page of a new mapping costs a
# page fault: with random keys nearly one per key, and most of the step's time. So mappings are kept, and they are far
# longer than their files, which grow into them. A mapped file keeps its inode, so a (device, inode) found here is the
# same file.
_mappings: OrderedDict[tuple[int, int], tuple[Path, ctypes.Array[ctypes.c_ubyte]]] = OrderedDict()
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedArray:
    """Fixed-width items that survive the process once written, because the page cache does.

    `items` is the whole capacity, zeros where nothing was written; the owner knows how many items are used. A view
    of `items` taken before `reserve` still shows the same memory of a file afterwards.
    """

    def __init__(self, path: Path | None, dtype: np.dtype | type, *, held: int = 0, scattered: bool = False) -> None:
        """Open the file, or make it; `held` items must be in it already.

        Args:
            path: the file; None for plain memory.
            dtype: the type of an item.
            held: minimum number of items in the file.
            scattered: whether items are written in random order: the kernel then uses small pages, so that a
                small change does not write megabytes to the disk.

        Raises:
            StateError: the file is missing or too short for `held` items.
        """
        self.path = path
        self.dtype = np.dtype(dtype)
        self.items: np.ndarray = np.zeros(0, self.dtype)
        self._scattered = scattered
        self._ahead: threading.Thread | None = None
        if path is not None and path.exists():
            self._map()
        if len(self.items) < held:
            raise StateError(f"{path} is missing or cut short", advice="delete this working state and restore it")
        self.reserve(1)

    def reserve(self, count: int) -> None:
        """Make room for `count` items in total, and some more.

        Raises:
            Unreachable: the disk is full or the file cannot be written.
        """
        if count <= len(self.items):
            return
        growth = _GROWTH if self.path else 0.5
        size = max(count, int(len(self.items) * (1 + growth))) * self.dtype.itemsize
        size = -(-size // _GRAIN_BYTES) * _GRAIN_BYTES
        if self.path is None:
            grown = np.zeros(size // self.dtype.itemsize, self.dtype)
            raw = np.dtype((np.void, self.dtype.itemsize))
            grown.view(raw)[: len(self.items)] = self.items.view(raw)
            self.items = grown
            return
        try:
            _grow_file(self.path, size)
        except OSError as error:
            raise Unreachable(f"cannot grow {self.path}: {error.strerror}; free some space") from error
        self._map()

    def expect_writes(self, count: int, *, ahead: bool = False) -> None:
        """Tell the kernel that `count` items will be written in random order, if these are on nearly all pages.

        It then makes the pages writable at once. Otherwise each costs a page fault, in a new mapping and again whenever
        the kernel has written the page to the disk: twice the time, measured on ext4.

        Args:
            count: items that will be written at least.
            ahead: do not wait. The next call does, or `close`.
        """
        self._wait_for_pages()
        if self.path and len(self.items) and count * mmap.PAGESIZE >= _MOST_PAGES * self.items.nbytes:
            if ahead:
                self._ahead = _begin_to_populate(self.items)
            else:
                _populate(self.items)

    def _wait_for_pages(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead:
            ahead.join()

    def _map(self) -> None:
        assert self.path is not None
        mapping, size = _mapping(self.path, self._scattered)
        if mapping is not None:
            self.items = np.frombuffer(memoryview(mapping), self.dtype, size // self.dtype.itemsize)

    def close(self) -> None:
        """Release the items; what was written stays in the file."""
        self._wait_for_pages()
        self.items = np.zeros(0, self.dtype)


def _begin_to_populate(items: np.ndarray) -> threading.Thread | None:
    """Populate in a thread; not at all if none can start, because it is a hint."""
    thread = threading.Thread(target=_populate, args=[items], daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _populate(items: np.ndarray) -> None:
    """Make the pages of mapped items writable; the items stay as they are."""
    first, end = items.ctypes.data, items.ctypes.data + items.nbytes
    for at in range(first, end, _POPULATED_BYTES):
        # A hint: an older kernel refuses it, and then each page has its fault.
        _libc.madvise(at, min(_POPULATED_BYTES, end - at), _MADV_POPULATE_WRITE)


def _grow_file(path: Path, size: int) -> None:
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        before = os.fstat(descriptor).st_size
        # Blocks are allocated now, because writing to a mapping on a full disk raises SIGBUS.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, before, size - before)
        else:
            os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def _mapping(path: Path, scattered: bool) -> tuple[ctypes.Array[ctypes.c_ubyte] | None, int]:
    """Map a file, and what it may grow to; return the mapping, None if it is empty, and its length in bytes.

    Memory beyond the end of the file must not be touched.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        status = os.fstat(descriptor)
        if status.st_size == 0:
            return None, 0
        file = (status.st_dev, status.st_ino)
        _, known = _mappings.pop(file, (path, None))
        if known is None or len(known) < status.st_size:
            known = _map_descriptor(descriptor, max(_MAPPED_BYTES, _MAPPED_FACTOR * status.st_size), scattered)
    finally:
        os.close(descriptor)
    _mappings[file] = path, known
    if len(_mappings) > _KEPT_MAPPINGS:
        _mappings.popitem(last=False)
    return known, status.st_size


def _map_descriptor(descriptor: int, length: int, scattered: bool) -> ctypes.Array[ctypes.c_ubyte]:
    """Map an open file by mmap(2), since Python's own refuses to map more than the file has."""
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise Unreachable(f"cannot map a file of working state: {os.strerror(ctypes.get_errno())}; free some memory")
    if scattered and hasattr(mmap, "MADV_RANDOM"):
        _libc.madvise(address, length, mmap.MADV_RANDOM)
    mapping = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(mapping, _libc.munmap, address, length)
    return mapping


def forget_removed_files() -> None:
    """Release mappings of deleted files, which would otherwise keep their disk space."""
    for file, (path, _) in list(_mappings.items()):
        try:
            status = path.stat()
            there = (status.st_dev, status.st_ino) == file
        except OSError:
            there = False
        if not there:
            _mappings.pop(file, None)
