"""Write the live state of the newest checkpoint in full, for `verify_checkpoints --deep` to compare with."""

from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.spark.operations import SnapshotResult


def take_snapshot(settings: Settings, stream: str) -> "SnapshotResult":
    """Take a full snapshot of a stream's newest checkpoint.

    Raises:
        SiltstoneError: see `siltstone.spark.operations.snapshot`.
    """
    from siltstone.spark.operations import snapshot

    return snapshot(settings, stream)


def main() -> None:
    """The job's command line."""
    run_job(job_parser(__doc__), lambda settings, given: take_snapshot(settings, given.stream))


if __name__ == "__main__":
    main()
