"""Look into plans of Spark's, in the JVM of a classic session.

Each call of the JVM takes some tenths of a millisecond, of a step of perhaps a hundred.
"""

from collections.abc import Iterator
from functools import lru_cache, reduce
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

_PATTERNS = "org.apache.spark.sql.catalyst.trees.TreePattern"


def runs_python(spark: SparkSession, plan: Any) -> bool:
    """Whether a plan calls Python code, also if this version of Spark does not tell."""
    try:
        if plan.containsPattern(look_up(spark._jvm, f"{_PATTERNS}.PYTHON_UDF")()):
            return True
        if not plan.containsPattern(look_up(spark._jvm, f"{_PATTERNS}.GENERATE")()):
            return False
        parts = [plan, *iterate(plan.subqueriesAll())]  # what stands behind LATERAL is a subquery
        generators = (node.generator() for part in parts for node in walk(part) if node.nodeName() == "Generate")
        return any("Python" in generator.getClass().getSimpleName() for generator in generators)
    except Py4JError:
        return True


@lru_cache(maxsize=16)
def look_up(jvm: Any, name: str) -> Any:
    """Return what a full name stands for in the JVM, such as a class or a static method.

    Only the first time is the JVM asked, about each part of the name.
    """
    return reduce(getattr, name.split("."), jvm)


def walk(plan: Any) -> Iterator[Any]:
    """Yield the nodes of a plan, each before those that it reads."""
    yield plan
    for child in iterate(plan.children()):
        yield from walk(child)


def iterate(sequence: Any) -> Iterator[Any]:
    """Yield the elements of a sequence of Scala's."""
    return (sequence.apply(i) for i in range(sequence.size()))
