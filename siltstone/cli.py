"""The command line: parses, calls one operation, prints. Exit codes are those of `siltstone.errors`.

With `--json` one JSON object goes to standard output and everything for people to standard error; without it
results are tables and long work shows progress on a terminal and stays silent in a pipe.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import filesize
from rich.console import Console
from rich.table import Table

from siltstone.catalog.place import Place
from siltstone.errors import SiltstoneError, UsageError
from siltstone.model import check_name
from siltstone.settings import Settings, load_settings

app = typer.Typer(
    name="siltstone",
    help="Durable, provable state for PySpark streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
DEBUG = "SILTSTONE_DEBUG"
LATEST = "latest"
INTERRUPTED = 130
WIDTH_IN_A_PIPE = 10_000
"""wider than any line: nothing may be cut or folded there"""
NOT_UNDERSTOOD = typer.BadParameter.__mro__[1]
"""what every mistake on the command line is: click's UsageError, which typer does not export"""
out = Console()
err = Console(stderr=True)

StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="Name of the stream.")]
WarehouseUrl = Annotated[
    str | None,
    typer.Option(
        "--warehouse", metavar="URL", help="Where objects lie: a path, s3://, redis:// or rocksdb:// URL. [./warehouse]"
    ),
]
CatalogUrl = Annotated[
    str | None, typer.Option("--catalog", metavar="URL", help="SQLAlchemy URL. [SQLite inside the warehouse]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
At = Annotated[str, typer.Option("--at", metavar="ID|TIMESTAMP|latest", help="Which checkpoint.")]


def _command_line() -> object:
    """The exit code that the command asked for, or None."""
    return app(prog_name="siltstone", standalone_mode=False)


def _version(asked: bool) -> None:
    if asked:
        out.print(f"siltstone {metadata.version('siltstone')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Durable, provable state for PySpark streams."""


def main(command: Callable[[], object] = _command_line) -> NoReturn:
    """Entry point: run the command, turn errors into one line and an exit code."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    for noisy in ("py4j", "pyspark"):
        # What stops a stream reaches the user once, as our own error.
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    # Py4J tells of interrupted calls on the root logger itself; others' loggers are heard as before.
    logging.getLogger().addFilter(_unheard)
    if not out.is_terminal:
        out.width = WIDTH_IN_A_PIPE
    sys.path.insert(0, os.getcwd())
    try:
        code = command()
    except SiltstoneError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        if isinstance(error, NOT_UNDERSTOOD):
            _not_understood(error)
        if os.environ.get(DEBUG):
            raise
        first = (str(error).strip() or "no message").splitlines()[0]
        _fail(f"{type(error).__name__}: {first} (set {DEBUG}=1 for the traceback)", 1)
    if code == INTERRUPTED:  # typer has seen it before us
        _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _unheard(_: logging.LogRecord) -> bool:
    return False


def _not_understood(error: Any) -> NoReturn:
    """A command, argument or option that is not there or not right; no command at all shows what there is."""
    message = error.format_message()
    if not sys.argv[1:]:
        err.print(message, markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    command = error.ctx.command_path if error.ctx else app.info.name
    _fail(f"{' '.join(message.split()).rstrip('.')} (see {command} --help)", 2)


def _fail(message: str, code: int) -> NoReturn:
    err.print(f"siltstone: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


@app.command()
def run(
    stream: StreamName,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    batches: Annotated[int | None, typer.Option(min=1, help="Stop after N micro-batches.")] = None,
    parallelism: Annotated[int | None, typer.Option(help="Subtasks an operator. [cores]")] = None,
    backend: Annotated[str | None, typer.Option(help="Working state: heap. [heap]")] = None,
    checkpoint_steps: Annotated[int | None, typer.Option(help="Micro-batches a checkpoint. [1]")] = None,
    checkpoint_s: Annotated[float | None, typer.Option(help="Seconds between checkpoints, instead.")] = None,
    policy: Annotated[str | None, typer.Option(help="When to take a base: marginal-cost or adjust-d.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A source option of the stream.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on waiting for more input until interrupted.")] = False,
    openmetrics: Annotated[
        Path | None,
        typer.Option("--openmetrics", metavar="FILE", help="Keep this run's upload metrics there as OpenMetrics text."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Process what is available, from the newest completed checkpoint on."""
    from siltstone.spark import operations

    settings = _settings(
        warehouse,
        catalog,
        parallelism=parallelism,
        backend=backend,
        policy=policy,
        checkpoint_steps=checkpoint_steps,
        checkpoint_s=checkpoint_s,
    )
    request = operations.RunRequest(batches, follow, _pairs(options), openmetrics)
    with _progress(f"running {stream}") as tell:
        result = operations.run(settings, _stream(settings, stream), request, lambda c: tell(_checkpoint_line(c)))
    _print(
        asdict(result),
        as_json,
        f"{stream}: {len(result.checkpoints)} checkpoints, {result.rows:,} rows, "
        f"{_size(result.bytes)}, {result.seconds:.1f} s, digest {result.digest}",
    )


@app.command()
def checkpoints(
    stream: StreamName,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the newest N.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the completed checkpoints of a stream."""
    from siltstone.lifecycle import inspect

    settings = _settings(warehouse, catalog)
    with _existing(settings) as place:
        found = inspect.list_checkpoints(place.catalog, stream, limit)
    if as_json:
        _print({"stream": stream, "checkpoints": found}, True, "")
        return
    table = Table("id", "forms", "bytes", "D", "rows", "event time", "proven", "committed", box=None)
    for c in found:
        proven = {True: "yes", False: "FAILED", None: "-"}[c["proven"]]
        table.add_row(
            str(c["id"]),
            _joined(c["forms"]),
            _size(c["bytes"]),
            _joined(c["D"]),
            f"{c['rows']:,}",
            c["event_time_max"] or "-",
            proven,
            c["committed_at"],
        )
    out.print(table)


@app.command()
def show(
    stream: StreamName,
    checkpoint: Annotated[str, typer.Argument(metavar="ID", help="Checkpoint id, timestamp or latest.")],
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print one checkpoint's manifest: handles, objects, digests, chain."""
    from siltstone.lifecycle import inspect

    with _existing(_settings(warehouse, catalog)) as place:
        found = inspect.show_checkpoint(place.catalog, place.warehouse.store, stream, checkpoint)
    if as_json:
        _print(found, True, "")
        return
    out.print(f"checkpoint {found['checkpoint']} of {stream}, epoch {found['epoch']}, chain {found['chain']}")
    out.print(f"digest {found['digest']}, committed {found['committed_at']}, event time {found['event_time_max']}")
    table = Table("operator", "table", "form", "key groups", "rows", "bytes", "builds on", "object", box=None)
    for h in found["handles"]:
        table.add_row(
            h["operator"],
            h["variable"],
            h["form"],
            h["key_groups"],
            f"{h['rows']:,}",
            _size(h["bytes"]),
            str(h["previous"] or "-"),
            h["object"],
        )
    out.print(table)


@app.command()
def restore(
    stream: StreamName,
    at: At = LATEST,
    as_of: Annotated[
        str | None, typer.Option("--as-of", metavar="EVENT_TIME", help="The last checkpoint not later in event time.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Write the state here as Parquet. [only prove it]")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="OPERATOR[.VARIABLE]", help="Read and restore nothing else.")
    ] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    parallelism: Annotated[int | None, typer.Option(help="Tasks an operator. [cores]")] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a checkpoint's state from the store, prove it, and write it as Parquet."""
    from siltstone.spark import operations

    if as_of and at != LATEST:
        raise UsageError("--at and --as-of exclude each other: leave one out")
    settings = _settings(warehouse, catalog, parallelism=parallelism)
    with _progress(f"restoring {stream}"):
        result = operations.restore(settings, stream, at=at, as_of=as_of, to=to, only=only or ())
    where = f" to {result.path}" if result.path else ""
    line = f"{stream}: checkpoint {result.checkpoint} restored{where}: {result.rows:,} rows from "
    line += f"{_size(result.bytes)} in {result.seconds:.2f} s, proven, digest {result.digest}"
    _print(asdict(result), as_json, line)


@app.command()
def verify(
    stream: StreamName,
    at: At = LATEST,
    every: Annotated[bool, typer.Option("--all", help="Prove every retained checkpoint.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also compare row by row with full snapshots.")] = False,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Prove that checkpoints restore to exactly the state the stream had. Exit code 1 if one does not."""
    from siltstone.spark import operations

    if every and at != LATEST:
        raise UsageError("--at and --all exclude each other: leave one out")
    with _progress(f"verifying {stream}"):
        result = operations.verify(_settings(warehouse, catalog), stream, at=at, every=every, deep=deep)
    line = f"{stream}: {len(result.proven)} checkpoints proven, {len(result.failed)} not, {result.seconds:.2f} s"
    for failure in result.failed:
        line += f"\n  checkpoint {failure.checkpoint}: {failure.reason}"
    _print(asdict(result), as_json, line)
    if result.failed:
        raise typer.Exit(1)


@app.command()
def snapshot(
    stream: StreamName, warehouse: WarehouseUrl = None, catalog: CatalogUrl = None, as_json: AsJson = False
) -> None:
    """Write the live state of the newest checkpoint in full, to compare restores with (verify --deep)."""
    from siltstone.spark import operations

    with _progress(f"taking a snapshot of {stream}"):
        result = operations.snapshot(_settings(warehouse, catalog), stream)
    line = f"{stream}: snapshot of checkpoint {result.checkpoint}, {result.rows:,} rows, {_size(result.bytes)}"
    _print(asdict(result), as_json, line)


@app.command()
def report(
    stream: StreamName,
    picture: Annotated[Path | None, typer.Option("--out", help="A .png, .svg or .pdf file. [STREAM-chain.png]")] = None,
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
    as_json: AsJson = False,
) -> None:
    """Draw the chain: bytes by form, what a restore reads, D, the bound beside measured restores."""
    from siltstone.report import check_picture_path, draw_report, report_data, summary_table

    path = picture or Path(f"{check_name('stream', stream)}-chain.png")
    check_picture_path(path)
    with _existing(_settings(warehouse, catalog)) as place:
        data = report_data(place.catalog, stream)
    draw_report(data, path)
    if as_json:
        _print({**data.to_dict(), "picture": str(path)}, True, "")
        return
    out.print(summary_table(data))
    out.print(f"picture: {path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def demo(
    warehouse: WarehouseUrl = None,
    seed: Annotated[int | None, typer.Option(help="When to kill the stream; chosen at random if not given.")] = None,
) -> None:
    """The main job on real flights: run it, kill it in the middle, resume it, prove every checkpoint."""
    from siltstone.demo import run_demo

    run_demo(_settings(warehouse, None), out, seed)


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 3000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback, anyone there may run things.")
    ] = "127.0.0.1",
    warehouse: WarehouseUrl = None,
    catalog: CatalogUrl = None,
) -> None:
    """Open the Dagster web server on the streams of this repository."""
    from siltstone.ui import serve

    serve(_settings(warehouse, catalog), host, port)


def _settings(warehouse: str | None, catalog: str | None, **further: object) -> Settings:
    return load_settings(warehouse=warehouse, catalog=catalog, **further)


def _existing(settings: Settings) -> Place:
    return Place.existing(settings.warehouse, settings.catalog)


def _stream(settings: Settings, name: str) -> Any:
    from siltstone.stream import find_stream

    return find_stream(name, settings.streams)


def _pairs(options: list[str] | None) -> dict[str, str]:
    pairs = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals:
            raise UsageError(f"--set {option}: write it as NAME=VALUE")
        pairs[name] = value
    return pairs


def _print(result: dict[str, Any], as_json: bool, line: str) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner and lines above it on a terminal, nothing in a pipe."""
    if not err.is_terminal:
        yield lambda line: None
        return
    with err.status(what):
        yield lambda line: err.print(line, markup=False, highlight=False)


def _checkpoint_line(c: Any) -> str:
    forms = ", ".join(f"{name} {form.value} (D={c.d[name]})" for name, form in c.forms.items())
    return f"checkpoint {c.id}: {forms}, {_size(c.bytes)}, {c.rows_in:,} rows"


def _joined(values: dict[str, Any]) -> str:
    """One value if all operators have the same, else each."""
    distinct = {str(v) for v in values.values()}
    return distinct.pop() if len(distinct) == 1 else " ".join(f"{name}={v}" for name, v in values.items())


def _size(count: int) -> str:
    """Bytes for people."""
    return filesize.decimal(count)


if __name__ == "__main__":
    main()
