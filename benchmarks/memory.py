"""Sample the peak memory of a process and its descendants, by role, from /proc while they run (Linux only)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from benchmarks.sampling import PROC, sampled

_ROLES = {"java": "jvm", "python": "worker"}


@dataclass
class Peak:
    """Most bytes of one process in each role: `driver` (the Python process itself), `jvm`, `worker`.

    `anonymous` leaves out pages of files, such as memory-mapped working state, which the kernel can drop at any time.
    `together` is the most anonymous bytes of all processes at one time; memory that processes share after a fork counts
    in each of them. Empty without /proc.
    """

    resident: dict[str, int] = field(default_factory=dict)
    anonymous: dict[str, int] = field(default_factory=dict)
    together: int = 0

    def take(self, root: int) -> None:
        """Take one sample."""
        parents: dict[int, int] = {}
        seen: dict[int, tuple[str, int, int]] = {}
        for entry in PROC.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
            except OSError:  # it has ended
                continue
            if "VmRSS" in status:
                pid = int(entry.name)
                parents[pid] = int(status["PPid"])
                seen[pid] = status["Name"].strip(), _bytes(status["VmRSS"]), _bytes(status["RssAnon"])
        together = 0
        for pid, (name, resident, anonymous) in seen.items():
            if pid == root or _descends(pid, root, parents):
                together += anonymous
                role = "driver" if pid == root else _ROLES.get(name[:6])
                if role is None:  # a shell, or a process that the JVM is just starting
                    continue
                self.resident[role] = max(self.resident.get(role, 0), resident)
                self.anonymous[role] = max(self.anonymous.get(role, 0), anonymous)
        self.together = max(self.together, together)


@contextmanager
def watch_memory(root: int) -> Iterator[Peak]:
    """Sample the process `root` and its descendants until the block ends."""
    peak = Peak()
    with sampled(partial(peak.take, root)):
        yield peak


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == root:
            return True
    return False


def _bytes(kilobytes: str) -> int:
    return int(kilobytes.split(maxsplit=1)[0]) * 1024
