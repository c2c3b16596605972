"""Tells whether a process of this machine has died, so that nobody waits for the leases that it left (Linux).

A process is known by the boot of its machine, its host name, its PID namespace, its PID, and when it was started, in
ticks of that boot. Only one of the same boot, host and namespace can be judged from here: another container counts
other processes under the same PIDs.
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
    """What tells this process from any other there is or was; None where the system does not say."""
    try:
        return f"{_namespace()} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    except (OSError, IndexError):
        return None


def is_known_dead(identity: str | None) -> bool:
    """Whether the process is certain to have died; False where it lives, or that cannot be told from here."""
    try:
        namespace, pid, started = (identity or "").rsplit(" ", 2)
        if namespace != _namespace():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # there is one of that PID, and it is another user's
        pass
    except (OSError, ValueError, OverflowError):
        return False
    with suppress(OSError, IndexError, ValueError):  # /proc may hide it
        stat = _stat(int(pid))
        return _ended(stat) or stat[_STARTED] != started
    return False


def is_known_gone(who: str) -> bool:
    """Whether `host:pid`, as people are told of a process, is one of this host, and there is none of that PID.

    Less sure than `is_known_dead`: another container may bear this host's name, and a PID may be used again.
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
        return _ended(_stat(int(pid)))
    return False


def _ended(stat: list[str]) -> bool:
    """Of a process that is listed: nobody has asked yet how it ended."""
    return stat[_STATE] in _DEAD and int(stat[_THREADS]) <= 1


def _namespace() -> str:
    """The boot, the host, and in which namespaces PIDs and times of starting mean what they mean here."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(_PROC / "self/ns" / name) for name in ("pid", "time") if (_PROC / "self/ns" / name).exists()]
    return " ".join([boot, socket.gethostname(), *spaces])


def _stat(pid: int) -> list[str]:
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
