"""`make test-fast` starts no server and no JVM: a test that does fails there, even if it catches the refusal."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast import Guard, NotFast

ROOT = Path(__file__).parents[2]
WRONG = """
import contextlib, socket, subprocess, sys, pytest

def test_a_server():
    socket.socket().bind(("127.0.0.1", 0))

def test_a_client_that_catches_everything():
    with contextlib.suppress(Exception):
        socket.create_connection(("127.0.0.1", 9), timeout=1)

def test_a_program():
    subprocess.run(["true"])

@pytest.fixture
def server():
    subprocess.Popen(["redis-server"])

def test_a_fixture(server):
    pass

@pytest.mark.server
def test_marked():
    subprocess.run(["true"])

def test_python():
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


@pytest.fixture
def guard() -> Guard:
    made = Guard()
    made.test = "test_this"
    return made


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("socket.connect", (socket.socket(), ("127.0.0.1", 1))),
        ("subprocess.Popen", ("/usr/bin/java", ["java"], None, None)),
        ("subprocess.Popen", (None, ["java"], None, None)),
        ("os.system", (b"java",)),
    ],
)
def test_what_it_refuses_is_remembered_once(guard: Guard, event: str, arguments: tuple) -> None:
    with pytest.raises(NotFast, match=r"test_this did .* mark it `server` or `jvm`"):
        guard.audit(event, arguments)
    with pytest.raises(NotFast):
        guard.check()
    guard.check()


def test_python_may_be_started_and_between_tests_anything(guard: Guard) -> None:
    guard.audit("subprocess.Popen", (sys.executable, [sys.executable], None, None))
    guard.test = None
    guard.audit("os.system", (b"java",))
    guard.check()


@pytest.mark.slow
def test_a_test_that_starts_a_server_or_a_program_fails(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text(WRONG)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = server\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.fast", "-p", "no:cacheprovider", "-rA"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    for name in ("a_server", "a_client_that_catches_everything", "a_program"):
        assert f"FAILED test_wrong.py::test_{name}" in said, said
    assert "1 passed, 1 deselected, 1 error" in said and "3 failed" in said, said
