"""The program of a process that reads the rows of foreign table files (`scan_process`).

RocksDB is C++ code that decodes what it is given, so crafted files may end this process; that is what it is for. It
imports rocksdict and nothing else that takes time, has a limit of memory and of processor time, and gives back keys and
values as they are, for the other side to check. It writes nothing but what RocksDB itself does into the directory.

    <- a request: the least key, and the least one after the last, of `BOUND_BYTES` each
    -> frames: READY once, at the start; then for each request ROWS, as often as there are some, and DONE; or FAILED

The process ends with the other one, however that ends: it has the other end of a pipe that then closes, which Linux
tells by SIGIO.
"""

import fcntl
import gc
import os
import resource
import select
import signal
import struct
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from operator import lt
from typing import Any, BinaryIO

HEAD = struct.Struct("<cIQQ")
"""kind, pairs, bytes of all keys (of FAILED: of the text), bytes of all values; the lengths of the keys and of the
values (u32 each), the keys, and the values follow"""
READY, ROWS, DONE, FAILED = b"s", b"r", b"d", b"f"
BOUND_BYTES = 5
FRAME_BYTES = 4 << 20
"""of keys and values in a frame, about; more if one pair has more"""
_PAIRS = 1 << 10
"""pairs taken at once: with more, they leave the processor's cache"""
_OTHER_BYTES = 64 << 20
"""memory that does not depend on the files, above what the process has once it has imported all: frames, threads"""
_OPEN_FILES = 128
_TEXT_BYTES = 1 << 10


def main(packages: str, directory: str, memory_bytes: str, cpu_s: str, lifeline: str) -> None:
    """Answer requests until there are no more.

    Args:
        packages: where rocksdict is.
        directory: the files; opened at the first request.
        memory_bytes: what reading them may take.
        cpu_s: seconds of the processor that it may take.
        lifeline: the descriptor of the pipe that closes with the other process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for the other process to act on
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _end_with(int(lifeline))
    gc.disable()
    sys.path.append(packages)
    requests, out = sys.stdin.buffer, sys.stdout.buffer
    try:
        import rocksdict  # noqa: F401

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit(resource.RLIMIT_CPU, int(cpu_s))
        _limit(resource.RLIMIT_AS, _reserved_bytes() + _OTHER_BYTES + int(memory_bytes))
        _send(out, READY)
        database = None
        while len(bounds := requests.read(2 * BOUND_BYTES)) == 2 * BOUND_BYTES:
            database = database or _open(directory)
            _send_rows(out, database, bounds[:BOUND_BYTES], bounds[BOUND_BYTES:])
    except BaseException as error:  # rocksdict raises some that are not Exceptions
        text = str(error) if type(error) in (Exception, ValueError) else f"{type(error).__name__}: {error}"
        said = text.encode("utf-8", "replace")[:_TEXT_BYTES]
        _send(out, FAILED, [said], sizes=(len(said), 0))


def _end_with(lifeline: int) -> None:
    with suppress(OSError):  # not Linux: it ends when it writes or reads next
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(lifeline, 0)
    if closed.poll(0):  # before SIGIO was asked for
        sys.exit()


def _limit(what: int, most: int) -> None:
    soft, hard = resource.getrlimit(what)
    known = [each for each in (soft, hard, most) if each != resource.RLIM_INFINITY]
    resource.setrlimit(what, (min(known), hard))


def _reserved_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 1 << 40


def _open(directory: str) -> Any:
    from rocksdict import AccessType, BlockBasedOptions, Options, Rdict

    options = Options(raw_mode=True)
    options.set_paranoid_checks(True)
    options.set_max_open_files(_OPEN_FILES)
    options.set_max_file_opening_threads(1)
    options.set_skip_stats_update_on_db_open(True)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    tables = BlockBasedOptions()
    tables.disable_cache()  # each block is read once
    options.set_block_based_table_factory(tables)
    return Rdict(directory, options, {"default": options}, AccessType.read_only(False))


def _send_rows(out: BinaryIO, database: Any, start: bytes, end: bytes) -> None:
    from rocksdict import ReadOptions

    options = ReadOptions()
    options.set_iterate_upper_bound(end)
    pairs = database.items(from_key=start, read_opt=options)
    frame, wanted, last = _Frame(), 1, b""
    while some := list(islice(pairs, wanted)):
        keys = [last, *(key for key, _ in some)]
        if not all(map(lt, keys, keys[1:])):
            raise ValueError("their keys are not in order")
        last = keys[-1]
        size = frame.add(some)
        wanted = max(1, min(_PAIRS, FRAME_BYTES * len(some) // max(size, 1), 2 * wanted))
        if frame.bytes >= FRAME_BYTES:
            frame.send(out)
            frame = _Frame()
    _check_end(database.iter(options), last or start, bool(last))
    if frame.count:
        frame.send(out)
    _send(out, DONE)


def _check_end(position: Any, key: bytes, is_there: bool) -> None:
    """Raise what ended a scan after a key, or before the first; rocksdict's scans just end."""
    position.seek(key)
    if is_there:
        position.next()
    position.status()


class _Frame:
    """Pairs that are sent together."""

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self._lengths = array("I"), array("I")
        self._parts: tuple[list[bytes], list[bytes]] = [], []

    def add(self, pairs: list[tuple[bytes, bytes]]) -> int:
        """Add pairs, and return how many bytes they have."""
        before = self.bytes
        for strings, lengths, parts in zip(zip(*pairs, strict=True), self._lengths, self._parts, strict=True):
            lengths.extend(map(len, strings))
            parts.append(b"".join(strings))
            self.bytes += len(parts[-1])
        self.count += len(pairs)
        return self.bytes - before

    def send(self, out: BinaryIO) -> None:
        """Send them."""
        (key_lengths, value_lengths), (keys, values) = self._lengths, self._parts
        parts = [key_lengths.tobytes(), value_lengths.tobytes(), *keys, *values]
        _send(out, ROWS, parts, self.count, (sum(map(len, keys)), sum(map(len, values))))


def _send(
    out: BinaryIO, kind: bytes, parts: Sequence[bytes] = (), count: int = 0, sizes: tuple[int, int] = (0, 0)
) -> None:
    out.write(HEAD.pack(kind, count, *sizes))
    for part in parts:
        out.write(part)
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
