"""Savepoints: names that keep checkpoints from deletion, for good or for a time."""

from datetime import timedelta
from typing import Any

from siltstone.catalog.repository import Catalog
from siltstone.catalog.savepoints import SavepointRecord
from siltstone.model import LATEST


def set_savepoint(
    catalog: Catalog, stream: str, name: str, *, at: str = LATEST, expires_in: timedelta | None = None
) -> SavepointRecord:
    """Name the checkpoint that `at` means (as `Checkpoints.resolve`); it is kept until the name expires or is dropped.

    Raises:
        UnknownStream, UnknownCheckpoint: nothing is there to name.
        UsageError: not a savepoint's name, one that is taken, or a time to expire that is out of range.
        Fenced: a run has taken the stream over in between; try again.
    """
    epoch = catalog.streams.get(stream).epoch
    return catalog.savepoints.add(stream, epoch, name, catalog.checkpoints.resolve(stream, at), expires_in)


def drop_savepoint(catalog: Catalog, stream: str, name: str) -> None:
    """Forget a savepoint. Its checkpoint stays until retention or somebody deletes it.

    Raises:
        UnknownStream, UnknownCheckpoint: the stream has nothing that could have a name.
        UsageError: there is no savepoint of that name.
        Fenced: a run has taken the stream over in between; try again.
    """
    epoch = catalog.streams.get(stream).epoch
    catalog.checkpoints.latest(stream)  # or there is no savepoint, and perhaps no epoch either
    catalog.savepoints.drop(stream, epoch, name)


def list_savepoints(catalog: Catalog, stream: str) -> list[dict[str, Any]]:
    """A stream's savepoints by name, as plain JSON values; expired ones too, until their checkpoint is deleted.

    Raises:
        UnknownStream: no such stream has run here.
    """
    return [describe_savepoint(catalog, savepoint) for savepoint in catalog.savepoints.list(stream)]


def describe_savepoint(catalog: Catalog, savepoint: SavepointRecord) -> dict[str, Any]:
    """One savepoint as plain JSON values."""
    expires = savepoint.expires_at
    return {
        "name": savepoint.name,
        "checkpoint": savepoint.checkpoint,
        "created_at": savepoint.created_at.isoformat(timespec="seconds"),
        "expires_at": None if expires is None else expires.isoformat(timespec="seconds"),
        "expired": savepoint.expired(catalog.now()),
    }
