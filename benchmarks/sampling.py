"""Take samples of processes from /proc while a block runs (Linux only)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROC = Path("/proc")
PERIOD_S = 0.1


@contextmanager
def sampled(take: Callable[[], None]) -> Iterator[None]:
    """Call `take` on a thread at the beginning of the block, every `PERIOD_S`, and at its end; never without /proc."""
    done = threading.Event()

    def watch() -> None:
        take()
        while not done.wait(PERIOD_S):
            take()
        take()

    thread = threading.Thread(target=watch, daemon=True)
    if PROC.is_dir():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
