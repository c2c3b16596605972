"""Print results on standard output, as text or as one JSON object, and progress and errors on standard error.

Anyone who can write to the store or the catalog may have chosen a name, an edit's author or a line of an error. So all
text goes through `Terminal`, which interprets nothing in it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from siltstone.log import configuration, escape_unprintable
from siltstone.pipes.session import current_session
from siltstone.result import Result

if TYPE_CHECKING:
    from siltstone.restore.verify import Failure


class Terminal(Console):
    """A console that interprets no markup, and escapes what cannot be printed in all text that it renders."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text before its width is measured."""
        return super().render_str(_escape_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render, and escape the text of what was not a string, such as `rich.text.Text`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_escape_lines(segment.text))


out = Terminal()
err = Terminal(stderr=True)
ROW_WIDTH = 10_000
"""most columns of a table in a pipe"""


def print_result(result: Result, as_json: bool, *lines: str) -> None:
    """Print a result as JSON, or its lines of text, after Dagster was told if it launched this process."""
    if (session := current_session()) is not None:
        session.report(result)
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        say(*lines)


def say(*lines: str) -> None:
    """Print lines without wrapping them."""
    for line in lines:
        out.print(escape_unprintable(line), soft_wrap=True)


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
        Terminal(file=out.file, width=ROW_WIDTH).print(rows)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner, and lines above it, on a terminal; show nothing in a pipe or if log events are JSON.

    Dagster gets the lines as log messages if it launched this process.

    Yields:
        A function that prints a line.
    """
    if (session := current_session()) is not None:
        yield session.log
        return
    if not err.is_terminal or (configuration() or ("", "text"))[1] == "json":
        yield lambda line: None
        return
    with err.status(Text(what)):
        yield lambda line: err.print(escape_unprintable(line))


def checkpoint_line(c: Any) -> str:
    """Describe a checkpoint that has just completed, in one line."""
    forms = ", ".join(f"{name} {form.value} (D={c.d[name]})" for name, form in c.forms.items())
    return f"checkpoint {c.id}: {forms}, {size(c.bytes)}, {c.rows_in:,} rows{rows_left(c)}"


def failure_line(failure: "Failure") -> str:
    """Describe why a checkpoint is not proven, as a line below another."""
    return f"  checkpoint {failure.checkpoint}: {failure.reason}"


def rows_left(of: Any) -> str:
    """Describe the numbers of dead letters and late rows per operator, as the end of a line; "" if there are none."""
    letters = "".join(f", {count:,} dead letters of {operator}" for operator, count in of.dead_letters.items())
    return letters + "".join(f", {count:,} late rows of {operator}" for operator, count in of.late.items())


def health_line(health: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe in one line the state of materialization per operator (`CheckpointList.materialization`)."""
    return "materialization: " + "; ".join(_health(operator, found) for operator, found in health.items())


def _health(operator: str, found: Mapping[str, Any]) -> str:
    if found["state"] == "fine":
        return f"{operator} fine ({found['deltas']} deltas, {found['amplification'] or 1:.2f} times its live state)"
    return found["reason"]


def summarize(values: dict[str, Any]) -> str:
    """Describe values per operator: one value if all have the same, else OPERATOR=VALUE for each."""
    distinct = {str(v) for v in values.values()}
    return distinct.pop() if len(distinct) == 1 else " ".join(f"{name}={v}" for name, v in values.items())


def size(count: int) -> str:
    """Format a number of bytes with a unit."""
    return filesize.decimal(count)


def _escape_lines(text: str) -> str:
    """Escape what cannot be printed, except line ends, by which text is laid out."""
    return text if text.isprintable() else "\n".join(map(escape_unprintable, text.split("\n")))
