"""Delete stored objects that nothing refers to. No Spark is needed."""

from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.retention.sweep import SweepResult


def sweep(
    settings: Settings, stream: str, *, dry_run: bool = False, limit: int | None = None, incomplete: bool = False
) -> "SweepResult":
    """Sweep a stream's orphans.

    Raises:
        SiltstoneError: see `siltstone.retention.sweep.sweep`.
    """
    from siltstone.retention import sweep as sweeping

    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
        return sweeping.sweep(place, stream, sweeping.SweepOptions(limit, dry_run, incomplete))


def main() -> None:
    """The job's command line."""
    parser = job_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted; change nothing")
    parser.add_argument("--limit", type=int, metavar="N", help="delete at most N objects")
    parser.add_argument("--incomplete", action="store_true", help="look only where checkpoints did not complete")
    run_job(
        parser,
        lambda settings, given: sweep(
            settings, given.stream, dry_run=given.dry_run, limit=given.limit, incomplete=given.incomplete
        ),
    )


if __name__ == "__main__":
    main()
