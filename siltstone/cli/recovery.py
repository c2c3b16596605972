"""Commands of last resort: state from the logged input."""

from dataclasses import asdict
from typing import Annotated

import typer

from siltstone.cli.application import app
from siltstone.cli.options import AsJson, CatalogUrl, StreamName, WarehouseUrl, settings_of, stream_of
from siltstone.cli.output import print_result, progress
from siltstone.model import LATEST


@app.command()
def replay(
    stream: StreamName,
    to: Annotated[
        str, typer.Option("--to", metavar="ID|TIMESTAMP|SAVEPOINT|latest", help="Whose state to rebuild.")
    ] = LATEST,
    since: Annotated[
        str | None,
        typer.Option("--from", metavar="ID|TIMESTAMP|SAVEPOINT|start", help="Where to begin. [the start, or an edit]"),
    ] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    parallelism: Annotated[int | None, typer.Option(help="Subtasks an operator. [cores]")] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a checkpoint's state from the logged input alone, and compare it with all that was recorded on the way.

    Nothing of the stream changes, and no output is repeated. Exit code 1 if a recorded digest is another.
    """
    from siltstone.spark import operations

    settings = settings_of(warehouse, catalog, parallelism=parallelism)
    with progress(f"replaying {stream}") as tell:
        result = operations.replay(settings, stream_of(settings, stream), to=to, since=since, on_step=tell)
    begin = f"checkpoint {result.since}" if result.since else "the start"
    line = f"{stream}: checkpoint {result.checkpoint} replayed from {begin}: {result.steps} steps, "
    line += f"{result.rows:,} rows, {result.seconds:.2f} s, as recorded at {result.compared} checkpoints, "
    line += f"digest {result.digest}"
    if result.why:
        line += f"; {result.why}, which no input brings about again"
    print_result({"from" if k == "since" else k: v for k, v in asdict(result).items()}, as_json, line)
