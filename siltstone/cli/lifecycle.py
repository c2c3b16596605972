"""Commands that keep chains short and stores clean: materialization, retention, savepoints, sweeping."""

from typing import Annotated

import typer

from siltstone.cli.help import command
from siltstone.cli.options import (
    AsJson,
    At,
    CatalogUrl,
    DryRun,
    Keep,
    KeepWithin,
    Limit,
    StreamName,
    WarehouseUrl,
    stream_client,
)
from siltstone.cli.output import print_result, print_table, progress, size, table
from siltstone.client import StreamClient
from siltstone.errors import UsageError
from siltstone.log import escape_unprintable
from siltstone.model import LATEST

GROUP = "Chains and storage"


@command(GROUP, StreamClient.materialize)
def materialize(
    stream: StreamName,
    at: At = LATEST,
    operators: Annotated[list[str] | None, typer.Option("--operator")] = None,
    due: Annotated[bool, typer.Option("--due")] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    parallelism: Annotated[int | None, typer.Option(help="Tasks per operator. [cores]")] = None,
    as_json: AsJson = False,
) -> None:
    client = stream_client(stream, warehouse, catalog, parallelism=parallelism)
    with progress(f"materializing {stream}") as tell:
        result = client.materialize(at=at, operators=operators or (), due=due, on_operator=tell)
    if due and not result.triggers:
        print_result(result, as_json, f"{stream}: nothing is due at checkpoint {result.checkpoint}")
        return
    line = f"{stream}: checkpoint {result.checkpoint} materialized: {result.rows:,} rows, {size(result.bytes)}, "
    line += f"{result.seconds:.2f} s"
    if result.kept:
        line += f"; {', '.join(result.kept)} already had no deltas there"
    print_result(result, as_json, line, *(f"  {name}: {reason}" for name, reason in result.triggers.items()))


@command(GROUP, StreamClient.truncate)
def truncate(
    stream: StreamName,
    keep_last: Keep = None,
    keep_within: KeepWithin = None,
    keep_hourly: Keep = None,
    keep_daily: Keep = None,
    keep_weekly: Keep = None,
    keep_monthly: Keep = None,
    dry_run: DryRun = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Each option replaces the one of the same name under [retention] in siltstone.toml."""
    rules = {
        "keep_last": keep_last,
        "keep_within": keep_within,
        "keep_hourly": keep_hourly,
        "keep_daily": keep_daily,
        "keep_weekly": keep_weekly,
        "keep_monthly": keep_monthly,
    }
    given = {name: value for name, value in rules.items() if value is not None}
    done = stream_client(stream, warehouse, catalog, retention=given).truncate(dry_run=dry_run)
    if dry_run and not as_json:
        fates = {kept.checkpoint: f"kept: {', '.join(kept.reasons)}" for kept in done.kept}
        fates |= dict.fromkeys(done.deleted, "would be deleted")
        fates |= dict.fromkeys(done.leased, "would wait for a reader")
        fates |= {w.checkpoint: f"would wait for {w.needed_by}, which builds on it" for w in done.waiting}
        rows = table("id", "outcome")
        for id, fate in sorted(fates.items()):
            rows.add_row(str(id), fate)
        print_table(rows)
    would, wait = ("would be ", "would wait") if dry_run else ("", "wait")
    line = f"{stream}: {len(done.kept)} checkpoints {would}kept, {len(done.deleted)} {would}deleted, "
    line += f"{len(done.waiting) + len(done.leased)} {wait} for others, {done.objects} objects, {size(done.bytes)}"
    if not done.has_rules:
        line += "; no rule is set: set one by an option (--keep-last) or by siltstone retention"
    print_result(done, as_json, line)


@command(GROUP, StreamClient.retention)
def retention(
    stream: StreamName,
    keep_last: Keep = None,
    keep_within: KeepWithin = None,
    keep_hourly: Keep = None,
    keep_daily: Keep = None,
    keep_weekly: Keep = None,
    keep_monthly: Keep = None,
    keep_all: Annotated[bool, typer.Option("--keep-all")] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    rules = {
        "keep_last": keep_last,
        "keep_within": keep_within,
        "keep_hourly": keep_hourly,
        "keep_daily": keep_daily,
        "keep_weekly": keep_weekly,
        "keep_monthly": keep_monthly,
        "keep_all": keep_all or None,
    }
    given = {name: value for name, value in rules.items() if value is not None}
    found = stream_client(stream, warehouse, catalog).retention(given)
    print_result(found, as_json, f"{stream}: {found.described} ({found.source})")


@command(GROUP, StreamClient.savepoint)
def savepoint(
    stream: StreamName,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    at: At = LATEST,
    expires: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    full: Annotated[bool, typer.Option("--full")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Remove the savepoint; its checkpoint stays.")] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    if drop and (at != LATEST or expires or full):
        raise UsageError("--drop takes only the name: leave out --at, --expires and --full")
    client = stream_client(stream, warehouse, catalog)
    if drop:
        print_result(client.drop_savepoint(name), as_json, f"{stream}: savepoint {name} dropped")
        return
    with progress(f"making savepoint {name}"):
        made = client.savepoint(name, at=at, expires=expires, full=full)
    until = f"until {made.expires_at}" if made.expires_at else "until it is dropped"
    print_result(made, as_json, f"{stream}: savepoint {name} keeps checkpoint {made.checkpoint} {until}")


@command(GROUP, StreamClient.savepoints)
def savepoints(
    stream: StreamName, warehouse: WarehouseUrl = None, catalog: CatalogUrl = None, as_json: AsJson = False
) -> None:
    found = stream_client(stream, warehouse, catalog).savepoints()
    if as_json:
        print_result(found, True)
        return
    rows = table("name", "checkpoint", "created", "expires")
    for s in found.savepoints:
        expires = "never" if s["expires_at"] is None else s["expires_at"] + (" (expired)" if s["expired"] else "")
        rows.add_row(s["name"], str(s["checkpoint"]), s["created_at"], expires)
    print_table(rows)


@command(GROUP, StreamClient.deletions)
def deletions(
    stream: StreamName,
    limit: Limit = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    found = stream_client(stream, warehouse, catalog).deletions(limit)
    if as_json:
        print_result(found, True)
        return
    rows = table("began", "what was deleted", "checkpoints", "objects", "bytes", "rows", "by")
    for each in found.deletions:
        counts = (f"{each['checkpoints']:,}", f"{each['objects']:,}", size(each["bytes"]), f"{each['rows']:,}")
        rows.add_row(each["began_at"], escape_unprintable(each["what"]), *counts, escape_unprintable(each["who"]))
    print_table(rows)


@command(GROUP, StreamClient.outputs)
def outputs(
    stream: StreamName, warehouse: WarehouseUrl = None, catalog: CatalogUrl = None, as_json: AsJson = False
) -> None:
    found = stream_client(stream, warehouse, catalog).outputs()
    if not as_json:
        rows = table("output", "checkpoint", "rows", "delivered")
        for each in found.outputs:
            rows.add_row(
                each["output"], str(each["checkpoint"]), f"{each['rows']:,}", each["delivered_at"] or "not yet"
            )
        print_table(rows)
    print_result(found, as_json, f"{stream}: all sinks have their rows up to checkpoint {found.consistent}")


@command(GROUP, StreamClient.sweep)
def sweep(
    stream: StreamName,
    dry_run: DryRun = False,
    limit: Limit = None,
    incomplete: Annotated[bool, typer.Option("--incomplete")] = False,
    age_guard: Annotated[str, typer.Option(metavar="TIME")] = "3d",
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    client = stream_client(stream, warehouse, catalog)
    with progress(f"sweeping {stream}"):
        done = client.sweep(dry_run=dry_run, limit=limit, incomplete=incomplete, age_guard=age_guard)
    if done.reasons and not as_json:
        rows = table("outcome", "why", "objects", "bytes", "examples")
        verb = "would be deleted" if dry_run else "deleted"
        for f in done.reasons:
            fate = verb if f.deletes else "kept"
            more = f" and {f.objects - len(f.names)} more" if f.objects > len(f.names) else ""
            names = "\n".join(map(escape_unprintable, f.names)) + more
            rows.add_row(fate, f.reason, f"{f.objects:,}", size(f.bytes), names)
        print_table(rows)
    would = sum(f.objects for f in done.reasons if f.deletes)
    did = f"{would:,} would be deleted" if dry_run else f"{done.deleted:,} deleted"
    line = f"{stream}: {done.found:,} objects that nothing refers to, {did}, {size(done.bytes)}, {done.seconds:.2f} s"
    print_result(done, as_json, line)


@command(GROUP, StreamClient.optimize_sinks)
def optimize(
    stream: StreamName,
    dry_run: DryRun = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    client = stream_client(stream, warehouse, catalog)
    with progress(f"optimizing the tables of {stream}"):
        done = client.optimize_sinks(dry_run=dry_run)
    would = "would be deleted" if dry_run else "deleted"
    lines = [
        f"{stream}: table of {each.sink}: {each.merged:,} files merged into {each.written:,}, "
        f"{each.deleted:,} {would}, {size(each.bytes)}"
        for each in done.tables
    ]
    print_result(done, as_json, *lines or [f"{stream}: no sink has a table"])
