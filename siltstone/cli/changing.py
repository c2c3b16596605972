"""Commands that change a stream: fork it, rescale it, edit its state, take it to another warehouse."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siltstone.cli.help import command
from siltstone.cli.options import AsJson, At, CatalogUrl, DryRun, StreamName, WarehouseUrl, client_of, stream_client
from siltstone.cli.output import print_result, progress, size
from siltstone.client import Client, StreamClient
from siltstone.errors import SiltstoneError, UsageError
from siltstone.model import LATEST

if TYPE_CHECKING:
    from siltstone.spark.operations.edit_rows import Change

GROUP = "Change a stream"


@command(GROUP, StreamClient.fork)
def fork(
    stream: StreamName,
    new: Annotated[str, typer.Argument(metavar="NEW")],
    at: At = LATEST,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    done = stream_client(stream, warehouse, catalog).fork(new, at=at)
    line = f"{new}: forked from {stream} at checkpoint {done.forked_at}, shares {done.objects} objects, "
    line += f"{size(done.bytes)}, none copied, digest {done.digest}"
    print_result(done, as_json, line)


@command(GROUP, StreamClient.rescale)
def rescale(
    stream: StreamName,
    parallelism: Annotated[int, typer.Option(metavar="N")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """A run that is fenced ends with exit code 4."""
    client = stream_client(stream, warehouse, catalog)
    with progress(f"rescaling {stream}"):
        done = client.rescale(parallelism)
    line = f"{stream}: checkpoint {done.checkpoint} at parallelism {done.parallelism} (before: {done.before}): "
    line += f"{done.rows:,} rows from {size(done.bytes)} in {done.seconds:.2f} s, proven, digest {done.digest}"
    if (option := client.settings.parallelism) not in (None, parallelism):
        line += f"; the option parallelism is set to {option} and overrides this: remove it to run at {parallelism}"
    print_result(done, as_json, line)


@command(GROUP, StreamClient.edit)
def edit(
    stream: StreamName,
    operator: Annotated[str, typer.Option(metavar="OPERATOR")],
    variable: Annotated[str, typer.Option(metavar="VARIABLE")],
    rows: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="A Parquet file that every executor can read.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="COLUMN=SQL", help="Set a column, by Spark SQL over a row's columns; repeatable."
        ),
    ] = None,
    deletes: Annotated[bool, typer.Option("--delete", help="Delete the rows that --where chooses.")] = False,
    where: Annotated[
        str | None, typer.Option(metavar="SQL", help="Of which rows --set sets columns, or --delete deletes.")
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A function from the variable's rows to those to put or delete."),
    ] = None,
    dry_run: DryRun = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Give the rows by one of --from, --set, --delete and --function. Exit code 1 if the new checkpoint is not proven.
    A run that is fenced ends with exit code 4."""
    given = _rows_to_edit(rows, sets or [], function, where, deletes=deletes)
    with progress(f"editing {stream}"):
        done = stream_client(stream, warehouse, catalog).edit(operator, variable, given, dry_run=dry_run)
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


def _rows_to_edit(
    rows: Path | None, sets: Sequence[str], function: str | None, where: str | None, *, deletes: bool
) -> "Path | Change":
    if sum([rows is not None, bool(sets), function is not None, deletes]) != 1:
        raise UsageError("an edit needs exactly one of --from, --set, --delete and --function")
    if where is not None and not (sets or deletes):
        raise UsageError("--where belongs to --set or --delete: leave it out")
    if rows is not None:
        return rows
    if function is not None:
        from siltstone.stream import load_module

        try:
            module, _, name = function.rpartition(":")
            found: Change = getattr(load_module(module), name)
        except SiltstoneError:
            raise
        except Exception as error:  # the user's module may raise any
            raise UsageError(f"function {function} cannot be imported: {error!r}", advice="give MODULE:NAME") from error
        if not callable(found):
            raise UsageError(f"{function} is not a function: give MODULE:NAME of one")
        return found
    from siltstone.spark.operations.edit_rows import Expressions

    if deletes and where is None:
        raise UsageError("--delete needs --where: --where true deletes all rows")
    named = dict[str, str]()
    for each in sets:
        name, equals, sql = each.partition("=")
        if not equals or not name.strip() or not sql.strip() or name.strip() in named:
            raise UsageError(f"--set {each!r} is not COLUMN=SQL, each column once: correct it")
        named[name.strip()] = sql.strip()
    return Expressions(named, where, deletes)


@command(GROUP, StreamClient.export_savepoint)
def export_savepoint(
    stream: StreamName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a savepoint made with --full.")],
    to: Annotated[str, typer.Option(metavar="URL")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    with progress(f"exporting savepoint {name} of {stream}"):
        done = stream_client(stream, warehouse, catalog).export_savepoint(name, to)
    line = (
        f"{stream}: savepoint {name} (checkpoint {done.checkpoint}) exported to {done.url}: {done.objects:,} objects, "
    )
    line += f"{size(done.bytes)}, {done.seconds:.2f} s, digest {done.digest}"
    print_result(done, as_json, line)


@command(GROUP, Client.import_savepoint)
def import_savepoint(
    url: Annotated[str, typer.Argument(metavar="URL")],
    stream: Annotated[str | None, typer.Option("--as", metavar="STREAM")] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    with progress("importing the savepoint"):
        done = client_of(warehouse, catalog).import_savepoint(url, stream)
    line = f"{done.stream}: begins with savepoint {done.savepoint} (checkpoint {done.exported_checkpoint} of "
    line += f"{done.exported_stream}): {done.rows:,} rows, {size(done.bytes)}, {done.seconds:.2f} s, proven, "
    print_result(done, as_json, f"{line}digest {done.digest}")
