"""What suites of whole systems share with those under Spark."""

from tests.spark.conftest import six

__all__ = ["six"]
