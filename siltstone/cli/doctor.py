"""The command that checks the installation, the warehouse, the catalog and the streams."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from siltstone.cli.help import command
from siltstone.cli.options import AsJson, CatalogUrl, WarehouseUrl, client_of
from siltstone.cli.output import print_result, print_table, progress, table
from siltstone.client import Client

if TYPE_CHECKING:
    from siltstone.doctor.findings import Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}

GROUP = "When something broke"


@command(GROUP, Client.doctor)
def doctor(
    stream: Annotated[str | None, typer.Argument(metavar="STREAM")] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Exit code 1 if there is a problem."""
    with progress("checking everything"):
        found = client_of(warehouse, catalog).doctor(stream)
    if as_json:
        print_result(found, True)
    else:
        _print_findings(found.findings)
    if found.problem:
        raise typer.Exit(1)


def _print_findings(found: "Sequence[Finding]") -> None:
    rows = table("", "check", "stream", "finding and advice")
    for each in found:
        text = each.found if each.advice is None else f"{each.found}\n-> {each.advice}"
        rows.add_row(Text(each.state, _STYLES[each.state]), each.check, each.stream or "-", text)
    print_table(rows)
