"""The command that looks at everything at once."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from siltstone.cli.application import app
from siltstone.cli.options import AsJson, CatalogUrl, WarehouseUrl, settings_of
from siltstone.cli.output import out, print_result, progress
from siltstone.doctor.findings import Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@app.command()
def doctor(
    stream: Annotated[str | None, typer.Argument(metavar="STREAM", help="Only this stream. [all]")] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Look at the warehouse, its catalog and its streams, and say what to do. Exit code 1 if there is a problem.

    Nothing is changed. What does not answer is waited for 15 seconds, and the rest is looked at all the same.
    """
    from siltstone.doctor.examine import examine

    with progress("looking at everything"):
        found = examine(settings_of(warehouse, catalog), stream)
    problems = sum(each.state == "problem" for each in found)
    if as_json:
        counts = {state: sum(each.state == state for each in found) for state in _STYLES}
        print_result({"stream": stream, **counts, "findings": [asdict(each) for each in found]}, True, "")
    else:
        _print_findings(found)
    if problems:
        raise typer.Exit(1)


def _print_findings(found: Sequence[Finding]) -> None:
    table = Table("", "check", "stream", "found, and what to do", box=None)
    table.columns[-1].overflow = "fold"
    for each in found:
        text = each.found if each.advice is None else f"{each.found}\n-> {each.advice}"
        table.add_row(Text(each.state, _STYLES[each.state]), each.check, Text(each.stream or "-"), Text(text))
    out.print(table)
