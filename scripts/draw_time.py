"""Draw the picture of docs/time.md from steps that were really taken: `python -m scripts.draw_time`."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from siltstone.operator import Due, Operator, Rows, State, Timer
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "watermark.svg"
BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)
SCHEMA = {"user": pa.string(), "at": pa.timestamp("us", "UTC"), "part": pa.string()}
STEPS = [
    [("a", 2, "p0"), ("b", 4, "p1")],
    [("a", 9, "p0"), ("b", 7, "p1")],
    [("a", 16, "p0"), ("b", 13, "p1"), ("c", 11, "p0")],
    [("a", 27, "p0"), ("c", 24, "p0")],
    [("a", 34, "p0"), ("d", 6, "p0")],
    [("a", 41, "p0"), ("c", 36, "p0")],
    [("a", 45, "p0")],
]
"""(user, minute, partition) of each micro-batch; from the fourth on, nothing comes from p1"""
INK, QUIET, LINE, LATE, DUE, IDLE = "#222222", "#888888", "#0072B2", "#D55E00", "#009E73", "#E9E2D6"


class Quiet(Operator):
    """Has one timer per user, ten minutes after the newest row."""

    name = "quiet"
    key = {"user": pa.string()}  # noqa: RUF012
    output = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    idle = Timer()

    def process(self, rows: Rows, state: State) -> None:
        newest = rows.max("at")
        state.idle.set(rows.keys, pa.array([at + timedelta(minutes=10) for at in newest.to_pylist()], newest.type))

    def on_timer(self, due: Due, state: State) -> pa.Table:
        return due.keys.with_columns({"at": due.at})


def minute(at: datetime) -> float:
    """Minutes after the beginning."""
    return (at - BEGIN) / timedelta(minutes=1)


def draw(axes: Axes) -> None:
    """Draw rows, watermark and timers over steps."""
    event_time = EventTime("at", delay="5 minutes", idle_after="2 minutes", per="part")
    stream = Stream("picture", None, [Quiet()], event_time=event_time, sinks={"quiet": None})
    with StreamTester(stream, schema=SCHEMA, now=BEGIN + timedelta(hours=1)) as tester:
        reached: list[tuple[int, float]] = []
        for number, rows in enumerate(STEPS, 1):
            before = reached[-1][1] if reached else None
            made = tester.step([{"user": u, "at": BEGIN + timedelta(minutes=m), "part": p} for u, m, p in rows])
            if tester.watermark is not None:
                reached.append((number, minute(tester.watermark)))
            for place, (_, at, part) in enumerate(rows):
                x, late = number + 0.18 * (place - 1), before is not None and at < before
                color = LATE if late else INK
                axes.plot(x, at, "s" if part == "p1" else "o", color=color, markersize=6, zorder=3)
            for due in made["quiet"]["at"].to_pylist():
                axes.plot(number + 0.32, minute(due), "^", color=DUE, markersize=8, zorder=3)
            between = tester.advance("1 minute")
            for due in between["quiet"]["at"].to_pylist():
                axes.plot(number + 0.5, minute(due), "^", color=DUE, markersize=8, zorder=3)
    xs = [x for number, _ in reached for x in (number - 0.5, number + 0.5)]
    axes.plot(xs, [at for _, at in reached for _ in (0, 1)], color=LINE, linewidth=2)
    axes.axvspan(4.5, len(STEPS) + 0.5, color=IDLE, zorder=0)
    number, at = reached[-1]
    axes.annotate("watermark W(n)", (number - 1, at), (number - 0.9, at - 9), color=LINE)
    axes.annotate("late: before W(n-1)", (5, 6), (5.15, 4), color=LATE)
    axes.annotate("p1 is idle: it no longer\nholds the watermark back", (4.6, 50), color=QUIET, va="top")
    axes.annotate("held back by p1", (3.55, 5), color=QUIET)


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.set_xlabel("micro-batch")
    axes.set_ylabel("event time, minutes after 12:00")
    axes.set_ylim(-6, 52)
    axes.set_xlim(0.5, len(STEPS) + 0.5)
    for kind, color, label in (("o", INK, "row of partition p0"), ("s", INK, "row of p1"), ("^", DUE, "timer fires")):
        axes.plot([], [], kind, color=color, label=label)
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
