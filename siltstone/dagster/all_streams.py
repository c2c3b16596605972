"""Every stream of siltstone.toml and of installed packages: what `siltstone ui` shows where no workspace.yaml is."""

import dagster as dg

from siltstone.dagster.definitions import stream_definitions
from siltstone.dagster.project import load_project


@dg.definitions
def all_streams() -> dg.Definitions:
    """Everything of every stream; a module that did not load is shown as an asset with its error."""
    project = load_project()
    parts = [stream_definitions(stream, settings=project.settings) for stream in project.streams]
    return dg.Definitions.merge(dg.Definitions(assets=project.broken_assets()), *parts)
