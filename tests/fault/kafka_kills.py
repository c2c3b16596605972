"""Kill runs of a stream from Kafka to Kafka, and the broker, and compare the topics with an answer of one pass.

    python -m tests.fault.kafka_kills --kills 60 [--seed N] [--directory DIR] [--tell]

Orders come in three partitions, each in order within two minutes; some come twice, as from a producer that was started
again. `once` passes each on once, and `totals` adds them up by customer and ten minutes of event time. Each writes to a
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
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.functions import Count, Sum
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Tumbling
from siltstone.deduplicate import Deduplicate
from siltstone.secret import Secret
from siltstone.sinks.kafka import KafkaSink
from siltstone.spark.operations import RunRequest, run
from siltstone.stream import Stream
from siltstone.time.event_time import EventTime
from tests.fault.kills import Kills, Started, answers, arguments, check_proven, compare, note, settings_of
from tests.kafka_server import VERSION, KafkaServer, connector_jars
from tests.kafka_streams import ADDRESS, read_numbers
from tests.topic_run import create_markers, value_of

if TYPE_CHECKING:
    pass

NAME = "orders"
ORDERS, ONCE, TOTALS = "TOPIC_ORDERS", "TOPIC_ONCE", "TOPIC_TOTALS"
TOPICS = (ORDERS, ONCE, TOTALS)
"""variables that name the topics of one stream"""
PARTITIONS, CUSTOMERS, A_PIECE = 3, 20, 150
WINDOW = timedelta(minutes=10)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TWICE = 0.1
"""how many orders come a second time"""
Order = tuple[int, int, int]
"""customer, number, and milliseconds since 1970"""


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


def define(given: argparse.Namespace) -> Stream:
    """The stream between the topics that variables name."""

    def source(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        note(given.directory)
        return read_numbers(spark, options)

    once = Deduplicate("once", {"value": pa.int64()}, "1 hour", on="timestamp", columns={"key": pa.int64()})
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
        source,
        event_time=EventTime("timestamp", delay="2 minutes", per="partition"),
        operators=[once, totals],
        sinks=sinks,
        options={"subscribe": os.environ[ORDERS], "startingOffsets": "earliest", "maxOffsetsPerTrigger": "200"},
        max_parallelism=8,
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

    @property
    def killed(self) -> int:
        """How many processes of runs were killed."""
        return self.counts["runs"] + self.counts["task processes"]

    def make_input(self, directory: Path) -> list[list[Order]]:
        self.topics = {name: f"{name.rpartition('_')[2].lower()}-{uuid.uuid4().hex[:8]}" for name in TOPICS}
        for topic in self.topics.values():
            # A topic forgets records by their timestamps, which are event times here.
            self.kafka.create_topic(topic, PARTITIONS, {"retention.ms": "-1"})
        create_markers(self.kafka)
        first, *pieces = orders(self.given.seed, self.given.pieces)
        # Before the first run: the watermark knows of a partition once it has seen a row of it.
        self.give(first, directory)
        return pieces

    def give(self, piece: list[Order], directory: Path) -> None:
        for partition in range(PARTITIONS):
            rows = [row for row in piece if row[0] % PARTITIONS == partition]
            at_ms = [at for _, _, at in rows]
            self.kafka.produce(self.topics[ORDERS], [(of, n) for of, n, _ in rows], partition, at_ms)
        self.tell(f"{len(piece)} more orders come in topic {self.topics[ORDERS]}")

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
        return f"{len(rows)} orders and {len(sums)} totals, each once, as pandas computes them; {proven}"

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
