"""What a benchmark is held to, and how it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Goal:
    """A number and the most or the least it may be; None where no bound is set."""

    what: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def kept(self) -> bool | None:
        """Whether the number is within its bound; None where there is none."""
        if self.at_most is not None:
            return self.measured <= self.at_most
        return None if self.at_least is None else self.measured >= self.at_least

    @property
    def bound(self) -> str:
        """As people write it."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "-" if self.at_least is None else f">= {self.at_least:g}"


@dataclass
class Report:
    """What one part of the benchmarks found: tables for people, numbers for machines, and its goals."""

    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


def goals_table(goals: Sequence[Goal], title: str = "goals") -> Table:
    """A line a goal."""
    table = table_of(title, "goal", "measured", "bound", "")
    for goal in goals:
        said = {True: "met", False: "missed", None: ""}[goal.kept]
        table.add_row(goal.what, f"{goal.measured:.3g}", goal.bound, said)
    return table


def table_of(title: str, *heads: str, left: int = 1) -> Table:
    """A table whose first `left` columns hold words, the others numbers."""
    table = Table(title=title)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < left else "right")
    return table
