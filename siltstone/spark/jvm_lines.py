"""Log what the JVM and its Python workers write to standard error as events of the command line.

Otherwise their lines would break a spinner, and would not be JSON with --log-format json.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from siltstone.log import configuration, relay_line

_STANDARD_ERROR = 2
_OF_NO_USE = "WARNING: Using incubator modules:"
"""a warning that every JVM of Spark prints at its start"""


@contextmanager
def log_jvm_lines() -> Iterator[None]:
    """Log the standard error of programs started in this block, for as long as they live.

    Does nothing if Siltstone's logging is not configured in this process.
    """
    if configuration() is None:
        yield
        return
    ours, theirs = os.pipe()
    before = os.dup(_STANDARD_ERROR)
    os.dup2(theirs, _STANDARD_ERROR)
    os.close(theirs)
    threading.Thread(target=_pass_on, args=(ours,), name="siltstone-jvm-lines", daemon=True).start()
    try:
        yield
    finally:
        os.dup2(before, _STANDARD_ERROR)
        os.close(before)


def _pass_on(descriptor: int) -> None:
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip() and not line.startswith(_OF_NO_USE):
                relay_line(line.rstrip())
