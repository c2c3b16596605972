"""What suites of whole systems share with others: fixtures."""

from tests.contract.conftest import postgres
from tests.spark.conftest import six

__all__ = ["postgres", "six"]
