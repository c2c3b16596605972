"""Measure seconds per phase of a piece of work, and the bytes it read."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PhaseTimer:
    """Adds up the seconds of each phase of one piece of work, and the bytes it read."""

    seconds: dict[str, float] = field(default_factory=dict)
    restored_bytes: int = 0
    """bytes read from the store to restore state"""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
