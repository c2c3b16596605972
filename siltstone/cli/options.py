"""Arguments and options that several commands take, and their parsing."""

from collections.abc import Sequence
from typing import Annotated

import typer

from siltstone.client import Client, StreamClient
from siltstone.errors import UsageError
from siltstone.pipes.session import current_session
from siltstone.settings import given_settings

StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="Name of the stream.")]
WarehouseUrl = Annotated[str | None, typer.Option("--warehouse", metavar="URL")]
CatalogUrl = Annotated[str | None, typer.Option("--catalog", metavar="URL")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
At = Annotated[str, typer.Option("--at", metavar="ID|TIMESTAMP|SAVEPOINT|latest", help="Which checkpoint.")]

DryRun = Annotated[bool, typer.Option("--dry-run")]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N")]
Keep = Annotated[int | None, typer.Option(min=0, metavar="N")]
KeepWithin = Annotated[str | None, typer.Option(metavar="TIME")]


def client_of(warehouse: str | None, catalog: str | None, **options: object) -> Client:
    """Make the client of the warehouse and catalog named on the command line, in the environment or siltstone.toml.

    Args:
        options: further settings from the command line; None means not given.
    """
    client = Client(given_settings(warehouse, catalog, **options))
    if (session := current_session()) is not None:
        session.settings = client.settings
    return client


def stream_client(stream: str, warehouse: str | None, catalog: str | None, **options: object) -> StreamClient:
    """Make the client of one stream (`client_of`)."""
    return client_of(warehouse, catalog, **options).stream(stream)


def parse_pairs(given: Sequence[str] | None, form: str = "NAME=VALUE, such as --set path=orders") -> dict[str, str]:
    """Split arguments of the form NAME=VALUE.

    Args:
        form: the form with an example, for the error.

    Raises:
        UsageError: an argument has no `=`, or nothing before it.
    """
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"{text}: write it as {form}")
        found[name] = value
    return found


def parse_labels(labels: Sequence[str]) -> dict[str, int]:
    """Split arguments of the form LABEL=ID into label -> checkpoint id.

    Raises:
        UsageError: an argument has another form.
    """
    found = parse_pairs(labels, form := "LABEL=ID, such as monday=12")
    for label, id in found.items():
        if not (id.isascii() and id.isdigit() and len(id) < 19):
            raise UsageError(f"{label}={id}: write it as {form}")
    return {label: int(id) for label, id in found.items()}
