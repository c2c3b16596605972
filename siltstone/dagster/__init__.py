"""Siltstone's streams in Dagster; needs `pip install siltstone[dagster]`.

    from siltstone.dagster import stream_definitions

    defs = stream_definitions("flights")

`stream_definitions` makes all definitions of a stream. `StreamComponent` does the same from YAML in a `dg` project. The
other names are the parts of both, for a project that combines them itself, as those of `siltstone init` do.
"""

from siltstone.dagster.assets.full_snapshot import full_snapshot_asset
from siltstone.dagster.assets.materialization import materialization_asset
from siltstone.dagster.assets.restored_state import restored_state_asset
from siltstone.dagster.assets.run import events_asset, run_asset
from siltstone.dagster.automation import restore_condition
from siltstone.dagster.checks.asset_checks import asset_check, stream_checks
from siltstone.dagster.checks.suites import SUITES, Suite
from siltstone.dagster.component import StreamComponent
from siltstone.dagster.definitions import (
    annotate,
    expect_checkpoints,
    stream_assets,
    stream_definitions,
    stream_resources,
    stream_sensors,
)
from siltstone.dagster.jobs import operation_jobs, stream_job
from siltstone.dagster.launch import Launch, in_subprocess
from siltstone.dagster.messages import WholeMessages
from siltstone.dagster.names import OpOptions
from siltstone.dagster.project import Project, load_project, project_of
from siltstone.dagster.resources import (
    LogNotifier,
    Notifier,
    SparkResource,
    WarehouseResource,
    WebhookNotifier,
)
from siltstone.dagster.schedules import stream_schedules
from siltstone.dagster.translator import StreamAsset, StreamTranslator

__all__ = [
    "SUITES",
    "Launch",
    "LogNotifier",
    "Notifier",
    "OpOptions",
    "Project",
    "SparkResource",
    "StreamAsset",
    "StreamComponent",
    "StreamTranslator",
    "Suite",
    "WarehouseResource",
    "WebhookNotifier",
    "WholeMessages",
    "annotate",
    "asset_check",
    "events_asset",
    "expect_checkpoints",
    "full_snapshot_asset",
    "in_subprocess",
    "load_project",
    "materialization_asset",
    "operation_jobs",
    "project_of",
    "restore_condition",
    "restored_state_asset",
    "run_asset",
    "stream_assets",
    "stream_checks",
    "stream_definitions",
    "stream_job",
    "stream_resources",
    "stream_schedules",
    "stream_sensors",
]
