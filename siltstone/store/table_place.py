"""Where a table library finds a prefix of a store, and what it needs to open it: its URL, and options for S3."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from siltstone.store.base import Store
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.retry import Retrying


@dataclass(frozen=True)
class TablePlace:
    """The place of a table.

    Attributes:
        url: a `file://` or `s3://` URL.
        options: delta-rs' options of the store; they contain credentials.
    """

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)


def find_table_obstacle(store: Store) -> str | None:
    """Return why a store cannot have tables, as a clause; None if it can: it is a directory, or a bucket of S3."""
    inner = _inner(store)
    if isinstance(inner, FilesystemStore):
        path = str(inner.root)
        return None if unquote(path) == path else f"delta-rs reads % in {path} as an escape"
    return None if store.url.startswith("s3://") else f"no other program could read it in {store.label}"


def table_place(store: Store, prefix: str) -> TablePlace:
    """Return the place of the table whose objects' names begin with `prefix`, a name and a slash.

    Raises:
        UsageError: an AWS profile does not exist.
        Unreachable: no credentials were found.
    """
    inner = _inner(store)
    if isinstance(inner, FilesystemStore):
        return TablePlace((inner.root / prefix).as_uri())
    from siltstone.store.s3.store import S3Store
    from siltstone.store.s3.table_options import table_options

    assert isinstance(inner, S3Store), "find_table_obstacle"
    path = f"{inner.prefix}/{prefix}" if inner.prefix else prefix
    return TablePlace(
        f"s3://{inner.bucket}/{path.rstrip('/')}", table_options(inner.options, inner.bucket, inner.label)
    )


def _inner(store: Store) -> Store:
    return store.once if isinstance(store, Retrying) else store
