"""A database that breaks off while a sink's rows are written: they are there once when it answers again."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import URL

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Unreachable
from siltstone.sinks import jdbc
from siltstone.sinks.jdbc import MARKERS, JdbcSink, JdbcTable
from tests.jdbc_run import TABLE, begin_stream, rows_in, stage
from tests.outbox_run import NAME, SINK
from tests.places import place_at
from tests.proxy import LOST_ANSWER, LOST_REQUEST, Fault, Proxy

pytestmark = pytest.mark.server
COMMIT = rb"COMMIT(?!TED)"
"""not of BEGIN ISOLATION LEVEL READ COMMITTED"""
MOMENTS = {
    "rows": rb'COPY "tallied"',
    "keyed rows": rb"INSERT INTO tallied",
    "marker": rb"UPDATE siltstone_sinks",
    "commit": COMMIT,
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with place_at(tmp_path / "w") as opened:
        begin_stream(opened)
        yield opened


@pytest.fixture
def url(schema: URL) -> str:
    return schema.render_as_string(hide_password=False)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", [LOST_REQUEST, LOST_ANSWER], ids=["request", "answer"])
def test_what_is_lost_on_the_way_is_made_again_and_rows_are_there_once(
    place: OpenWarehouse, through: str, proxy: Proxy, url: str, moment: str, fault: Fault
) -> None:
    key = "n" if moment == "keyed rows" else ()
    table = JdbcTable(JdbcSink(through, TABLE, key=key), place, NAME, SINK)
    table.deliver(stage(place, pa.table({"n": [1]})))
    proxy.next(fault, holding=MOMENTS[moment])
    table.deliver(stage(place, pa.table({"n": [2, 3]}), id=2))
    assert proxy.met == 1 and rows_in(url) == [1, 2, 3] and rows_in(url, f"SELECT id FROM {MARKERS}") == [2]


def test_an_outage_is_waited_for_and_then_ends_in_an_error_that_may_pass(
    place: OpenWarehouse, through: str, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jdbc, "OUTAGE_S", 1.0)
    table = JdbcTable(JdbcSink(through, TABLE), place, NAME, SINK)
    table.deliver(stage(place, pa.table({"n": [1]})))
    second = stage(place, pa.table({"n": [2]}), id=2)
    proxy.down()
    with pytest.raises(Unreachable, match=f"the JdbcSink of {SINK}, table {TABLE} in .*cannot be used"):
        table.deliver(second)
    proxy.up()
    table.deliver(second)
    proxy.down()
    back = threading.Timer(0.3, proxy.up)
    back.start()
    table.deliver(stage(place, pa.table({"n": [3]}), id=3))
    assert rows_in(url) == [1, 2, 3]


def test_a_writer_that_is_frozen_in_its_transaction_neither_holds_others_up_nor_writes(
    place: OpenWarehouse, through: str, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends its transaction; when it wakes up, it finds newer ids."""
    monkeypatch.setattr(jdbc, "_WAIT_S", 0.5)
    older, newer = (JdbcTable(JdbcSink(through, TABLE), place, NAME, SINK) for _ in range(2))
    outputs = [stage(place, pa.table({"n": [id]}), id=id) for id in (1, 2, 3)]
    older.deliver(outputs[0])
    proxy.next(Fault(delay_s=6), holding=MOMENTS["marker"])
    thread = threading.Thread(target=older.deliver, args=[outputs[1]])
    thread.start()
    while not proxy.met:
        time.sleep(0.01)
    for output in outputs[1:]:
        newer.deliver(output)
    assert thread.is_alive() and rows_in(url) == [1, 2, 3]
    thread.join()
    assert rows_in(url) == [1, 2, 3] and rows_in(url, f"SELECT id FROM {MARKERS}") == [3]
