"""Topics of Kafka with a stream's output: each row exactly once, for consumers that read committed records.

    deliver    for each staged object of an output, in order, one transaction: its rows, then a marker (`kafka_marker`)
    repeat     read the marker, and go on after the objects that it counts

The transactions' id is that of `sink_identity`. The first delivery of a run takes it over (`init_transactions`): the
broker ends what an earlier process left open, and refuses what it sends from then on. Only then the marker is read. So
each object's rows are in the topic once (promise 2): after a crash before or after a commit, after a commit whose
answer was lost, and if a writer that was fenced wakes up in the middle.

The driver reads the staged objects and sends the rows; Spark runs no job for it.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.extras import check_extra
from siltstone.format.output import read_output
from siltstone.log import get_logger
from siltstone.secret import Secret
from siltstone.sinks.identity import sink_identity
from siltstone.sinks.kafka_calls import EXTRA, OWN, KafkaClients
from siltstone.sinks.kafka_marker import PARTITION, Marker, after, check_topics, read_marker
from siltstone.sinks.kafka_rows import Columns, Record, check_columns, encode_records

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from siltstone.catalog.records.outbox import OutputRecord
    from siltstone.catalog.warehouse import OpenWarehouse
    from siltstone.model import StoredObject

_LOG = get_logger(__name__)
MARKERS = "siltstone-markers"
STREAM_HEADER, CHECKPOINT_HEADER = "siltstone.stream", "siltstone.checkpoint"
TIMEOUT = "transaction.timeout.ms"
TIMEOUT_MS = 60_000
"""how long a transaction may take, unless the options say otherwise"""
BEGIN_S = 30.0
"""how long the broker may take to hand over the transactions' id"""
ABORT_S = 5.0
_WAIT_S = 0.05
_WHOLE = re.compile(r"[1-9][0-9]{0,8}")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True)
class KafkaSink:
    """A topic of Kafka, with each row of the output exactly once for consumers with `isolation.level=read_committed`.

    It needs `pip install 'siltstone[kafka]'`, and two topics, which it does not create: `topic`, and `markers`, in
    which it notes how far it has come (`cleanup.policy=compact`). Each record has the headers `siltstone.stream` and
    `siltstone.checkpoint`. Its timestamp is the row's event time if the operator has an `output_time`, and else the
    time at which it was sent.

    Args:
        topic: the name of the topic.
        servers: `host:port` of one or more brokers, with commas between.
        key: the column with the records' key: text and bytes as they are, other types as JSON, and null as no key.
            Several columns become one JSON object. None for records without a key.
        value: likewise the records' value, in which null is a tombstone. None is a JSON object of all columns.
        options: options of the client (librdkafka), such as `security.protocol`; a `Secret` for passwords.
        markers: the topic for the markers. Streams may share it. Never change it.
    """

    topic: str
    servers: str | Secret
    key: Columns = None
    value: Columns = None
    options: Mapping[str, str | int | float | bool | Secret] = field(default_factory=dict, repr=False)
    markers: str = MARKERS
    stages_table: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in (self.topic, self.markers):
            if not _TOPIC.fullmatch(name):
                raise UsageError(f"a KafkaSink names the topic {name!r}: use letters, digits, '.', '_' and '-'")
        if self.topic == self.markers:
            raise UsageError(f"a KafkaSink writes rows and markers to the topic {self.topic}: name another for one")
        if own := OWN.intersection(self.options):
            raise UsageError(f"a KafkaSink sets {min(own)} itself: leave it out of its options")
        if not _WHOLE.fullmatch(str(self.options.get(TIMEOUT, TIMEOUT_MS))):
            raise UsageError(f"a KafkaSink's {TIMEOUT} is a whole number of milliseconds: correct its options")


@dataclass
class _Session:
    """A producer that has taken over the transactions' id, and what its topic has."""

    id: str
    producer: "Producer"
    marker: Marker | None


class KafkaTopic:
    """The topic of one sink of a stream; not safe for use by two threads.

    Args:
        time: the column of the output with the event time of its rows.
    """

    def __init__(
        self, sink: KafkaSink, warehouse: "OpenWarehouse", stream: str, operator: str, time: str | None
    ) -> None:
        self.sink, self.stream, self.operator = sink, stream, operator
        self._warehouse, self._time = warehouse, time
        self._clients = KafkaClients(f"{self.label}, topic {sink.topic}", sink.servers, sink.options)
        self._timeout_s = int(str(sink.options.get(TIMEOUT, TIMEOUT_MS))) / 1000
        self._session: _Session | None = None

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"stream {self.stream}: the KafkaSink of {self.operator}"

    @property
    def id(self) -> str:
        """The id of its transactions, and the key of its markers; see `sink_identity`."""
        return f"siltstone/{sink_identity(self._warehouse, self.stream, self.operator)}"

    def check(self, schema: pa.Schema) -> None:
        """Check that rows of this schema can be written, before a run takes the stream over.

        Raises:
            UsageError: the package, a column or a topic is missing, or the markers could be deleted.
            Unreachable: the broker does not answer.
            StateError: the broker refuses.
        """
        check_extra(*EXTRA)
        check_columns(schema, self.sink.key, self.sink.value, self.label)
        check_topics(self._clients, self.sink.topic, self.sink.markers)

    def list_published(self) -> tuple[set[int], int]:
        """Return ids whose rows it has, of those that are not older than the second: all older ones have been sent.

        As `SinkTable.list_published`; only the newest id is recorded. No transactions are taken over for this.

        Raises:
            UsageError: the package is missing.
            Unreachable: the broker does not answer.
            StateError: the broker refuses.
        """
        check_extra(*EXTRA)
        with self._clients.translate_errors():
            marker = read_marker(self._clients, self.sink.markers, self.id)
        return set(), 1 if marker is None else marker.id + (marker.objects == marker.of)

    def deliver(self, output: "OutputRecord") -> None:
        """Send the rows of one checkpoint, without those that the topic has.

        Raises:
            Unreachable: the broker or the store failed, or another process delivers for this sink; the next delivery
                finds out what the topic has.
            StateError: the broker refuses a record; or see `Marker.count_delivered`.
            UsageError: the rows, which an earlier definition made, lack a column of the key or of the value.
            CorruptObject: a staged object is missing, cut or altered, in two reads.
        """
        if not output.objects:
            return
        check_extra(*EXTRA)
        check_columns(_schema_of(output), self.sink.key, self.sink.value, self.label)
        with suppress(CorruptObject):  # a store may answer wrongly once
            self._deliver(output)
            return
        self._deliver(output)

    def _deliver(self, output: "OutputRecord") -> None:
        with self._clients.translate_errors():
            try:
                session = self._session = self._session or self._begin()
                for number in range(self._count_delivered(session, output), len(output.objects)):
                    self._send(session, output, number)
            except BaseException:
                self._end()
                raise

    def _count_delivered(self, session: _Session, output: "OutputRecord") -> int:
        if session.marker is None:
            return 0
        return session.marker.count_delivered(output, self._clients.what, session.id, self.sink.markers)

    def _begin(self) -> _Session:
        """Take over the transactions' id, then read the marker, which no other process can write any more."""
        id = self.id
        producer = self._clients.make_producer(id)
        producer.init_transactions(BEGIN_S)
        marker = read_marker(self._clients, self.sink.markers, id)
        _LOG.debug("topic taken over", stream=self.stream, sink=self.operator, marker=str(marker))
        return _Session(id, producer, marker)

    def _end(self) -> None:
        """Give up the producer after an error, with its transaction: readers need not wait until that times out."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):  # that of the delivery is what counts
                session.producer.abort_transaction(ABORT_S)

    def _send(self, session: _Session, output: "OutputRecord", number: int) -> None:
        """Send the rows of one staged object and the marker in one transaction."""
        producer, until_s = session.producer, time.monotonic() + self._timeout_s
        producer.begin_transaction()
        headers: dict[str, str | bytes | None] = {STREAM_HEADER: self.stream, CHECKPOINT_HEADER: str(output.sink_id)}
        for records in self._encode(output, output.objects[number]):
            for key, value, at in records:
                while True:
                    try:
                        producer.produce(self.sink.topic, value, key, timestamp=at, headers=headers)
                        break
                    except BufferError:  # its queue is full
                        producer.poll(_WAIT_S)
                        self._check_time(until_s)
        while producer.flush(1.0):
            self._check_time(until_s)
        marker = after(output, number + 1)
        # Last, so that what a crash leaves open is hardly ever in the partition that all sinks read.
        producer.produce(self.sink.markers, marker.encode(), session.id, partition=PARTITION)
        producer.commit_transaction(max(until_s - time.monotonic(), _WAIT_S))
        session.marker = marker

    def _encode(self, output: "OutputRecord", stored: "StoredObject") -> Iterator[list[Record]]:
        store = self._warehouse.warehouse.store
        time = self._time if self._time in _schema_of(output).names else None
        for batch in read_output(store, stored, output.arrow_schema):
            yield from encode_records(batch, self.sink.key, self.sink.value, time)

    def _check_time(self, until_s: float) -> None:
        if time.monotonic() > until_s:
            raise Unreachable(
                f"{self._clients.what}: the broker did not take the rows of one staged object within {TIMEOUT} "
                f"({self._timeout_s:g} s)",
                advice="check that the broker answers; if it is only slow, raise that option, up to the broker's "
                "transaction.max.timeout.ms",
                transient=True,
            )


def _schema_of(output: "OutputRecord") -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(output.arrow_schema))
