"""The picture of a chain: its panels, its texts and its file."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from siltstone.catalog.repository import Catalog
from siltstone.errors import UsageError
from siltstone.report import ReportData, draw_report, report_data
from siltstone.report.panels import SHOWN_MAX, Page
from tests.report_chain import CHAIN, add, drawn, record_chain, report_catalog


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with report_catalog(tmp_path) as opened:
        yield opened


@pytest.fixture
def data(catalog: Catalog) -> ReportData:
    return record_chain(catalog)


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
    for ax, wanted in ((figure.axes[1], [p.record.bytes for p in data.checkpoints]),
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
    x0, y0, x1, y1 = np.array([box.padded(-0.5).extents for _, box in shown]).T
    overlap = (x0[:, None] <= x1) & (x0 <= x1[:, None]) & (y0[:, None] <= y1) & (y0 <= y1[:, None])
    covered = [(shown[one][0], shown[other][0]) for one, other in np.argwhere(np.triu(overlap, 1))]
    assert overlap.diagonal().all() and not covered


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
