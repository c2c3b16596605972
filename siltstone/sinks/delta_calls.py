"""Call delta-rs from any thread, and end the process well.

delta-rs runs without Python's lock and takes it again when a call returns. If the interpreter ends meanwhile, Python
ends the thread that asks for the lock by unwinding its stack, through frames of Rust, which kills the process
(SIGSEGV or SIGABRT, after its work was done). A run delivers in a daemon thread, so that it may well be in a call then.
Therefore the interpreter waits, before it ends, for the calls in progress, and no other begins.
"""

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from siltstone.errors import StateError, Unreachable

_changed = threading.Condition()
_calls = 0
_ending = False


@contextmanager
def delta_call(what: str) -> Iterator[None]:
    """Hold the interpreter's end off while the block calls delta-rs, and translate its errors.

    Once the interpreter ends, the block never begins: such a thread stops here and dies with the process.

    Args:
        what: the table, as errors call it.

    Raises:
        Unreachable: the store does not answer, or refuses.
        StateError: the table's log is damaged, or delta-rs cannot read it.
        CommitFailedError, TableNotFoundError: as delta-rs raises them.
    """
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

    with _in_progress():
        try:
            yield
        except (CommitFailedError, TableNotFoundError):
            raise
        except OSError as error:
            raise Unreachable(
                f"{what}: {first_line(error)}", advice="check that its store answers, and try again"
            ) from None
        except DeltaError as error:
            raise StateError(f"{what}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type; delta-rs adds lines about its own code."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _in_progress() -> Iterator[None]:
    global _calls  # noqa: PLW0603 - of the process, which ends once
    with _changed:
        while _ending:
            _changed.wait()
        _calls += 1
    try:
        yield
    finally:
        with _changed:
            _calls -= 1
            _changed.notify_all()


def _await_calls() -> None:
    """Let no call begin, and wait for those in progress."""
    global _ending  # noqa: PLW0603 - of the process, which ends once
    with _changed:
        _ending = True
        while _calls:
            _changed.wait()


def _forget() -> None:
    """Begin without calls in a forked child, where the threads of the parent are not."""
    global _changed, _calls
    _changed, _calls = threading.Condition(), 0


atexit.register(_await_calls)
os.register_at_fork(after_in_child=_forget)
