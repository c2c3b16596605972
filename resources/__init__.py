"""What runs need from outside, as Dagster resources: configuration and lifetime, nothing else."""

from resources.spark import SparkResource
from resources.warehouse import WarehouseResource

__all__ = ["SparkResource", "WarehouseResource"]
