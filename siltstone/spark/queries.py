"""Read what Spark's streaming queries know about their sources but do not expose, from the JVM of a classic session."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from siltstone.errors import StateError, UsageError
from siltstone.run.lag import Backlog
from siltstone.spark.plans import iterate, look_up, walk
from siltstone.spark.source_log import COMMIT_VERSION, COMPACT_INTERVAL, RecordForm, SourceLog
from siltstone.spark.versions import names_of_sources, offset_log_versions, start_of_batch, stateful_operator

_CLEANING = "cleanSource"
_LOSING = "failOnDataLoss"
_SOCKET = "socket"
SOURCE_EVOLUTION = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
_READS = ("path", "subscribe", "subscribePattern", "assign", "topic", "table")
"""options of sources that say what is read"""
_LISTED = ("InMemoryFileIndex", "MetadataLogFileIndex")
"""classes of the file indexes that Spark's file sources make"""
_LENGTH = re.compile(r"; isDirectory=false; length=([0-9]+);")
_MODIFIED = re.compile(r"; modification_time=([0-9]+)")


def check_source(rows: DataFrame) -> None:
    """Check that the sources of a streaming DataFrame can be read again.

    Raises:
        UsageError: one is a socket, deletes the files that it has read (the option `cleanSource`), or passes over input
            that is gone (`failOnDataLoss`).
    """
    frame: Any = rows
    _check_plan(frame._jdf.queryExecution().analyzed())


def check_query(spark: SparkSession, query_id: str) -> None:
    """Check the sources of the running query of an id, like `check_source`, and that it has no state of Spark's own.

    Raises:
        UsageError: as `check_source`, or the query has stateful operators.
        StateError: no query of this id is running.
    """
    execution = _execution(spark, query_id)
    _check_plan(execution.analyzedPlan())
    stateful = stateful_operator(spark)
    if any(stateful.isInstance(node) for node in walk(execution.lastExecution().executedPlan())):
        raise UsageError(
            "the query has stateful operators of Spark's own (dropDuplicates, a join, an aggregation) before "
            "foreachBatch, which a resumed run would begin empty: do that work in an operator of the stream"
        )


def analyzed_plan(spark: SparkSession, query_id: str) -> Any:
    """Return the plan of a running query, of the JVM.

    Raises:
        StateError: no query of this id is running.
    """
    return _execution(spark, query_id).analyzedPlan()


def read_progress(query: StreamingQuery, names: Sequence[str] | None = None) -> dict[tuple[str, str], float]:
    """Read the numbers of a query's newest progress, as `RunProgress.refresh_query` takes them.

    They are the query's rows per second and what each source reports; empty if there are none or Spark does not answer.

    Args:
        names: of the sources; None for their numbers.
    """
    newest = _read_newest(query)
    if newest is None:
        return {}
    rates = ("inputRowsPerSecond", "processedRowsPerSecond")
    distinct = list(dict.fromkeys(names or ()))
    told: list[tuple[str, str, Any]] = [("", name, newest.get(name)) for name in rates]
    for number, source in enumerate(newest["sources"]):
        which = distinct[number] if names else str(number)
        told += [(which, name, value) for name, value in source.get("metrics", {}).items()]
    found = {}
    for source, name, value in told:
        with suppress(TypeError, ValueError):  # a source may report text, too
            found[source, name] = float(value)
    return found


def read_backlog(query: StreamingQuery) -> Backlog | None:
    """Read how many rows wait in the sources that tell it, which are those of partitions with offsets, as Kafka's are;
    None if there are none, or no micro-batch has ended."""
    newest = _read_newest(query)
    if newest is None:
        return None
    told = (_count_between(of.get("endOffset"), of.get("latestOffset")) for of in newest["sources"])
    rows = [each for each in told if each is not None]
    return Backlog(newest["batchId"], sum(rows), newest["numInputRows"]) if rows else None


def _read_newest(query: StreamingQuery) -> Any:
    """Return a query's newest progress; None if there is none."""
    try:
        return query.lastProgress
    except (Py4JError, KeyError):  # Spark is gone, which others notice; it leaves out a rate that is not finite
        return None


def _count_between(end: Any, latest: Any) -> int | None:
    """Count the offsets between two of a source: topic -> partition -> offset, as JSON text or decoded."""
    try:
        first, last = (json.loads(each) if isinstance(each, str) else each for each in (end, latest))
        pairs = [
            (first.get(topic, {}).get(part, 0), offset) for topic, of in last.items() for part, offset in of.items()
        ]
        return sum(max(0, after - before) for before, after in pairs)
    except (AttributeError, TypeError, ValueError):  # other sources' offsets are of any form
        return None


def _check_plan(plan: Any) -> None:
    for leaf in iterate(plan.collectLeaves()):
        kind = leaf.getClass().getSimpleName()
        if kind == "StreamingRelationV2" and leaf.sourceName() == _SOCKET:
            raise UsageError(
                "a socket source gives its lines once, and a stream that resumes, recovers or is rolled back reads "
                "some again: write them to files or a Kafka topic, and read these"
            )
        if kind == "StreamingRelation":
            _check_options(leaf.dataSource().options())
        elif kind == "StreamingRelationV2" and (leaf.extraOptions().get(_LOSING) or "").lower() == "false":
            raise _losing_error()


def _check_options(options: Any) -> None:
    """Check the options of a source of Spark's first interface, such as one of files."""
    for name in iterate(options.keys().toSeq()):
        value = options.apply(name)
        if name.lower() == _CLEANING.lower() and value.lower() != "off":
            raise UsageError(
                f"the option {_CLEANING}={value} of a file source removes files once Spark has read them, but a "
                "rollback or a replay reads them again: leave it out, and remove old files by other means when no "
                "retained checkpoint is older than they are"
            )
        if name.lower() == _LOSING.lower() and value.lower() == "false":
            raise _losing_error()


def _losing_error() -> UsageError:
    return UsageError(
        f"the option {_LOSING}=false of a source passes over input that is gone (in Kafka by retention), and a "
        "rollback or a replay would make other rows of a step without a word: leave it out, and let the source keep "
        "its input as long as the oldest checkpoint that you may go back to"
    )


def describe_sources(rows: DataFrame) -> list[str] | None:
    """Tell the sources of a streaming DataFrame from each other: of each its kind, and a hash of what it reads.

    Tables that the stream is joined with are left out. Options that may hold a secret are not used. The result is None
    if the sources have names (`DataStreamReader.name`, from Spark 4.2 on), by which Spark tells them from each other.
    """
    if names_own_sources(rows.sparkSession):
        return None
    found = []
    for leaf in streaming_leaves(rows):
        told = [leaf.sourceName()]
        if leaf.getClass().getSimpleName() == "StreamingRelationV2":
            told += [str(leaf.extraOptions().get(name)) for name in _READS]
        found.append(f"{told[0].partition('[')[0]} {xxhash.xxh3_64_hexdigest(json.dumps(told).encode())}")
    return found


def names_own_sources(spark: SparkSession) -> bool:
    """Whether queries of a session tell their sources from each other by names (`DataStreamReader.name`)."""
    return spark.conf.get(SOURCE_EVOLUTION, "false") == "true"


def streaming_leaves(rows: DataFrame) -> list[Any]:
    """Return the leaves of a streaming DataFrame's plan that Spark makes sources of, in the order of their offsets."""
    frame: Any = rows
    leaves = iterate(frame._jdf.queryExecution().analyzed().collectLeaves())
    return [leaf for leaf in leaves if leaf.getClass().getSimpleName() in ("StreamingRelation", "StreamingRelationV2")]


def source_log(spark: SparkSession, location: Path, warehouse: Path, names: Sequence[str] | None = None) -> SourceLog:
    """Make the log of a query whose checkpoint location is `location`, as this session's Spark writes and reads it.

    A session of Spark Connect runs no query, so its form does not matter.

    Args:
        warehouse: the root of the warehouse on this machine.
        names: see `SourceLog`.
    """
    if not isinstance(spark, SparkSession):
        return SourceLog(location)
    form = RecordForm(
        offset_versions=offset_log_versions(spark),
        commit_version=spark.conf.get(COMMIT_VERSION, "1") or "1",
        compact_interval=int(spark.conf.get(COMPACT_INTERVAL, "10") or 10),
    )
    return SourceLog(location, _paths_in_urls(spark, warehouse), form, names)


def _paths_in_urls(spark: SparkSession, directory: Path) -> tuple[str, ...]:
    """Return the path of a local directory as Spark writes it in URLs: as given, and without symbolic links."""
    context: Any = spark.sparkContext
    paths = os.path.abspath(directory), os.path.realpath(directory)
    given, resolved = (context._jvm.org.apache.hadoop.fs.Path(path).toUri().getRawPath() for path in paths)
    return given, resolved


def source_names(spark: SparkSession, query_id: str) -> list[str] | None:
    """Return the name of each source of a running query in Spark's records, a number if it has none; None before 4.2.

    Raises:
        StateError: no query of this id is running.
    """
    execution = _execution(spark, query_id)
    names = names_of_sources(execution)
    return None if names is None else [names.apply(source) for source in iterate(execution.sources())]


@dataclass(frozen=True)
class ReadFile:
    """A file as a file source of a running batch found it: its size in bytes, if it is known, and when it was
    modified, in milliseconds since 1970."""

    size: int | None
    modified_ms: int | None


def read_files(spark: SparkSession, query_id: str) -> dict[str, ReadFile]:
    """Return the files that the running batch of a query reads from file sources: URL, as in Spark's record -> file.

    They are those that Spark has listed for the batch; no file is looked at again. A file that is gone is missing.

    Raises:
        StateError: no query of this id is running.
    """
    found: dict[str, ReadFile] = {}
    for leaf in iterate(_execution(spark, query_id).lastExecution().logical().collectLeaves()):
        # Not tables that the stream is joined with, nor Delta tables, which list their files in other ways.
        if leaf.nodeName() != "LogicalRelation" or not leaf.isStreaming():
            continue
        files = leaf.relation().location()
        if files.getClass().getSimpleName() not in _LISTED:
            continue
        # In one call each: there may be a hundred thousand. No path has a null character.
        join = look_up(spark._jvm, "org.apache.hadoop.util.StringUtils.join")
        urls = join("\0", files.inputFiles()).split("\0")
        told = files.allFiles().mkString("\0").split("\0")
        found |= {url: _read_file(status) for url, status in zip(urls, told, strict=True) if url}
    return found


def _read_file(status: str) -> ReadFile:
    """Read what Hadoop's `FileStatus.toString` says; its path, which comes first, may hold any character."""
    said = [pattern.findall(status) for pattern in (_LENGTH, _MODIFIED)]
    size, modified_ms = (int(numbers[-1]) if numbers else None for numbers in said)
    return ReadFile(size, modified_ms)


def start_offsets(spark: SparkSession, query_id: str) -> list[str | None]:
    """Return, per source, the offset (JSON) at which a query's current batch begins.

    None for a source without one: a file source, or one from which the batch reads nothing.

    Raises:
        StateError: no query of this id is running, or this version of Spark does not expose the offsets.
    """
    try:
        execution = _execution(spark, query_id)
        data = start_of_batch(execution)
        holders = [data.get(source) for source in iterate(execution.sources())]
        return [_start(holder.get()) if holder.isDefined() else None for holder in holders]
    except Py4JError as error:
        raise StateError(
            f"Spark does not expose where the sources of query {query_id} begin",
            advice=f"use the version of Spark that Siltstone requires ({str(error).splitlines()[0]})",
        ) from error


def _start(planned: Any) -> str | None:
    """Return the start offset of a source's part of a batch; None for sources of Spark's first interface."""
    return planned.start().json() if planned.getClass().getSimpleName() == "OffsetHolder" else None


def _execution(spark: SparkSession, query_id: str) -> Any:
    session: Any = spark
    # Not `spark.streams`: a batch runs in a copy of the session that started the query, and the copy has no queries.
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    execution = running.get(look_up(spark._jvm, "java.util.UUID.fromString")(query_id))
    if execution is None:
        raise StateError(
            f"no query {query_id} is running",
            advice="start it with .option('checkpointLocation', runner.checkpoint_location)",
        )
    return execution
