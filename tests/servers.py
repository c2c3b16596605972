"""Real servers for the suites: started on loopback when first asked for, one of a kind a run, stopped at its end."""

import atexit
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ACCESS_KEY, SECRET_KEY = "siltstone-tests", "no-secret-of-anybody"
REDIS_PASSWORD = "Xyzzy/pass#word@42"
VERSITYGW = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"

MOTO = """
import sys
import threading
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

# moto looks for an object and creates it in two steps: two threads would both be told that they did.
lock = threading.RLock()

def one_at_a_time(method):
    def call(*arguments):
        with lock:
            return method(*arguments)
    return call

for name in ("put_object", "_key_response_post"):
    setattr(S3Response, name, one_at_a_time(getattr(S3Response, name)))
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()  # until who started it ends
"""


@dataclass(frozen=True)
class S3Server:
    """An S3 server that knows ACCESS_KEY and SECRET_KEY."""

    endpoint: str


@cache
def moto() -> S3Server:
    """moto in server mode: AWS's answers as far as it knows them, everything in memory, no signature checked."""
    use_test_credentials()
    command = [sys.executable, "-c", MOTO]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    atexit.register(_stop, process)
    assert process.stdout is not None
    endpoint = process.stdout.readline().strip()
    assert endpoint, "moto did not start: is moto[server] installed?"
    return S3Server(endpoint)


@cache
def versitygw() -> S3Server:
    """Versity's S3 gateway over a directory: a real server, which checks signatures."""
    use_test_credentials()
    binary = versitygw_binary()
    assert binary is not None, f"Go is here and versitygw is not: run `go install {VERSITYGW}`"
    root = Path(tempfile.mkdtemp(prefix="siltstone-versitygw-"))
    port = free_port()
    process = subprocess.Popen(
        [binary, "--port", f"127.0.0.1:{port}", "--keep-alive", "--quiet", "posix", str(root)],
        env=os.environ | {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    atexit.register(_stop, process)
    wait_for_port(port, process)
    return S3Server(f"http://127.0.0.1:{port}")


def versitygw_binary() -> str | None:
    """Where it is: the variable VERSITYGW, PATH, or Go's own directories."""
    named = os.environ.get("VERSITYGW") or shutil.which("versitygw")
    if named:
        return named
    directories = [Path.home() / "go"]
    if shutil.which("go"):
        found = subprocess.run(["go", "env", "GOPATH"], capture_output=True, text=True, check=True).stdout.strip()
        directories.insert(0, Path(found))
    candidates = [directory / "bin" / "versitygw" for directory in directories]
    return next((str(path) for path in candidates if path.is_file()), None)


def marked(kinds: Iterable[str], *rest: Any) -> list[Any]:
    """Parameters (kind of store, *rest) of tests, those marked `server` whose kind needs one."""
    server = [pytest.mark.server]
    return [
        pytest.param(kind, *rest, marks=server if kind.startswith(("redis", "s3", "cassandra")) else [])
        for kind in kinds
    ]


def use_test_credentials() -> None:
    """Make clients see the servers' credentials and nothing of the user's own, here and in processes started later."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_EC2_METADATA_DISABLED="true",
        GUARDED_REDIS=REDIS_PASSWORD,
    )


def free_port() -> int:
    """A port of loopback that nobody listens on, nor will soon.

    The kernel gives it to nobody who asks for any port, as Spark does for its own sockets; no other worker of the suite
    gets it; and no further call.
    """
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port of this worker was given out")


def _own_ports() -> Iterator[int]:
    """The ports below those that the kernel chooses from, a part of them for each worker, in any order."""
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(ephemeral.read_text().split()[0]) if ephemeral.exists() else 49152
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    size = min((first - 10_000) // 16, 1_000)
    yield from random.sample(range(first - size * (worker + 1), first - size * worker), size)


_PORTS = _own_ports()


def wait_for_port(port: int, process: subprocess.Popen, seconds: float = 60) -> None:
    """Return when the process listens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f"{process.args} does not listen on port {port}")


def _stop(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
