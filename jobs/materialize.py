"""Consolidate chains into new bases, while the stream may run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.spark.operations import MaterializeResult


def materialize(
    settings: Settings, stream: str, *, at: str = "latest", operators: Sequence[str] = (), due: bool = False
) -> "MaterializeResult":
    """Materialize a stream's chains at a checkpoint.

    Args:
        due: only of operators whose chain has grown long enough.

    Raises:
        SiltstoneError: see `siltstone.spark.operations.materialize`.
    """
    from siltstone.spark import operations

    return operations.materialize(settings, stream, at=at, operators=operators, due=due)


def main() -> None:
    """The job's command line."""
    parser = job_parser(__doc__)
    parser.add_argument("--at", default="latest", metavar="ID|TIMESTAMP|SAVEPOINT|latest", help="which checkpoint")
    parser.add_argument("--operator", action="append", default=[], help="only this one; may be given again [all]")
    parser.add_argument("--due", action="store_true", help="only operators whose chain has grown long enough")
    run_job(
        parser,
        lambda settings, given: materialize(
            settings, given.stream, at=given.at, operators=given.operator, due=given.due
        ),
    )


if __name__ == "__main__":
    main()
