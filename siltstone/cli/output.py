"""What people see: results on standard output, progress and errors on standard error; one JSON object with --json."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import filesize
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from siltstone.log import configured
from siltstone.result import Result

out = Console()
err = Console(stderr=True)
ROW_WIDTH = 10_000
"""columns of a table in a pipe at most"""


def print_result(result: Result, as_json: bool, line: str) -> None:
    """Print a result as JSON, or the line for people."""
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        say(line)


def say(line: str) -> None:
    """Print a line for people, as it is."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def table(*columns: str) -> Table:
    """A table without lines between its cells. On a terminal, what is too wide goes on in the next line."""
    made = Table(*columns, box=None)
    for column in made.columns:
        column.overflow = "fold"
    return made


def print_table(rows: Table) -> None:
    """Print a table. In a pipe each row is one line, however wide, for others to read."""
    if out.is_terminal:
        out.print(rows)
    else:
        Console(file=out.file, width=ROW_WIDTH).print(rows)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner and lines above it on a terminal; nothing in a pipe, or where lines are for machines."""
    if not err.is_terminal or (configured() or ("", "text"))[1] == "json":
        yield lambda line: None
        return
    with err.status(what):
        yield lambda line: err.print(line, markup=False, highlight=False)


def checkpoint_line(c: Any) -> str:
    """A checkpoint that has just completed."""
    forms = ", ".join(f"{name} {form.value} (D={c.d[name]})" for name, form in c.forms.items())
    return f"checkpoint {c.id}: {forms}, {size(c.bytes)}, {c.rows_in:,} rows{dead_letters(c.dead_letters)}"


def dead_letters(counts: Mapping[str, int]) -> str:
    """How many rows operators could not take, to end a line with; nothing where there were none."""
    return "".join(f", {count:,} dead letters of {operator}" for operator, count in counts.items())


def health_line(health: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe in one line how materialization does for each operator (`CheckpointList.materialization`)."""
    return "materialization: " + "; ".join(_health(operator, found) for operator, found in health.items())


def _health(operator: str, found: Mapping[str, Any]) -> str:
    if found["state"] == "fine":
        return f"{operator} fine ({found['deltas']} deltas, {found['amplification'] or 1:.2f} times its live state)"
    return found["reason"]


def shown(name: str) -> str:
    """Escape a name for a table. Anyone who can write to the store may have chosen it, so markup is not interpreted and
    control characters become question marks."""
    return escape("".join(character if character.isprintable() else "?" for character in name))


def joined(values: dict[str, Any]) -> str:
    """One value if all operators have the same, else each."""
    distinct = {str(v) for v in values.values()}
    return distinct.pop() if len(distinct) == 1 else " ".join(f"{name}={v}" for name, v in values.items())


def size(count: int) -> str:
    """Bytes for people."""
    return filesize.decimal(count)
