"""What Spark's streaming queries know of their sources and tell nobody: read from the JVM, of a classic session."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from siltstone.errors import StateError, UsageError

_CLEANING = "cleanSource"


def check_source(rows: DataFrame) -> None:
    """Make sure that no source of a streaming DataFrame destroys what it has read.

    Raises:
        UsageError: a file source has the option `cleanSource`.
    """
    frame: Any = rows
    _check_plan(frame._jdf.queryExecution().analyzed())


def check_query(spark: SparkSession, query_id: str) -> None:
    """As `check_source`, of the query that is running under that id.

    Raises:
        UsageError: a file source has the option `cleanSource`.
        StateError: there is no such query.
    """
    _check_plan(_execution(spark, query_id).analyzedPlan())


def _check_plan(plan: Any) -> None:
    for leaf in _each(plan.collectLeaves()):
        if leaf.getClass().getSimpleName() != "StreamingRelation":
            continue  # file sources alone have the option
        options = leaf.dataSource().options()
        for name in _each(options.keys().toSeq()):
            value = options.apply(name)
            if name.lower() == _CLEANING.lower() and value.lower() != "off":
                raise UsageError(
                    f"the option {_CLEANING}={value} of a file source takes away files as soon as Spark has read them, "
                    "which a rollback or a replay reads again: leave it out, and remove old files by other means, once "
                    "no checkpoint that is kept comes before them"
                )


def paths_in_urls(spark: SparkSession, directory: Path) -> tuple[str, ...]:
    """The path of a local directory as Spark writes it in URLs, as it is given and without symbolic links.

    None in a session of Spark Connect, which runs no stream.
    """
    if not isinstance(spark, SparkSession):
        return ()
    context: Any = spark.sparkContext
    paths = os.path.abspath(directory), os.path.realpath(directory)
    given, resolved = (context._jvm.org.apache.hadoop.fs.Path(path).toUri().getRawPath() for path in paths)
    return given, resolved


def start_offsets(spark: SparkSession, query_id: str) -> list[str | None]:
    """The offset (JSON) that each source's part of the batch a query is running begins at, in the order of the sources.

    None for a source without one: a file source, or one of which the batch reads nothing.

    Raises:
        StateError: there is no such query, or this version of Spark does not show it.
    """
    try:
        execution = _execution(spark, query_id)
        data = execution.getLatestExecutionContext().newData()
        holders = [data.get(source) for source in _each(execution.sources())]
        return [_start(holder.get()) if holder.isDefined() else None for holder in holders]
    except Py4JError as error:
        raise StateError(
            f"Spark does not say where the sources of query {query_id} begin: use the version of Spark that Siltstone "
            f"requires ({str(error).splitlines()[0]})"
        ) from error


def _start(planned: Any) -> str | None:
    """Of what a batch reads of a source; sources of Spark's first interface show a plan instead of offsets."""
    return planned.start().json() if planned.getClass().getSimpleName() == "OffsetHolder" else None


def _execution(spark: SparkSession, query_id: str) -> Any:
    session: Any = spark
    # Not `spark.streams`: a batch runs in a copy of the session that started the query, which knows of none.
    running = session._jsparkSession.sharedState().activeStreamingQueries().values()
    for execution in running:
        if execution.id().toString() == query_id:
            return execution
    raise StateError(
        f"no query {query_id} is running: start it with .option('checkpointLocation', runner.checkpoint_location)"
    )


def _each(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(i) for i in range(sequence.size()))
