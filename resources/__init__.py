"""What runs need from outside: a warehouse, Spark, and someone to notify. siltstone.toml has their options."""

import dagster as dg

from siltstone.dagster import LogNotifier, SparkResource, WarehouseResource, WebhookNotifier
from siltstone.settings import Settings


def resources_of(settings: Settings) -> dict[str, dg.ConfigurableResource]:
    """The resources of every run; alerts go to the webhook of the settings, or else to the log."""
    return {
        "warehouse": WarehouseResource(),
        "spark": SparkResource(),
        "notifier": WebhookNotifier() if settings.alerts.webhook else LogNotifier(),
    }
