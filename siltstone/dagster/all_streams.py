"""Define every stream of siltstone.toml and of installed packages, for `siltstone ui` without a workspace.yaml."""

import dagster as dg

from siltstone.dagster.definitions import stream_definitions
from siltstone.dagster.project import load_project


@dg.definitions
def all_streams() -> dg.Definitions:
    """Make the definitions of every stream. A module that did not load becomes an asset with its error."""
    project = load_project()
    parts = [stream_definitions(stream, settings=project.settings) for stream in project.streams]
    io_manager = dg.fs_io_manager.configured({})  # a launch cannot name its directory
    return dg.Definitions.merge(
        dg.Definitions(assets=project.broken_assets(), resources={"io_manager": io_manager}), *parts
    )
