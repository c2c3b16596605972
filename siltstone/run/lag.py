"""How far a run is behind its sources, and when it will have caught up.

Rows wait after an outage or a long restore (US 9471438 bounds restores because these rows overwhelm source and
buffers). A run tells how many while there are more than one further micro-batch takes. The source's own limit on a
micro-batch, such as Kafka's `maxOffsetsPerTrigger`, keeps steps small meanwhile (docs/adr/0081).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from siltstone.log import get_logger

TELL_S = 10.0
"""seconds between two events that tell how far the run is behind"""
_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Backlog:
    """What sources tell at the end of a micro-batch.

    Attributes:
        batch: the number of the micro-batch.
        rows: that wait in them.
        batch_rows: that it had.
    """

    batch: int
    rows: int
    batch_rows: int


@dataclass(frozen=True)
class Lag:
    """How far a run is behind.

    Attributes:
        rows: that wait.
        rate: by how many rows per second they have become fewer since it began to be behind; None at first.
        left_s: seconds until none is left at this rate; None if that is not known, or never.
    """

    rows: int
    rate: float | None = None
    left_s: float | None = None


class LagWatch:
    """Notes how far a run is behind, and tells it in log events. One thread refreshes it; any may read `lag`.

    Args:
        now_s: a clock in seconds that never goes back.
    """

    def __init__(self, stream: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now_s = stream, now_s
        self._began: tuple[float, int] | None = None
        """when the run began to be behind, and by how many rows"""
        self._asked_s: float | None = None
        self._newest: Backlog | None = None
        self._lag: Lag | None = None

    @property
    def lag(self) -> Lag | None:
        """As of the newest micro-batch that was asked for; None if no source tells."""
        return self._lag

    def refresh(self, read: Callable[[], Backlog | None]) -> None:
        """Ask, if it is time to, and tell how far the run is behind, or that it has caught up.

        Args:
            read: returns the newest that the sources tell; None if they tell nothing.
        """
        now_s = self._now_s()
        if self._asked_s is not None and now_s < self._asked_s + TELL_S:
            return
        self._asked_s = now_s
        found = read()
        if found is None or found == self._newest:
            return
        self._newest = found
        if found.rows <= found.batch_rows:
            if self._began is not None:
                _LOG.info("caught up", stream=self._stream, seconds=round(now_s - self._began[0], 1))
            self._began, self._lag = None, Lag(found.rows)
            return
        self._began = self._began or (now_s, found.rows)
        since_s, before = now_s - self._began[0], self._began[1]
        rate = (before - found.rows) / since_s if since_s else None
        left_s = found.rows / rate if rate is not None and rate > 0 else None
        self._lag = Lag(found.rows, rate, left_s)
        _LOG.info(
            "catching up",
            stream=self._stream,
            rows_behind=found.rows,
            **({} if rate is None else {"rows_per_second": round(rate)}),
            **({} if left_s is None else {"seconds_left": round(left_s)}),
        )
