"""The streams of a project, as siltstone.toml names their modules, and what did not load of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from siltstone.dagster.names import dagster_name
from siltstone.dagster.schedules import check_schedules
from siltstone.settings import Settings, load_settings
from siltstone.stream import Stream, find_streams

BROKEN = "broken_stream_modules"


@dataclass(frozen=True)
class Project:
    """The streams that Dagster is shown, and the settings they run with.

    Attributes:
        settings: of siltstone.toml and `SILTSTONE_*`.
        streams: every stream that loaded and that Dagster can tell from the others.
        not_loaded: module or stream -> why it is not among them.
    """

    settings: Settings
    streams: Sequence[Stream]
    not_loaded: Mapping[str, str]

    def broken_assets(self) -> list[dg.AssetSpec]:
        """An asset for each module that did not load, where the reader of the graph sees what is missing, and why."""
        return [_broken(what, why) for what, why in self.not_loaded.items()]


def load_project() -> Project:
    """Find the streams of the modules that siltstone.toml names, and of installed packages.

    Modules are imported, and nothing else happens: no warehouse or catalog is read, no JVM starts. A module that fails
    to import is logged and left out.

    Raises:
        UsageError: an unknown option, or a schedule of an unknown stream.
    """
    settings = load_settings()
    return project_of(*find_streams(settings.streams), settings)


def project_of(streams: Mapping[str, Stream], broken: Mapping[str, str], settings: Settings | None = None) -> Project:
    """A project of the given streams; `broken`: module -> why it did not import.

    Raises:
        UsageError: as `load_project`.
    """
    settings = settings or load_settings()
    distinct, clashing = _distinct(streams.values())
    project = Project(settings, distinct, {**broken, **clashing})
    for what, why in project.not_loaded.items():
        dg.get_dagster_logger().warning(f"{what} did not load: {why}")
    if not project.not_loaded:  # options of a stream that did not load are left alone
        check_schedules(settings, {stream.name for stream in distinct})
    return project


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
    return dg.AssetSpec(
        dg.AssetKey([BROKEN, *re.findall(r"[\w-]+", what)]),
        group_name=BROKEN,
        description=f"Its streams are missing here, as `{what}` did not load:\n\n    {why}",
        metadata={"error": why},
    )
