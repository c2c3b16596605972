"""The Dagster resources of runs: the warehouse, the Spark session, and the notifier of alerts."""

from siltstone.dagster.resources.notifier import LogNotifier, Notifier, WebhookNotifier
from siltstone.dagster.resources.spark import SparkResource
from siltstone.dagster.resources.warehouse import WarehouseResource

__all__ = ["LogNotifier", "Notifier", "SparkResource", "WarehouseResource", "WebhookNotifier"]
