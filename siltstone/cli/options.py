"""Arguments and options that several commands take, and what they mean."""

from typing import Annotated, Any

import typer

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.settings import Settings, given_settings

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
At = Annotated[str, typer.Option("--at", metavar="ID|TIMESTAMP|SAVEPOINT|latest", help="Which checkpoint.")]

KeepLast = Annotated[int | None, typer.Option(min=0, metavar="N", help="Keep the newest N.")]
KeepWithin = Annotated[str | None, typer.Option(metavar="TIME", help="Keep those of the last 90s, 15m, 12h, 7d or 4w.")]
KeepHourly = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Keep the newest of each of the last N hours.")
]
KeepDaily = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Keep the newest of each of the last N days (UTC).")
]
KeepWeekly = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Keep the newest of each of the last N weeks.")
]
KeepMonthly = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Keep the newest of each of the last N months.")
]


def settings_of(warehouse: str | None, catalog: str | None, **further: object) -> Settings:
    """The settings, of which the command line named some; None means not named."""
    return given_settings(warehouse, catalog, **further)


def existing(settings: Settings) -> OpenWarehouse:
    """The warehouse and catalog that the settings name, to be read."""
    return OpenWarehouse.existing(settings.warehouse, settings.catalog)


def stream_of(settings: Settings, name: str) -> Any:
    """The definition of the stream of that name, which may be a fork."""
    from siltstone.change.fork import stream_named

    return stream_named(settings, name)


def pairs(options: list[str] | None) -> dict[str, str]:
    """What `--set NAME=VALUE` named."""
    found = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals:
            raise UsageError(f"--set {option}: write it as NAME=VALUE")
        found[name] = value
    return found
