"""Commands that change a stream: fork it, rescale it, edit its state, take it to another warehouse."""

from pathlib import Path
from typing import Annotated

import typer

from siltstone.cli.application import app
from siltstone.cli.options import AsJson, At, CatalogUrl, StreamName, WarehouseUrl, client_of, stream_client
from siltstone.cli.output import print_result, progress, size
from siltstone.model import LATEST

GROUP = "Change a stream"


@app.command(rich_help_panel=GROUP)
def fork(
    stream: StreamName,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Name of the new stream.")],
    at: At = LATEST,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Begin a new stream at a checkpoint of another, without copying objects.

    `siltstone run NEW` continues from that checkpoint.
    """
    done = stream_client(stream, warehouse, catalog).fork(new, at=at)
    line = f"{new}: forked from {stream} at checkpoint {done.forked_at}, shares {done.objects} objects, "
    line += f"{size(done.bytes)}, none copied, digest {done.digest}"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def rescale(
    stream: StreamName,
    parallelism: Annotated[int, typer.Option(metavar="N", help="Subtasks per operator, 1 to max_parallelism.")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Change the parallelism of a stream: makes a new checkpoint and proves it.

    A run in progress is fenced: it ends with exit code 4. Later runs use this parallelism unless they set another one
    (--parallelism, SILTSTONE_PARALLELISM or siltstone.toml), which applies to that run only.
    """
    client = stream_client(stream, warehouse, catalog)
    with progress(f"rescaling {stream}"):
        done = client.rescale(parallelism)
    line = f"{stream}: checkpoint {done.checkpoint} at parallelism {done.parallelism} (before: {done.before}): "
    line += f"{done.rows:,} rows from {size(done.bytes)} in {done.seconds:.2f} s, proven, digest {done.digest}"
    if (option := client.settings.parallelism) not in (None, parallelism):
        line += f"; the option parallelism is set to {option} and overrides this: remove it to run at {parallelism}"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def edit(
    stream: StreamName,
    operator: Annotated[str, typer.Option(metavar="OPERATOR", help="Operator whose state to edit.")],
    variable: Annotated[str, typer.Option(metavar="VARIABLE", help="One of its values or maps.")],
    rows: Annotated[
        Path, typer.Option("--from", metavar="FILE", help="Parquet: key and value columns, optionally __deleted.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and count the rows; change nothing.")] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Insert, replace or delete rows of a table of state, in a new proven checkpoint.

    The file has the key columns (for a map, also its own key columns) and the value columns. A row whose __deleted is
    true deletes its key. Everything is checked before anything changes. A run in progress is fenced: it ends with exit
    code 4. Exit code 1 if the new checkpoint is not proven.
    """
    with progress(f"editing {stream}"):
        done = stream_client(stream, warehouse, catalog).edit(operator, variable, rows, dry_run=dry_run)
    what = f"{operator}.{variable}"
    if done.checkpoint is None:
        line = f"{stream}: {done.upserts:,} rows of {what} would be put, {done.deletes:,} deleted"
    else:
        line = f"{stream}: checkpoint {done.checkpoint}: {done.upserts:,} rows of {what} put ({done.inserts:,} new), "
        line += f"{done.deletes:,} deleted, {done.absent:,} to delete did not exist, {done.seconds:.2f} s, "
        line += f"proven, digest {done.digest}" if done.proven else f"NOT PROVEN: {done.failure}"
    print_result(done, as_json, line)
    if done.proven is False:
        raise typer.Exit(1)


@app.command(rich_help_panel=GROUP)
def export_savepoint(
    stream: StreamName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a savepoint made with --full.")],
    to: Annotated[
        str,
        typer.Option(metavar="URL", help="An empty place: a path, s3://, redis://, cassandra:// or rocksdb:// URL."),
    ],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Copy a full savepoint out of the warehouse, for another one to import.

    The stream may run meanwhile. If the export is interrupted, run it again: it goes on with what is missing.
    """
    with progress(f"exporting savepoint {name} of {stream}"):
        done = stream_client(stream, warehouse, catalog).export_savepoint(name, to)
    line = (
        f"{stream}: savepoint {name} (checkpoint {done.checkpoint}) exported to {done.url}: {done.objects:,} objects, "
    )
    line += f"{size(done.bytes)}, {done.seconds:.2f} s, digest {done.digest}"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def import_savepoint(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where siltstone export-savepoint wrote it.")],
    name: Annotated[
        str | None, typer.Option("--as", metavar="STREAM", help="Name of the stream here. [the one that it had]")
    ] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Begin a stream with an exported savepoint, after proving its state.

    `siltstone run STREAM` continues from it. If the import is interrupted, run it again.
    """
    with progress("importing the savepoint"):
        done = client_of(warehouse, catalog).import_savepoint(url, name)
    line = f"{done.stream}: begins with savepoint {done.savepoint} (checkpoint {done.exported_checkpoint} of "
    line += f"{done.exported_stream}): {done.rows:,} rows, {size(done.bytes)}, {done.seconds:.2f} s, proven, "
    print_result(done, as_json, f"{line}digest {done.digest}")
