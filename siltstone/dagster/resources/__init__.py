"""What runs need from outside, as Dagster resources: configuration and lifetime, nothing else."""

from siltstone.dagster.resources.notifier import LogNotifier, Notifier, WebhookNotifier
from siltstone.dagster.resources.spark import SparkResource
from siltstone.dagster.resources.warehouse import WarehouseResource

__all__ = ["LogNotifier", "Notifier", "SparkResource", "WarehouseResource", "WebhookNotifier"]
