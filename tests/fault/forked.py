"""Victims forked from a process that has imported everything (`victims`): how they are started, hurt and waited for."""

import multiprocessing
import multiprocessing.context
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fault.processes import POLL_S, ROOT, End, ended, send
from tests.fault.victims import Orders, main
from tests.servers import use_test_credentials

LIMIT_S = 300.0
"""no victim takes so long"""


def _context() -> multiprocessing.context.ForkServerContext:
    """The server starts once; it finds this repository, and its victims find S3, by the environment of that moment."""
    use_test_credentials()
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(ROOT) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *known])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.__module__])
    return context


@dataclass
class Victim:
    """One at work."""

    orders: Orders

    def __post_init__(self) -> None:
        self.kind, self.stream = self.orders.arguments[0], self.orders.stream or self.orders.arguments[1]
        self._process = _context().Process(target=main, args=(self.orders,), daemon=True)
        self._process.start()
        self.started_s = time.monotonic()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return not self._process.is_alive()

    @property
    def stopped(self) -> bool:
        """Whether it is frozen by SIGSTOP."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2]
        except OSError:
            return False
        return state.startswith("T")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        send([self.pid], number)

    def until(self, reached: Callable[[], bool], within_s: float = LIMIT_S) -> bool:
        """Wait until something holds; False if the victim ended before, or it took too long."""
        deadline = time.monotonic() + within_s
        while not reached():
            if self.ended or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S / 5)
        return True

    def wait(self) -> End:
        """How it ended.

        Raises:
            TimeoutError: it hangs; it is killed.
        """
        self._process.join(LIMIT_S)
        if not self.ended:
            self.kill()
            raise TimeoutError(f"{' '.join(self.orders.arguments)} goes on after {LIMIT_S} s")
        code = self._process.exitcode
        assert code is not None
        return ended(code, self.orders.said.with_suffix(".out"), self.orders.said.with_suffix(".err"))

    @property
    def seconds(self) -> float:
        """How long it has been at work."""
        return time.monotonic() - self.started_s

    def kill(self) -> None:
        """Kill -9 it, and wait for that."""
        self.signal(signal.SIGKILL)
        self._process.join()
