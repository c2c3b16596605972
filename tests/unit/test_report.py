"""The report of a chain: its numbers and its tables, from a real catalog of hand-made records."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from sqlalchemy import insert

from siltstone.catalog.database.tables import materialization
from siltstone.catalog.repository import Catalog
from siltstone.errors import UnknownCheckpoint, UnknownStream
from siltstone.report import ReportData, checkpoint_table, report_data, summary_table
from siltstone.report.timeline import timeline_of
from tests.report_chain import CHAIN, MANIFEST, NOON, add, drawn, record_chain, report_catalog


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with report_catalog(tmp_path) as opened:
        yield opened


@pytest.fixture
def data(catalog: Catalog) -> ReportData:
    return record_chain(catalog)


# Numbers


def test_a_restore_reads_the_newest_base_and_the_deltas_since(data: ReportData) -> None:
    assert [p.operators["aircraft"].chain_bytes for p in data.checkpoints] == [1000, 1100, 1300, 1200, 1500]
    assert [p.operators["routes"].chain_bytes for p in data.checkpoints] == [500, 540, 600, 650, 710]
    assert [p.operators["aircraft"].chain_deltas for p in data.checkpoints] == [0, 1, 2, 0, 1]
    # Of the manifests, those from the oldest base on: at 4 the one of routes, written at 3.
    assert [p.chain_other_bytes // MANIFEST for p in data.checkpoints] == [1, 2, 3, 2, 3]
    assert [p.chain_bytes for p in data.checkpoints] == [1507, 1654, 1921, 1864, 2231]


def test_a_chain_begins_with_what_was_materialized(catalog: Catalog, data: ReportData) -> None:
    with catalog.transactions.writer.begin() as connection:
        connection.execute(
            insert(materialization),
            {
                "stream": "flights",
                "id": "m1",
                "operator": "aircraft",
                "checkpoint": 2,
                "who": "a test",
                "began_at": NOON,
                "ended_at": NOON,
                "manifest": "flights/00000001/000000000002/aircraft.m1.materialized.arrow",
                "bytes": 5000,
            },
        )
    seen = report_data(catalog, "flights")
    parts = [p.operators["aircraft"] for p in seen.checkpoints[:3]]
    assert [(p.chain_base_bytes, p.chain_deltas) for p in parts][1:] == [(5000, 0), (5000, 1)]
    assert parts[2].chain_delta_bytes == parts[2].bytes
    assert seen.checkpoints[1].materialized_bytes == 5000
    assert seen.stored_bytes == data.stored_bytes + 5000
    assert seen.checkpoints[0] == data.checkpoints[0]


def test_amplification_compares_with_the_newest_base(data: ReportData) -> None:
    assert data.stored_bytes == sum(size for parts in CHAIN for _, size in parts.values()) + 5 * MANIFEST
    assert data.newest.chain_base_bytes == 1200 + 600
    assert data.amplification == pytest.approx(4085 / 1800)
    assert data.restore_amplification == pytest.approx(2231 / 1800)


def test_bounds_and_measured_restores_are_told_where_they_are_known(catalog: Catalog, data: ReportData) -> None:
    assert [p.bound_bytes for p in data.checkpoints] == [2900, 2901, 2902, 2903, 2904]
    assert data.newest.bound_s == pytest.approx(2.904)
    assert [(p.record.restore_s, p.record.restore_bytes) for p in data.checkpoints[1:4]] == [
        (None, None),
        (1.5, 1900),
        (None, None),
    ]
    assert [p.record.proven for p in data.checkpoints] == [None, False, True, None, None]
    add(catalog, CHAIN[4], 2, bound={"aircraft": 2000.0})
    newest = report_data(catalog, "flights").newest
    assert newest.operators["aircraft"].bound_bytes == 2000
    assert newest.bound_bytes is None and newest.bound_s is None


@pytest.mark.parametrize("newest", [1, 2, 3, 5, 9])
def test_of_the_newest_few_the_same_is_said_as_among_all(catalog: Catalog, data: ReportData, newest: int) -> None:
    few = report_data(catalog, "flights", newest=newest)
    assert few.checkpoints == data.checkpoints[-newest:]
    assert few.timeline == timeline_of([point.record for point in few.checkpoints])


def test_operators_may_come_later(catalog: Catalog) -> None:
    add(catalog, {"aircraft": ("base", 1000)})
    add(catalog, {"aircraft": ("delta", 10), "routes": ("base", 50)})
    data = report_data(catalog, "flights")
    assert data.operators == ("aircraft", "routes")
    assert data.newest.chain_bytes == 1000 + 10 + 50 + 2 * MANIFEST
    assert drawn(data).axes


def test_json_has_the_names_of_the_command_line(data: ReportData) -> None:
    said = json.loads(json.dumps(data.to_dict(), allow_nan=False))
    assert {k: said[k] for k in ("stream", "stored_bytes", "base_bytes", "chain_bytes")} == {
        "stream": "flights",
        "stored_bytes": 4085,
        "base_bytes": 1800,
        "chain_bytes": 2231,
    }
    third = said["checkpoints"][2]
    operators = third.pop("operators")
    assert third == {
        "id": 3,
        "epoch": 1,
        "committed_at": third["committed_at"],
        "event_time_max": "2013-01-04T00:00:00+00:00",
        "bytes": 807,
        "rows": 60,
        "proven": True,
        "materialized_bytes": 0,
        "chain_bytes": 1921,
        "restore_bound_bytes": 2902.0,
        "restore_bound_seconds": 2.902,
        "restore_seconds": 1.5,
        "restore_bytes": 1900,
    }
    assert operators["aircraft"] == {
        "form": "delta",
        "bytes": 200,
        "D": 2,
        "rows": 30,
        "seconds": {"delta": 0.25},
        "chain_bytes": 1300,
        "chain_deltas": 2,
        "restore_bound_bytes": 2000.0,
        "restore_bound_seconds": 2.0,
        "amplification": 1.3,
    }


def test_a_stream_that_has_nothing_to_report(catalog: Catalog) -> None:
    with pytest.raises(UnknownCheckpoint, match="flights has no checkpoint"):
        report_data(catalog, "flights")
    with pytest.raises(UnknownStream, match="fligths"):
        report_data(catalog, "fligths")


# Tables


def rows_of(table: Table) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(table)
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_summary_has_an_operator_a_row(data: ReportData) -> None:
    title, _, aircraft, routes, all_ = rows_of(summary_table(data))
    assert " ".join(title) == "flights: 5 checkpoints, 4.1 kB stored, 2.3 times the newest base"
    assert " ".join(aircraft) == "aircraft 50 2 1.1 kB 3 200 bytes 2 1.5 kB 2.0 kB 1.25 2.00"
    assert " ".join(routes) == "routes 50 2 550 bytes 3 50 bytes 2 710 bytes 904 bytes 1.18 0.90"
    assert " ".join(all_) == "all 100 2.2 kB 2.9 kB 1.50 (at 3) 2.90"


def test_the_summary_of_a_chain_without_bounds_or_restores(catalog: Catalog) -> None:
    add(catalog, {"aircraft": ("base", 1000)}, events=False)
    data = report_data(catalog, "flights")
    title, _, aircraft, all_ = rows_of(summary_table(data))
    assert " ".join(title) == "flights: 1 checkpoint, 1.0 kB stored, 1.0 times the newest base"
    assert " ".join(aircraft) == "aircraft 10 1 1.0 kB 0 - 2 1.0 kB - 1.00 -"
    assert " ".join(all_) == "all 10 1.0 kB - - -"
    assert " ".join(rows_of(checkpoint_table(data))[1]) == "1 base 2 1.0 kB 1.0 kB - - -"


def test_checkpoints_have_a_row_each(data: ReportData) -> None:
    rows = [" ".join(row) for row in rows_of(checkpoint_table(data, 4))[1:]]
    assert rows == [
        "2 delta 2 delta 2 147 bytes 1.7 kB - 2013-01-03 FAILED",
        "3 delta 2 base 2 807 bytes 1.9 kB 1.50 2013-01-04 yes",
        "4 base 2 delta 2 1.3 kB 1.9 kB - 2013-01-05 -",
        "5 delta 2 delta 2 367 bytes 2.2 kB - 2013-01-06 -",
    ]
    assert len(rows_of(checkpoint_table(data))) == 6
