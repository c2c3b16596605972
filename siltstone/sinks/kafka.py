"""Topics of Kafka with a stream's output: each row exactly once, for consumers that read committed records.

The driver reads the staged objects of an output and sends the rows; Spark runs no job for it. They are sent in
transactions (`kafka_transactions`), each with a marker that tells what is there (`kafka_marker`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from siltstone.errors import UsageError
from siltstone.extras import check_extra
from siltstone.format.output import read_again, read_output, staged_schema
from siltstone.secret import Secret
from siltstone.sinks.identity import sink_identity
from siltstone.sinks.kafka_avro import AvroFormat
from siltstone.sinks.kafka_calls import EXTRA, OWN, KafkaClients
from siltstone.sinks.kafka_marker import check_topics, read_markers
from siltstone.sinks.kafka_rows import FORMATS, Columns, Record, check_columns, encode_records
from siltstone.sinks.kafka_transactions import TIMEOUT, Cluster, KafkaTransactions

if TYPE_CHECKING:
    from siltstone.catalog.records.outbox import OutputRecord
    from siltstone.catalog.warehouse import OpenWarehouse

MARKERS = "siltstone-markers"
TIMEOUT_MS = 60_000
"""how long a transaction may take, unless the options say otherwise"""
_WHOLE = re.compile(r"[1-9][0-9]{0,8}")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True)
class KafkaSink:
    """A topic of Kafka, with each row of the output exactly once for consumers with `isolation.level=read_committed`.

    It needs `pip install 'siltstone[kafka]'`, and two topics, which it does not create: `topic`, and `markers`, in
    which it notes how far it has come (`cleanup.policy=compact`). Each record has the headers `siltstone.stream` and
    `siltstone.checkpoint`. Its timestamp is the row's event time if the operator has an `output_time` and that
    is not to come, and else the time at which it was sent.

    Args:
        topic: the name of the topic.
        servers: `host:port` of one or more brokers, with commas between.
        key: the column with the records' key: text and bytes as they are, other types in the format, and null as no
            key. Several columns become one JSON object, or one Avro record. None for records without a key.
        value: likewise the records' value, in which null is a tombstone. None is all columns as one object or
            record.
        options: options of the client (librdkafka), such as `security.protocol`; a `Secret` for passwords.
        markers: the topic for the markers. Streams may share it. Never change it.
        format: "json", or "avro": bare binary data, without the header of a schema registry. Readers need the schema,
            which is `st.avro_schema(output)`.
    """

    topic: str
    servers: str | Secret
    key: Columns = None
    value: Columns = None
    options: Mapping[str, str | int | float | bool | Secret] = field(default_factory=dict, repr=False)
    markers: str = MARKERS
    format: str = "json"
    stages_table: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in (self.topic, self.markers):
            if not _TOPIC.fullmatch(name):
                raise UsageError(f"a KafkaSink names the topic {name!r}: use letters, digits, '.', '_' and '-'")
        if self.topic == self.markers:
            raise UsageError(f"a KafkaSink writes rows and markers to the topic {self.topic}: name another for one")
        if self.format not in FORMATS:
            raise UsageError(f"a KafkaSink has the format {self.format!r}: use {' or '.join(FORMATS)}")
        if own := OWN.intersection(self.options):
            raise UsageError(f"a KafkaSink sets {min(own)} itself: leave it out of its options")
        if not _WHOLE.fullmatch(str(self.options.get(TIMEOUT, TIMEOUT_MS))):
            raise UsageError(f"a KafkaSink's {TIMEOUT} is a whole number of milliseconds: correct its options")


class KafkaTopic:
    """The topic of one sink of a stream; not safe for use by two threads.

    Args:
        time: the column of the output with the event time of its rows.
    """

    def __init__(
        self,
        sink: KafkaSink,
        warehouse: "OpenWarehouse",
        stream: str,
        operator: str,
        time: str | None,
        transactions: KafkaTransactions | None = None,
    ) -> None:
        self.sink, self.stream, self.operator, self.topic = sink, stream, operator, sink.topic
        self.cluster = Cluster(sink.servers, sink.options, sink.markers)
        self.timeout_s = int(str(sink.options.get(TIMEOUT, TIMEOUT_MS))) / 1000
        self._warehouse, self._time = warehouse, time
        self._transactions = transactions or KafkaTransactions(warehouse, stream)
        self._transactions.add(self)
        self._avro = AvroFormat(self.label, stream, operator) if sink.format == "avro" else None

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"stream {self.stream}: the KafkaSink of {self.operator}"

    @property
    def key(self) -> str:
        """The key of its markers."""
        return f"siltstone/{sink_identity(self._warehouse, self.stream, self.operator)}"

    def check(self, schema: pa.Schema) -> None:
        """Check that rows of this schema can be written, before a run takes the stream over.

        Raises:
            UsageError: the package, a column or a topic is missing, or the markers could be deleted.
            Unreachable: the broker does not answer.
            StateError: the broker refuses.
        """
        check_extra(*EXTRA)
        check_columns(schema, self.sink.key, self.sink.value, self.label, self._avro)
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
            marker = read_markers(self._clients, self.sink.markers, [key := self.key]).get(key)
        return set(), 1 if marker is None else marker.id + (marker.objects == marker.of)

    def deliver(self, output: "OutputRecord") -> None:
        """Send the rows of one checkpoint, without those that the topic has.

        Raises:
            UsageError: see `encode`.
            Unreachable, StateError: see `KafkaTransactions.deliver`.
            CorruptObject: a staged object is missing, cut or altered, in two reads.
        """
        if not output.objects:
            return
        check_extra(*EXTRA)
        read_again(lambda: self._transactions.deliver(self, output))

    def encode(self, output: "OutputRecord", number: int) -> Iterator[list[Record]]:
        """Read one staged object of an output, as records.

        Raises:
            UsageError: the rows, which an earlier definition made, lack a column of the key or of the value.
            CorruptObject: the object is missing, cut or altered.
            Unreachable: the store failed.
        """
        schema = staged_schema(output.arrow_schema)
        check_columns(schema, self.sink.key, self.sink.value, self.label, self._avro)
        # An earlier definition may have made the rows, with another column of this name, or none.
        time = next((f.name for f in schema if f.name == self._time and pa.types.is_timestamp(f.type)), None)
        for batch in read_output(self._warehouse.warehouse.store, output.objects[number], output.arrow_schema):
            yield from encode_records(batch, self.sink.key, self.sink.value, time, self._avro)

    @cached_property
    def _clients(self) -> KafkaClients:
        return KafkaClients(f"{self.label}, topic {self.topic}", self.sink.servers, self.sink.options)
