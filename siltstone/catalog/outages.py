"""Waits for a catalog that has gone away, as a database does that fails over, and calls again what failed meanwhile.

Every public method of the catalog is one call, made again as a whole (`Transactions`). That is safe for a write too: a
transaction that failed before its COMMIT did nothing, and of one whose COMMIT got no answer the outcome is looked up
first (`receipts`).
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
    """The outages of one catalog, as the calls of all threads see them.

    Once a call has waited `timeout_s` in vain, further ones make one attempt each until one of them succeeds: a process
    that cannot go on ends after one wait, not after one for each call that it ends with.

    Args:
        label: the catalog, as people may see it.
        timeout_s: no further attempt of a call begins after so many seconds; with 0 there is one.
    """

    def __init__(self, label: str, timeout_s: float) -> None:
        self._label, self._timeout_s = label, timeout_s
        self._patient = RetryPolicy(attempts=sys.maxsize, wait_s=0.1, wait_max_s=5.0, total_s=timeout_s)
        self._impatient = replace(self._patient, kind="none")
        self._given_up = timeout_s <= 0
        self._local = threading.local()
        self._away_since: float | None = None
        """when the first call of any thread failed since the last that succeeded"""
        self._changing = threading.Lock()

    def call(self, function: Callable[[], Answer]) -> Answer:
        """What `function` returns; called again while it raises a transient `Unreachable`. One within another is not
        called again by itself: the outer one is.

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
        """As `call`, within another call too."""

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
        """Tell of an outage once, whichever thread sees it first, and not at each attempt."""
        with self._changing:
            if self._away_since is None:
                self._away_since = time.monotonic()
                _LOG.warning("catalog is away, trying again", error=str(error), up_to_s=self._timeout_s)

    def _succeeded(self) -> None:
        with self._changing:
            if self._away_since is not None:
                seconds, self._away_since = time.monotonic() - self._away_since, None
                _LOG.warning("catalog answers again", catalog=self._label, seconds=round(seconds, 1))
