"""A Spark standalone cluster on loopback whose workers share no disk with each other or with the driver.

    with Cluster(directory) as cluster:
        worker = cluster.add_worker("127.0.0.2")
        spark = spark_session(cluster.master, cluster.settings())
        worker.freeze()

Each worker has a mount namespace and a process namespace of its own (`unshare`). A tmpfs covers `cluster.private` in
it, where its working state, its local and its temporary files are, so the same path names another directory for each
worker and for the driver. `cluster.shared` is the same for all. When a worker's first process ends, the kernel kills
the others and drops the tmpfs. Master and workers end with the thread that started them, however it ends.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pyspark

from siltstone.log import worker_variables
from tests import jvm

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
START_S = 60.0
"""how long master and workers may take to start"""
HEARTBEAT_S, HEARTBEAT_TIMEOUT_S = 1, 6
"""how often executors and workers say that they live, and how long they may be silent"""
_POLL_S = 0.05
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--")
_PRIVATE = 'mount -t tmpfs -o size=2g,mode=700 tmpfs "$0" && mkdir "$0/tmp" "$0/local" "$0/work" "$0/home" && exec "$@"'
_MASTER = re.compile(r"Starting Spark master at (spark://[\d.]+:\d+)")
_REGISTERED = re.compile("Successfully registered with master")


def find_obstacle() -> str | None:
    """Say why this machine cannot run a cluster; None if it can."""
    if os.geteuid() != 0:
        return "a cluster whose machines share no disk needs mount namespaces (unshare -m), which need root"
    if missing := [tool for tool in (_ENDS_WITH_US[0], _NAMESPACES[0]) if shutil.which(tool) is None]:
        return f"a cluster whose machines share no disk needs {' and '.join(missing)}, of util-linux"
    tried = subprocess.run([*_NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    if tried.returncode:
        return f"this machine refuses mount namespaces: {tried.stderr.decode().strip()}"
    return None


@dataclass(frozen=True)
class Worker:
    """A worker with its executors and their Python processes, alone in its namespaces."""

    host: str
    process: subprocess.Popen
    log: Path

    def processes(self) -> Iterator[int]:
        """Find the ids of its living processes."""
        with suppress(OSError):
            own = os.readlink(f"/proc/{self.process.pid}/ns/pid_for_children")
            for directory in Path("/proc").iterdir():
                with suppress(OSError):
                    if directory.name.isdigit() and os.readlink(directory / "ns" / "pid") == own:
                        yield int(directory.name)

    def see(self, path: Path) -> Path:
        """Return the path by which this process sees a path of the worker's own."""
        return Path(f"/proc/{min(self.processes())}/root") / path.relative_to("/")

    def freeze(self) -> None:
        """Stop all its processes where they are."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def decommission(self) -> None:
        """Tell it to give up, as Spark's script `decommission-worker.sh` does: its tasks end, and no new ones begin.

        It stays registered, without executors, until it is removed.
        """
        os.kill(min(self.processes()), signal.SIGPWR)

    def kill(self) -> None:
        """Kill all its processes at once; its private files are gone."""
        self.process.kill()
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # Until nothing new is found: a process may start another one meanwhile.
        reached: set[int] = set()
        while found := set(self.processes()) - reached:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            reached |= found


@dataclass
class Cluster:
    """A master, and workers of one core each.

    Attributes:
        directory: an empty directory for all files.
        environment: further variables of the workers, such as the store's credentials.
        master: the master's URL.
        workers: those that were not killed.
    """

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    master: str = ""
    workers: list[Worker] = field(default_factory=list)
    _master: subprocess.Popen | None = None
    _started: int = 0

    @property
    def shared(self) -> Path:
        """A directory that all machines see."""
        return self.directory / "shared"

    @property
    def private(self) -> Path:
        """The path of a directory that each machine has for itself."""
        return self.directory / "private"

    def __enter__(self) -> Self:
        for path in (self.shared, self.private, self.directory / "logs"):
            path.mkdir()
        master = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        self._master, log = self._start(lambda command: [*_ENDS_WITH_US, *command], "master.Master", master)
        self.master = _await(log, _MASTER, self._master)[1]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        if self._master is not None:
            self._master.kill()
            self._master.wait()

    @property
    def processes(self) -> list[int]:
        """The ids of the first processes of the master and of the workers that were not killed."""
        started = [self._master, *(worker.process for worker in self.workers)]
        return [process.pid for process in started if process is not None]

    def alone(self, command: Sequence[str]) -> list[str]:
        """Make a command that runs another one as a worker runs: alone in its namespaces, with `private` of its own.

        Its process ends with the thread that starts it.
        """
        return [*_ENDS_WITH_US, *_NAMESPACES, "sh", "-c", _PRIVATE, str(self.private), *command]

    def private_variables(self) -> dict[str, str]:
        """Return the variables with which a process has its local and temporary files in `private`."""
        return {
            "SPARK_LOCAL_DIRS": str(self.private / "local"),
            "TMPDIR": str(self.private / "tmp"),
            "HOME": str(self.private / "home"),
            "XDG_STATE_HOME": str(self.private / "home" / "state"),
            "PYTHONPATH": str(ROOT),
        }

    def add_worker(self, host: str) -> Worker:
        """Start a worker on an address of loopback; return it once the master knows it.

        Call it from a thread that lives as long as the worker is needed.
        """
        arguments = ["--host", host, "--port", "0", "--webui-port", "0", "--cores", "1", "--memory", "1g"]
        arguments += ["--work-dir", str(self.private / "work"), self.master]
        process, log = self._start(self.alone, "worker.Worker", arguments)
        worker = Worker(host, process, log)
        self.workers.append(worker)
        _await(log, _REGISTERED, process)
        return worker

    def remove(self, worker: Worker) -> None:
        """Kill a worker for good."""
        worker.kill()
        self.workers.remove(worker)

    def settings(self) -> dict[str, str]:
        """Return the Spark settings of a session on this cluster: an executor of one core per worker."""
        return {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": self._java_options(),
            "spark.executor.heartbeatInterval": f"{HEARTBEAT_S}s",
            "spark.network.timeout": f"{HEARTBEAT_TIMEOUT_S}s",
            "spark.network.timeoutInterval": f"{HEARTBEAT_S}s",
            # What a lost worker's shuffle had is computed again after this, not after minutes.
            "spark.shuffle.io.maxRetries": "1",
            "spark.shuffle.io.retryWait": "1s",
            "spark.sql.shuffle.partitions": "2",
        }

    def _java_options(self) -> str:
        # An executor takes Spark's settings from the session only.
        options = [each for each in jvm.environment()["SPARK_SUBMIT_OPTS"].split() if not each.startswith("-Dspark.")]
        # Process namespaces give two machines the same process ids, by which Java names its files of figures.
        return f"{' '.join(options)} -XX:-UsePerfData -Djava.io.tmpdir={self.private}/tmp"

    def _start(
        self, around: Callable[[Sequence[str]], list[str]], name: str, arguments: Sequence[str]
    ) -> tuple[subprocess.Popen, Path]:
        self._started += 1
        log = self.directory / "logs" / f"{self._started:02d}-{name}.log"
        own = {
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData "
            f"-Dspark.worker.timeout={HEARTBEAT_TIMEOUT_S} -Dspark.decommission.enabled=true",
            **self.private_variables(),
        }
        command = around([str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments])
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **own, **self.environment, **worker_variables()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, log


def wait_until(condition: Callable[[], object], what: str, seconds: float = START_S) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: it does not come to hold.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(_POLL_S)


def _await(log: Path, line: re.Pattern[str], process: subprocess.Popen) -> re.Match[str]:
    """Wait for a line of a daemon's log."""
    found: list[re.Match[str]] = []

    def is_there() -> bool:
        text = log.read_text(errors="replace")
        assert process.poll() is None, f"{log.name} ended:\n{text[-2000:]}"
        found.extend(line.finditer(text))
        return bool(found)

    wait_until(is_there, f"{line.pattern!r} in {log.name}")
    return found[0]
