"""Process what a stream's source has, from the newest completed checkpoint on."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.change.fork import stream_named
from siltstone.errors import UsageError
from siltstone.run.region import Completed
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.spark.operations import RunResult


def run_stream(
    settings: Settings,
    stream: str,
    *,
    batches: int | None = None,
    options: Mapping[str, str] | None = None,
    on_checkpoint: Callable[[Completed], None] = lambda _: None,
    who: str | None = None,
    drop: Sequence[str] = (),
) -> "RunResult":
    """Run the stream of that name over what is available.

    Args:
        batches: micro-batches at most.
        options: source options of the stream.
        on_checkpoint: called with each completed checkpoint.
        who: tells people whose run it is; this process, for None.
        drop: operators and variables (`OPERATOR.VARIABLE`) that the code no longer has, whose state is given up.

    Raises:
        SiltstoneError: see `siltstone.spark.operations.run`.
    """
    if batches is not None and batches < 1:
        raise UsageError(f"batches is {batches}: run at least 1, or leave it out to run all there are")
    definition = stream_named(settings, stream)
    from siltstone.spark.operations import RunRequest, run

    return run(settings, definition, RunRequest(batches, options=options or {}, who=who, drop=drop), on_checkpoint)


def main() -> None:
    """The job's command line."""
    parser = job_parser(__doc__)
    parser.add_argument("--batches", type=int, metavar="N", help="stop after N micro-batches")
    parser.add_argument(
        "--drop", metavar="OPERATOR[.VARIABLE]", action="append", default=[], help="give its state up; repeatable"
    )
    run_job(parser, lambda settings, given: run_stream(settings, given.stream, batches=given.batches, drop=given.drop))


if __name__ == "__main__":
    main()
