"""What a dead process left is known to be left, on its own machine, over every database a catalog can be in."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.catalog.records import leases
from siltstone.catalog.records.processes import is_known_dead, this_process_identity
from siltstone.catalog.repository import Catalog
from siltstone.errors import UsageError
from tests.catalog_cases import add

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere one waits")
ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from datetime import timedelta
from siltstone.catalog.open import open_catalog
catalog = open_catalog(sys.argv[1])
catalog.leases.take("flights", [3], id="held", who="holder", lasts=timedelta(days=400))
catalog.materializations.begin("flights", "aircraft", 3, id="held", who="holder")
print("holds", flush=True)
time.sleep(600)
"""


@pytest.fixture
def held(flights: Catalog) -> Catalog:
    add(flights, 3, first={"aircraft": 1})
    return flights


@contextmanager
def holder(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lease and materializes under it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        yield process
    finally:
        process.kill()
        process.wait()


def kill(process: subprocess.Popen[str]) -> None:
    """Kill it, and do not ask how it ended: it stays a zombie, as under a parent that does not look."""
    process.send_signal(signal.SIGKILL)
    stat = Path(f"/proc/{process.pid}/stat")
    threads = stat.with_name("task")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z" or len(list(threads.iterdir())) > 1:
        time.sleep(0.01)


def materialize(catalog: Catalog, id: str) -> None:
    catalog.leases.take("flights", [3], id=id, who="me", lasts=timedelta(hours=1))
    catalog.materializations.begin("flights", "aircraft", 3, id=id, who="me")


@pytest.mark.slow
def test_a_materialization_whose_process_was_killed_keeps_nobody_out(held: Catalog, catalog_url: str) -> None:
    with holder(catalog_url) as process:
        with pytest.raises(UsageError, match="is being materialized at checkpoint 3 by holder"):
            materialize(held, "early")
        kill(process)
        materialize(held, "mine")
        outcomes = {m.id: m.outcome for m in held.materializations.list("flights")}
        assert outcomes == {"held": "failed", "mine": "running"}


@pytest.mark.slow
def test_a_lease_whose_process_was_killed_keeps_nothing(held: Catalog, catalog_url: str) -> None:
    with holder(catalog_url) as process:
        assert held.deletions.mark("flights", 1, [1], spare_leased=True) == (1,)
        assert [lease.id for lease in held.references.view("flights", ()).leases] == ["held"]
        kill(process)
        assert held.references.view("flights", ()).leases == ()
        assert held.deletions.mark("flights", 1, [1], spare_leased=True) == ()
        assert held.leases.list_live("flights") == []
        assert not held.leases.renew("held", timedelta(hours=1))


def test_a_lease_of_another_machine_lives_until_it_expires(held: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = f"another-boot host pid:[1] {os.getpid()} 1"
    monkeypatch.setattr(leases, "this_process_identity", lambda: elsewhere)
    held.leases.take("flights", [3], id="held", who="holder", lasts=timedelta(hours=1))
    assert [lease.id for lease in held.leases.list_live("flights")] == ["held"]


def test_a_lease_without_a_known_process_lives_until_it_expires(held: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "this_process_identity", lambda: None)
    held.leases.take("flights", [3], id="held", who="holder", lasts=timedelta(hours=1))
    assert [lease.id for lease in held.leases.list_live("flights")] == ["held"]


def test_a_process_is_dead_only_where_that_is_certain() -> None:
    mine = this_process_identity()
    assert mine is not None and not is_known_dead(mine)
    namespace, pid, started = mine.rsplit(" ", 2)
    assert is_known_dead(f"{namespace} {pid} {int(started) - 1}")  # its PID has been given to another since
    assert is_known_dead(f"{namespace} {2**22 + 1} {started}")  # beyond what Linux gives out
    assert not is_known_dead(f"{namespace} 1 x") or os.getpid() != 1
    for unknown in (None, "", "x", f"{namespace} x {started}", f"{namespace[1:]} {2**22 + 1} {started}"):
        assert not is_known_dead(unknown)


def test_a_forked_child_is_another_process() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, (this_process_identity() or "").encode())
        os._exit(0)
    told = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    assert told != this_process_identity()
    os.waitpid(child, 0)
    assert is_known_dead(told)
