"""Reset a run by itself: go back to its newest checkpoint, in this process and under a new writer epoch.

Done outside of `foreachBatch`, once the query has ended and its jobs are cancelled. It helps against failures that are
neither the code's nor the input's: a store or a catalog that was away for longer than calls are retried, a machine that
died, working state that is gone. Everything else fails again, and ends the run at once.
"""

import time

from siltstone.errors import Fenced, SiltstoneError
from siltstone.log import get_logger
from siltstone.settings import RecoveryOptions
from siltstone.spark.failures import may_pass
from siltstone.spark.session import is_jvm_gone
from siltstone.spark.stopping import StopRequest

DELAY_MAX_S = 60.0
_POLL_S = 0.1
_LOG = get_logger(__name__)


class Resets:
    """The resets of one run.

    Attributes:
        count: resets so far.

    Args:
        stop: once set, no further reset begins.
    """

    def __init__(self, stream: str, options: RecoveryOptions, stop: StopRequest) -> None:
        self.count = 0
        self._stream, self._options, self._stop = stream, options, stop
        self._in_a_row = 0

    def note_checkpoint(self) -> None:
        """Note that the run has completed a checkpoint."""
        self._in_a_row = 0

    def may_reset(self, error: BaseException, cause: BaseException, *, is_news: bool = False) -> bool:
        """Whether a reset may follow a failure.

        Args:
            error: what ended the run under its epoch, or was found to be behind that.
            cause: what failed in it; may be `error` itself.
            is_news: whether it told of a file that cannot be read (`unreadable_files`): it passes without that file.
        """
        if isinstance(error, Fenced) or self._stop.is_set() or is_jvm_gone():
            return False
        return is_news or ((may_pass(error) or may_pass(cause)) and self._in_a_row < self._options.resets)

    def wait(self, error: BaseException, *, is_news: bool = False) -> None:
        """Count a reset and wait until it may begin: longer each time without a checkpoint in between.

        Args:
            is_news: as in `may_reset`; such a reset is not one of those in a row.
        """
        delay_s = min(self._options.reset_delay_s * 2**self._in_a_row, DELAY_MAX_S)
        self.count, self._in_a_row = self.count + 1, self._in_a_row + (not is_news)
        said = error.full_text if isinstance(error, SiltstoneError) else str(error)
        _LOG.warning(
            "going back to the newest checkpoint",
            stream=self._stream,
            error=said,
            in_a_row=self._in_a_row,
            at_most=self._options.resets,
            delay_s=delay_s,
        )
        until_s = time.monotonic() + delay_s
        while time.monotonic() < until_s and not self._stop.is_set():
            time.sleep(min(_POLL_S, delay_s))
