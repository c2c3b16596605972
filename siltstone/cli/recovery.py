"""Commands for when something broke: recover a stream, give a copy an identity, replay the input log."""

from typing import Annotated

import typer

from siltstone.cli.application import app
from siltstone.cli.options import AsJson, CatalogUrl, StreamName, WarehouseUrl, client_of, stream_client
from siltstone.cli.output import failure_line, print_result, progress, size
from siltstone.model import LATEST

GROUP = "When something broke"


@app.command(rich_help_panel=GROUP)
def recover(
    stream: StreamName,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be given up and why; change nothing and stop no run.")
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="If needed, go back past savepoints, edits or more than 3 checkpoints, or to the empty state.",
        ),
    ] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Go back to the newest checkpoint that restores. A stream whose newest checkpoint restores is not changed.

    The next run makes the checkpoints that were given up again, from the source and under the same ids. `run` recovers
    by itself, but never past a savepoint or an edit, past more than 3 checkpoints, or to the empty state.
    """
    client = stream_client(stream, warehouse, catalog)
    with progress(f"recovering {stream}") as tell:
        result = client.recover(dry_run=dry_run, accept_loss=accept_loss, on_step=tell)
    line = f"{stream}: {result.summary}; {result.swept_objects} objects swept, {size(result.swept_bytes)}, "
    line += f"{result.seconds:.2f} s"
    print_result(result, as_json, line, *map(failure_line, result.failures))


@app.command(rich_help_panel=GROUP)
def reidentify(warehouse: WarehouseUrl = None, catalog: CatalogUrl = None, as_json: AsJson = False) -> None:
    """Give a copied warehouse an identity of its own, or replace one that was lost.

    Copy the store and the catalog, then run this with the URLs of the copies. If it is interrupted, run it again.
    """
    done = client_of(warehouse, catalog).reidentify()
    print_result(done, as_json, f"the warehouse's identity is now {done.identity}, before {done.before or 'none'}")


@app.command(rich_help_panel=GROUP)
def replay(
    stream: StreamName,
    to: Annotated[
        str, typer.Option("--to", metavar="ID|TIMESTAMP|SAVEPOINT|latest", help="Checkpoint whose state to rebuild.")
    ] = LATEST,
    since: Annotated[
        str | None,
        typer.Option("--from", metavar="ID|TIMESTAMP|SAVEPOINT|start", help="Where to begin. [the last edit or start]"),
    ] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    parallelism: Annotated[int | None, typer.Option(help="Subtasks per operator. [as the checkpoint had]")] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild state from the logged input, and compare digests at every checkpoint.

    The stream is not changed, and no output is delivered. Exit code 1 if a digest differs from the recorded one.
    """
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
