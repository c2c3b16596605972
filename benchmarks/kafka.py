"""Compare a stream from Kafka to Kafka with Spark's own stateful query between its own source and sink.

    python -m benchmarks kafka [--quick] [--rounds N]

Both keep the same aggregates per key, and write the keys that a micro-batch changed as JSON to a topic. Spark's sink
is at least once: a task that fails writes again. Siltstone's is exactly once for consumers that read committed records.
The systems take turns in rounds, each in a process of its own, on one broker (`tests.kafka_server`).

    throughput  seconds for ROWS records that are there already, in micro-batches of `A_BATCH`, after a warm-up in the
                same process
    latency     from a record's production to its being read by a consumer in another process: `ROWS_PER_S` records a
                second, in ten parts; Spark polls every 10 ms
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

import siltstone as st
from benchmarks.goals import Goal, Report, spread_of, table_of
from benchmarks.rounds import in_turn, own_process
from benchmarks.systems import CORES, OPERATOR, ROCKSDB, SPARK
from siltstone.aggregates.operator import Aggregate, Count, Max
from siltstone.spark.session import spark_session
from tests.kafka_server import KafkaServer, connector_jars
from tests.topic_run import create_topics

OURS, PENDING, PEER = "siltstone", "siltstone-pending", "spark"
TITLES = {OURS: "Siltstone", PENDING: "Siltstone, 2 pending", PEER: "Spark, RocksDB, its own sink"}
ROWS, WARM_UP, A_BATCH, KEYS, PARTITIONS = 1_000_000, 200_000, 100_000, 100_000, 2
ROWS_PER_S = 1000
PERCENTILES = (50, 99)
_READY_S = 300.0
"""most seconds until the first record comes out"""


def read(spark: SparkSession, address: str, topic: str) -> DataFrame:
    """Read a topic of (key, when it was produced, in ms since 1970)."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", address).option("subscribe", topic)
    rows = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", A_BATCH).load()
    return rows.selectExpr("cast(cast(key as string) as long) as key", "cast(cast(value as string) as long) as arrived")


def transfer(spark: SparkSession, system: str, work: Path, address: str, source: str, target: str, wait: bool) -> None:
    """Run one system from topic to topic: over what is there, or until the process is killed."""
    rows, trigger = read(spark, address, source), dict[str, Any](processingTime="0 seconds")
    if not wait:
        trigger = {"availableNow": True}
    if system == PEER:
        totals = rows.groupBy("key").agg(F.count(F.lit(1)).alias("rows"), F.max("arrived").alias("arrived"))
        out = totals.select(F.col("key").cast("string").alias("key"), F.to_json(F.struct("*")).alias("value"))
        writer = out.writeStream.format("kafka").option("kafka.bootstrap.servers", address).option("topic", target)
        writer = writer.outputMode("update").option("checkpointLocation", str(work / f"checkpoint-{source}"))
        writer.trigger(**trigger).start().awaitTermination()
        return
    operators = [Aggregate(OPERATOR, {"key": pa.int64()}, [Count("rows"), Max("arrived", of="arrived")])]
    stream = st.Stream(source, None, operators, sinks={OPERATOR: st.KafkaSink(target, address, key="key")})
    options = {"warehouse": str(work / "warehouse"), "parallelism": CORES, "max_pending": 2 * (system == PENDING)}
    st.write_stream(rows, stream, trigger=trigger, **options).await_termination()


def throughput(kafka: KafkaServer, sources: Sequence[str], system: str, work: Path) -> float:
    """Return the seconds of one system for the second of two topics, the first one being its warm-up.

    Raises:
        RuntimeError: it failed; the message ends with its output.
    """
    targets = [f"out-{uuid.uuid4().hex}" for _ in sources]
    for target in targets:
        create_topics(kafka, target, PARTITIONS)
    given = [system, str(work), kafka.address, *(name for pair in zip(sources, targets, strict=True) for name in pair)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *given], capture_output=True, text=True, check=False, timeout=1800
    )
    if done.returncode:
        raise RuntimeError(f"{system} failed:\n{done.stderr[-4000:]}")
    return float(done.stdout.split()[-1])


def latency(kafka: KafkaServer, system: str, work: Path, warm_up_s: float, measured_s: float) -> np.ndarray:
    """Return the seconds from production to being read of each record that came out after a warm-up.

    Raises:
        RuntimeError: nothing came out, or the system ended; the message ends with its output.
    """
    source, target = f"in-{uuid.uuid4().hex}", f"out-{uuid.uuid4().hex}"
    kafka.create_topic(source, PARTITIONS)
    create_topics(kafka, target, PARTITIONS)
    done, delays = threading.Event(), list[float]()
    feeder = threading.Thread(target=feed, args=(kafka.address, source, done))
    options = {"group.id": uuid.uuid4().hex, "isolation.level": "read_committed", "fetch.wait.max.ms": 10}
    consumer = Consumer({"bootstrap.servers": kafka.address, "auto.offset.reset": "earliest", **options})
    consumer.assign([TopicPartition(target, number, 0) for number in range(PARTITIONS)])
    try:
        with (
            (work / "said").open("w+") as said,
            own_process(__name__, system, str(work), kafka.address, source, target, said=said) as process,
        ):
            feeder.start()
            began, give_up = None, time.monotonic() + _READY_S
            while began is None or time.monotonic() < began + warm_up_s + measured_s:
                if process.poll() is not None or (began is None and time.monotonic() > give_up):
                    said.seek(0)
                    raise RuntimeError(f"{system} delivered nothing, or ended:\n{said.read()[-4000:]}")
                for message in consumer.consume(1000, 0.05):
                    began = began or time.monotonic()
                    if time.monotonic() > began + warm_up_s:
                        delays.append(time.time() - json.loads(message.value() or b"")["arrived"] / 1000)
    finally:
        done.set()
        feeder.join()
        consumer.close()
    return np.array(delays)


def feed(address: str, topic: str, done: threading.Event) -> None:
    """Produce records of keys that come again after `KEYS`, until told to stop."""
    producer, number = Producer({"bootstrap.servers": address, "linger.ms": 1}), 0
    while not done.wait(0.1):
        for _ in range(ROWS_PER_S // 10):
            number += 1
            producer.produce(topic, key=str(number % KEYS), value=str(int(time.time() * 1000)))
        producer.flush()


def run(kafka: KafkaServer, scratch: Path, rounds: int, *, quick: bool) -> Report:
    """Measure every system in rounds."""
    factor, (warm_up_s, measured_s) = 0.1 if quick else 1, (10.0, 20.0) if quick else (30.0, 60.0)
    sources = {"warm-up": int(WARM_UP * factor), "measured": int(ROWS * factor)}
    draw = np.random.default_rng(1)
    for source, count in sources.items():
        kafka.create_topic(source, PARTITIONS)
        for partition in range(PARTITIONS):
            keys = draw.integers(KEYS, size=count // PARTITIONS).tolist()
            kafka.produce(source, [(key, number) for number, key in enumerate(keys)], partition)
    progress = Console(stderr=True)
    seconds, delays = {s: list[float]() for s in TITLES}, {s: list[Mapping[int, float]]() for s in TITLES}
    for number in range(rounds):
        for system in in_turn(TITLES, number):
            progress.print(f"round {number + 1} of {rounds}: {TITLES[system]} ...")
            with tempfile.TemporaryDirectory(dir=scratch) as work:
                seconds[system].append(throughput(kafka, list(sources), system, Path(work)))
            with tempfile.TemporaryDirectory(dir=scratch) as work:
                found = latency(kafka, system, Path(work), warm_up_s, measured_s)
            delays[system].append({each: float(np.percentile(found, each)) for each in PERCENTILES})
    return report_of(sources["measured"], seconds, delays)


def report_of(
    rows: int, seconds: Mapping[str, Sequence[float]], delays: Mapping[str, Sequence[Mapping[int, float]]]
) -> Report:
    """Compare the systems. No goals were set."""
    heads = [f"{rows:,} records, s", *(f"p{each} s" for each in PERCENTILES)]
    report = Report([table := table_of("from Kafka to Kafka", "system", *heads)])
    for system, title in TITLES.items():
        table.add_row(
            title,
            spread_of(seconds[system]),
            *(spread_of([times[each] for times in delays[system]]) for each in PERCENTILES),
        )
        report.numbers[system] = {
            "seconds": seconds[system],
            **{f"p{each}_s": [times[each] for times in delays[system]] for each in PERCENTILES},
        }
    for system in (OURS, PENDING):
        ratios = [a / b for a, b in zip(seconds[system], seconds[PEER], strict=True)]
        report.goals.append(Goal.of_rounds(f"throughput, seconds: {TITLES[system]} / {TITLES[PEER]}", ratios))
        for each in PERCENTILES:
            ratios = [a[each] / b[each] for a, b in zip(delays[system], delays[PEER], strict=True)]
            report.goals.append(Goal.of_rounds(f"latency, p{each}: {TITLES[system]} / {TITLES[PEER]}", ratios))
    return report


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kafka", description="From Kafka to Kafka.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the records, and shorter")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the comparison (default: 3)")
    parser.add_argument("--directory", type=Path, help="temporary files (default: the system's)")
    parser.add_argument("--json", type=Path, default=Path("bench-kafka.json"), help="file for the numbers")
    options = parser.parse_args(arguments)
    kafka = KafkaServer()
    with tempfile.TemporaryDirectory(prefix="siltstone-kafka-", dir=options.directory) as scratch:
        report = run(kafka, Path(scratch), options.rounds, quick=options.quick)
    report.show("kafka: ratios", options.json)
    return 0


def one_system(system: str, work: Path, address: str, pairs: Sequence[str]) -> None:
    """Run one system from each source to its target; print the seconds of the last, or go on if there is one pair."""
    settings = {"spark.local.dir": str(work / "spark"), "spark.sql.streaming.pollingDelay": "10ms"}
    settings |= SPARK | {"spark.jars": connector_jars()} | (ROCKSDB if system == PEER else {})
    spark = spark_session(f"local[{CORES}]", settings, steps=system != PEER)
    for source, target in zip(pairs[::2], pairs[1::2], strict=True):
        began = time.perf_counter()
        transfer(spark, system, work, address, source, target, wait=len(pairs) == 2)
        seconds = time.perf_counter() - began
    print(seconds)  # pyright: ignore[reportPossiblyUnboundVariable]


if __name__ == "__main__":
    one_system(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
