"""The resources of runs: a warehouse, a Spark session and a notifier. siltstone.toml has their options."""

import dagster as dg

from siltstone.dagster import LogNotifier, SparkResource, WarehouseResource, WebhookNotifier
from siltstone.settings import Settings


def resources_of(settings: Settings) -> dict[str, dg.ConfigurableResource | dg.ResourceDefinition]:
    """Make the resources of every run. Alerts go to the webhook of the settings, or else to the log."""
    return {
        "siltstone_warehouse": WarehouseResource(),
        "siltstone_spark": SparkResource(),
        "siltstone_notifier": WebhookNotifier() if settings.alerts.webhook else LogNotifier(),
        "io_manager": dg.fs_io_manager.configured({}),  # a launch cannot name its directory
    }
