"""Kill runs of a stream from Kafka to Kafka, and the broker, and compare the topics with an answer of one pass.

    python -m tests.fault.kafka_kills --kills 60 [--seed N] [--directory DIR] [--tell]

Orders come in three partitions, each in order within two minutes; some come twice, as from a producer that was started
again. They come by one topic, by two, or by a topic and files, each with its own event times. `once` passes each on
once, whichever source it came by, and `totals` adds them up by customer and ten minutes of event time. Each writes to a
topic of the same broker.

Runs and processes of their tasks are killed (`tests.fault.kills`). The broker is killed and started again, stays away
for a while, or freezes. Once the input is used up, a last run finishes. Then

- readers of committed records find each order once, and each total as pandas computes it from all orders;
- nothing timed is left, every checkpoint is proven, and a replay comes to the same digests.
"""

import argparse
import json
import os
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.functions import Count, Sum
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Tumbling
from siltstone.deduplicate import Deduplicate
from siltstone.operator import Due, Operator, Rows, State, Timer
from siltstone.secret import Secret
from siltstone.sinks.kafka import KafkaSink
from siltstone.spark.operations import RunRequest, run
from siltstone.stream import SourceFunction, Stream
from siltstone.time.event_time import EventTime
from tests.fault.kills import (
    Kills,
    Started,
    answers,
    arguments,
    check_proven,
    compare,
    files_of,
    lay_out,
    let_in,
    note,
    settings_of,
)
from tests.kafka_server import VERSION, KafkaServer, connector_jars
from tests.kafka_streams import ADDRESS, read_numbers
from tests.timed_streams import HOUR, values_of
from tests.topic_run import create_markers, value_of

if TYPE_CHECKING:
    pass

NAME = "orders"
ORDERS, MORE, ONCE, TOTALS = "TOPIC_ORDERS", "TOPIC_MORE", "TOPIC_ONCE", "TOPIC_TOTALS"
TOPICS = (ORDERS, MORE, ONCE, TOTALS)
"""variables that name the topics of one stream"""
SOURCES = {"orders": ORDERS, "more": MORE}
"""sources that are topics"""
FILES = "files"
SHAPES = [("orders",), ("orders", "more"), ("orders", FILES)]
"""the sources of a stream"""
PARTITIONS, CUSTOMERS, A_PIECE = 3, 20, 150
WINDOW = timedelta(minutes=10)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TWICE = 0.1
"""how many orders come a second time"""
Order = tuple[int, int, int]
"""customer, number, and milliseconds since 1970"""
ROW = pa.schema([("value", pa.int64()), ("key", pa.int64()), ("timestamp", pa.timestamp("us", "UTC"))])
"""an order in a file: number, customer and time"""


def orders(seed: int, pieces: int) -> list[list[Order]]:
    """The orders of each piece, which are of ten minutes each, in any order within two; those that come twice, too."""
    draw, made = np.random.default_rng(seed), list[list[Order]]()
    for number in range(pieces):
        begin = int((BEGIN + number * WINDOW).timestamp() * 1000)
        times = np.sort(draw.integers(0, WINDOW // timedelta(milliseconds=1), A_PIECE)) + begin
        rows = [(int(draw.integers(CUSTOMERS)), number * A_PIECE + n, int(at)) for n, at in enumerate(times)]
        rows += [row for row in rows if draw.random() < TWICE]
        rows.sort(key=lambda row: row[2] + draw.uniform(-55_000, 55_000))
        made.append(rows)
    return made


def sources_of(seed: int) -> tuple[str, ...]:
    """The names of the sources that are drawn for a stream."""
    return random.Random(f"sources {seed}").choice(SHAPES)


def shares(seed: int, pieces: int) -> list[dict[str, list[Order]]]:
    """The orders of each piece by source; one that comes twice comes by either."""
    names = sources_of(seed)
    return [{name: rows[n :: len(names)] for n, name in enumerate(names)} for rows in orders(seed, pieces)]


class Once(Operator):
    """Passes on each order of several sources once, as `Deduplicate` does those of one."""

    name = "once"
    key = {"value": pa.int64()}  # noqa: RUF012
    output = ROW
    output_time = "timestamp"
    seen = Timer()

    def process(self, rows: Rows, state: State) -> pa.Table:
        at, is_new = rows.max(values_of(rows, "timestamp")), pc.is_null(state.seen.get(rows.keys))
        state.seen.set(rows.keys, pc.add(at, pa.scalar(HOUR)))
        made = rows.keys.with_columns({"key": rows.max(values_of(rows, "key")), "timestamp": at})
        return made.filter(is_new)

    def on_timer(self, due: Due, state: State) -> None:
        """Forget the orders: none of them can come again."""


def source_of(directory: Path, name: str) -> SourceFunction:
    """A source by its name."""

    def read(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        note(directory)
        return read_numbers(spark, {**options, "subscribe": os.environ[SOURCES[name]]})

    return read if name in SOURCES else files_of(directory, name, ROW)


def define(given: argparse.Namespace) -> Stream:
    """The stream between the topics that variables name; each run names two sources in any order."""
    names = sources_of(given.seed)
    sources = {name: source_of(given.directory, name) for name in random.sample(names, len(names))}
    event_times = {
        name: EventTime("timestamp", delay="2 minutes", **({"per": "partition"} if name in SOURCES else {}))
        for name in names
    }
    if len(names) > 1:
        by_number = {name: {"value": "value"} for name in names}
        once = Once(reads=by_number, inputs=dict.fromkeys(names, ("key", "timestamp")))
        options: dict[str, Any] = {"sources": sources, "event_time": event_times}
    else:
        once = Deduplicate("once", {"value": pa.int64()}, HOUR, on="timestamp", columns={"key": pa.int64()})
        options = {"source": sources["orders"], "event_time": event_times["orders"]}
    totals = Aggregate(
        "totals",
        {"key": pa.int64()},
        [Count("orders"), Sum("sum", of="value")],
        window=Tumbling(WINDOW, on="timestamp"),
        reads="once",
    )
    sinks = {
        "once": KafkaSink(os.environ[ONCE], Secret(ADDRESS), key="key"),
        "totals": KafkaSink(os.environ[TOTALS], Secret(ADDRESS), key="key"),
    }
    return Stream(
        NAME,
        operators=[once, totals],
        sinks=sinks,
        options={"startingOffsets": "earliest", "maxOffsetsPerTrigger": "200"},
        max_parallelism=8,
        **options,
    )


def check(given: argparse.Namespace) -> str:
    """Finish the stream, and prove it; return what was proven, for people."""
    settings, stream = settings_of(given, random.Random(given.seed)), define(given)
    run(settings, stream, RunRequest(finish=True))
    check_proven(settings, stream, given.directory)
    return "every checkpoint proven, and nothing timed left"


class KafkaKills(Kills):
    """Runs of streams from Kafka to Kafka, on a broker that is killed, too.

    Args:
        kafka: the broker.
    """

    module = "tests.fault.kafka_kills"

    def __init__(self, given: argparse.Namespace, kafka: KafkaServer) -> None:
        super().__init__(given)
        self.kafka = kafka
        self.topics: dict[str, str] = {}
        """of the stream: variable -> topic"""
        self.files: Iterator[Path] = iter(())
        """of the stream, to come"""

    @property
    def killed(self) -> int:
        """How many processes of runs were killed."""
        return self.counts["runs"] + self.counts["task processes"]

    def make_input(self, directory: Path) -> list[dict[str, list[Order]]]:
        self.topics = {name: f"{name.rpartition('_')[2].lower()}-{uuid.uuid4().hex[:8]}" for name in TOPICS}
        for topic in self.topics.values():
            # A topic forgets records by their timestamps, which are event times here.
            self.kafka.create_topic(topic, PARTITIONS, {"retention.ms": "-1"})
        create_markers(self.kafka)
        first, *pieces = every = shares(self.given.seed, self.given.pieces)
        if FILES in first:
            self.files = iter(lay_out(directory, {FILES: [file_of(piece[FILES]) for piece in every]})[FILES])
        # Before the first run: the watermark knows of a partition once it has seen a row of it.
        self.give(first, directory)
        return pieces

    def give(self, piece: dict[str, list[Order]], directory: Path) -> None:
        for name, share in piece.items():
            if name == FILES:
                let_in(next(self.files), directory)
                self.tell(f"{len(share)} more orders come in a file")
                continue
            topic = self.topics[SOURCES[name]]
            for partition in range(PARTITIONS):
                rows = [row for row in share if row[0] % PARTITIONS == partition]
                at_ms = [at for _, _, at in rows]
                self.kafka.produce(topic, [(of, n) for of, n, _ in rows], partition, at_ms)
            self.tell(f"{len(share)} more orders come in topic {topic}")

    def kill_part(self, started: Started, draw: random.Random) -> None:
        """Kill a process of the run's tasks, or the broker, or let that stand still."""
        what = draw.choice(["task processes"] * 4 + ["broker restarts", "broker outages", "frozen brokers"])
        if what == "task processes":
            super().kill_part(started, draw)
            return
        self.counts[what] += 1
        if what == "frozen brokers":
            self.tell("the broker stands still for some seconds")
            self.kafka.freeze()
            time.sleep(draw.uniform(1, 5))
            self.kafka.thaw()
            return
        away_s = draw.uniform(3, 12) if what == "broker outages" else 0
        self.tell(f"the broker is killed, and started again after {away_s:.0f} s")
        self.kafka.kill()
        time.sleep(away_s)
        self.kafka.start()

    def stream(self, directory: Path) -> str:
        """Run one stream, and compare what readers of its topics find."""
        proven = super().stream(directory)
        given = [row for piece in orders(self.given.seed, self.given.pieces) for row in piece]
        rows = pd.DataFrame(dict(zip(("key", "value", "at"), zip(*given, strict=True), strict=True))).drop_duplicates()
        found = Counter(row["value"] for row in self.read(ONCE))
        compare("orders", found, Counter(rows["value"].tolist()))
        ms = WINDOW // timedelta(milliseconds=1)
        sums = rows.groupby(["key", rows["at"] // ms * ms])["value"].agg(["count", "sum"]).reset_index()
        totals = [(row["key"], to_ms(row["window_start"]), row["orders"], row["sum"]) for row in self.read(TOTALS)]
        compare("totals", Counter(totals), Counter(sums.itertuples(index=False, name=None)))
        read = " and ".join(sources_of(self.given.seed))
        return f"read {read}: {len(rows)} orders and {len(sums)} totals, each once, as pandas computes them; {proven}"

    def read(self, topic: str) -> list[dict[str, Any]]:
        """What a reader of committed records finds in a topic."""
        return [value_of(message) for message in self.kafka.read_messages(self.topics[topic], PARTITIONS)]

    @contextmanager
    def options(self, directory: Path) -> Iterator[list[str]]:
        """The options of one stream's runs."""
        spark = json.dumps({"spark.jars": connector_jars()})
        yield ["--warehouse", str(directory / "warehouse"), "--spark", spark]

    def variables(self) -> dict[str, str]:
        """Where runs find the broker and the topics."""
        return {ADDRESS: self.kafka.address, **self.topics}


def file_of(rows: list[Order]) -> pa.Table:
    """Orders as rows of a file."""
    of, number, at_ms = zip(*rows, strict=True)
    times = pa.array(at_ms, pa.timestamp("ms", "UTC"))
    return pa.table([number, of, times.cast(ROW.field("timestamp").type)], schema=ROW)


def to_ms(text: str) -> int:
    """Return milliseconds since 1970 of a time in ISO 8601."""
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def main() -> int:
    """Kill runs, one after the other, and compare each time the input is used up."""
    given = arguments(__doc__).parse_args()
    if not answers(given, check, define):
        kafka = KafkaServer()
        print(f"broker {VERSION} on {kafka.address}", flush=True)
        KafkaKills(given, kafka).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
