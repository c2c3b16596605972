"""`siltstone` with Spark in a process tree of its own, and ways to hurt it. Processes are found in /proc by a mark."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests import jvm
from tests.fault import journaled_stream, series

ROOT = Path(__file__).resolve().parents[2]
MARK = "SILTSTONE_FAULT_RUN"
DAEMONS = {"siltstone.spark.daemon", "pyspark.daemon"}
"""modules that Python workers run as: of tasks, and of what Spark asks Python while it plans"""
POLL_S = 0.01
# A short life is all that these machines get, so they take little memory.
SPARK = {"spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "2"}


@dataclass(frozen=True)
class End:
    """How a run ended: exit code (negative: by that signal), its JSON, what it told people."""

    code: int
    result: dict[str, Any] | None
    said: str

    @property
    def error(self) -> str:
        """The line that says why it stopped."""
        lines = [line for line in self.said.splitlines() if line.startswith("siltstone: ")]
        return lines[-1] if lines else ""


def ended(code: int, out: Path, err: Path) -> End:
    """How a process ended that wrote into these files; one that was killed early may have written neither."""
    said = [path.read_text() if path.exists() else "" for path in (out, err)]
    lines = [line for line in said[0].splitlines() if line.startswith("{") and line.endswith("}")]
    return End(code, json.loads(lines[-1]) if lines else None, said[1])


class Run:
    """Commands of `siltstone`, one after the other on one JVM; every process of the tree carries a mark in its
    environment.

    Args:
        commands: the arguments of each.
        output: a directory for what they say.
        master: a Spark master; `local[2,3]` lets a task fail twice.
        streams: further modules with streams.
        spark: further settings of Spark.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        output: Path,
        master: str,
        streams: Sequence[str] = (),
        spark: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.commands = commands
        self.started_s = time.monotonic()
        self._out, self._err = output / f"{self.mark}.out", output / f"{self.mark}.err"
        environment = {
            **os.environ,
            MARK: self.mark,
            **jvm.environment(),
            "PYTHONPATH": str(ROOT),
            "SILTSTONE_STREAMS": json.dumps(["streams", journaled_stream.__name__, *streams]),
            "SILTSTONE_MASTER": master,
            "SILTSTONE_SPARK": json.dumps({**SPARK, **spark}),
        }
        command = [sys.executable, "-m", series.__name__, json.dumps(commands)]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def begun(self) -> list[str]:
        """The kinds of the commands that have begun."""
        lines = self._err.read_text().splitlines()
        return [line.removeprefix(series.BEGUN).split()[0] for line in lines if line.startswith(series.BEGUN)]

    @property
    def ended(self) -> bool:
        """Whether the driver is gone."""
        return self.process.poll() is not None

    def wait(self, timeout_s: float) -> End:
        """How it ended.

        Raises:
            TimeoutError: it has not.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            what = " ".join(self.begun)
            raise TimeoutError(f"{what} (pid {self.process.pid}) goes on after {timeout_s} s") from None
        return ended(code, self._out, self._err)

    def until(self, reached: Callable[[], bool]) -> bool:
        """Wait until something holds; False if the run ended before."""
        while not reached():
            if self.ended:
                return False
            time.sleep(POLL_S)
        return True

    def processes(self) -> dict[int, list[str]]:
        """Every living process of the tree, orphans too: pid -> command line."""
        return processes_of(self.mark)

    def machine(self) -> list[int]:
        """The JVM."""
        return [pid for pid, command in self.processes().items() if command[0].endswith("java")]

    def workers(self) -> list[int]:
        """Spark's Python workers, and the daemon that they are forked from."""
        return workers_of(self.mark)

    def kill_all(self) -> None:
        """kill -9 of every process, until none is left."""
        while pids := list(self.processes()):
            send(pids, signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)

    def gone(self, within_s: float) -> bool:
        """Whether the whole tree is gone after at most so many seconds."""
        deadline = time.monotonic() + within_s
        while self.processes():
            if time.monotonic() > deadline:
                return False
            self.process.poll()
            time.sleep(POLL_S * 10)
        return True


def processes_of(mark: str) -> dict[int, list[str]]:
    """Every living process that carries a mark in its environment (`MARK`): pid -> command line."""
    return {
        int(entry): command
        for entry in os.listdir("/proc")
        if entry.isdigit() and (command := _command_of(int(entry), mark))
    }


def workers_of(mark: str) -> list[int]:
    """Spark's Python workers among them, and the daemon that they are forked from."""
    return [pid for pid, command in processes_of(mark).items() if DAEMONS & set(command)]


def forked_of(mark: str) -> list[int]:
    """Spark's Python workers without the daemon, which while it starts cannot be told from one that never will."""
    workers = workers_of(mark)
    return [pid for pid in workers if _parent_of(pid) in workers]


def _parent_of(pid: int) -> int:
    """The parent of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal these processes; those that are gone are no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _command_of(pid: int, mark: str) -> list[str] | None:
    """The command line of a living process that carries the mark."""
    try:
        if f"{MARK}={mark}".encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return None
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it went meanwhile, or belongs to another user
        return None


def arguments_of(options: Mapping[str, Any]) -> list[str]:
    """Options of `siltstone run` as arguments; None is left out."""
    named = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None}
    return [text for name, value in named.items() for text in (name, str(value))]
