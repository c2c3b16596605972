"""The one composition root: the registered streams, each with its assets and checks.

Loading imports Dagster and the modules that define streams, and nothing else happens: no warehouse or catalog is
looked at, no JVM starts.
"""

from collections.abc import Iterable, Mapping

import dagster as dg

from assets.checkpoints import checkpoints_asset
from assets.names import dagster_name
from assets.restored_state import restored_state_asset
from checks.digest import digest_check
from resources import SparkResource, WarehouseResource
from siltstone.settings import load_settings
from siltstone.stream import Stream, find_streams

BROKEN = "broken_stream_modules"


@dg.definitions
def siltstone() -> dg.Definitions:
    """Everything that this code location offers, from the stream modules that siltstone.toml names.

    Raises:
        UsageError: siltstone.toml or a `SILTSTONE_*` variable holds what is no option.
    """
    return definitions_of(*find_streams(load_settings().streams))


def definitions_of(streams: Mapping[str, Stream], broken: Mapping[str, str]) -> dg.Definitions:
    """Definitions for some streams; each of `broken` (what did not load -> why) is shown with its reason."""
    shown, clashing = _distinct(streams.values())
    not_loaded = {**broken, **clashing}
    for what, why in not_loaded.items():
        dg.get_dagster_logger().warning(f"{what} did not load: {why}")
    return dg.Definitions(
        assets=[
            *(factory(stream) for stream in shown for factory in (checkpoints_asset, restored_state_asset)),
            *(_broken(what, why) for what, why in not_loaded.items()),
        ],
        asset_checks=[digest_check(stream) for stream in shown],
        jobs=[stream_job(stream) for stream in shown],
        resources={"warehouse": WarehouseResource(), "spark": SparkResource()},
        # One process, hence one Spark session, for all steps of a run.
        executor=dg.in_process_executor,
    )


def stream_job(stream: Stream):  # Dagster does not export the type of what define_asset_job returns
    """Everything of one stream in one run. Unlike a run from the asset graph it refuses config of unknown steps."""
    name = dagster_name(stream.name)
    return dg.define_asset_job(
        name,
        selection=dg.AssetSelection.groups(name),
        description=f"Run `{stream.name}` over what is available, prove its checkpoints, restore the newest.",
    )


def _distinct(streams: Iterable[Stream]) -> tuple[list[Stream], dict[str, str]]:
    """The streams that Dagster can tell apart, and why the others are left out."""
    by_name: dict[str, Stream] = {}
    clashing: dict[str, str] = {}
    for stream in streams:
        first = by_name.setdefault(dagster_name(stream.name), stream)
        if first is not stream:
            clashing[stream.name] = f"Dagster takes it for stream {first.name}, as - and _ are one to it: rename one"
    return list(by_name.values()), clashing


def _broken(what: str, why: str) -> dg.AssetSpec:
    """A place in the asset graph where the reader sees what is missing, and why."""
    return dg.AssetSpec(
        dg.AssetKey([BROKEN, *what.split(".")]),
        group_name=BROKEN,
        description=f"Its streams are missing here, as `{what}` did not load:\n\n    {why}",
        metadata={"error": why},
    )
