"""Print results on standard output, as text or as one JSON object, and progress and errors on standard error."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import filesize
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from siltstone.log import configuration
from siltstone.result import Result

out = Console()
err = Console(stderr=True)
ROW_WIDTH = 10_000
"""most columns of a table in a pipe"""


def print_result(result: Result, as_json: bool, line: str) -> None:
    """Print a result as JSON, or its line of text."""
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        say(line)


def say(line: str) -> None:
    """Print a line without markup, highlighting or wrapping."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def table(*columns: str) -> Table:
    """Make a table without rules. On a terminal, cells that are too wide wrap."""
    made = Table(*columns, box=None)
    for column in made.columns:
        column.overflow = "fold"
    return made


def print_table(rows: Table) -> None:
    """Print a table. In a pipe each row is one line, however wide, for other programs to read."""
    if out.is_terminal:
        out.print(rows)
    else:
        Console(file=out.file, width=ROW_WIDTH).print(rows)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner, and lines above it, on a terminal; show nothing in a pipe or if log events are JSON.

    Yields:
        A function that prints a line.
    """
    if not err.is_terminal or (configuration() or ("", "text"))[1] == "json":
        yield lambda line: None
        return
    with err.status(what):
        yield lambda line: err.print(line, markup=False, highlight=False)


def checkpoint_line(c: Any) -> str:
    """Describe a checkpoint that has just completed, in one line."""
    forms = ", ".join(f"{name} {form.value} (D={c.d[name]})" for name, form in c.forms.items())
    return f"checkpoint {c.id}: {forms}, {size(c.bytes)}, {c.rows_in:,} rows{dead_letters(c.dead_letters)}"


def dead_letters(counts: Mapping[str, int]) -> str:
    """Describe the number of dead letters per operator, as the end of a line; "" if there are none."""
    return "".join(f", {count:,} dead letters of {operator}" for operator, count in counts.items())


def health_line(health: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe in one line the state of materialization per operator (`CheckpointList.materialization`)."""
    return "materialization: " + "; ".join(_health(operator, found) for operator, found in health.items())


def _health(operator: str, found: Mapping[str, Any]) -> str:
    if found["state"] == "fine":
        return f"{operator} fine ({found['deltas']} deltas, {found['amplification'] or 1:.2f} times its live state)"
    return found["reason"]


def escape_name(name: str) -> str:
    """Escape a name for a table: markup is not interpreted and control characters become question marks.

    Anyone who can write to the store may have chosen the name.
    """
    return escape("".join(character if character.isprintable() else "?" for character in name))


def summarize(values: dict[str, Any]) -> str:
    """Describe values per operator: one value if all have the same, else OPERATOR=VALUE for each."""
    distinct = {str(v) for v in values.values()}
    return distinct.pop() if len(distinct) == 1 else " ".join(f"{name}={v}" for name, v in values.items())


def size(count: int) -> str:
    """Format a number of bytes with a unit."""
    return filesize.decimal(count)
