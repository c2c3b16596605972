"""Decide how long an upload is tried, count and log its retries.

An upload that fails for a transient reason is tried again until `checkpoint_timeout_s`; then the checkpoint fails, and
the run resets. After that, uploads are tried only as often as other calls of the store, until one succeeds. So a
checkpoint of many uploads fails after one time-out, not after one for each.
"""

import threading
from dataclasses import replace

from siltstone.changelog.upload_metrics import UploadMetrics
from siltstone.errors import Unreachable
from siltstone.log import get_logger
from siltstone.store.base import Store
from siltstone.store.retry import Retrying, RetryPolicy

OPTION = "upload.checkpoint_timeout_s"
LOG_EVERY_S = 30.0
"""seconds between two warnings while uploads fail"""
UNUSUAL_S = 3.0
"""seconds for which an upload fails before the first warning: another writer may only hold a lock"""
_LOG = get_logger(__name__)


class UploadRetries:
    """The retries of one process's uploads to a store; thread-safe.

    Args:
        timeout_s: seconds after which an upload is given up.
    """

    def __init__(self, store: Store, timeout_s: float, metrics: UploadMetrics) -> None:
        retrying = store if isinstance(store, Retrying) else Retrying(store, RetryPolicy())
        policy = retrying.policy
        self._patient, self._ordinary = retrying.with_policy(policy.with_timeout(timeout_s, OPTION)), retrying
        self._label, self._timeout_s, self._metrics = store.label, timeout_s, metrics
        self._now_s = policy.now_s
        self._lock = threading.Lock()
        self._given_up = False
        self._failing_since_s: float | None = None
        """when the first warning was logged since the last success"""
        self._logged_s = 0.0
        self._last: Unreachable | None = None

    def begin(self) -> "Upload":
        """Begin an upload."""
        if self._given_up:
            return Upload(self, self._ordinary, min(self._timeout_s, self._ordinary.policy.total_s))
        return Upload(self, self._patient, self._timeout_s)

    def count_attempt(self) -> None:
        """Count a call of the store."""
        self._metrics.count("attempts")

    def note_retry(self, error: Unreachable, seconds: float) -> None:
        """Count a retry, the first attempt of which was `seconds` ago, and log a warning now and then."""
        self._metrics.count("retries")
        now_s = self._now_s()
        with self._lock:
            self._last = error
            if seconds < UNUSUAL_S:
                return
            if self._failing_since_s is None:
                self._failing_since_s = now_s - seconds
            elif now_s - self._logged_s < LOG_EVERY_S:
                return
            self._logged_s = now_s
            for_s = round(now_s - self._failing_since_s, 1)
        _LOG.warning("uploads fail, trying again", error=str(error), for_s=for_s, up_to_s=self._timeout_s)

    def note_given_up(self) -> None:
        """Note that an upload was tried in vain until its time was over."""
        self._given_up = True

    def note_success(self) -> None:
        """Note that an upload succeeded."""
        self._given_up = False
        if self._failing_since_s is None and self._last is None:
            return
        with self._lock:
            since_s, self._failing_since_s, self._last = self._failing_since_s, None, None
        if since_s is not None:
            _LOG.warning("uploads succeed again", store=self._label, seconds=round(self._now_s() - since_s, 1))

    def give_up(self, name: str, limit_s: float) -> Unreachable:
        """Note that the store did not answer in time; return the error of the upload of `name`."""
        self._given_up = True
        last = self._last
        failed = "" if last is None else f"; the last failure was: {last}"
        longer = "" if limit_s < self._timeout_s else f", or raise {OPTION} if it may take longer"
        return Unreachable(
            f"cannot write object {name} in {self._label}: it does not answer for {limit_s:g} s{failed}; "
            f"check it{longer}"
        )


class Upload:
    """One upload: counts its calls of the store, as the watcher of its retries (`RetryWatcher`).

    Attributes:
        store: the store with the policy for it.
        limit_s: seconds after which it is given up.
        attempts: how many calls it has made, its hedge's included.
    """

    def __init__(self, retries: UploadRetries, store: Retrying, limit_s: float) -> None:
        self.store = store.with_policy(replace(store.policy, watcher=self))
        self.limit_s, self.attempts, self._retries = limit_s, 0, retries
        self._lock = threading.Lock()

    def note_attempt(self) -> None:
        """Count a call."""
        with self._lock:
            self.attempts += 1
        self._retries.count_attempt()

    def note_retry(self, error: Unreachable, attempts: int, seconds: float) -> None:
        """Count a retry."""
        self.note_attempt()
        self._retries.note_retry(error, seconds)

    def note_given_up(self) -> None:
        """Note that it was tried in vain until its time was over."""
        self._retries.note_given_up()
