"""Sample the CPU seconds of processes and all their descendants from /proc, also of those that have ended (Linux only).

A process that its parent waits for leaves its time to the parent (`cutime` and `cstime` of proc(5)), exactly. One whose
parent ignores SIGCHLD does not: the kernel drops its time. PySpark's daemon ignores SIGCHLD, so this is every Python
worker. Such a process counts as last seen: what it used after the last sample before its end, at most
`sampling.PERIOD_S`, is missing.
"""

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from benchmarks.sampling import PROC, sampled

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_Key = tuple[int, int]
"""process id and start time: ids are used again"""


@dataclass(frozen=True)
class _Seen:
    parent: int
    started: int
    ticks: int
    """used by the process and by those of its children that it has waited for"""


@dataclass(frozen=True)
class _Known:
    seen: _Seen
    parent: _Key | None
    """None if the parent is not one of these processes"""
    ignores_children: bool


@dataclass
class CpuSeconds:
    """CPU seconds, user and system, of some processes and their descendants since the first sample.

    Args:
        roots: ids of the processes.

    Attributes:
        samples: (seconds since the epoch, CPU seconds), in order; empty without /proc.
    """

    roots: Collection[int]
    samples: list[tuple[float, float]] = field(default_factory=list)
    _known: dict[_Key, _Known] = field(default_factory=dict)
    _lost_ticks: int = 0
    """used by processes that have ended and left their time to nobody"""

    def take(self) -> None:
        """Take one sample.

        Parents are read before their children: a child that ends in between is missing from this sample, until the
        next one finds its time with the parent. It is never counted twice.
        """
        living: dict[_Key, _Known] = {}
        for pid, parent in self._descend(_read_all()):
            if seen := _read(pid):
                # An orphan's parent is now one that adopts orphans, most often none of these processes.
                parent_key = next((key for key in living if key[0] == parent), None)
                living[pid, seen.started] = _Known(seen, parent_key, _ignores_children(pid))
        for key, known in self._known.items():
            if key not in living:
                parent = known.parent and (living.get(known.parent) or self._known.get(known.parent))
                if not parent or parent.ignores_children:
                    self._lost_ticks += known.seen.ticks
        self._known = living
        total = (self._lost_ticks + sum(known.seen.ticks for known in living.values())) / _TICKS_PER_S
        self.samples.append((time.time(), max(total, self.samples[-1][1] if self.samples else 0.0)))

    def between(self, began: float, ended: float) -> float | None:
        """Return the CPU seconds used between two times, in seconds since the epoch; None if nothing was sampled.

        Raises:
            ValueError: the samples do not cover them.
        """
        if not self.samples:
            return None
        times, seconds = zip(*self.samples, strict=True)
        if not times[0] <= began <= ended <= times[-1]:
            raise ValueError(f"sampled from {times[0]} to {times[-1]}, not from {began} to {ended}")
        first, last = np.interp([began, ended], times, seconds)
        return float(last - first)

    def _descend(self, found: dict[int, _Seen]) -> Iterator[tuple[int, int]]:
        """Yield the id and the parent's of each process, parents first, and orphans last."""
        children: dict[int, list[int]] = {}
        for pid, seen in found.items():
            children.setdefault(seen.parent, []).append(pid)
        orphans = [pid for pid, started in self._known if pid in found and found[pid].started == started]
        done: set[int] = set()
        for root in [*self.roots, *orphans]:
            waiting = [root] if root in found else []
            while waiting:
                pid = waiting.pop()
                if pid not in done:
                    done.add(pid)
                    waiting += children.get(pid, [])
                    yield pid, found[pid].parent


@contextmanager
def watch_cpu(*roots: int) -> Iterator[CpuSeconds]:
    """Sample processes and their descendants until the block ends."""
    cpu = CpuSeconds(roots)
    with sampled(cpu.take):
        yield cpu


def _read_all() -> dict[int, _Seen]:
    pids = [int(name) for name in os.listdir(PROC) if name.isdigit()]
    return {pid: seen for pid in pids if (seen := _read(pid))}


def _read(pid: int) -> _Seen | None:
    """Read one process's `stat`; None if it is gone."""
    with suppress(OSError):
        # The name, in brackets, may hold anything; `state` follows it.
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return _Seen(int(fields[1]), int(fields[19]), sum(int(each) for each in fields[11:15]))
    return None


def _ignores_children(pid: int) -> bool:
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)
    return False
