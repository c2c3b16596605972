"""What suites of whole systems share with others: fixtures."""

from tests.contract.conftest import postgres
from tests.spark.conftest import new_project, six

__all__ = ["new_project", "postgres", "six"]
