"""The streams of this project, as Dagster loads them; workspace.yaml names this module."""

import dagster as dg

from siltstone.dagster.definitions import project_definitions


@dg.definitions
def siltstone() -> dg.Definitions:
    """Everything that this code location offers."""
    return project_definitions()
