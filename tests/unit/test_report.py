"""The report of a chain: its numbers, its picture and its tables, from a real catalog of hand-made records."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from rich.console import Console
from rich.table import Table
from sqlalchemy import insert

from siltstone.catalog.commits import CheckpointCommit
from siltstone.catalog.open import open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.catalog.tables import materialization
from siltstone.errors import UnknownCheckpoint, UnknownStream, UsageError
from siltstone.model import Form, StoredObject
from siltstone.report import ReportData, checkpoint_table, draw_report, report_data, summary_table
from siltstone.report.panels import SHOWN_MAX, Page

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
MANIFEST = 7
"""bytes of each manifest"""
NO_BOUND: Mapping[str, float] = {}
Part = tuple[str, int]
"""form and bytes"""
CHAIN: list[dict[str, Part]] = [
    {"aircraft": ("base", 1000), "routes": ("base", 500)},
    {"aircraft": ("delta", 100), "routes": ("delta", 40)},
    {"aircraft": ("delta", 200), "routes": ("base", 600)},
    {"aircraft": ("base", 1200), "routes": ("delta", 50)},
    {"aircraft": ("delta", 300), "routes": ("delta", 60)},
]


def add(
    catalog: Catalog,
    parts: Mapping[str, Part],
    epoch: int = 1,
    *,
    bound: Mapping[str, float] = NO_BOUND,
    statistics: bool = True,
    events: bool = True,
    d: int = 2,
) -> None:
    """Commit the next checkpoint of stream flights, as a region would."""
    id = catalog.checkpoints.last_id("flights") + 1
    operators = {
        name: {"bytes": size, "state_rows": 10 * id, "seconds": {form: 0.25}}
        | ({"restore_bound_bytes": bound[name], "restore_bound_s": bound[name] / 1000} if name in bound else {})
        for name, (form, size) in parts.items()
    }
    catalog.commits.add(
        "flights",
        epoch,
        CheckpointCommit(
            id=id,
            manifest=StoredObject(f"flights/{epoch:08d}/{id:012d}/manifest.a.arrow", MANIFEST, "0" * 32),
            digest="0" * 32,
            rows=10 * id * len(parts),
            bytes=MANIFEST + sum(size for _, size in parts.values()),
            forms={name: Form(form) for name, (form, _) in parts.items()},
            d=dict.fromkeys(parts, d),
            statistics={"operators": operators} if statistics else {},
            event_time_max=datetime(2013, 1, 1, tzinfo=UTC) + timedelta(days=id) if events else None,
        ),
    )


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    times = (NOON + timedelta(seconds=3 * i) for i in range(10**6))
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db", now=lambda: next(times)) as opened:
        opened.streams.register("flights", 128, {})
        opened.runs.begin("flights", "here:1")
        yield opened


@pytest.fixture
def data(catalog: Catalog) -> ReportData:
    """`CHAIN` with bounds, a second run from checkpoint 4 on, a measured restore of 3 and a failed proof of 2."""
    for i, parts in enumerate(CHAIN):
        if i == 3:
            catalog.runs.begin("flights", "here:2")
        add(catalog, parts, 2 if i >= 3 else 1, bound={"aircraft": 2000.0, "routes": 900.0 + i})
    catalog.checkpoints.record_proof("flights", 2, False, "digest differs")
    catalog.checkpoints.record_proof("flights", 3, True, restore_s=1.5, restore_bytes=1900)
    return report_data(catalog, "flights")


def long_chain(catalog: Catalog, count: int, names: tuple[str, ...], *, events: bool = True) -> ReportData:
    """A base every tenth checkpoint, seven runs."""
    runs = {1 + run * count // 7 for run in range(1, 7)} - {1}
    epoch = 1
    for id in range(1, count + 1):
        if id in runs:
            epoch = catalog.runs.begin("flights", "here")
        part = ("base", 10_000 * id) if id % 10 == 1 else ("delta", 3_000 + id)
        add(catalog, dict.fromkeys(names, part), epoch, bound=dict.fromkeys(names, 20_000.0 * id), events=events, d=9)
    catalog.checkpoints.record_proof("flights", count, True, restore_s=0.02, restore_bytes=9)
    return report_data(catalog, "flights")


def drawn(data: ReportData) -> Figure:
    figure = Page(data).figure()
    FigureCanvasAgg(figure).draw()
    return figure


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
    assert [(p.restore_s, p.restore_bytes) for p in data.checkpoints[1:4]] == [(None, None), (1.5, 1900), (None, None)]
    assert [p.proven for p in data.checkpoints] == [None, False, True, None, None]
    add(catalog, CHAIN[4], 2, bound={"aircraft": 2000.0})
    newest = report_data(catalog, "flights").newest
    assert newest.operators["aircraft"].bound_bytes == 2000
    assert newest.bound_bytes is None and newest.bound_s is None


def test_operators_may_come_later(catalog: Catalog) -> None:
    add(catalog, {"aircraft": ("base", 1000)})
    add(catalog, {"aircraft": ("delta", 10), "routes": ("base", 50)})
    data = report_data(catalog, "flights")
    assert data.operators == ("aircraft", "routes")
    assert data.newest.chain_bytes == 1000 + 10 + 50 + 2 * MANIFEST
    assert drawn(data).axes


def test_without_statistics_all_bytes_are_outside_operators(catalog: Catalog) -> None:
    add(catalog, {"aircraft": ("base", 1000)}, statistics=False)
    add(catalog, {"aircraft": ("delta", 100)}, statistics=False)
    data = report_data(catalog, "flights")
    assert (data.newest.other_bytes, data.newest.chain_bytes) == (107, 1114)
    assert data.amplification is None and data.restore_amplification is None
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
        "amplification": None,
    }


def test_a_stream_that_has_nothing_to_report(catalog: Catalog) -> None:
    with pytest.raises(UnknownCheckpoint, match="flights has no checkpoint"):
        report_data(catalog, "flights")
    with pytest.raises(UnknownStream, match="fligths"):
        report_data(catalog, "fligths")


# The picture


def panel(figure: Figure, title: str) -> Axes:
    (found,) = (ax for ax in figure.axes if ax.get_title(loc="left").startswith(title))
    return found


def heights(ax: Axes) -> dict[str, np.ndarray]:
    """label -> y of each line."""
    return {str(line.get_label()): np.asarray(line.get_ydata()) for line in ax.get_lines()}


@pytest.mark.slow
def test_panels_show_bounds_and_measurements(data: ReportData) -> None:
    figure = drawn(data)
    titles = [ax.get_title(loc="left").split(":")[0] for ax in figure.axes[1:]]
    assert titles == ["Bytes written by each checkpoint", "Bytes a restore reads", "D", "Seconds a restore takes"]
    size, seconds = heights(panel(figure, "Bytes a restore")), heights(panel(figure, "Seconds"))
    assert size["bound"][::2].tolist() == [2900, 2901, 2902, 2903, 2904]
    np.testing.assert_array_equal(size["measured restore"], [np.nan, np.nan, 1900, np.nan, np.nan])
    np.testing.assert_array_equal(seconds["measured restore"], [np.nan, np.nan, 1.5, np.nan, np.nan])


@pytest.mark.slow
def test_the_panel_of_d_shows_how_long_each_chain_became(data: ReportData) -> None:
    lines = panel(drawn(data), "D: ").get_lines()
    points = [line.get_xydata() for line in lines if line.get_marker() == "o"]
    # aircraft had deltas 2 and 3 before its base 4, routes had delta 2 before its base 3
    assert [np.asarray(xy).tolist() for xy in points] == [[[3, 2]], [[2, 1]]]
    steps = [np.asarray(line.get_ydata()).tolist() for line in lines if len(np.asarray(line.get_xdata())) == 10]
    assert steps == [[2] * 10, [2] * 10]


@pytest.mark.slow
def test_bars_have_the_heights_of_the_bytes(data: ReportData) -> None:
    figure = drawn(data)
    for ax, wanted in ((figure.axes[1], [p.bytes for p in data.checkpoints]),
                       (figure.axes[2], [p.chain_bytes for p in data.checkpoints])):  # fmt: skip
        tops = dict.fromkeys(range(1, 6), 0.0)
        area = dict.fromkeys(range(1, 6), 0.0)
        for collection in ax.collections:
            for corners in (np.asarray(path.vertices) for path in collection.get_paths()):
                (left, low), (right, high) = corners.min(axis=0), corners.max(axis=0)
                id = round((left + right) / 2)
                tops[id], area[id] = max(tops[id], high), area[id] + high - low
        assert list(tops.values()) == wanted
        assert list(area.values()) == pytest.approx(wanted), "bars of one checkpoint overlap or leave gaps"


def test_the_panel_of_seconds_is_left_out_where_none_are_known(catalog: Catalog) -> None:
    add(catalog, CHAIN[0])
    assert len(drawn(report_data(catalog, "flights")).axes) == 4


@pytest.mark.slow
def test_a_run_that_took_over_is_marked(data: ReportData) -> None:
    strip = drawn(data).axes[0]
    assert [(t.get_text(), t.xy[0]) for t in strip.texts] == [("epoch 2", 3.5)]  # type: ignore[attr-defined]


def test_of_many_operators_the_smallest_are_drawn_together(catalog: Catalog) -> None:
    sizes = {f"op{i}": ("base", 1000 - 10 * i) for i in range(8)}
    add(catalog, sizes)
    add(catalog, {name: ("delta", size) for name, (_, size) in sizes.items()})
    page = Page(report_data(catalog, "flights"))
    assert [s.name for s in page.series] == ["op0", "op1", "op2", "op3", "op4", "3 smaller operators"]
    assert page.series[-1].base.tolist() == [950 + 940 + 930, 0]
    assert page.series[-1].chain_delta.tolist() == [0, 950 + 940 + 930]


@pytest.mark.slow
def test_more_checkpoints_than_fit_are_the_newest(data: ReportData) -> None:
    many = ReportData("flights", tuple([data.checkpoints[0]] * SHOWN_MAX + list(data.checkpoints)))
    page = Page(many)
    assert len(page.points) == SHOWN_MAX and page.points[-1] is data.newest
    assert any(t.get_text().startswith("newest 1000 of 1005") for t in page.figure().texts)


def texts_of(figure: Figure) -> list[Text]:
    """Every text that is drawn; matplotlib also keeps labels of ticks beyond an axis' ends, and draws them not."""
    beyond: set[Text] = set()
    for ax in figure.axes:
        for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            beyond |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in beyond]


LAYOUTS = [
    (1, ("aircraft",), True),
    (5, ("aircraft", "routes"), False),
    (60, ("aircraft", "routes", "carriers"), True),
    (500, ("x" * 64, "y" * 64, "c", "d", "e", "f"), False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "names", "events"), LAYOUTS, ids=lambda v: str(v) if isinstance(v, int) else "")
def test_no_text_is_cut_or_covers_another(catalog: Catalog, count: int, names: tuple[str, ...], events: bool) -> None:
    figure = drawn(long_chain(catalog, count, names, events=events))
    page = figure.bbox
    shown = [(text.get_text(), text.get_window_extent()) for text in texts_of(figure)]
    assert len(shown) > 20
    for words, box in shown:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, words
    for (words, box), (others, other) in combinations(shown, 2):
        assert not box.padded(-0.5).overlaps(other.padded(-0.5)), (words, others)


# The file


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.b.pdf", b"%PDF")])
def test_the_suffix_names_the_format(data: ReportData, tmp_path: Path, name: str, start: bytes) -> None:
    before = set(tmp_path.iterdir())
    path = tmp_path / name
    path.write_text("an older picture")
    assert draw_report(data, path) == path
    assert path.read_bytes().startswith(start)
    assert set(tmp_path.iterdir()) - before == {path}


@pytest.mark.slow
def test_a_png_is_a_page_with_colours_in_it(data: ReportData, tmp_path: Path) -> None:
    pixels = imread(draw_report(data, tmp_path / "a.png"))
    assert pixels.shape[:2] == (1350, 1755)
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    assert (np.abs(pixels[..., :3] - blue).max(axis=2) < 0.01).sum() > 10_000


@pytest.mark.slow
def test_nothing_outside_the_picture_is_touched(data: ReportData, tmp_path: Path) -> None:
    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    draw_report(data, tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot


@pytest.mark.parametrize("name", ["a.jpeg", "a", "png", ".png"])
def test_another_suffix_is_refused_before_anything_is_drawn(data: ReportData, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"end it in one of \.png, \.svg, \.pdf"):
        draw_report(data, tmp_path / name)
    assert not (tmp_path / name).exists()


def missing_directory(path: Path) -> Path:
    return path / "missing" / "a.png"


def a_directory(path: Path) -> Path:
    (path / "a.png").mkdir()
    return path / "a.png"


def under_a_file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file" / "a.png"


def too_long(path: Path) -> Path:
    return path / ("a" * 300 + ".png")


@pytest.mark.slow
@pytest.mark.parametrize("bad", [missing_directory, a_directory, under_a_file, too_long])
def test_a_path_that_cannot_be_written_is_one_clear_line(
    data: ReportData, tmp_path: Path, bad: Callable[[Path], Path]
) -> None:
    path = bad(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="cannot write the picture") as caught:
        draw_report(data, path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


# Tables


def rows_of(table: Table) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(table)
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_summary_has_an_operator_a_row(data: ReportData) -> None:
    title, _, aircraft, routes, all_ = rows_of(summary_table(data))
    assert " ".join(title) == "flights: 5 checkpoints, 4.1 kB stored, 2.3 times the newest base"
    assert " ".join(aircraft) == "aircraft 50 2 1.1 kB 3 200 bytes 2 1.5 kB 2.0 kB - 2.00"
    assert " ".join(routes) == "routes 50 2 550 bytes 3 50 bytes 2 710 bytes 904 bytes - 0.90"
    assert " ".join(all_) == "all 100 2.2 kB 2.9 kB 1.50 (at 3) 2.90"


def test_the_summary_of_a_chain_without_bounds_or_restores(catalog: Catalog) -> None:
    add(catalog, {"aircraft": ("base", 1000)}, events=False)
    data = report_data(catalog, "flights")
    title, _, aircraft, all_ = rows_of(summary_table(data))
    assert " ".join(title) == "flights: 1 checkpoint, 1.0 kB stored, 1.0 times the newest base"
    assert " ".join(aircraft) == "aircraft 10 1 1.0 kB 0 - 2 1.0 kB - - -"
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
