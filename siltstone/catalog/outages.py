"""Wait for an unreachable catalog, for example during a database failover, and retry failed calls.

Every public method of the catalog is one call, retried as a whole (`Transactions`). That is safe for writes, too: a
transaction that failed before its COMMIT did nothing, and if a COMMIT got no answer, its outcome is looked up first
(`receipts`).
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from siltstone.errors import Unreachable
from siltstone.log import get_logger
from siltstone.store.retry import RetryPolicy

_LOG = get_logger(__name__)
Answer = TypeVar("Answer")


class Outages:
    """The outages of one catalog, shared by the calls of all threads.

    Once a call has waited `timeout_s` in vain, later calls make one attempt each until one of them succeeds: a process
    that cannot continue ends after one wait, not after one for each call that it still makes.

    Args:
        label: the catalog's name for people.
        timeout_s: seconds after which no further attempt of a call begins; 0 means one attempt.
    """

    def __init__(self, label: str, timeout_s: float) -> None:
        self._label, self._timeout_s = label, timeout_s
        self._patient = RetryPolicy(attempts=sys.maxsize, wait_s=0.1, wait_max_s=5.0, total_s=timeout_s)
        self._impatient = replace(self._patient, kind="none")
        self._given_up = timeout_s <= 0
        self._local = threading.local()
        self._away_since: float | None = None
        """when the first call of any thread failed since the last success"""
        self._changing = threading.Lock()

    def call(self, function: Callable[[], Answer]) -> Answer:
        """Return the result of `function`, retrying while it raises a transient `Unreachable`. A nested call is not
        retried by itself; the outer one is.

        Raises:
            Unreachable: the error of the last attempt.
        """
        if getattr(self._local, "inside", False):
            return function()
        self._local.inside = True
        try:
            return self.persist(function)
        finally:
            self._local.inside = False

    def persist(self, function: Callable[[], Answer]) -> Answer:
        """Retry like `call`, also within another call."""

        def attempt() -> Answer:
            try:
                return function()
            except Unreachable as error:
                if error.transient and not self._given_up:
                    self._failed(error)
                raise

        try:
            answer = (self._impatient if self._given_up else self._patient).call(attempt)
        except Unreachable as error:
            self._given_up = self._given_up or error.transient
            raise
        self._given_up = self._timeout_s <= 0
        if self._away_since is not None:
            self._succeeded()
        return answer

    def _failed(self, error: Unreachable) -> None:
        """Log an outage once, by whichever thread sees it first, and not at each attempt."""
        with self._changing:
            if self._away_since is None:
                self._away_since = time.monotonic()
                _LOG.warning("catalog is unreachable, trying again", error=str(error), up_to_s=self._timeout_s)

    def _succeeded(self) -> None:
        with self._changing:
            if self._away_since is not None:
                seconds, self._away_since = time.monotonic() - self._away_since, None
                _LOG.warning("catalog answers again", catalog=self._label, seconds=round(seconds, 1))
