"""Markers: how far each sink has come with its outputs, in a compacted topic.

A marker is written in the transaction of the rows that it counts, so both are there or neither is. Its key names the
sink. All markers are in the topic's first partition, which is read from its beginning when a run begins to deliver;
compaction keeps the newest marker of each sink.
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from siltstone.decoding import check_integer, check_object, check_text, parse_json, translate_decode_errors
from siltstone.errors import StateError, Unreachable, UsageError
from siltstone.sinks.kafka_calls import KafkaClients, is_missing_topic

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.admin import AdminClient

    from siltstone.catalog.records.outbox import OutputRecord

PARTITION = 0
REQUEST_S = 20.0
"""how long a broker may take to answer"""
LOOK_S = 5.0
"""how long a topic may be missing: a broker that has just started does not know all of them"""
READ_S = 120.0
"""how long the markers may take to read; an open transaction of another sink holds them up until it times out"""
MAX_ID = 2**63 - 1
POLICY = "cleanup.policy"
_CREATE = "kafka-topics.sh --bootstrap-server SERVER --create --topic"
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Marker:
    """What a topic has of a sink's outputs: those before `id`, and of `id` the first `objects` of `of` staged objects.

    `last` is the name of the last of these objects.
    """

    id: int
    objects: int
    of: int
    last: str

    def encode(self) -> bytes:
        """Return the value of its record."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes, name: str) -> "Marker":
        """Decode the value of a record.

        Raises:
            StateError: it is not a marker.
        """
        with translate_decode_errors(name, "a marker", StateError):
            values = check_object(parse_json(data), "it")
            id, objects, of = (check_integer(values[each], 1, MAX_ID, each) for each in ("id", "objects", "of"))
            return cls(id, objects, of, check_text(values["last"], "last"))

    def count_delivered(self, output: "OutputRecord", what: str, key: str, topic: str) -> int:
        """Return how many of an output's staged objects the topic has.

        Raises:
            StateError: the output came again in other objects, after some of them had reached the topic.
        """
        count = len(output.objects)
        if self.id != output.sink_id:
            return count if self.id > output.sink_id else 0
        if self.objects == self.of:
            return count
        if count != self.of or output.objects[self.objects - 1].name != self.last:
            raise StateError(
                f"{what} has a part of the rows of checkpoint {output.checkpoint}, {self.objects} of {self.of} staged "
                "objects; the others were damaged, and the checkpoint was made again with others",
                advice=f"to send all of its rows, some of them once more, write a record with the key {key!r} and no "
                f"value into partition {PARTITION} of topic {topic}, and run again",
            )
        return self.objects


def check_topics(clients: KafkaClients, topic: str, markers: str) -> None:
    """Check that both topics exist, and that the markers are never deleted.

    Raises:
        UsageError: one is missing, or the markers are not only compacted.
        Unreachable, StateError: see `KafkaClients.translate_errors`.
    """
    with clients.translate_errors():
        from confluent_kafka.admin import ConfigResource, ResourceType

        admin = clients.make_admin()
        settings = f"--partitions 1 --config {POLICY}=compact --config segment.bytes=16777216"
        for name, advice in ((topic, "--partitions N"), (markers, settings)):
            if not _has_topic(admin, name):
                kind = "for its markers, " if name == markers else ""
                raise UsageError(
                    f"{clients.what}: the topic {kind}{name} does not exist: create it ({_CREATE} {name} {advice})"
                )
        resource = ConfigResource(ResourceType.TOPIC, markers)
        [future] = admin.describe_configs([resource], request_timeout=REQUEST_S).values()
        policy = future.result()[POLICY].value
        if policy != "compact":
            raise UsageError(
                f"{clients.what}: {POLICY} of the topic for its markers, {markers}, is {policy}, with which they could "
                f"be deleted, and rows would come twice: set it to compact (kafka-configs.sh --bootstrap-server SERVER "
                f"--alter --entity-type topics --entity-name {markers} --add-config {POLICY}=compact)"
            )


def _has_topic(admin: "AdminClient", name: str) -> bool:
    from confluent_kafka import KafkaException, TopicCollection

    end = time.monotonic() + LOOK_S
    while True:
        [future] = admin.describe_topics(TopicCollection([name]), request_timeout=REQUEST_S).values()
        try:
            future.result()
            return True
        except KafkaException as error:
            if not is_missing_topic(error.args[0]):
                raise
        if time.monotonic() > end:
            return False
        time.sleep(0.2)


def read_markers(clients: KafkaClients, topic: str, keys: Collection[str]) -> dict[str, Marker]:
    """Read the newest marker of each of some sinks, after their own transactions have ended: key -> marker.

    Raises:
        Unreachable: the broker is away, or other sinks' transactions stay open.
        StateError: the record is not a marker.
    """
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    end, found, wanted = _find_end(clients, topic), dict[str, bytes | None](), {key.encode(): key for key in keys}
    consumer, deadline = clients.make_consumer(), time.monotonic() + READ_S
    try:
        at = 0  # or the first offset that there is; asking the broker for it takes the client half a second
        consumer.assign([TopicPartition(topic, PARTITION, at)])
        while at < end:
            message = consumer.poll(_POLL_S)
            if message is not None:
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - its own name
                    raise KafkaException(error)
                at = _next_offset(message)
                if error is None and (key := wanted.get(message.key() or b"")) is not None:
                    found[key] = message.value()
            if at < end and time.monotonic() > deadline:
                raise Unreachable(
                    f"{clients.what}: the markers in topic {topic} could be read up to offset {at} of {end} only: a "
                    "transaction of another sink is open",
                    advice="run again once that sink's process has ended or its transaction has timed out",
                    transient=True,
                )
    finally:
        consumer.close()
    return {
        key: Marker.decode(value, f"the record {key} of topic {topic}")
        for key, value in found.items()
        if value is not None  # taken away by hand, to send an output once more
    }


def _next_offset(message: "Message[Any, Any]") -> int:
    """Return how far a partition was read: the end of the partition comes as an error with its offset."""
    return (message.offset() or 0) + (message.error() is None)


def _find_end(clients: KafkaClients, topic: str) -> int:
    """Return the offset after the newest marker, committed or not."""
    from confluent_kafka import IsolationLevel, TopicPartition
    from confluent_kafka.admin import OffsetSpec

    asked: dict[TopicPartition, Any] = {TopicPartition(topic, PARTITION): OffsetSpec.latest()}
    level, admin = IsolationLevel.READ_UNCOMMITTED, clients.make_admin()  # which has to live until it is answered
    [future] = admin.list_offsets(asked, isolation_level=level, request_timeout=REQUEST_S).values()
    return future.result().offset


def after(output: "OutputRecord", delivered: int) -> Marker:
    """Return the marker of an output of which the topic has this many staged objects."""
    names: Sequence[str] = [stored.name for stored in output.objects]
    return Marker(output.sink_id, delivered, len(names), names[delivered - 1])
