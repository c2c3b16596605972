"""What every test may use: one Spark session a run, and a guard against a suite that lost its Spark tests."""

import faulthandler
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from pytest_timeout import is_debugging

from tests import jvm
from tests.examples import is_thorough, register_profiles
from tests.recorded_migrations import recorded_migrations
from tests.shared_statements import shared_statements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TESTS = Path(__file__).parent

os.environ.update(jvm.environment() | os.environ)

register_profiles()


SYSTEM = {"tests/system", "tests/user", "tests/cluster", "tests/cassandra", "tests/kafka"}
"""whole systems, each of some processes that are started, killed and started again: `make test-system` and
`make test-cluster`, and those with servers that are fetched: `make test-cassandra` and `make test-kafka`"""
SERVED = {"spark": "jvm", "postgres": "server", "guarded": "server"}
"""fixtures that start a server or a JVM -> the mark of tests that use them, which `make test-fast` leaves out"""


LONGEST_FIRST = (
    "system/test_dagster_live.py",
    "user/test_guide.py",
    "system/test_kills.py",
    "user",
    "system",
    "fault/test_corruption.py",
    "fault",
    "spark/test_beginnings.py",
    "spark",
    "dagster",
    "unit/test_bit_flips.py",
    "contract/catalog",
    "contract",
)
"""files and directories of tests in the order in which workers take them: the last to end is then a short one"""


def _turn(item: pytest.Item) -> int:
    """The place of a test's file, or of the nearest directory above it, in `LONGEST_FIRST`; all others come last."""
    path = item.path.relative_to(TESTS) if item.path.is_relative_to(TESTS) else item.path
    turns = {name: turn for turn, name in enumerate(LONGEST_FIRST)}
    return next((turns[str(each)] for each in (path, *path.parents) if str(each) in turns), len(turns))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses a fixture that starts a server or a JVM; what takes long comes first, what is `thorough` only in
    `make test-thorough`."""
    items.sort(key=_turn)
    for item in items:
        for name in SERVED.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(SERVED[name])
    if not is_thorough() and (left_out := [item for item in items if item.get_closest_marker("thorough")]):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def _is_whole_suite(config: pytest.Config) -> bool:
    """Whether this run was asked for everything but perhaps whole systems: no path inside tests/, no filter."""
    options = config.option
    ignored = set(options.ignore or ()) - SYSTEM
    filtered = ignored or any(
        getattr(options, name, None) for name in ("keyword", "markexpr", "lf", "deselect", "ignore_glob", "collectonly")
    )
    roots = {Path(os.path.abspath(config.invocation_params.dir / arg)) for arg in config.args}
    return not filtered and bool(roots & {TESTS, TESTS.parent})


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail a run of the whole suite in which tests/spark has no test: it proves nothing about streams."""
    gc.freeze()  # what was imported stays: no collection of garbage need go through it
    found = any(item.path.is_relative_to(TESTS / "spark") for item in session.items)
    if not found and _is_whole_suite(session.config):
        raise pytest.UsageError("the whole suite was asked for, but no test of tests/spark was collected")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool:
    """Watch over a test's time, as pytest-timeout does, but show the threads where workers of pytest-xdist can, too: on
    the standard error that the process was begun with. It ends, since a thread that waits for ever cannot be joined."""
    stderr = item.config.stash[fault_handler_stderr_fd_key]

    def expire() -> None:
        if is_debugging():
            return
        os.write(stderr, f"\n{item.nodeid} takes more than {settings.timeout:g} s; its threads:\n".encode())
        faulthandler.dump_traceback(stderr)
        os._exit(1)

    def cancel() -> None:
        timer.cancel()
        timer.join()

    timer = threading.Timer(settings.timeout, expire)
    timer.start()
    item.cancel_timeout = cancel  # pytest-timeout calls it when the test has ended
    return True


@pytest.fixture(scope="session", autouse=True)
def statements() -> Iterator[None]:
    """What is compiled once for all catalogs."""
    with shared_statements():
        yield


@pytest.fixture(scope="module", autouse=True)
def new_catalogs() -> Iterator[None]:
    """How new catalogs are made; suites of migrations have their own fixture of this name, which leaves that to
    Alembic."""
    with recorded_migrations():
        yield


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """A local Spark of two cores, one for the whole run, without a web page."""
    from siltstone.spark.session import spark_session
    from tests.servers import use_test_credentials

    use_test_credentials()  # workers have the environment that the JVM was started in
    settings = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"}
    session = spark_session("local[2]", settings | jvm.PLANTED_SETTINGS, steps=True)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
