"""Prove that every retained checkpoint restores to the state the stream had. Exit code 1 if one does not."""

from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.spark.operations import VerifyResult


def verify_checkpoints(settings: Settings, stream: str, *, deep: bool = False) -> "VerifyResult":
    """Prove all retained checkpoints of a stream; the outcome is recorded in the catalog.

    Args:
        deep: also compare row by row with the full snapshots.

    Raises:
        SiltstoneError: see `siltstone.spark.operations.verify`.
    """
    from siltstone.spark.operations import verify

    return verify(settings, stream, every=True, deep=deep)


def main() -> None:
    """The job's command line."""
    parser = job_parser(__doc__)
    parser.add_argument("--deep", action="store_true", help="also compare row by row with full snapshots")
    run_job(
        parser,
        lambda settings, given: verify_checkpoints(settings, given.stream, deep=given.deep),
        failed=lambda result: bool(result.failed),
    )


if __name__ == "__main__":
    main()
