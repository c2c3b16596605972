"""A process that decodes what it is sent, one input after the other, so that its death is seen by another one.

    python -m tests.fuzz.child DECODER SECONDS

It reads and writes frames: a length of 4 bytes, then that many bytes. Its answer to an input is empty if all was well,
else what was wrong. An input may take some seconds of this process's own time, and then the signal that ends it tells
of a hang; a machine that is busy makes no difference.
"""

import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.decoders import Decoder

MEMORY_BYTES = 256 << 20
"""what one input may take above what the process takes already"""
CPU_S = 20
_LENGTH = struct.Struct("<I")
_ADDRESSES_BYTES = 4 << 30
"""and what it may reserve, so that a wrong decoder does not take the machine along"""
_ROOT = Path(__file__).parents[2]


class Child:
    """The other end: starts a process, and another one when it has died."""

    def __init__(self, decoder: str, cpu_s: float = CPU_S) -> None:
        self._decoder, self._cpu_s = decoder, cpu_s
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, data: bytes) -> str:
        """What was wrong with decoding `data`; empty if nothing was."""
        if self._process is None:
            command = [sys.executable, "-m", "tests.fuzz.child", self._decoder, str(self._cpu_s)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            _write(self._process.stdin, data)
            return _read(self._process.stdout).decode()
        except (BrokenPipeError, EOFError):
            code, self._process = self._process.wait(), None
            if code == -signal.SIGPROF:
                return f"it took more than {self._cpu_s} s of the processor"
            return f"the process ended: {signal.Signals(-code).name if code < 0 else f'exit {code}'}"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def _read(file: IO[bytes]) -> bytes:
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    [size] = _LENGTH.unpack(head)
    return file.read(size)


def _peak_bytes() -> int:
    """The most memory that this process has had; what `getrusage` says begins with its parent's."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10
    except (OSError, IndexError):
        pass
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _reserved_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _judge(decoder: "Decoder", data: bytes, cpu_s: float) -> str:
    """What was wrong with decoding `data`."""
    before = _peak_bytes()
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        decoder.decode(data)
    except decoder.errors:
        pass
    except BaseException as error:
        return f"undocumented {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    more = _peak_bytes() - before
    return f"it took {more >> 20} MB of memory" if more > MEMORY_BYTES else ""


def main(name: str, cpu_s: float) -> None:
    """Answer until there is no more input."""
    from tests.fuzz.decoders import DECODERS, TRAPS
    from tests.fuzz.seeds import CORPUS

    decoder = {**DECODERS, **TRAPS}[name]
    for seed in sorted((CORPUS / name).glob("seed-*")):
        decoder.decode(seed.read_bytes())  # imports what is imported late, and fills pools
    if reserved := _reserved_bytes():
        most = reserved + _ADDRESSES_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while True:
        try:
            data = _read(sys.stdin.buffer)
        except EOFError:
            return
        _write(sys.stdout.buffer, _judge(decoder, data, cpu_s).encode())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
