"""What the JVM and its Python workers write to standard error, shown among the events of the command line.

Without this it would fall into the middle of a spinner, and would not be JSON where all lines are to be.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from siltstone.log import configured, pass_on

_STANDARD_ERROR = 2
_OF_NO_USE = "WARNING: Using incubator modules:"
"""how every JVM begins that Spark starts"""


@contextmanager
def shown_jvm_lines() -> Iterator[None]:
    """Show what the programs write that are started in this block, for as long as they live; where the program logs as
    it likes, they write to its own standard error."""
    if configured() is None:
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
                pass_on(line.rstrip())
