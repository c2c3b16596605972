"""A catalog that goes away while it is in use, as a PostgreSQL server does that restarts or fails over."""

import logging
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import URL, create_engine, text

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.tombstones import Tombstone
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, Unreachable, UsageError
from siltstone.store.open import Warehouse
from tests import sums
from tests.behind_run import WAIT_S, expected, hold_stores
from tests.behind_run import Run as Behind
from tests.catalog_cases import add, commit_of, stored
from tests.proofs import failures
from tests.proxy import LOST_ANSWER, LOST_REQUEST, Fault, Proxy
from tests.region_run import RegionRun

pytestmark = pytest.mark.server
COMMIT = rb"COMMIT(?!TED)"
"""not of BEGIN ISOLATION LEVEL READ COMMITTED"""
AWAY_S = 0.5
"""how long a server is away of which a run's checkpoints are pending"""


@pytest.fixture
def flights(through: str) -> Iterator[Catalog]:
    with open_catalog(through) as catalog:
        catalog.streams.register("flights", 128, {})
        assert catalog.runs.begin("flights", "host:1") == 1
        yield catalog


def assert_whole(catalog: Catalog, last: int) -> None:
    assert [c.id for c in catalog.checkpoints.list("flights")] == list(range(1, last + 1))
    assert [o.checkpoint for o in catalog.objects.list("flights")] == list(range(1, last + 1))


# One call


def test_a_commit_whose_acknowledgement_is_lost_is_found_to_be_there(
    flights: Catalog, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.next(LOST_ANSWER, holding=COMMIT)
    flights.commits.add("flights", 1, commit_of(1))
    assert proxy.met == 1
    assert_whole(flights, 1)
    flights.commits.add("flights", 1, commit_of(2))
    assert_whole(flights, 2)


def test_a_commit_that_never_arrived_is_made_again(
    flights: Catalog, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.next(LOST_REQUEST, holding=COMMIT)
    with caplog.at_level(logging.WARNING):
        flights.commits.add("flights", 1, commit_of(1))
    assert proxy.met == 1
    assert_whole(flights, 1)
    assert len([r for r in caplog.records if "trying again" in r.getMessage() and "up_to_s=60" in r.getMessage()]) == 1
    assert "catalog answers again" in caplog.records[-1].getMessage()


def test_a_commit_whose_outcome_is_asked_for_before_it_is_carried_out_is_made_once(
    flights: Catalog, through: str, proxy: Proxy
) -> None:
    """The client is cut off while its COMMIT is on its way: the look waits for the transaction it left open."""
    with open_catalog(through) as other:
        proxy.next(Fault(delay_s=0.5, answer_bytes=0), holding=COMMIT)
        cutting = threading.Timer(0.2, proxy.down)
        again = threading.Timer(0.3, proxy.up)
        cutting.start()
        again.start()
        flights.commits.add("flights", 1, commit_of(1))
        assert_whole(other, 1)


def test_a_commit_cut_at_any_request_is_made_once(flights: Catalog, proxy: Proxy) -> None:
    for id in range(1, 40):
        proxy.clear()
        proxy.next(LOST_ANSWER if id % 2 else LOST_REQUEST, every=(id + 1) // 2)
        flights.commits.add("flights", 1, commit_of(id))
        if not proxy.met:
            break
    assert 20 < id < 39
    assert_whole(flights, id)


def test_a_commit_that_was_fenced_while_the_catalog_was_away_is_refused(
    flights: Catalog, schema: URL, proxy: Proxy
) -> None:
    with open_catalog(schema.render_as_string(hide_password=False)) as other:
        proxy.down()
        threading.Timer(0.3, lambda: (other.runs.begin("flights", "host:2"), proxy.up())).start()
        with pytest.raises(Fenced):
            flights.commits.add("flights", 1, commit_of(1))
        assert other.checkpoints.last_id("flights") == 0


class Losing:
    """A catalog that loses the answer to, or the request of, the COMMIT of each call."""

    def __init__(self, catalog: Catalog, proxy: Proxy, fault: Fault) -> None:
        self.catalog, self.proxy, self.fault = catalog, proxy, fault

    def __getattr__(self, name: str) -> object:
        self.proxy.next(self.fault, holding=COMMIT)
        return getattr(self.catalog, name)


def drop(catalog: Catalog) -> None:
    catalog.savepoints.add("flights", 1, "kept", 1)
    catalog.savepoints.drop("flights", 1, "kept")


def materialize(catalog: Catalog) -> None:
    catalog.leases.take("flights", [3], id="m", who="me", lasts=timedelta(hours=1))
    catalog.materializations.begin("flights", "aircraft", 3, id="m", who="me")
    manifest = stored(3, "m.arrow")
    catalog.materializations.complete("flights", "m", manifest, [], (), (), rows_=1, bytes_=1, seconds=1.0)
    assert catalog.materializations.list("flights")[0].outcome == "done"


def rewind(catalog: Catalog) -> None:
    epoch = catalog.runs.begin("flights", "host:2")
    assert epoch == 2 and [run.epoch for run in catalog.runs.list("flights")] == [1, 2]
    assert catalog.rollbacks.roll_back("flights", epoch, 1, "a test", "me").given_up == (2, 3)


def delete(catalog: Catalog) -> None:
    assert catalog.deletions.mark("flights", 1, iter([1])) == ()
    doomed = [Tombstone(stored(1, "manifest.a.arrow").name, 10, "deleted")]
    assert catalog.tombstones.record_deletion("flights", 1, "me", doomed) == doomed
    catalog.deletions.forget("flights", 1, iter([]), iter([doomed[0].name]))
    assert [o.checkpoint for o in catalog.objects.list("flights")] == [2, 3]


def snapshot(catalog: Catalog) -> None:
    catalog.reference_copies.add("flights", 1, 2, [stored(2, "s.arrow")], 5)
    assert [s.checkpoint for s in catalog.reference_copies.list("flights")] == [2]


def fork(catalog: Catalog) -> None:
    assert catalog.forks.create("flights", "branch", 2).forked_at == 2


@pytest.mark.parametrize("lost", [LOST_ANSWER, LOST_REQUEST], ids=["answer", "request"])
@pytest.mark.parametrize("work", [drop, materialize, rewind, delete, snapshot, fork])
def test_every_write_happens_once_whatever_is_lost_at_its_end(
    flights: Catalog, proxy: Proxy, work: Callable[[Catalog], None], lost: Fault
) -> None:
    add(flights, 3)
    work(cast("Catalog", Losing(flights, proxy, lost)))
    assert proxy.met > 0


# Some seconds


@contextmanager
def away(seconds: float, proxy: Proxy) -> Iterator[None]:
    """The server is away from a moment in the block on, for so long."""
    down, up = threading.Timer(0.05, proxy.down), threading.Timer(0.05 + seconds, proxy.up)
    down.start()
    up.start()
    yield
    up.join()


@pytest.mark.parametrize("seconds", [0.1, 1.0, 4.0])
def test_a_run_commits_on_through_an_outage(flights: Catalog, proxy: Proxy, seconds: float) -> None:
    with away(seconds, proxy):
        id = 0
        while id < 20 or not proxy.listening:
            flights.commits.add("flights", 1, commit_of(id := id + 1))
    assert_whole(flights, id)


@pytest.mark.parametrize(("outage_s", "outlasts"), [(60.0, True), (0.2, False)], ids=["outlasted", "given up"])
def test_checkpoints_that_are_pending_when_an_outage_begins_complete_or_come_again(
    through: str, proxy: Proxy, tmp_path: Path, outage_s: float, outlasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse = Warehouse.at(str(tmp_path / "w"))
    warehouse.prepare()

    with OpenWarehouse(warehouse, open_catalog(through, outage_s=outage_s)) as place:
        run = Behind(place, 2)
        run.step()
        run.drain()
        with monkeypatch.context() as patch:
            storing = hold_stores(patch)
            run.step()
            run.step()
            proxy.down()
            storing.open()
            back = threading.Timer(AWAY_S if outlasts else WAIT_S, proxy.up)
            back.start()
            run.drain()
            back.cancel()
            back.join()
            proxy.up()
        run.behind.close()
        assert [type(error) for error in run.errors] == ([] if outlasts else [Unreachable])
    with OpenWarehouse(warehouse, open_catalog(through)) as place:
        again = RegionRun(place, sums.STREAM, sums.POLICY)
        assert again.batches == (3 if outlasts else 2), "the one whose manifest is stored is completed"
        while again.batches < 4:
            again.step(sums.rows(again.batches + 1))
        assert not failures(place, sums.NAME)
        found = [record.digest for record in place.catalog.checkpoints.list(sums.NAME)]
    with OpenWarehouse.open_writable(str(tmp_path / "still")) as still:
        assert found == expected(still, 4)


def test_a_run_commits_on_through_a_crash_of_the_server(schema: URL) -> None:
    """A backend is killed: PostgreSQL ends all others, recovers, and takes no connections meanwhile."""
    url = schema.render_as_string(hide_password=False)
    with open_catalog(url) as catalog:
        catalog.streams.register("flights", 128, {})
        epoch = catalog.runs.begin("flights", "host:1")
        for crash in range(3):
            killer = threading.Thread(target=crash_server, args=(schema,))
            killer.start()
            for id in range(crash * 40 + 1, crash * 40 + 41):
                catalog.commits.add("flights", epoch, commit_of(id))
            killer.join()
        assert_whole(catalog, 120)


def crash_server(url: URL) -> None:
    time.sleep(0.05)
    engine = create_engine(url)
    with engine.connect() as connection:
        os.kill(connection.scalar(text("SELECT pg_backend_pid()")) or 0, signal.SIGKILL)
        connection.invalidate()
    engine.dispose()


def test_a_process_frozen_within_a_transaction_keeps_others_out_for_a_while_only(through: str, proxy: Proxy) -> None:
    with open_catalog(through, timeout_s=0.5) as frozen, open_catalog(through, timeout_s=0.5) as other:
        frozen.streams.register("flights", 128, {})
        frozen.runs.begin("flights", "host:1")
        proxy.next(Fault(delay_s=6), holding=rb"INSERT INTO checkpoint")
        refused: list[BaseException] = []

        def commit() -> None:
            try:
                frozen.commits.add("flights", 1, commit_of(1))
            except Fenced as error:
                refused.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        while not proxy.met:
            time.sleep(0.01)
        assert other.runs.begin("flights", "host:2") == 2
        assert thread.is_alive()
        thread.join()
        assert len(refused) == 1 and other.checkpoints.last_id("flights") == 0


# Too long, or no outage at all


def test_an_outage_that_is_too_long_ends_in_an_error_once(through: str, proxy: Proxy, schema: URL) -> None:
    with open_catalog(through, outage_s=0.5) as catalog:
        catalog.streams.register("flights", 128, {})
        proxy.down()
        with pytest.raises(Unreachable, match="check that the server runs") as caught:
            catalog.runs.begin("flights", "host:1")
        assert "\n" not in str(caught.value)
        proxy.clear()
        proxy.next(LOST_REQUEST, times=1)
        with pytest.raises(Unreachable):  # one attempt: the wait is over
            catalog.checkpoints.last_id("flights")
        assert catalog.checkpoints.last_id("flights") == 0
        proxy.next(LOST_REQUEST, times=1)
        assert catalog.checkpoints.last_id("flights") == 0  # a new outage


def test_a_commit_whose_outcome_cannot_be_asked_for_says_so(through: str, proxy: Proxy) -> None:
    with open_catalog(through, outage_s=0.5) as catalog:
        catalog.streams.register("flights", 128, {})
        epoch = catalog.runs.begin("flights", "host:1")
        proxy.next(Fault(answer_bytes=0), holding=COMMIT)
        watch = threading.Thread(target=lambda: (wait_until(lambda: proxy.met > 0), proxy.down()))
        watch.start()
        with pytest.raises(Unreachable, match="it is not known whether checkpoint 1 of stream flights was written"):
            catalog.commits.add("flights", epoch, commit_of(1))
        watch.join()


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.001)


def test_a_catalog_that_is_away_when_it_is_opened_is_not_waited_for(
    through: str, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.down()
    with pytest.raises(Unreachable):
        open_catalog(through)
    assert caplog.records == []


def test_what_is_wrong_is_not_tried_again(flights: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    for wrong in (
        lambda: flights.commits.add("flights", 1, commit_of(7)),
        lambda: flights.commits.add("flights", 9, commit_of(1)),
        lambda: flights.streams.get("nobody"),
    ):
        with pytest.raises((UsageError, Fenced, Unreachable)):
            wrong()
    assert caplog.records == []


def test_a_sqlite_catalog_that_somebody_holds_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "catalog.db"
    with open_catalog(f"sqlite:///{path}", timeout_s=0.05) as catalog:
        catalog.streams.register("flights", 128, {})
        with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as holder:
            holder.execute("BEGIN IMMEDIATE")

            def let_go() -> None:
                wait_until(lambda: any("trying again" in r.getMessage() for r in caplog.records))
                holder.execute("ROLLBACK")

            thread = threading.Thread(target=let_go)
            thread.start()
            assert catalog.runs.begin("flights", "host:1") == 1
            thread.join()
