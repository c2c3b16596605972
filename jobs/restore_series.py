"""Rebuild the state of many checkpoints side by side, and leave each in the warehouse as Parquet under a label."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jobs.command import job_parser, run_job
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import ProofFailed, UsageError
from siltstone.restore.series import RestoredLabel
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.spark.operations import SeriesResult


def restore_series(
    settings: Settings,
    stream: str,
    labels: Callable[[Catalog], Mapping[str, int]],
    on_label: Callable[[RestoredLabel], None] = lambda _: None,
) -> "SeriesResult":
    """Restore checkpoints to `<warehouse>/restored/<stream>/series/<label>`; what lies there, proven, is kept.

    Args:
        labels: says, from the catalog, which checkpoint goes under which label.
        on_label: called with each label that is restored.

    Raises:
        ProofFailed: some are not proven; all others are restored.
        SiltstoneError: see `siltstone.spark.operations.restore_series`.
    """
    with OpenWarehouse.existing(settings.warehouse, settings.catalog) as place:
        wanted = labels(place.catalog)
    from siltstone.spark import operations

    result = operations.restore_series(settings, stream, wanted, on_label)
    if result.failed:
        first, good = result.failed[0], len(result.restored) + len(result.kept)
        raise ProofFailed(f"{len(result.failed)} checkpoints are not restored, {good} labels are: {first.reason}")
    return result


def main() -> None:
    """The job's command line."""
    parser = job_parser(__doc__)
    parser.add_argument("labels", nargs="+", metavar="LABEL=ID", help="a name and the checkpoint to show under it")

    def labels(given: list[str]) -> Mapping[str, int]:
        found = {}
        for label in given:
            name, _, id = label.partition("=")
            if not (name and id.isascii() and id.isdigit()):
                raise UsageError(f"{label!r}: write it as LABEL=ID, such as monday=12")
            found[name] = int(id)
        return found

    def work(settings: Settings, given: Namespace) -> "SeriesResult":
        wanted = labels(given.labels)
        return restore_series(settings, given.stream, lambda _: wanted)

    run_job(parser, work)


if __name__ == "__main__":
    main()
