"""The panels of the page: proofs, bytes written, bytes a restore reads, D, and restore seconds over checkpoint ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, FigureBase
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator
from rich import filesize

from siltstone.model import Form
from siltstone.report.data import CheckpointPoint, ReportData
from siltstone.report.timeline_panel import draw_timeline, panel_height

SHOWN_MAX = 1000
"""most checkpoints on one page: more would be narrower than a dot"""

_HUES = ("#0072B2", "#E69F00", "#009E73", "#882255", "#6B4A2B")
_OTHERS = "#777777"
_MANIFEST = "#A7B3C2"
_INK, _QUIET, _GRID = "#222222", "#666666", "#E4E4E4"
_PROOFS = {True: ("#44546A", "proven"), False: ("#D55E00", "proof failed"), None: ("#DDDDDD", "not tried")}
_TICKS = 10
_WIDTH, _PAGE = 11.7, 9.0
"""inches of the page, without the timeline"""
_BOUND = {"color": _INK, "linewidth": 1.2}
_MEASURED = {"color": _INK, "marker": "D", "linestyle": "none", "markerfacecolor": "white", "markeredgewidth": 1.2}


@dataclass(frozen=True)
class _Series:
    """One operator, or several small ones together: four arrays of bytes, one value per checkpoint."""

    name: str
    hue: str
    base: np.ndarray
    delta: np.ndarray
    chain_base: np.ndarray
    chain_delta: np.ndarray


class Page:
    """The page of one report; `figure` draws it."""

    def __init__(self, data: ReportData) -> None:
        self.data = data
        self.points: Sequence[CheckpointPoint] = data.checkpoints[-SHOWN_MAX:]
        self.ids = np.array([point.record.id for point in self.points])
        self.series = self._series()
        # A few checkpoints are drawn in the middle instead of filling the page.
        pad = max(0, 4 - (self.ids[-1] - self.ids[0])) / 2
        self.first, self.last = self.ids[0] - 0.5 - pad, self.ids[-1] + 0.5 + pad

    def figure(self) -> Figure:
        """Draw a landscape page, and below it the timeline, if there is one."""
        below = panel_height(self.data.timeline)
        figure = Figure(figsize=(_WIDTH, _PAGE + below), facecolor="white")
        if not below:
            self._draw(figure)
            return figure
        grid = figure.add_gridspec(2, 1, height_ratios=[_PAGE, below], hspace=0)
        self._draw(figure.add_subfigure(grid[0]))
        draw_timeline(figure.add_subfigure(grid[1]), self.data.timeline)
        return figure

    def _draw(self, figure: FigureBase) -> None:
        timed = any(p.bound_s is not None or p.record.restore_s is not None for p in self.points)
        heights = [0.13, 1.25, 1.25, 0.9] + ([0.9] if timed else [])
        grid = figure.add_gridspec(
            len(heights), 1, height_ratios=heights, left=0.075, right=0.957, top=0.83, bottom=0.085, hspace=0.42
        )
        axes = [figure.add_subplot(grid[0])]
        axes += [figure.add_subplot(grid[row], sharex=axes[0]) for row in range(1, len(heights))]
        draw = [self._proofs, self._draw_written, self._draw_read, self._deltas, self._times]
        for panel, ax in zip(draw, axes, strict=False):
            panel(ax)
        for ax in axes[1:]:
            self._dress(ax)
        self._epochs(axes)
        self._label_ids(axes)
        self._head(figure)

    # Panels

    def _proofs(self, ax: Axes) -> None:
        for proven, (colour, _) in _PROOFS.items():
            ids = np.array([p.record.id for p in self.points if p.record.proven is proven])
            self._bars(ax, ids, np.zeros(len(ids)), np.ones(len(ids)), colour)
            if proven is False and len(ids):
                ax.plot(ids, np.full(len(ids), 0.5), "x", color="white", markersize=5, markeredgewidth=1.4)
        ax.set_ylim(0, 1)
        ax.set_yticks([0.5], ["proof"])
        ax.tick_params(length=0, labelbottom=False, labelcolor=_QUIET, labelsize=9)
        ax.spines[:].set_visible(False)
        seen = {p.record.proven for p in self.points}
        handles = [Patch(color=colour, label=label) for key, (colour, label) in _PROOFS.items() if key in seen]
        self._legend(ax, handles, above=2.5)

    def _draw_written(self, ax: Axes) -> None:
        other = np.array([p.other_bytes for p in self.points], float)
        highest = self._stack(ax, [s.base for s in self.series], [s.delta for s in self.series], other)
        self._title(ax, "Bytes written by each checkpoint")
        self._bytes(ax, highest)

    def _draw_read(self, ax: Axes) -> None:
        other = np.array([p.chain_other_bytes for p in self.points], float)
        highest = self._stack(ax, [s.chain_base for s in self.series], [s.chain_delta for s in self.series], other)
        self._title(ax, "Bytes a restore reads: the base, and the deltas since")
        known = self._bound_and_measured(
            ax, [p.bound_bytes for p in self.points], [p.record.restore_bytes for p in self.points]
        )
        self._bytes(ax, max(highest, known))

    def _deltas(self, ax: Axes) -> None:
        highest = 1
        for i, s in enumerate(s for s in self.series if s.name in self.data.operators):
            parts = [p.operators.get(s.name) for p in self.points]
            d = np.array([np.nan if part is None else part.d for part in parts])
            deltas = np.array([np.nan if part is None else part.chain_deltas for part in parts])
            based = np.array([part is not None and part.form is not Form.DELTA for part in parts])
            ended = np.flatnonzero(based[1:] & np.isfinite(deltas[:-1]))
            highest = max(highest, np.nanmax(d), np.nanmax(deltas))
            # If lines or points coincide, the wider ones below still show.
            wide = max(1.3, 4.6 - 1.3 * i)
            ax.plot(*self._steps(d), color=s.hue, linewidth=wide, zorder=2, solid_capstyle="butt")
            ax.plot(
                self.ids[ended],
                deltas[ended],
                "o",
                color=s.hue,
                markersize=self._mark(3.0, 5.0) + wide / 2,
                markeredgecolor="white",
                markeredgewidth=0.7,
                zorder=3,
                clip_on=False,
            )
        self._title(ax, "D: deltas a base is meant to carry, and how many each chain had")
        ax.set_ylim(0, highest * 1.15)
        ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.set_ylabel("deltas")
        handles = [
            Line2D([], [], color=_QUIET, linewidth=3, label="D"),
            Line2D([], [], color=_QUIET, marker="o", linestyle="none", markersize=5, label="a chain's last delta"),
        ]
        self._legend(ax, handles)

    def _times(self, ax: Axes) -> None:
        self._title(ax, "Seconds a restore takes")
        highest = self._bound_and_measured(
            ax, [p.bound_s for p in self.points], [p.record.restore_s for p in self.points]
        )
        ax.set_ylim(0, highest * 1.12 or 1)
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.yaxis.set_major_formatter(EngFormatter("s"))

    def _bound_and_measured(self, ax: Axes, bound: Sequence[float | None], measured: Sequence[float | None]) -> float:
        """Draw the bounds as a line and the measurements as points, where known; return the highest value."""
        bounds, found = np.array(bound, float), np.array(measured, float)
        handles: list[Line2D] = []
        if np.isfinite(bounds).any():
            handles += ax.plot(*self._steps(bounds), label="bound", zorder=4, **_BOUND)
        if np.isfinite(found).any():
            size = self._mark(3.8, 6.0)
            handles += ax.plot(self.ids, found, label="measured restore", markersize=size, zorder=5, **_MEASURED)
        self._legend(ax, handles)
        known = np.concatenate([bounds, found])
        return float(np.nanmax(known)) if np.isfinite(known).any() else 0.0

    # Shared by panels

    def _series(self) -> list[_Series]:
        """Make one series per operator; if there are more operators than hues, the smallest share one."""
        names = list(self.data.operators)
        size = {n: sum(p.operators[n].bytes for p in self.points if n in p.operators) for n in names}
        kept = names
        if len(names) > len(_HUES):
            largest = sorted(names, key=lambda n: -size[n])[: len(_HUES)]
            kept = [n for n in names if n in largest]
        rest = [n for n in names if n not in kept]
        series = [self._make_series(name, hue, [name]) for name, hue in zip(kept, _HUES, strict=False)]
        return series + ([self._make_series(f"{len(rest)} smaller operators", _OTHERS, rest)] if rest else [])

    def _make_series(self, label: str, hue: str, operators: Sequence[str]) -> _Series:
        columns = np.zeros((4, len(self.points)))
        for i, point in enumerate(self.points):
            for part in (point.operators[name] for name in operators if name in point.operators):
                columns[1 if part.form is Form.DELTA else 0, i] += part.bytes
                columns[2:, i] += part.chain_base_bytes, part.chain_delta_bytes
        return _Series(label, hue, *columns)

    def _stack(self, ax: Axes, bases: Sequence[np.ndarray], deltas: Sequence[np.ndarray], other: np.ndarray) -> float:
        """Stack all operators' bases, then the deltas, then the manifests; return the highest top."""
        hues = [s.hue for s in self.series]
        layers = [*zip(bases, hues, strict=True), *zip(deltas, map(_lighten, hues), strict=True), (other, _MANIFEST)]
        top = np.zeros(len(self.ids))
        for values, colour in layers:
            self._bars(ax, self.ids, top, values, colour)
            top = top + values
        return float(top.max())

    def _mark(self, least: float, most: float) -> float:
        """Return the size of a point: smaller with more checkpoints."""
        return float(np.clip(500 / len(self.ids), least, most))

    def _bars(self, ax: Axes, ids: np.ndarray, bottom: np.ndarray, height: np.ndarray, colour: object) -> None:
        """Draw one bar per id, all as one collection: thousands of patches would take seconds."""
        there = height > 0
        ids, low, high = ids[there], bottom[there], (bottom + height)[there]
        half = 0.42 if len(self.ids) <= 120 else 0.5
        x = np.stack([ids - half, ids - half, ids + half, ids + half], axis=1)
        y = np.stack([low, high, high, low], axis=1)
        ax.add_collection(PolyCollection([*np.stack([x, y], axis=2)], facecolors=[colour], linewidths=0, zorder=2))

    def _steps(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a flat line over each id, so that a single checkpoint shows too."""
        return np.stack([self.ids - 0.5, self.ids + 0.5], axis=1).ravel(), np.repeat(values, 2)

    def _title(self, ax: Axes, text: str) -> None:
        ax.set_title(text, loc="left", fontsize=10.5, fontweight="bold", color=_INK, pad=6)

    def _legend(self, ax: Axes, handles: Sequence[Patch | Line2D], above: float = 1.0) -> None:
        """Draw the legend on the title's line, where it never covers data."""
        if handles:
            ax.legend(
                handles=handles,
                loc="lower right",
                bbox_to_anchor=(1.0, above),
                ncols=len(handles),
                frameon=False,
                fontsize=9,
                borderaxespad=0.1,
                labelcolor=_QUIET,
                handlelength=1.6,
                columnspacing=1.4,
            )

    def _bytes(self, ax: Axes, highest: float) -> None:
        ax.set_ylim(0, highest * 1.08 or 1)
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        ax.yaxis.set_major_formatter(EngFormatter("B"))

    def _dress(self, ax: Axes) -> None:
        ax.grid(axis="y", color=_GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color("#999999")
        ax.tick_params(axis="both", colors=_QUIET, labelsize=9, length=3)
        ax.tick_params(axis="y", length=0)
        ax.tick_params(axis="x", labelbottom=False)
        ax.yaxis.label.set(color=_QUIET, size=9)

    def _epochs(self, axes: Sequence[Axes]) -> None:
        """Draw a thin line wherever another run took over, with its epoch if there is room."""
        free_from = self.first
        for before, point in zip(self.points, self.points[1:], strict=False):
            if before.record.epoch == point.record.epoch:
                continue
            x = (before.record.id + point.record.id) / 2
            for ax in axes[1:]:
                ax.axvline(x, color="#999999", linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
            if x >= free_from:
                axes[0].annotate(
                    f"epoch {point.record.epoch}",
                    (x, 1),
                    xytext=(0, 4),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=_QUIET,
                    annotation_clip=False,
                )
                free_from = x + 0.07 * (self.last - self.first)

    def _label_ids(self, axes: Sequence[Axes]) -> None:
        """Label ids, and below them times: event times if all have one, else commit times."""
        axes[0].set_xlim(self.first, self.last)
        ids = [int(i) for i in self.ids]
        ticks = ids
        if len(ids) > _TICKS:
            nice = MaxNLocator(_TICKS, integer=True, steps=[1, 2, 5, 10]).tick_values(ids[0], ids[-1])
            ticks = sorted(set(ids) & {int(tick) for tick in nice}) or [ids[0], ids[-1]]
        events = all(p.record.event_time_max for p in self.points)
        times = {
            p.record.id: (p.record.event_time_max if events and p.record.event_time_max else p.record.committed_at)
            for p in self.points
        }
        span = times[ids[-1]] - times[ids[0]]
        step = span / max(1, len(ticks))
        form = "%Y-%m-%d" if step >= timedelta(days=1) else "%m-%d %H:%M" if span >= timedelta(hours=12) else "%H:%M:%S"
        labels = [f"{tick}\n{times[tick].strftime(form)}" for tick in ticks]
        axes[-1].set_xticks(ticks, labels)
        axes[-1].tick_params(axis="x", labelbottom=True)
        what = "highest event time so far" if events else "time of commit"
        day = "" if form == "%Y-%m-%d" else f", from {times[ids[0]]:%Y-%m-%d} on"
        axes[-1].set_xlabel(f"checkpoint, and its {what} (UTC{day})", color=_QUIET, fontsize=9, labelpad=6)

    def _head(self, figure: FigureBase) -> None:
        data, newest = self.data, self.data.newest
        title = f"Chain of stream {data.stream}"
        size = min(17.0, 17.0 * 60 / len(title))
        figure.text(0.025, 0.962, title, fontsize=size, fontweight="bold", color=_INK)
        count = len(data.checkpoints)
        said = [
            f"{count} checkpoint{'s' * (count != 1)}",
            f"{filesize.decimal(data.stored_bytes)} stored"
            + (f", {data.amplification:.1f} times the newest base" if data.amplification else ""),
            f"a restore of checkpoint {newest.record.id} reads {filesize.decimal(newest.chain_bytes)}"
            + (f", {data.restore_amplification:.1f} times its base" if data.restore_amplification else ""),
        ]
        if len(self.points) < count:
            said[0] = f"newest {len(self.points)} of {count} checkpoints"
        figure.text(0.025, 0.934, "   ·   ".join(said), fontsize=10.5, color=_QUIET)
        hues = [s.hue for s in self.series] + [_QUIET]
        handles: list[Any] = [(Patch(color=hue), Patch(color=_lighten(hue))) for hue in hues]
        names = _shorten([s.name for s in self.series], 105 - 8 * len(self.series))
        figure.legend(
            [*handles, Patch(color=_MANIFEST)],
            [*names, "base, delta", "manifest"],
            loc="upper left",
            bbox_to_anchor=(0.018, 0.925),
            ncols=len(handles) + 1,
            frameon=False,
            fontsize=9.5,
            labelcolor=_INK,
            columnspacing=1.6,
            handlelength=2.6,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        )


def _shorten(names: Sequence[str], room: int) -> list[str]:
    """Cut the longest names so that all together have at most `room` characters."""
    longest = max(map(len, names))
    while sum(min(len(name), longest) for name in names) > room:
        longest -= 1
    return [name if len(name) <= longest else f"{name[: longest - 1]}…" for name in names]


def _lighten(hue: str) -> tuple[float, float, float]:
    """Return the tone of deltas: the hue, most of the way to white."""
    red, green, blue = (1 - 0.42 * (1 - part) for part in to_rgb(hue))
    return red, green, blue
