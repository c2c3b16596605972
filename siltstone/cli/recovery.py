"""Commands for when something broke: recover a stream, give a copy an identity, replay the input log."""

from typing import Annotated

import typer

from siltstone.cli.help import command
from siltstone.cli.options import AsJson, CatalogUrl, DryRun, StreamName, WarehouseUrl, client_of, stream_client
from siltstone.cli.output import failure_line, print_result, progress, size
from siltstone.client import Client, StreamClient
from siltstone.model import LATEST

GROUP = "When something broke"


@command(GROUP, StreamClient.recover)
def recover(
    stream: StreamName,
    dry_run: DryRun = False,
    accept_loss: Annotated[bool, typer.Option("--accept-loss")] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    client = stream_client(stream, warehouse, catalog)
    with progress(f"recovering {stream}") as tell:
        result = client.recover(dry_run=dry_run, accept_loss=accept_loss, on_step=tell)
    line = f"{stream}: {result.summary}; {result.swept_objects} objects swept, {size(result.swept_bytes)}, "
    line += f"{result.seconds:.2f} s"
    print_result(result, as_json, line, *map(failure_line, result.failures))


@command(GROUP, Client.reidentify)
def reidentify(warehouse: WarehouseUrl = None, catalog: CatalogUrl = None, as_json: AsJson = False) -> None:
    done = client_of(warehouse, catalog).reidentify()
    print_result(done, as_json, f"the warehouse's identity is now {done.identity}, before {done.before or 'none'}")


@command(GROUP, StreamClient.replay)
def replay(
    stream: StreamName,
    to: Annotated[str, typer.Option("--to", metavar="ID|TIMESTAMP|SAVEPOINT|latest")] = LATEST,
    since: Annotated[str | None, typer.Option("--from", metavar="ID|TIMESTAMP|SAVEPOINT|start")] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    parallelism: Annotated[int | None, typer.Option(help="Subtasks per operator. [as the checkpoint had]")] = None,
    as_json: AsJson = False,
) -> None:
    """Exit code 1 if a digest differs from the recorded one."""
    client = stream_client(stream, warehouse, catalog, parallelism=parallelism)
    with progress(f"replaying {stream}") as tell:
        result = client.replay(to=to, since=since, on_step=tell)
    begin = f"checkpoint {result.since}" if result.since else "the start"
    line = f"{stream}: checkpoint {result.checkpoint} replayed from {begin}: {result.steps} steps, "
    line += f"{result.rows:,} rows, {result.seconds:.2f} s, as recorded at {result.compared} checkpoints, "
    line += f"digest {result.digest}"
    if result.why:
        line += f"; {result.why}, which replaying input cannot repeat"
    print_result(result, as_json, line)
