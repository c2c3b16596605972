"""Commands on the catalog itself: upgrade it, back it up, restore it."""

from pathlib import Path
from typing import Annotated

import typer

from siltstone.cli.help import command
from siltstone.cli.options import AsJson, CatalogUrl, WarehouseUrl, client_of
from siltstone.cli.output import print_result, progress, size
from siltstone.client import Client

GROUP = "The catalog"


@command(GROUP, Client.upgrade)
def upgrade(
    backup: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    fence: Annotated[bool, typer.Option("--fence")] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    with progress("upgrading the catalog"):
        done = client_of(warehouse, catalog).upgrade(backup=backup, fence=fence)
    lines = [f"the catalog has revision {done.after}: nothing to do"]
    if done.backup is not None:
        line = f"the catalog now has revision {done.after}, before {done.before}; backup: {done.backup.file} "
        lines = [line + f"({done.backup.rows:,} rows, {size(done.backup.bytes)})"]
    if done.fenced:
        lines += [f"  fenced unfinished runs of {', '.join(done.fenced)}"]
    print_result(done, as_json, *lines)


@command(GROUP, Client.back_up)
def backup(
    file: Annotated[Path | None, typer.Argument(metavar="FILE")] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Read it by --catalog sqlite:///FILE."""
    with progress("backing up the catalog"):
        done = client_of(warehouse, catalog).back_up(file)
    line = f"{done.file}: {done.rows:,} rows, {size(done.bytes)}, catalog revision {done.revision}"
    print_result(done, as_json, line)


@command(GROUP, Client.restore_catalog)
def restore_catalog(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    with progress("restoring the catalog"):
        done = client_of(warehouse, catalog).restore_catalog(file)
    line = f"the catalog is restored: revision {done.revision}, {done.rows:,} rows. A stream that ran after the "
    line += "backup needs `siltstone recover STREAM --accept-loss` before it can run again"
    print_result(done, as_json, line)


@command(GROUP, Client.rebuild_catalog)
def rebuild_catalog(
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    with progress("rebuilding the catalog") as tell:
        done = client_of(warehouse, catalog).rebuild_catalog(tell)
    lines = [f"the catalog {done.catalog} is rebuilt:", *(f"  {stream.summary}" for stream in done.streams)]
    lines += [f"  left out: {each.stream}: {each.why}" for each in done.left_out]
    lines += ["It does not know:", *(f"  {each}" for each in done.unknown)]
    print_result(done, as_json, *lines)
