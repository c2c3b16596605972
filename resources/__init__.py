"""What runs need from outside, as Dagster resources: configuration and lifetime, nothing else."""

from resources.notifier import LogNotifier, Notifier, WebhookNotifier
from resources.spark import SparkResource
from resources.warehouse import WarehouseResource

__all__ = ["LogNotifier", "Notifier", "SparkResource", "WarehouseResource", "WebhookNotifier"]
