"""Commands on the catalog itself: upgrade it, back it up, restore it."""

from pathlib import Path
from typing import Annotated

import typer

from siltstone.cli.application import app
from siltstone.cli.options import AsJson, CatalogUrl, WarehouseUrl, client_of
from siltstone.cli.output import print_result, progress, size

GROUP = "The catalog"


@app.command(rich_help_panel=GROUP)
def upgrade(
    backup: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file of the backup made first. [next to a SQLite catalog]"),
    ] = None,
    fence: Annotated[
        bool,
        typer.Option("--fence", help="Fence runs and readers that have not ended: none of them can write again."),
    ] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Upgrade a catalog that an older Siltstone made.

    It is backed up first. Nothing may use the catalog meanwhile. If the upgrade is interrupted, run it again.
    Older versions of Siltstone refuse the catalog afterwards.
    """
    with progress("upgrading the catalog"):
        done = client_of(warehouse, catalog).upgrade(backup=backup, fence=fence)
    lines = [f"the catalog has revision {done.after}: nothing to do"]
    if done.backup is not None:
        line = f"the catalog now has revision {done.after}, before {done.before}; backup: {done.backup.file} "
        lines = [line + f"({done.backup.rows:,} rows, {size(done.backup.bytes)})"]
    if done.fenced:
        lines += [f"  fenced unfinished runs of {', '.join(done.fenced)}"]
    print_result(done, as_json, *lines)


@app.command(rich_help_panel=GROUP)
def backup(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A file that does not exist yet. [next to a SQLite catalog]")
    ] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Back up the catalog into one file. Streams may run meanwhile.

    The file is a SQLite catalog, whatever database the catalog is in: --catalog sqlite:///FILE reads it.
    """
    with progress("backing up the catalog"):
        done = client_of(warehouse, catalog).back_up(file)
    line = f"{done.file}: {done.rows:,} rows, {size(done.bytes)}, catalog revision {done.revision}"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def restore_catalog(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `siltstone backup` wrote.")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Restore the catalog from a backup, into any database that has no catalog yet.

    A stream that ran after the backup is refused until `siltstone recover STREAM --accept-loss`.
    """
    with progress("restoring the catalog"):
        done = client_of(warehouse, catalog).restore_catalog(file)
    line = f"the catalog is restored: revision {done.revision}, {done.rows:,} rows. A stream that ran after the "
    line += "backup needs `siltstone recover STREAM --accept-loss` before it can run again"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def rebuild_catalog(
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a lost catalog from the store, into any database that has no catalog yet.

    The store has everything but a little history; the command says what it could not know. Nothing may use the
    warehouse meanwhile. If it is interrupted, run it again.
    """
    with progress("rebuilding the catalog") as tell:
        done = client_of(warehouse, catalog).rebuild_catalog(tell)
    lines = [f"the catalog {done.catalog} is rebuilt:", *(f"  {stream.summary}" for stream in done.streams)]
    lines += [f"  left out: {each.stream}: {each.why}" for each in done.left_out]
    lines += ["It does not know:", *(f"  {each}" for each in done.unknown)]
    print_result(done, as_json, *lines)
