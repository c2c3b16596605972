"""Leave a stream ready to run on from its newest checkpoint that restores."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.change.recover import Recovery


def recover(
    settings: Settings,
    stream: str,
    *,
    dry_run: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> "Recovery":
    """Recover a stream. A run at work is fenced only where something is damaged; a loss that people have to accept is
    refused.

    Args:
        dry_run: only look; nothing changes.
        on_step: told what is done and found, line by line.

    Raises:
        SiltstoneError: see `siltstone.spark.operations.recover`.
    """
    from siltstone.spark import operations

    return operations.recover(settings, stream, dry_run=dry_run, on_step=on_step)


def main() -> None:
    """The job's command line."""
    parser = job_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="say what would be given up; change nothing")
    run_job(parser, lambda settings, given: recover(settings, given.stream, dry_run=given.dry_run))


if __name__ == "__main__":
    main()
