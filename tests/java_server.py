"""A server in a JVM, which tests start from its jars, kill, freeze and start again."""

import atexit
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from tests.servers import free_port

START_S, POLL_S = 180.0, 0.2


class JavaServer(ABC):
    """A server on a free port, its data in a directory of its own, which goes when the tests end.

    Args:
        name: what it is called, to begin messages.
    """

    def __init__(self, name: str) -> None:
        self.name, self.port = name, free_port()
        self.root = Path(tempfile.mkdtemp(prefix=f"siltstone-{name.lower()}-"))
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.remove)

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command that runs it."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether it answers by now."""

    def start(self) -> None:
        """Start the server, again if it was killed, and wait until it answers."""
        with (self.root / "output").open("ab") as output:
            self._process = subprocess.Popen(self.command(), stdout=output, stderr=output)
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            if self.answers():
                return
            time.sleep(POLL_S)
        said = (self.root / "output").read_text()[-3000:]
        raise AssertionError(f"{self.name} did not start on port {self.port}: {said}")

    def freeze(self) -> None:
        """Let the server stand still."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the server go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the server at once (kill -9)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill the server, and start it on the same port and data."""
        self.kill()
        self.start()

    def remove(self) -> None:
        """Kill the server and delete its data."""
        self.kill()
        shutil.rmtree(self.root, ignore_errors=True)
