"""Work that a forked child does until it is killed at a chosen moment: a statement, a commit, or a change of a file."""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Engine, event

FILES = frozenset({"fcntl.flock", "os.link", "os.mkdir", "os.remove", "os.rename", "sqlite3.connect"})
"""audit events (PEP 578) that are moments, too"""
_LIMIT_S = 300
"""a child that works longer shows where its threads are, and ends"""

Made = TypeVar("Made")


def killed_at(work: Callable[[], object], moment: int) -> int:
    """Work in a child, which is killed right before its moment of that number; -9, or how many it had."""
    return prepared_and_killed_at(lambda: None, lambda _: work(), moment)


def prepared_and_killed_at(prepare: Callable[[], Made], work: Callable[[Made], object], moment: int) -> int:
    """As `killed_at`, in a child that has prepared its work before; moments are counted from then on."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
        had, made = 0, prepare()

        def count(*_: object) -> None:
            nonlocal had
            had += 1
            if had == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(name: str, _: tuple[Any, ...]) -> None:
            if name in FILES:
                count()

        event.listen(Engine, "before_cursor_execute", count)
        event.listen(Engine, "commit", count)
        sys.addaudithook(audit)
        try:
            work(made)
            os.write(write, str(had).encode())
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    told = os.read(read, 100)
    os.close(read)
    return -signal.SIGKILL if os.WIFSIGNALED(status) else int(told)


@contextmanager
def frozen_at(work: Callable[[], object], name: str) -> Iterator[None]:
    """Let a child work up to its first audit event of that name, where it stands still; killed at the end."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True)

        def audit(found: str, _: tuple[Any, ...]) -> None:
            if found == name:
                os.kill(os.getpid(), signal.SIGSTOP)

        sys.addaudithook(audit)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "it ended before that"
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
