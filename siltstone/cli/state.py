"""Commands on recorded state: restore it, prove it, copy it, delete it."""

from pathlib import Path
from typing import Annotated

import typer

from siltstone.cli.help import command
from siltstone.cli.options import (
    AsJson,
    At,
    CatalogUrl,
    StreamName,
    WarehouseUrl,
    parse_labels,
    stream_client,
)
from siltstone.cli.output import failure_line, print_result, progress, size
from siltstone.client import StreamClient
from siltstone.model import LATEST
from siltstone.pipes.session import checks_session

GROUP = "Restore and prove"


@command(GROUP, StreamClient.restore)
def restore(
    stream: StreamName,
    at: At = LATEST,
    as_of: Annotated[str | None, typer.Option("--as-of", metavar="EVENT_TIME")] = None,
    to: Annotated[Path | None, typer.Option("--to")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="OPERATOR[.VARIABLE]")] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    parallelism: Annotated[int | None, typer.Option(help="Tasks per operator. [cores]")] = None,
    as_json: AsJson = False,
) -> None:
    client = stream_client(stream, warehouse, catalog, parallelism=parallelism)
    with progress(f"restoring {stream}"):
        result = client.restore(at=at, as_of=as_of, to=to, only=only or ())
    where = f" to {result.path}" if result.path else ""
    line = f"{stream}: checkpoint {result.checkpoint} restored{where}: {result.rows:,} rows from "
    line += f"{size(result.bytes)} in {result.seconds:.2f} s, proven, digest {result.digest}"
    print_result(result, as_json, line)


@command(GROUP, StreamClient.restore_series)
def restore_series(
    stream: StreamName,
    labels: Annotated[list[str], typer.Argument(metavar="LABEL=ID...")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Exit code 1 if one is not proven."""
    wanted = parse_labels(labels)
    with progress(f"restoring {stream}") as tell:
        result = stream_client(stream, warehouse, catalog).restore_series(wanted, lambda done: tell(done.label))
    line = f"{stream}: {len(result.restored)} labels restored, {len(result.kept)} kept below {result.root}, "
    line += f"{len(result.failed)} not proven, {result.seconds:.2f} s"
    print_result(result, as_json, line, *map(failure_line, result.failed))
    if result.failed:
        raise typer.Exit(1)


@command(GROUP, StreamClient.verify)
def verify(
    stream: StreamName,
    at: At = LATEST,
    every: Annotated[bool, typer.Option("--all")] = False,
    sample: Annotated[int | None, typer.Option(min=0, metavar="N")] = None,
    deep: Annotated[bool, typer.Option("--deep")] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Exit code 1 if one does not, or if materialization has stalled or keeps failing, because restores then take
    longer and longer.
    """
    with progress(f"verifying {stream}"):
        result = stream_client(stream, warehouse, catalog).verify(at=at, every=every, deep=deep, sample=sample)
    line = f"{stream}: {len(result.proven)} checkpoints proven, {len(result.failed)} not, {result.seconds:.2f} s"
    stalled = (f"  materialization: {ill.reason}" for ill in result.stalled)
    print_result(result, as_json, line, *map(failure_line, result.failed), *stalled)
    if (result.failed or result.stalled) and checks_session() is None:
        raise typer.Exit(1)


@command(GROUP, StreamClient.snapshot)
def snapshot(
    stream: StreamName,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    backend: Annotated[str | None, typer.Option()] = None,
    as_json: AsJson = False,
) -> None:
    with progress(f"taking a snapshot of {stream}"):
        result = stream_client(stream, warehouse, catalog, backend=backend).snapshot()
    line = f"{stream}: snapshot of checkpoint {result.checkpoint}, {result.rows:,} rows, {size(result.bytes)}"
    print_result(result, as_json, line)


@command(GROUP, StreamClient.delete)
def delete(
    stream: StreamName,
    checkpoints: Annotated[list[int], typer.Argument(metavar="ID...")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    result = stream_client(stream, warehouse, catalog).delete(checkpoints)
    line = f"{stream}: {len(result.deleted)} checkpoints deleted, {result.objects} objects, {size(result.bytes)}"
    if result.marked:
        line += f"; {', '.join(map(str, result.marked))} will be deleted with the last checkpoint that builds on them"
    if result.leased:
        line += f"; {', '.join(map(str, result.leased))} are being read, and will be deleted by a later deletion"
    print_result(result, as_json, line)
