"""A process of its own that reads foreign table files, so that crafted ones end it and nothing else.

`scan_program` runs in it. What comes back is pairs of keys and values, which `coding` checks before it decodes them.
"""

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import rocksdict

from siltstone.decoding import decoded_bytes_max
from siltstone.errors import Unreachable
from siltstone.state.backends.rocksdb import scan_program
from siltstone.state.backends.rocksdb.database import FULL
from siltstone.state.backends.rocksdb.packing import Packed
from siltstone.state.backends.rocksdb.scan_program import DONE, FAILED, HEAD, READY, ROWS

_CPU_S = 60
_BYTES_PER_CPU_S = 1 << 20
"""seconds of the processor: a hundred times what reading takes"""
_OWN_DEATHS = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP", "SIGXCPU"})
"""signals by which bytes end a process; others come from outside"""
_LENGTH = np.dtype("<u4")
_CHECK_MACHINE = "check this machine's disk and memory, and try again"


class ScanProcess:
    """Starts the process at once, so that it is ready when the files are. Close it after use.

    Args:
        directory: of the files, which need not be there before the first scan.
        stored_bytes: how large they are; reading them may take memory in proportion (`siltstone.decoding`).

    Raises:
        Unreachable: it cannot be started.
    """

    def __init__(self, directory: Path, stored_bytes: int) -> None:
        self._most = decoded_bytes_max(stored_bytes)
        self._cpu_s = _CPU_S + stored_bytes // _BYTES_PER_CPU_S
        self._is_ready = False
        packages = str(Path(rocksdict.__file__).parents[1])
        read, self._lifeline = os.pipe()
        limits = map(str, (self._most, self._cpu_s, read))
        # The source, because the module may be in a zip file. No file of the user's directories or environment is read,
        # and the environment's secrets stay here.
        command = [sys.executable, "-I", "-S", "-c", inspect.getsource(scan_program)]
        own = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [*command, packages, str(directory.absolute()), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(read,),
                cwd="/",
                env={"MALLOC_ARENA_MAX": "1", **own},
            )
        except OSError as error:
            os.close(self._lifeline)
            raise Unreachable(
                f"cannot start a process to read files of RocksDB: {error}", advice=_CHECK_MACHINE
            ) from error
        finally:
            os.close(read)

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[Packed, Packed]]:
        """Yield keys from `start` on and before `end`, and their values; consume it whole before the next.

        Raises:
            ValueError: the files cannot be read, or ended the process, or take more memory than their length pays for.
            Unreachable: something else ended it, or the disk is full.
        """
        requests = self._process.stdin
        assert requests is not None
        left = self._most
        try:
            requests.write(start + end)
            requests.flush()
        except BrokenPipeError:
            raise self._death_error() from None
        while True:
            kind, count, key_bytes, value_bytes = HEAD.unpack(self._read(HEAD.size).tobytes())
            size = key_bytes + value_bytes + 2 * count * _LENGTH.itemsize
            left -= size
            if left < 0:
                raise ValueError("their rows take more memory than their length pays for")
            if kind == READY:
                self._is_ready = True
            elif kind == ROWS:
                yield unpack_pairs(self._read(size), count, key_bytes)
            elif kind == FAILED:
                raise self._failure_error(self._read(key_bytes))
            elif kind == DONE:
                return
            else:
                raise ValueError("the process that reads them sent something else")

    def _read(self, size: int) -> np.ndarray:
        """Read some bytes (uint8[size])."""
        answers, data = self._process.stdout, np.empty(size, np.uint8)
        assert answers is not None
        if answers.readinto(data) < size:  # pyright: ignore[reportAttributeAccessIssue]
            raise self._death_error()
        return data

    def _failure_error(self, text: np.ndarray) -> Exception:
        said = text.tobytes().decode("utf-8", "replace").split("\n", 1)[0]
        if not self._is_ready or any(words in said.lower() for words in FULL):
            return Unreachable(f"cannot read files of RocksDB: {said}", advice=_CHECK_MACHINE)
        return ValueError(said)

    def _death_error(self) -> Exception:
        code = self._process.wait()
        how = _signal_name(-code) if code < 0 else f"exit {code}"
        if not self._is_ready:
            return Unreachable(
                f"{sys.executable} did not start to read files of RocksDB ({how})", advice=_CHECK_MACHINE
            )
        if how == "SIGXCPU":
            return ValueError(f"reading them takes more than {self._cpu_s} s of the processor")
        if how in _OWN_DEATHS:
            return ValueError(f"reading them ended a process ({how})")
        return Unreachable(f"the process that read files of RocksDB was ended ({how}): free some memory, and try again")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
        os.close(self._lifeline)


def unpack_pairs(data: np.ndarray, count: int, key_bytes: int) -> tuple[Packed, Packed]:
    """Return the keys and the values of a frame (uint8[n], what follows `scan_program.HEAD`).

    Raises:
        ValueError: its lengths do not add up.
    """
    start = 2 * count * _LENGTH.itemsize
    if not count or start + key_bytes > len(data):
        raise ValueError("a frame is cut")
    lengths = data[:start].view(_LENGTH)
    parts = lengths[:count], data[start : start + key_bytes], lengths[count:], data[start + key_bytes :]
    return _strings(*parts[:2]), _strings(*parts[2:])


def _strings(lengths: np.ndarray, data: np.ndarray) -> Packed:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] != len(data):
        raise ValueError("the lengths of a frame do not add up")
    return pa.Array.from_buffers(pa.large_binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
