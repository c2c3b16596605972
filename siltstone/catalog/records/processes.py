"""Find out whether a process of this machine has died, so that its leases do not have to expire (Linux).

A process is identified by the boot of its machine, its host name, its PID namespace, its PID, and its start time in
ticks since that boot. Only processes of the same boot, host and namespace can be judged from here: another container
uses the same PIDs for other processes.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_DEAD = frozenset("ZX")
_STATE, _THREADS, _STARTED = 0, 17, 19
"""fields of /proc/PID/stat after the command's name"""


def this_process_identity() -> str | None:
    """Return an identity of this process that no other process has or had; None if the system does not provide it."""
    try:
        return f"{_namespace()} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    except (OSError, IndexError):
        return None


def is_known_dead(identity: str | None) -> bool:
    """Whether the process has certainly died; False if it lives, or if that is not known here."""
    try:
        namespace, pid, started = (identity or "").rsplit(" ", 2)
        if namespace != _namespace():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process has this PID
        pass
    except (OSError, ValueError, OverflowError):
        return False
    with suppress(OSError, IndexError, ValueError):  # /proc may hide it
        stat = _stat(int(pid))
        return _has_ended(stat) or stat[_STARTED] != started
    return False


def is_known_gone(who: str) -> bool:
    """Whether `host:pid`, a process's name for people, is of this host, and no process has that PID.

    Less certain than `is_known_dead`: another container may have this host's name, and PIDs are used again.
    """
    host, _, pid = who.rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    with suppress(OSError, IndexError, ValueError):
        return _has_ended(_stat(int(pid)))
    return False


def _has_ended(stat: list[str]) -> bool:
    """Whether a listed process has ended and only waits for its parent to collect it."""
    return stat[_STATE] in _DEAD and int(stat[_THREADS]) <= 1


def _namespace() -> str:
    """Return the boot, the host, and the namespaces of PIDs and start times."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(_PROC / "self/ns" / name) for name in ("pid", "time") if (_PROC / "self/ns" / name).exists()]
    return " ".join([boot, socket.gethostname(), *spaces])


def _stat(pid: int) -> list[str]:
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
