"""Commands for the catalog itself: to a newer revision, into a backup, and back from one."""

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
        Path | None, typer.Option(metavar="FILE", help="Where to back it up first. [beside a SQLite catalog]")
    ] = None,
    fence: Annotated[
        bool,
        typer.Option("--fence", help="Give up runs and readers that have not ended, and let none of them write again."),
    ] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Upgrade a catalog that an older Siltstone made. It is backed up first. Nothing may run on it meanwhile.

    Stopped on the way, do it again. Older versions of Siltstone refuse the catalog from then on.
    """
    with progress("upgrading the catalog"):
        done = client_of(warehouse, catalog).upgrade(backup=backup, fence=fence)
    line = f"the catalog is of revision {done.after}: nothing to do"
    if done.backup is not None:
        line = f"the catalog is of revision {done.after} now, was {done.before}; what it held is in {done.backup.file} "
        line += f"({done.backup.rows:,} rows, {size(done.backup.bytes)})"
    if done.rebuilt:
        line += f"\n  its tables were not those of revision {done.before}, and are: {', '.join(done.rebuilt)}"
    if done.fenced:
        line += f"\n  fenced: runs of {', '.join(done.fenced)} that had not ended"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def backup(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A file that is not there yet. [beside a SQLite catalog]")
    ] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Back the catalog up into one file. Streams may run meanwhile.

    The file is a catalog in SQLite, whatever database it was in: --catalog sqlite:///FILE reads from it.
    """
    with progress("backing the catalog up"):
        done = client_of(warehouse, catalog).back_up(file)
    line = f"{done.file}: {done.rows:,} rows, {size(done.bytes)}, catalog revision {done.revision}"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def restore_catalog(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `siltstone backup` wrote.")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Bring the catalog back from a backup. It goes into any kind of database that has no catalog yet.

    A stream that ran after the backup is refused until `siltstone recover STREAM --accept-loss`.
    """
    with progress("bringing the catalog back"):
        done = client_of(warehouse, catalog).restore_catalog(file)
    line = f"the catalog is back, of revision {done.revision}, with {done.rows:,} rows: a stream that ran since the "
    line += "backup needs `siltstone recover STREAM --accept-loss` before it runs on"
    print_result(done, as_json, line)
