"""Findings of `siltstone doctor`, and running its checks: each by itself, for a bounded time."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from siltstone.errors import SiltstoneError, UnknownStream, Unreachable, summarize
from siltstone.log import redact

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found about a stream or, if `stream` is None, about the warehouse.

    `advice` is what to do; None if there is nothing to do, or if `found`, the text of an error, says it.
    """

    check: str
    state: State
    found: str
    advice: str | None = None
    stream: str | None = None


@dataclass
class Examination:
    """The findings so far.

    A check that fails is a finding, and so is one that does not end within `limit_s` seconds. A store or catalog that
    does not answer is not asked again, so that the examination takes a bounded time.
    """

    limit_s: float
    findings: list[Finding] = field(default_factory=list)
    _silent: set[str] = field(default_factory=set)

    def make(
        self,
        check: str,
        function: Callable[[], Sequence[Finding]],
        *,
        uses: Sequence[str] = (),
        stream: str | None = None,
    ) -> bool:
        """Run a check; return whether it found no problem.

        Args:
            uses: what the check asks: `catalog`, `store`. A check without an answer counts as the first one's silence,
                and later checks that use it are skipped.

        Raises:
            UnknownStream: the catalog does not know the stream.
        """
        if self._silent.intersection(uses):
            return False
        try:
            found = self._run_bounded(check, function)
        except UnknownStream:
            raise
        except SiltstoneError as error:
            if isinstance(error, Unreachable) and error.transient:
                self._silent.update(uses[:1])
            found = [Finding(check, "problem", redact(str(error)), stream=stream)]
        except Exception as error:  # the other checks still run
            found = [Finding(check, "problem", redact(f"{summarize(error)}"), _REPORT, stream)]
        if found is None:
            self._silent.update(uses[:1])
            what = " and ".join(f"the {name}" for name in uses) or "this machine"
            advice = f"check its address, its network and its load: {what}"
            found = [Finding(check, "problem", f"no answer within {self.limit_s:g} s", advice, stream)]
        self.findings += found
        return all(each.state != "problem" for each in found)

    def _run_bounded(self, check: str, function: Callable[[], Sequence[Finding]]) -> Sequence[Finding] | None:
        """Return the check's findings; None if it does not end in time, and its thread ends with the process."""
        answers: queue.SimpleQueue[Sequence[Finding] | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put(function())
            except BaseException as error:
                answers.put(error)

        threading.Thread(target=run, name=f"doctor-{check}", daemon=True).start()
        try:
            answer = answers.get(timeout=self.limit_s)
        except queue.Empty:
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer


_REPORT = "this is a fault of Siltstone, please report it"
