"""What the process does from which Python workers are forked."""

import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from siltstone.spark.daemon import confirm_at_once, prefer_unpacked

FORKS = """
import os
from siltstone.spark.daemon import import_for_workers
import_for_workers()
print(len(os.listdir("/proc/self/task")), flush=True)
for _ in range(2):
    if not os.fork():
        import numpy
        print(numpy.random.random(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def installed(tmp_path: Path) -> tuple[str, list[str]]:
    """A directory with a package of Spark, and its zip files."""
    library = tmp_path / "packages" / "pyspark" / "python" / "lib"
    library.mkdir(parents=True)
    (tmp_path / "packages" / "pyspark" / "__init__.py").touch()
    return str(tmp_path / "packages"), [str(library / "pyspark.zip"), str(library / "py4j-0.10-src.zip")]


def test_zip_files_of_the_spark_that_is_installed_are_left_out(installed: tuple[str, list[str]]) -> None:
    packages, zips = installed
    assert prefer_unpacked(["mine", *zips, "more.zip", packages]) == ["mine", "more.zip", packages]


def test_those_of_another_spark_stay(installed: tuple[str, list[str]], tmp_path: Path) -> None:
    packages, zips = installed
    other = tmp_path / "other" / "pyspark"
    other.mkdir(parents=True)
    assert prefer_unpacked([*zips, str(tmp_path)]) == [*zips, str(tmp_path)]
    (other / "__init__.py").touch()
    assert prefer_unpacked([*zips, str(other.parent), packages]) == [*zips, str(other.parent), packages]


def test_those_of_a_spark_that_is_not_there_stay(installed: tuple[str, list[str]]) -> None:
    """A search path may come from another machine."""
    gone = "/nowhere/pyspark/python/lib/pyspark.zip"
    assert prefer_unpacked([gone, installed[0]]) == [gone, installed[0]]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_it_forks_with_one_thread_and_workers_draw_numbers_of_their_own() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as Spark starts it
    said = subprocess.run([sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True, check=True)
    threads, *numbers = said.stdout.split()
    assert threads == "1"
    assert len(set(numbers)) == len(numbers) == 2


@pytest.mark.server
@pytest.mark.parametrize("timeout_s", [None, 0.001])
@pytest.mark.parametrize("tcp", [True, False], ids=["TCP", "Unix"])
def test_a_worker_reads_what_was_sent_also_before_it_began(tcp: bool, timeout_s: float | None) -> None:
    chance, said = random.Random(1), [bytes([n % 256]) * size for n, size in enumerate([3, 1, 200_000, 8, 70_000, 1])]
    ours, theirs = _connected() if tcp else socket.socketpair()
    with ours, theirs, ExitStack() as stack:
        sender = threading.Thread(target=_send, args=(theirs, said))

        def main(infile: Any, outfile: Any) -> None:
            found = infile.read(1)
            while piece := infile.read(chance.choice([1, 10, 100_000])):
                found += piece
            outfile.write(found[-5:])
            assert found == b"".join(said)[2:]

        with open(os.dup(ours.fileno()), "rb") as infile, open(os.dup(ours.fileno()), "wb") as outfile:
            sender.start()
            if timeout_s is not None:
                stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
                socket.setdefaulttimeout(timeout_s)  # as a user's code in an earlier task may
            assert infile.read(2) == said[0][:2], "as the secret, which PySpark reads itself"
            confirm_at_once(main)(infile, outfile)
            sender.join()
        ours.shutdown(socket.SHUT_WR)
        assert theirs.recv(100) == b"".join(said)[-5:]


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def _send(to: socket.socket, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        to.sendall(piece)
    to.shutdown(socket.SHUT_WR)


@pytest.mark.server
@pytest.mark.parametrize("buffer_bytes", [16, 4096, 1 << 20])
def test_a_worker_waits_for_no_more_than_was_sent(buffer_bytes: int) -> None:
    """Whatever the buffer of what it reads from, with bytes left in that when it begins."""
    ours, theirs = _connected()
    with ours, theirs, open(os.dup(ours.fileno()), "rb", buffer_bytes) as infile:
        theirs.sendall(bytes(100))
        infile.read(2)
        found: list[bytes] = []

        def main(infile: Any, _: Any) -> None:
            found.append(infile.read(98))
            theirs.sendall(b"next")
            found.append(infile.read(4))

        reading = threading.Thread(target=confirm_at_once(main), args=(infile, None), daemon=True)
        reading.start()
        reading.join(20)
        assert not reading.is_alive() and found == [bytes(98), b"next"]
