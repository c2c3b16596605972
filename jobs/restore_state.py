"""Rebuild the state of one checkpoint from the store, prove it, and leave it in the warehouse as Parquet."""

from dataclasses import replace
from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.catalog.place import Place
from siltstone.catalog.records import parse_time
from siltstone.errors import Unreachable
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.spark.operations import RestoreResult


def restore_state(settings: Settings, stream: str, *, at: str = "latest", as_of: str | None = None) -> "RestoreResult":
    """Restore to `<warehouse>/restored/<stream>/<checkpoint>`; one that lies there already is proven again and kept.

    Args:
        at: checkpoint id, commit time, or "latest".
        as_of: event time instead: the last checkpoint whose highest event time is not later.

    Raises:
        SiltstoneError: see `siltstone.spark.operations.restore`; nothing is left behind.
    """
    with Place.existing(settings.warehouse, settings.catalog) as place:
        catalog = place.catalog
        checkpoint = catalog.as_of(stream, parse_time(as_of)) if as_of else catalog.resolve(stream, at)
        path = place.warehouse.local.restored(stream, checkpoint)
    from siltstone.spark.operations import restore

    if path.exists():
        return replace(restore(settings, stream, at=str(checkpoint)), path=str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unreachable(f"cannot make {path.parent}: {error.strerror}; check permissions and free space") from error
    return restore(settings, stream, at=str(checkpoint), to=path)


def main() -> None:
    """The job's command line."""
    parser = job_parser(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--at", default="latest", metavar="ID|TIMESTAMP|SAVEPOINT|latest", help="which checkpoint")
    which.add_argument("--as-of", metavar="EVENT_TIME", help="the last checkpoint not later in event time")
    run_job(parser, lambda settings, given: restore_state(settings, given.stream, at=given.at, as_of=given.as_of))


if __name__ == "__main__":
    main()
