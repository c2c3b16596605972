"""Look into plans of Spark's, in the JVM of a classic session."""

from collections.abc import Iterator
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession


def runs_python(spark: SparkSession, plan: Any) -> bool:
    """Whether a plan calls Python code, also if this version of Spark does not tell."""
    try:
        jvm: Any = spark._jvm
        if plan.containsPattern(jvm.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()):
            return True
        generators = (node.generator() for node in walk(plan) if node.getClass().getSimpleName() == "Generate")
        return any("Python" in generator.getClass().getSimpleName() for generator in generators)
    except Py4JError:
        return True


def walk(plan: Any) -> Iterator[Any]:
    """Yield the nodes of a plan, each before those that it reads."""
    yield plan
    for child in iterate(plan.children()):
        yield from walk(child)


def iterate(sequence: Any) -> Iterator[Any]:
    """Yield the elements of a sequence of Scala's."""
    return (sequence.apply(i) for i in range(sequence.size()))
