"""NEXMark's events as sources of a stream: Spark counts, and each number becomes an event where it is read.

With the option `kafka`, the address of a broker, they are read from topics (`streams.nexmark.kafka`).

All options are those of the stream: `siltstone run nexmark-q5 --set rate=1000`. A run takes one micro-batch; with
`--follow` or `--batches N` more. Rows are the same in each run, in a replay, and whatever the parallelism.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

import siltstone as st

from .events import EPOCH, KINDS, PER_EPOCH, SLOTS, Events
from .kafka import read_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OPTIONS = {"events": "50000", "rate": "10000", "seed": "0", "kafka": ""}
"""events of all kinds in a micro-batch; events per second of event time; the seed of all that is random; the address of
a broker whose topics are read instead"""
EVENT_TIME = st.EventTime("date_time", delay="1 second")
"""rows are out of order by a tenth of a second at 10,000 events per second of event time"""


def source(kind: str) -> "Callable[[SparkSession, Mapping[str, str]], DataFrame]":
    """Return a source of events of one kind (`Events.make`)."""
    return partial(_read, kind)


def _read(kind: str, spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    from pyspark.sql.pandas.types import from_arrow_schema

    count = SLOTS if kind == "side" else max(1, int(options["events"]) // EPOCH) * PER_EPOCH[kind]
    if options["kafka"]:
        return read_topic(spark, options["kafka"], kind, count)
    events = Events(int(options["seed"]), int(options["rate"]))
    numbers = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", count)
        .option("numPartitions", spark.sparkContext.defaultParallelism)
        .load()
    )
    return numbers.mapInArrow(partial(_make, events, kind), from_arrow_schema(KINDS[kind]))


def _make(events: Events, kind: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from events.make(kind, batch.column("value").to_numpy()).to_batches()


def query(number: int, reads: "list[str]", operators: "list[st.Operator]") -> st.Stream:
    """Return a query as a stream, whose last operator's output is the answer."""
    return st.Stream(
        f"nexmark-q{number}",
        sources={kind: source(kind) for kind in reads},
        event_time={kind: EVENT_TIME for kind in reads if "date_time" in KINDS[kind].names},
        options=OPTIONS,
        operators=operators,
        sinks={operators[-1].name: None},
    )


def columns_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return the columns of a table by name."""
    return dict(zip(table.column_names, table.columns, strict=True))
