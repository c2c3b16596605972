"""The definitions that Dagster loads: assets, checks, jobs, schedules, sensors and resources of every stream.

`siltstone.dagster.stream_definitions` makes the same for one stream in one call. Here the parts are separate, so that
each can be changed or left out.
"""

import dagster as dg

from assets.checkpoints import checkpoint_assets
from assets.materializations import materialization_assets
from assets.reference_copies import reference_copy_assets
from assets.restored_state import restored_assets
from checks import checks_of
from orchestration.automation import schedules_of, sensors_of
from resources import resources_of
from siltstone.dagster import annotate, load_project, operation_jobs, stream_job

OWNERS = ["team:siltstone"]
ASSETS = (checkpoint_assets, materialization_assets, reference_copy_assets, restored_assets)


@dg.definitions
def definitions() -> dg.Definitions:
    """Make the definitions of every stream. A module that did not load becomes an asset with its error."""
    project = load_project()
    streams, settings = project.streams, project.settings
    assets = [asset for stream in streams for assets_of in ASSETS for asset in assets_of(stream)]
    return dg.Definitions(
        assets=[*annotate(assets, streams, settings, OWNERS), *project.broken_assets()],
        asset_checks=[check for stream in streams for check in checks_of(stream)],
        jobs=[*map(stream_job, streams), *(operation_jobs() if streams else ())],
        schedules=[schedule for stream in streams for schedule in schedules_of(stream, settings)],
        sensors=sensors_of() if streams else [],
        resources=resources_of(settings),
        executor=dg.in_process_executor,  # one process, and so one Spark session, for all steps of a run
    )
