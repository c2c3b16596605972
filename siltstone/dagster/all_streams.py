"""Define every stream of siltstone.toml and of installed packages, for `siltstone ui` without a workspace.yaml."""

import dagster as dg

from siltstone.dagster.definitions import stream_definitions
from siltstone.dagster.project import load_project


@dg.definitions
def all_streams() -> dg.Definitions:
    """Make the definitions of every stream. A module that did not load becomes an asset with its error."""
    project = load_project()
    parts = [stream_definitions(stream, settings=project.settings) for stream in project.streams]
    own = dg.Definitions(
        assets=project.broken_assets(),
        resources={"io_manager": dg.fs_io_manager.configured({})},  # a launch cannot name its directory
        executor=dg.in_process_executor,  # one process, and so one Spark session, for all steps of a run
    )
    return dg.Definitions.merge(own, *parts)
