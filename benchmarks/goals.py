"""The goals of benchmarks, and their reports."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Goal:
    """A measured number, and the upper or the lower bound that it has to keep; None for a bound that it does not have.

    What was measured in several rounds has their median, and the lowest and the highest of them as its spread. The goal
    is missed only by more than the spread: if every round is beyond the bound.
    """

    what: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None
    low: float | None = None
    high: float | None = None
    less_is_better: bool | None = None
    """which way is better; None for a number that is only shown"""

    def __post_init__(self) -> None:
        if self.less_is_better is None and (self.at_most, self.at_least) != (None, None):
            object.__setattr__(self, "less_is_better", self.at_most is not None)

    @classmethod
    def of_rounds(
        cls,
        what: str,
        rounds: Sequence[float],
        at_most: float | None = None,
        at_least: float | None = None,
        *,
        less_is_better: bool | None = None,
    ) -> "Goal":
        """Make the goal for a number that was measured once per round."""
        return cls(what, median(rounds), at_most, at_least, min(rounds), max(rounds), less_is_better)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest of the rounds."""
        return (self.measured if self.low is None else self.low, self.measured if self.high is None else self.high)

    @property
    def is_kept(self) -> bool | None:
        """Whether the number is within its bound, or beyond it by no more than the spread; None if it has no bound."""
        low, high = self.spread
        if self.at_most is not None:
            return low <= self.at_most
        return None if self.at_least is None else high >= self.at_least

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or `within the spread` if the median is beyond the bound, but not every round."""
        if not self.is_kept:
            return "" if self.is_kept is None else "missed"
        at_median = Goal(self.what, self.measured, self.at_most, self.at_least)
        return "met" if at_median.is_kept else "within the spread"

    @property
    def bound(self) -> str:
        """The bound as text."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "-" if self.at_least is None else f">= {self.at_least:g}"

    @property
    def range(self) -> str:
        """The spread as text."""
        return "" if self.low is None or self.high is None else f"{digits(self.low)} to {digits(self.high)}"


@dataclass
class Report:
    """The result of one part of the benchmarks: tables to print, numbers for JSON, and goals."""

    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def show(self, title: str, path: Path) -> None:
        """Print the tables, and that of the goals with this title; write the numbers to a file."""
        console = Console(width=None if sys.stdout.isatty() else 150)
        for table in self.tables:
            console.print(table)
        path.write_text(json.dumps(self.numbers, indent=1))
        console.print(goals_table(self.goals, title))
        console.print(f"numbers: {path}")


def goals_table(goals: Sequence[Goal], title: str = "goals") -> Table:
    """Make a table with one line per goal."""
    table = table_of(title, "goal", "measured", "rounds", "bound", "")
    for goal in goals:
        table.add_row(goal.what, digits(goal.measured), goal.range, goal.bound, goal.verdict)
    return table


def table_of(title: str, *heads: str, left: int = 1) -> Table:
    """Make a table whose first `left` columns are text and the others numbers."""
    table = Table(title=title)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < left else "right")
    return table


def digits(number: float) -> str:
    """Format a number by three digits, and thousands and millions by a letter."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def spread_of(rounds: Sequence[float]) -> str:
    """Format what was measured once per round: the median, and the range if there are several."""
    found = f"{median(rounds):.3f}"
    return found if len(rounds) == 1 else f"{found} ({min(rounds):.3f} to {max(rounds):.3f})"
