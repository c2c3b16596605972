"""`make test-fast`: the tests that need neither a server nor a JVM, with fewer examples each.

    python -m pytest -p tests.fast tests/unit tests/property tests/contract

Leaves out tests that are marked `server`, `jvm` or `slow`. A test that is left and starts a server or a JVM fails: in a
test, only Python may be started, no socket be bound or connected, and Java is not found.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

LEFT_OUT = ("server", "jvm", "slow")
NO_JAVA = "/make-test-fast-has-no-java"
NETWORK = frozenset({"socket.bind", "socket.connect"})
STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"})


class NotFast(Exception):
    """A test of `make test-fast` started what it may not start."""


class Guard:
    """Refuses servers and JVMs while a test runs, and remembers what it refused."""

    def __init__(self) -> None:
        self.test: str | None = None
        self.refused: list[str] = []
        """what the test did, whose code may have caught the refusal"""

    def audit(self, event: str, arguments: Sequence[Any]) -> None:
        """An audit hook (PEP 578): raises for what no fast test may do."""
        if self.test is None:
            return
        if event in NETWORK:
            self._refuse(f"{event}{arguments[1:]}")
        elif event in STARTS and not _is_python(event, arguments):
            self._refuse(f"{event} of {arguments[0]}")

    def check(self) -> None:
        """Fail the test if it was refused something, though it went on."""
        if self.refused:
            said, self.refused = self.refused, []
            raise NotFast("; ".join(said))

    def _refuse(self, what: str) -> None:
        said = f"{self.test} did {what}, and make test-fast starts no server and no JVM: mark it `server` or `jvm`"
        self.refused.append(said)
        raise NotFast(said)


def _is_python(event: str, arguments: Sequence[Any]) -> bool:
    """Whether the program to start is this Python."""
    if event == "os.system":
        return False
    program = arguments[0] or arguments[1][0]
    return Path(os.fsdecode(program)).resolve() == Path(sys.executable).resolve()


GUARD = Guard()


def pytest_configure(config: pytest.Config) -> None:
    """Watch this process; fewer examples; no Java for the processes that tests start."""
    sys.addaudithook(GUARD.audit)
    settings.register_profile("fast", deadline=None, print_blob=True, max_examples=10)
    settings.load_profile("fast")
    os.environ["JAVA_HOME"] = NO_JAVA


@pytest.hookimpl(trylast=True)  # once tests/conftest.py has marked what it can tell by fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a server or a JVM, and what takes long."""
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch while a test runs."""
    GUARD.test, GUARD.refused = item.nodeid, []
    try:
        return (yield)
    finally:
        GUARD.test = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Check what fixtures did."""
    yield
    GUARD.check()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Check what the test did."""
    yield
    GUARD.check()
