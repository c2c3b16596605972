"""Delete the checkpoints that retention does not keep, and what only they need. No Spark is needed."""

from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.retention.truncate import Truncation


def truncate(settings: Settings, stream: str, *, dry_run: bool = False) -> "Truncation":
    """Truncate a stream by the rules of [retention] in the settings, or else by those recorded with it.

    Raises:
        SiltstoneError: see `siltstone.retention.truncate.truncate`.
    """
    from siltstone.retention import truncate as retention

    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
        return retention.truncate(place, stream, settings.retention, dry_run=dry_run)


def main() -> None:
    """The job's command line."""
    parser = job_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    run_job(parser, lambda settings, given: truncate(settings, given.stream, dry_run=given.dry_run))


if __name__ == "__main__":
    main()
