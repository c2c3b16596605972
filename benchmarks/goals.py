"""The goals of benchmarks, and their reports."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Goal:
    """A number and its upper or lower bound; None if there is no such bound."""

    what: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_kept(self) -> bool | None:
        """Whether the number is within its bound; None if it has none."""
        if self.at_most is not None:
            return self.measured <= self.at_most
        return None if self.at_least is None else self.measured >= self.at_least

    @property
    def bound(self) -> str:
        """The bound as text."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "-" if self.at_least is None else f">= {self.at_least:g}"


@dataclass
class Report:
    """The result of one part of the benchmarks: tables to print, numbers for JSON, and goals."""

    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


def goals_table(goals: Sequence[Goal], title: str = "goals") -> Table:
    """Make a table with one line per goal."""
    table = table_of(title, "goal", "measured", "bound", "")
    for goal in goals:
        said = {True: "met", False: "missed", None: ""}[goal.is_kept]
        table.add_row(goal.what, f"{goal.measured:.3g}", goal.bound, said)
    return table


def table_of(title: str, *heads: str, left: int = 1) -> Table:
    """Make a table whose first `left` columns are text and the others numbers."""
    table = Table(title=title)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < left else "right")
    return table
