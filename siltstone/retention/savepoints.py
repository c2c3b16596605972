"""Savepoints: names that keep checkpoints from deletion, for good or for a time."""

from datetime import timedelta
from typing import Any

from siltstone.catalog.records.savepoints import SavepointRecord
from siltstone.catalog.repository import Catalog
from siltstone.errors import UsageError
from siltstone.model import LATEST, check_name


def check_savepoint(catalog: Catalog, stream: str, name: str) -> None:
    """Check that a stream can get a savepoint of this name, before it takes long.

    Raises:
        UnknownStream: the stream does not exist.
        UsageError: the name is not valid or is taken.
    """
    if check_name("savepoint", name) in {each.name for each in catalog.savepoints.list(stream)}:
        raise UsageError(
            f"stream {stream} has a savepoint {name} already: drop it first (--drop), or choose another name"
        )


def set_savepoint(
    catalog: Catalog, stream: str, name: str, *, at: str = LATEST, expires_in: timedelta | None = None
) -> SavepointRecord:
    """Name the checkpoint at `at` (see `Checkpoints.resolve`); it is kept until the name expires or is dropped.

    Raises:
        UnknownStream, UnknownCheckpoint: the stream or the checkpoint does not exist.
        UsageError: the name is not valid or is taken, or the expiry is out of range.
        Fenced: a run has taken the stream over meanwhile; try again.
    """
    epoch = catalog.streams.get(stream).epoch
    return catalog.savepoints.add(stream, epoch, name, catalog.checkpoints.resolve(stream, at), expires_in)


def drop_savepoint(catalog: Catalog, stream: str, name: str) -> None:
    """Drop a savepoint. Its checkpoint stays until it is deleted.

    Raises:
        UnknownStream, UnknownCheckpoint: the stream does not exist or has no checkpoint.
        UsageError: the savepoint does not exist.
        Fenced: a run has taken the stream over meanwhile; try again.
    """
    epoch = catalog.streams.get(stream).epoch
    catalog.checkpoints.get_latest(stream)  # raises if there can be no savepoint; there may be no epoch then
    catalog.savepoints.drop(stream, epoch, name)


def list_savepoints(catalog: Catalog, stream: str) -> list[dict[str, Any]]:
    """List a stream's savepoints by name, as plain JSON values; expired ones too, until their checkpoint is deleted.

    Raises:
        UnknownStream: the stream has not run here.
    """
    return [describe_savepoint(catalog, savepoint) for savepoint in catalog.savepoints.list(stream)]


def describe_savepoint(catalog: Catalog, savepoint: SavepointRecord) -> dict[str, Any]:
    """Describe one savepoint as plain JSON values."""
    expires = savepoint.expires_at
    return {
        "name": savepoint.name,
        "checkpoint": savepoint.checkpoint,
        "created_at": savepoint.created_at.isoformat(timespec="seconds"),
        "expires_at": None if expires is None else expires.isoformat(timespec="seconds"),
        "expired": savepoint.is_expired(catalog.now()),
    }
