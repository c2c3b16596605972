"""Seconds by phase, and bytes read."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PhaseTimer:
    """Adds up how long each phase of one piece of work took, in seconds, and what it read."""

    seconds: dict[str, float] = field(default_factory=dict)
    restored_bytes: int = 0
    """read from the store to restore state"""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time towards phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
