"""Commands for when something broke, and of last resort: a stream made ready again, state from the logged input."""

from typing import Annotated

import typer

from siltstone.cli.application import app
from siltstone.cli.options import AsJson, CatalogUrl, StreamName, WarehouseUrl, client_of, stream_client
from siltstone.cli.output import print_result, progress, size
from siltstone.model import LATEST

GROUP = "When something broke"


@app.command(rich_help_panel=GROUP)
def recover(
    stream: StreamName,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be given up and why; change nothing, stop no run.")
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Go back past savepoints, edits and more than 3 checkpoints, or to nothing, if need be.",
        ),
    ] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Go back to the newest checkpoint that restores. A sound stream is left alone.

    What is given up comes again from the source with the next run, under the same ids. `run` does this by itself, but
    never past a savepoint or an edit, past more than 3 checkpoints, or to nothing.
    """
    client = stream_client(stream, warehouse, catalog)
    with progress(f"recovering {stream}") as tell:
        result = client.recover(dry_run=dry_run, accept_loss=accept_loss, on_step=tell)
    line = f"{stream}: {result.summary}; {result.swept_objects} objects swept, {size(result.swept_bytes)}, "
    line += f"{result.seconds:.2f} s"
    for failure in result.failures:
        line += f"\n  checkpoint {failure.checkpoint}: {failure.reason}"
    print_result(result, as_json, line)


@app.command(rich_help_panel=GROUP)
def reidentify(warehouse: WarehouseUrl = None, catalog: CatalogUrl = None, as_json: AsJson = False) -> None:
    """Give a copied warehouse an identity of its own. Also replaces one that was lost.

    Copy the store and the catalog, then do this with the URLs of the copies. Stopped on the way, do it again.
    """
    done = client_of(warehouse, catalog).reidentify()
    print_result(done, as_json, f"the warehouse is {done.identity} from now on, was {done.before or 'none'}")


@app.command(rich_help_panel=GROUP)
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
    """Rebuild state from the logged input, and compare digests. They are compared at every checkpoint on the way.

    Nothing of the stream changes, and no output is repeated. Exit code 1 if a recorded digest is another.
    """
    client = stream_client(stream, warehouse, catalog, parallelism=parallelism)
    with progress(f"replaying {stream}") as tell:
        result = client.replay(to=to, since=since, on_step=tell)
    begin = f"checkpoint {result.since}" if result.since else "the start"
    line = f"{stream}: checkpoint {result.checkpoint} replayed from {begin}: {result.steps} steps, "
    line += f"{result.rows:,} rows, {result.seconds:.2f} s, as recorded at {result.compared} checkpoints, "
    line += f"digest {result.digest}"
    if result.why:
        line += f"; {result.why}, which no input brings about again"
    print_result(result, as_json, line)
