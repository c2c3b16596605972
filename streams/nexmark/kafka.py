"""NEXMark's events in Kafka: a topic per kind, of one partition, whose n-th record is the n-th event, as JSON.

Times are microseconds since 1970.
"""

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

from .events import EPOCH, KINDS, PER_EPOCH, SLOTS, TIME, Events

if TYPE_CHECKING:
    from confluent_kafka import Message, Producer
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "nexmark-{}"
AT_ONCE = 10_000
"""about how many events are made together"""
WAIT_S = 20
"""for each answer of the broker"""


def read_topic(spark: "SparkSession", address: str, kind: str, at_once: int) -> "DataFrame":
    """Read the events of a kind, at most `at_once` per micro-batch."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(_with_numbers(KINDS[kind])).simpleString()
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", address)
    reader = reader.option("subscribe", TOPIC.format(kind)).option("startingOffsets", "earliest")
    records = reader.option("maxOffsetsPerTrigger", at_once).load()
    columns = [
        f"timestamp_micros({field.name}) as {field.name}" if field.type == TIME else field.name for field in KINDS[kind]
    ]
    return (
        records.selectExpr(f"from_json(cast(value as string), '{schema}') as event")
        .select("event.*")
        .selectExpr(*columns)
    )


def write_topics(address: str, events: Events, count: int) -> dict[str, int]:
    """Write the next `count` events, in whole epochs, kind by kind within about `AT_ONCE`.

    It makes the topics if they are not there, and goes on where each of them ends, with the same `events` as before.

    Returns:
        Kind -> how many events its topic has now.

    Raises:
        KafkaException: the broker does not answer, or refuses.
        TimeoutError: it does not confirm that it has all.
        ValueError: a topic has other records than the n-th event as the n-th.
    """
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True})
    _make_topics(address)
    has = {kind: _length(address, kind) for kind in KINDS}
    _write(producer, events, "side", range(has["side"], SLOTS))
    # Epochs that a former call has begun, it may not have written for each kind.
    last = max(-(-has[kind] // each) for kind, each in PER_EPOCH.items()) + count // EPOCH
    for begin in range(0, last, AT_ONCE // EPOCH):
        for kind, each in PER_EPOCH.items():
            end = min(begin + AT_ONCE // EPOCH, last)
            _write(producer, events, kind, range(max(has[kind], begin * each), end * each))
    return {kind: _length(address, kind) for kind in KINDS}


def _with_numbers(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(pa.int64()) if field.type == TIME else field for field in schema])


def _make_topics(address: str) -> None:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.create_topics(
        [NewTopic(TOPIC.format(each), 1) for each in KINDS], request_timeout=WAIT_S
    ).values():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise


def _has_no_leader(error: BaseException) -> bool:
    """Whether an error says that a topic was made just now."""
    from confluent_kafka import KafkaError, KafkaException

    codes = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART)
    return isinstance(error, KafkaException) and error.args[0].code() in codes


@retry(retry=retry_if_exception(_has_no_leader), wait=wait_fixed(0.1), stop=stop_after_delay(WAIT_S), reraise=True)
def _length(address: str, kind: str) -> int:
    """Return how many events a topic has."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

    latest: Any = OffsetSpec.latest()  # its annotation has None
    asked = {TopicPartition(TOPIC.format(kind), 0): latest}
    admin = AdminClient({"bootstrap.servers": address})  # answers as long as it exists
    (found,) = admin.list_offsets(asked, request_timeout=WAIT_S).values()
    return found.result().offset


def _write(producer: "Producer", events: Events, kind: str, places: range) -> None:
    """Write the events at some places of a kind, and wait until the broker has them."""
    from confluent_kafka import KafkaException

    def check(place: int, error: object, message: "Message") -> None:
        if error is not None:
            raise KafkaException(error)
        if message.offset() != place:
            raise ValueError(f"event {place} is record {message.offset()} of {TOPIC.format(kind)}: delete the topic")

    if places:
        made = events.make(kind, np.arange(places.start, places.stop)).cast(_with_numbers(KINDS[kind]))
        for place, row in zip(places, made.to_pylist(), strict=True):
            producer.produce(TOPIC.format(kind), json.dumps(row), partition=0, on_delivery=partial(check, place))
        if producer.flush(WAIT_S):
            raise TimeoutError(f"the broker did not confirm all events of {TOPIC.format(kind)}")
