"""Load the streams of a project from the modules listed in siltstone.toml."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from siltstone.dagster.names import LOCATION, dagster_name, is_shared
from siltstone.dagster.schedules import check_schedules
from siltstone.errors import UsageError
from siltstone.settings import CONFIG, CONFIGURATION, Settings, load_settings
from siltstone.stream import Stream, find_streams

BROKEN = "broken_stream_modules"
VALIDATES = "DAGSTER_IS_DEFS_VALIDATION_CLI"
"""what Dagster's commands that validate definitions set: there, nothing may be left out"""


@dataclass(frozen=True)
class Project:
    """The streams of a project, and the settings they run with.

    Attributes:
        settings: those of siltstone.toml and `SILTSTONE_*`.
        streams: every stream that loaded and has a name that is distinct in Dagster.
        not_loaded: module or stream -> why it is not in `streams`.
    """

    settings: Settings
    streams: Sequence[Stream]
    not_loaded: Mapping[str, str]

    def broken_assets(self) -> list[dg.AssetSpec]:
        """Make an asset for each module that did not load, so that the graph shows what is missing and why."""
        return [_broken_asset(what, why) for what, why in self.not_loaded.items()]


def load_project() -> Project:
    """Find the streams of the modules listed in siltstone.toml, and of installed packages.

    This only imports the modules: no warehouse or catalog is read, no JVM starts. A module that fails to import is
    logged and left out.

    Raises:
        UsageError: an unknown option, a schedule of an unknown stream, or, in `dagster definitions validate` and `dg
            check defs`, a module that fails to import.
    """
    settings = load_settings()
    streams, broken = find_streams(settings.streams)
    if not streams and not broken:
        dg.get_dagster_logger().warning(
            f"no streams: {CONFIGURATION} in {Path.cwd()} names none; {CONFIG} can name a configuration elsewhere"
        )
    return project_of(streams, broken, settings)


def project_of(streams: Mapping[str, Stream], broken: Mapping[str, str], settings: Settings | None = None) -> Project:
    """Make a project of the given streams.

    Args:
        broken: module -> why it did not import.

    Raises:
        UsageError: see `load_project`.
    """
    settings = settings or load_settings()
    distinct, clashing = _select_distinct(streams.values())
    project = Project(settings, distinct, {**broken, **clashing})
    failures = [f"{what} did not load: {why}" for what, why in project.not_loaded.items()]
    if failures and os.environ.get(VALIDATES):
        raise UsageError("; ".join(failures))
    for failure in failures:
        dg.get_dagster_logger().warning(failure)
    if not project.not_loaded:  # otherwise a schedule may be for a stream that did not load
        check_schedules(settings, {stream.name for stream in distinct})
    return project


def _select_distinct(streams: Iterable[Stream]) -> tuple[list[Stream], dict[str, str]]:
    """Select the streams with distinct names in Dagster; return them, and stream -> why it is left out."""
    by_name: dict[str, Stream] = {}
    clashing: dict[str, str] = {}
    for stream in streams:
        name = dagster_name(stream.name)
        if is_shared(name):
            clashing[stream.name] = f"in Dagster, {LOCATION} is the name of what all streams share; rename it"
            continue
        first = by_name.setdefault(name, stream)
        if first is not stream:
            clashing[stream.name] = f"in Dagster it is called like stream {first.name}: - becomes _; rename one"
    return list(by_name.values()), clashing


def _broken_asset(what: str, why: str) -> dg.AssetSpec:
    return dg.AssetSpec(
        dg.AssetKey([BROKEN, *re.findall(r"[\w-]+", what)]),
        group_name=BROKEN,
        description=f"Its streams are missing because `{what}` did not load:\n\n    {why}",
        metadata={"error": why},
    )
