"""Commands that run a stream and show what it has recorded."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siltstone.cli.help import command
from siltstone.cli.options import AsJson, CatalogUrl, Limit, StreamName, WarehouseUrl, parse_pairs, stream_client
from siltstone.cli.output import (
    checkpoint_line,
    health_line,
    print_result,
    print_table,
    progress,
    rows_left,
    say,
    size,
    summarize,
    table,
)
from siltstone.client import StreamClient
from siltstone.model import check_name
from siltstone.pipes.parts import CHECKPOINTS
from siltstone.pipes.session import current_session

if TYPE_CHECKING:
    from siltstone.spark.stream_run import RunResult

GROUP = "Run and look"
MaterializeEvery = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Consolidate chains in the background after 90s, 15m or 12h; 0 or off. [10m]"),
]


@command(GROUP, StreamClient.run)
def run(
    stream: StreamName,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    batches: Annotated[int | None, typer.Option(min=1)] = None,
    parallelism: Annotated[int | None, typer.Option()] = None,
    backend: Annotated[str | None, typer.Option()] = None,
    checkpoint_steps: Annotated[int | None, typer.Option()] = None,
    checkpoint_s: Annotated[float | None, typer.Option()] = None,
    max_pending: Annotated[int | None, typer.Option(min=0)] = None,
    policy: Annotated[str | None, typer.Option()] = None,
    materialize_every: MaterializeEvery = None,
    options: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE")] = None,
    follow: Annotated[bool, typer.Option("--follow")] = False,
    drop: Annotated[list[str] | None, typer.Option("--drop", metavar="OPERATOR[.VARIABLE]|source.NAME")] = None,
    finish: Annotated[bool, typer.Option("--finish")] = False,
    openmetrics: Annotated[Path | None, typer.Option("--openmetrics", metavar="FILE")] = None,
    metrics_port: Annotated[str | None, typer.Option(metavar="[HOST:]PORT")] = None,
    as_json: AsJson = False,
) -> None:
    client = stream_client(
        stream,
        warehouse,
        catalog,
        parallelism=parallelism,
        backend=backend,
        policy=policy,
        checkpoint_steps=checkpoint_steps,
        checkpoint_s=checkpoint_s,
        max_pending=max_pending,
        openmetrics=openmetrics,
        metrics_port=metrics_port,
        materialization=None if materialize_every is None else _parse_every(materialize_every),
    )
    session = current_session()
    with progress(f"running {stream}") as tell:
        result = client.run(
            who=session.owner_of(stream, CHECKPOINTS) if session else None,
            batches=batches,
            follow=follow,
            options=parse_pairs(options),
            drop=drop or (),
            finish=finish,
            on_checkpoint=lambda c: tell(checkpoint_line(c)),
        )
    print_result(result, as_json, *map(_run_line, (result, *result.autonomous)))


def _run_line(result: "RunResult") -> str:
    return (
        f"{result.stream}: {len(result.checkpoints)} checkpoints, {result.rows:,} rows, "
        f"{size(result.bytes)}, {result.seconds:.1f} s, digest {result.digest}{rows_left(result)}"
        f"{f', {result.resets} resets' if result.resets else ''}"
    )


def _parse_every(text: str) -> dict[str, object]:
    """Convert the value of `--materialize-every` to options of [materialization]."""
    from siltstone.times import parse_duration

    if text in ("0", "off"):
        return {"enabled": False}
    return {"enabled": True, "interval_s": parse_duration(text).total_seconds()}


@command(GROUP, StreamClient.checkpoints)
def checkpoints(
    stream: StreamName,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    listed = stream_client(stream, warehouse, catalog).checkpoints(limit)
    if as_json:
        print_result(listed, True)
        return
    _print_origin(stream, listed.forked_from, listed.forked_at)
    rows = table("id", "forms", "bytes", "D", "rows", "event time", "proven", "committed")
    for c in listed.checkpoints:
        proven = {True: "yes", False: "FAILED", None: "-"}[c["proven"]]
        rows.add_row(
            str(c["id"]),
            summarize(c["forms"]),
            size(c["bytes"]),
            summarize(c["D"]),
            f"{c['rows']:,}",
            c["event_time_max"] or "-",
            proven,
            c["committed_at"],
        )
    print_table(rows)
    if listed.materialization:
        say(health_line(listed.materialization))


def _print_origin(stream: str, forked_from: str | None, forked_at: int | None) -> None:
    if forked_from is not None:
        say(f"{stream} was forked from {forked_from} at checkpoint {forked_at}")


@command(GROUP, StreamClient.show)
def show(
    stream: StreamName,
    checkpoint: Annotated[str, typer.Argument(metavar="ID", help="Checkpoint id, timestamp, savepoint or latest.")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    result = stream_client(stream, warehouse, catalog).show(checkpoint)
    if as_json:
        print_result(result, True)
        return
    found = result.details
    _print_origin(stream, found["forked_from"], found["forked_at"])
    say(f"checkpoint {found['checkpoint']} of {stream}, epoch {found['epoch']}, chain {found['chain']}")
    say(f"digest {found['digest']}, committed {found['committed_at']}, event time {found['event_time_max']}")
    for source, offset in found["input"].items():
        say(f"input {source} read up to {_show_offset(offset)}")
    if found["dropped"]:
        say(f"made without {', '.join(found['dropped'])}, whose state was dropped")
    if edit := found["edit"]:
        what = f"{edit['operator']}.{edit['variable']}: {edit['upserts']:,} put, {edit['deletes']:,} deleted"
        line = f"edited by {edit['who']} at {edit['edited_at']}: {what}, from {edit['source']}"
        say(line)
    if found["unchanged"]:
        say(f"unchanged: {', '.join(f'{name} (since {at})' for name, at in sorted(found['unchanged'].items()))}")
    rows = table("operator", "table", "form", "step", "key groups", "rows", "bytes", "builds on", "object")
    for h in found["handles"]:
        rows.add_row(
            h["operator"],
            h["variable"],
            h["form"],
            str(h["step"] or "-"),
            h["key_groups"],
            f"{h['rows']:,}",
            size(h["bytes"]),
            str(h["previous"] or "-"),
            h["object"],
        )
    print_table(rows)


def _show_offset(offset: str) -> str:
    """Return the offset of a source for people: those of Kafka by partition, others as Spark wrote them."""
    with suppress(ValueError, AttributeError, TypeError):
        topics = {topic: sorted(of.items(), key=lambda each: int(each[0])) for topic, of in json.loads(offset).items()}
        return "; ".join(f"{topic} {', '.join(f'{part}: {at:,}' for part, at in of)}" for topic, of in topics.items())
    return offset


@command(GROUP, StreamClient.report)
def report(
    stream: StreamName,
    picture: Annotated[Path | None, typer.Option("--out", show_default="STREAM-chain.png")] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    from siltstone.report import summary_table

    path = picture or Path(f"{check_name('stream', stream)}-chain.png")
    result = stream_client(stream, warehouse, catalog).report(path)
    if as_json:
        print_result(result, True)
        return
    print_table(summary_table(result.data))
    say(f"picture: {path}")
