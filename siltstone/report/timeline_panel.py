"""The panel of the page with time on its axis: each checkpoint's phases, and the micro-batches beside them."""

from datetime import datetime
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from siltstone.report.timeline import PHASES, Timeline

SHOWN = 12
"""most checkpoints that the panel shows: of more, the phases would be too narrow to tell apart"""
_COLOURS = {"drain": "#CBD5DF", "waiting": "#FFFFFF", "storing": "#7FA6C9", "commit": "#1F4E79", "delivery": "#D9A441"}
_EDGE, _BATCHES = "#5A6B7B", ("#A3B899", "#C3D2BC")
_INK, _QUIET = "#222222", "#666666"
_HEIGHT = 0.54
_LABEL_MIN = 0.022
"""least part of the axis that has room for a number"""


def panel_height(timeline: Timeline) -> float:
    """Return how high the panel is, in inches; 0 if there is nothing to show."""
    shown = timeline.select_newest(SHOWN)
    return 1.3 + 0.4 * (max(shown.lanes()) + 2) if shown.checkpoints else 0.0


def draw_timeline(figure: SubFigure, timeline: Timeline) -> Axes:
    """Draw the newest checkpoints of a timeline, which has some."""
    shown = timeline.select_newest(SHOWN)
    inches = panel_height(timeline)
    ax = figure.add_axes((0.1, 0.62 / inches, 0.857, 1 - 1.1 / inches))
    panel = _Panel(ax, shown)
    panel.draw()
    return ax


class _Panel:
    """The panel of one timeline; lane 0 has the micro-batches, checkpoints are above."""

    def __init__(self, ax: Axes, shown: Timeline) -> None:
        self._ax, self._shown = ax, shown
        ends = [(each.began_at, each.ended_at) for each in (*shown.checkpoints, *shown.steps)]
        self._start = min(began for began, _ in ends)
        self._span = max((max(ended for _, ended in ends) - self._start).total_seconds(), 1e-3)

    def draw(self) -> None:
        """Draw everything."""
        ax, lanes = self._ax, self._shown.lanes()
        for number, step in enumerate(self._shown.steps):
            self._bar(0, step.began_at, step.ended_at, _BATCHES[number % 2])
            self._number(0, step.began_at, step.ended_at, step.step)
        for span, lane in zip(self._shown.checkpoints, lanes, strict=True):
            for phase, first, last in span.phases():
                self._bar(lane + 1, first, last, _COLOURS[phase], edge=_EDGE)
            self._number(lane + 1, span.began_at, span.ended_at, span.id, above=True)
        top = max(lanes) + 1
        names = ["checkpoints", *(f"{lane + 1} at once" for lane in range(1, top))]
        ax.set_yticks(range(top + 1), ["micro-batches", *names])
        ax.set_ylim(-0.5, top + 0.75)
        ax.set_xlim(-0.005 * self._span, 1.005 * self._span)
        ax.xaxis.set_major_locator(MaxNLocator(8))
        ax.xaxis.set_major_formatter(EngFormatter("s"))
        ax.set_xlabel(
            f"time since {self._start.isoformat(' ', 'milliseconds').removesuffix('+00:00')} UTC",
            color=_QUIET,
            fontsize=9,
        )
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color("#999999")
        ax.tick_params(axis="both", colors=_QUIET, labelsize=9, length=3)
        ax.tick_params(axis="y", length=0)
        self._title()

    def _title(self) -> None:
        count = len(self._shown.checkpoints)
        text = f"Timeline of the newest {count} checkpoints" if count > 1 else "Timeline of the newest checkpoint"
        self._ax.set_title(text, loc="left", fontsize=10.5, fontweight="bold", color=_INK, pad=6)
        seen = {
            phase
            for span in self._shown.checkpoints
            for phase, first, last in span.phases()
            if self._is_seen(first, last)
        }
        handles = [Patch(facecolor=_COLOURS[p], edgecolor=_EDGE, linewidth=0.6, label=p) for p in PHASES if p in seen]
        self._ax.legend(
            handles=[*handles, Patch(color=_BATCHES[0], label="micro-batch")],
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=len(handles) + 1,
            frameon=False,
            fontsize=9,
            borderaxespad=0.1,
            labelcolor=_QUIET,
            handlelength=1.6,
            columnspacing=1.2,
        )

    def _bar(self, lane: int, first: datetime, last: datetime, colour: str, edge: str | None = None) -> None:
        left, width = self._seconds(first), (last - first).total_seconds()
        style: dict[str, Any] = (
            {"color": colour, "linewidth": 0}
            if edge is None
            else {"facecolor": colour, "edgecolor": edge, "linewidth": 0.5}
        )
        self._ax.broken_barh([(left, width)], (lane - _HEIGHT / 2, _HEIGHT), zorder=2, **style)

    def _number(self, lane: int, first: datetime, last: datetime, number: int, *, above: bool = False) -> None:
        """Write a number into a bar, or above it, if there is room."""
        left, right = self._seconds(first), self._seconds(last)
        if right - left < _LABEL_MIN * self._span * max(1, len(str(number)) / 3):
            return
        y = lane + (_HEIGHT / 2 if above else 0)
        self._ax.annotate(
            str(number),
            ((left + right) / 2, y),
            xytext=(0, 1.5 if above else 0),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "center",
            fontsize=8,
            color=_INK,
            annotation_clip=True,
        )

    def _is_seen(self, first: datetime, last: datetime) -> bool:
        return (last - first).total_seconds() > 0.001 * self._span

    def _seconds(self, at: datetime) -> float:
        return (at - self._start).total_seconds()
