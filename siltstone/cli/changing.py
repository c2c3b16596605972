"""Commands that make of a stream something else: a fork of it, another parallelism, other state."""

from pathlib import Path
from typing import Annotated

import typer

from siltstone.cli.application import app
from siltstone.cli.options import AsJson, At, CatalogUrl, StreamName, WarehouseUrl, stream_client
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
    """Begin a new stream at a checkpoint of another. No object is copied. `siltstone run NEW` goes on there."""
    done = stream_client(stream, warehouse, catalog).fork(new, at=at)
    line = f"{new}: forked from {stream} at checkpoint {done.forked_at}, shares {done.objects} objects, "
    line += f"{size(done.bytes)}, none copied, digest {done.digest}"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def rescale(
    stream: StreamName,
    parallelism: Annotated[int, typer.Option(metavar="N", help="Subtasks an operator, 1 to max_parallelism.")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Change the parallelism of a stream, with proof. Later runs begin with a new checkpoint.

    A run of the stream that is at work is fenced: it ends with exit code 4. Later runs have this parallelism unless
    they name one (--parallelism, SILTSTONE_PARALLELISM or siltstone.toml), which then holds for that run alone.
    """
    client = stream_client(stream, warehouse, catalog)
    with progress(f"rescaling {stream}"):
        done = client.rescale(parallelism)
    line = f"{stream}: checkpoint {done.checkpoint} at parallelism {done.parallelism} (before: {done.before}): "
    line += f"{done.rows:,} rows from {size(done.bytes)} in {done.seconds:.2f} s, proven, digest {done.digest}"
    if (option := client.settings.parallelism) not in (None, parallelism):
        line += f"; the option parallelism says {option} and comes first: leave it out to run at this one"
    print_result(done, as_json, line)


@app.command(rich_help_panel=GROUP)
def edit(
    stream: StreamName,
    operator: Annotated[str, typer.Option(metavar="OPERATOR", help="Whose state.")],
    variable: Annotated[str, typer.Option(metavar="VARIABLE", help="A value or map of it.")],
    rows: Annotated[Path, typer.Option("--from", metavar="FILE", help="Parquet: keys, values, perhaps __deleted.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the rows, say how many there are, change nothing.")
    ] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Put corrected rows into a variable's table, or delete some. Makes a checkpoint. Exit code 1 if it is not proven.

    The file has the key columns (of a map also those of its own key) and the value columns. Where its column __deleted
    is true, the key is deleted. Everything is checked before anything changes. A run of the stream that is at work is
    fenced: it ends with exit code 4.
    """
    with progress(f"editing {stream}"):
        done = stream_client(stream, warehouse, catalog).edit(operator, variable, rows, dry_run=dry_run)
    what = f"{operator}.{variable}"
    if done.checkpoint is None:
        line = f"{stream}: {done.upserts:,} rows of {what} would be put, {done.deletes:,} deleted"
    else:
        line = f"{stream}: checkpoint {done.checkpoint}: {done.upserts:,} rows of {what} put ({done.inserts:,} new), "
        line += f"{done.deletes:,} deleted, {done.absent:,} to delete were not there, {done.seconds:.2f} s, "
        line += f"proven, digest {done.digest}" if done.proven else f"NOT PROVEN: {done.failure}"
    print_result(done, as_json, line)
    if done.proven is False:
        raise typer.Exit(1)
