"""A driver whose time of day jumps, within what is not refused."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

from siltstone.run import stream_clock

OFFSET_S = 240.0
"""how far it is off the machine's at most; 300 are refused"""


@contextmanager
def jumping_clock(draw: Random, lowest_s: float = -OFFSET_S, highest_s: float = OFFSET_S) -> Iterator[None]:
    """Let the driver's time of day be off by between `lowest_s` and `highest_s`, and jump now and then."""
    off_s = draw.uniform(lowest_s, highest_s)

    def time_ns() -> int:
        nonlocal off_s
        if draw.random() < 0.05:
            off_s = draw.uniform(lowest_s, highest_s)
        return time.time_ns() + int(off_s * 1e9)

    with patch.object(stream_clock, "time", SimpleNamespace(time_ns=time_ns)):
        yield
