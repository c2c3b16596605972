"""The transactions of a stream's topics: what is atomic, and who may send it.

    enter      take the transactions' id over (`init_transactions`), then read the markers of all its topics
    send       in one transaction: the rows of one staged object, then its marker; or, if each of a checkpoint's outputs
               is one object, those of all its topics
    repeat     the markers tell what is there already

The id is the stream's alone, not a sink's. So the broker ends what an earlier process of the stream left open, and
refuses what it sends from then on, whichever sinks it had. Only then the markers are read. So each object's rows are in
their topic once (promise 2): after a crash before or after a commit, after a commit whose answer was lost, and if a
writer that was fenced wakes up in the middle.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from siltstone.errors import Unreachable
from siltstone.log import get_logger
from siltstone.sinks.identity import stream_identity
from siltstone.sinks.kafka_calls import KafkaClients
from siltstone.sinks.kafka_marker import PARTITION, Marker, after, read_markers
from siltstone.sinks.kafka_rows import Record

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from siltstone.catalog.records.outbox import OutputRecord
    from siltstone.catalog.warehouse import OpenWarehouse

_LOG = get_logger(__name__)
STREAM_HEADER, CHECKPOINT_HEADER = "siltstone.stream", "siltstone.checkpoint"
TIMEOUT = "transaction.timeout.ms"
BEGIN_S = 30.0
"""how long the broker may take to hand over the transactions' id"""
ABORT_S = 5.0
_WAIT_S = 0.05


@dataclass(frozen=True)
class Cluster:
    """What clients of topics have in common, whose rows may be in one transaction."""

    servers: Any
    options: Mapping[str, Any]
    markers: str


class Topic(Protocol):
    """A topic with the output of one operator."""

    operator: str
    topic: str
    cluster: Cluster
    timeout_s: float
    """how long a transaction may take"""

    @property
    def key(self) -> str:
        """That of its markers."""
        ...

    def encode(self, output: "OutputRecord", number: int) -> Iterator[list[Record]]:
        """Read one staged object of an output, as records."""
        ...


@dataclass(frozen=True)
class _Part:
    """One staged object of an output, and where its rows go."""

    topic: Topic
    output: "OutputRecord"
    number: int


@dataclass
class _Session:
    """A producer that has taken over the transactions' id, and what its topics have.

    Attributes:
        topics: by operator; so are the others.
        keys: of the markers.
        markers: the newest, if there is one.
    """

    cluster: Cluster
    clients: KafkaClients
    producer: "Producer"
    topics: Mapping[str, Topic]
    keys: Mapping[str, str]
    markers: dict[str, Marker]


class KafkaTransactions:
    """Sends outputs of one stream to its topics; not safe for use by two threads."""

    def __init__(self, warehouse: "OpenWarehouse", stream: str) -> None:
        self._warehouse, self._stream = warehouse, stream
        self._topics: list[Topic] = []
        self._clients: list[tuple[Cluster, KafkaClients]] = []
        self._session: _Session | None = None

    @property
    def id(self) -> str:
        """The id of the transactions."""
        return f"siltstone/{stream_identity(self._warehouse, self._stream)}"

    def add(self, topic: Topic) -> None:
        """Add a topic, before the first delivery."""
        self._topics.append(topic)

    def deliver(self, topic: Topic, output: "OutputRecord") -> None:
        """Send the rows of an output that its topic does not have.

        If that is one object, those of the checkpoint's other outputs that are one object, too, and for the same
        cluster, are in the same transaction; their own deliveries then find them.

        Raises:
            Unreachable: the broker or the store failed, or another process delivers for the stream; the next delivery
                finds out what the topics have.
            StateError: the broker refuses a record; or see `Marker.count_delivered`.
            CorruptObject: a staged object is missing, cut or altered.
        """
        clients = self._clients_of(topic.cluster)
        with clients.translate_errors():
            try:
                session = self._enter(topic.cluster, clients)
                left = _left(session, topic, output)
                if len(left) == 1 and len(session.topics) > 1:
                    self._send(session, [*left, *self._beside(session, output)])
                else:
                    for part in left:
                        self._send(session, [part])
            except BaseException:
                self._end()
                raise

    def _clients_of(self, cluster: Cluster) -> KafkaClients:
        for known, clients in self._clients:
            if known == cluster:
                return clients
        topics = [each for each in self._topics if each.cluster == cluster]
        named = ", ".join(f"{each.operator} (topic {each.topic})" for each in topics)
        clients = KafkaClients(f"stream {self._stream}: the KafkaSink of {named}", cluster.servers, cluster.options)
        self._clients.append((cluster, clients))
        return clients

    def _enter(self, cluster: Cluster, clients: KafkaClients) -> _Session:
        """Take over the transactions' id, then read the markers, which no other process can write any more.

        A producer for topics elsewhere is given up: that may be the same cluster by another name, with the same id.
        """
        if self._session is not None and self._session.cluster == cluster:
            return self._session
        self._end()
        producer = clients.make_producer(self.id)
        producer.init_transactions(BEGIN_S)
        topics = {each.operator: each for each in self._topics if each.cluster == cluster}
        keys = {operator: each.key for operator, each in topics.items()}
        found = read_markers(clients, cluster.markers, keys.values())
        markers = {operator: found[key] for operator, key in keys.items() if key in found}
        _LOG.debug("topics taken over", stream=self._stream, markers=str(markers))
        self._session = _Session(cluster, clients, producer, topics, keys, markers)
        return self._session

    def _end(self) -> None:
        """Give up the producer, with its transaction if one is open: readers need not wait until that times out."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):  # there is none, or the error of the delivery is what counts
                session.producer.abort_transaction(ABORT_S)

    def _beside(self, session: _Session, output: "OutputRecord") -> Iterator[_Part]:
        """Yield the other outputs of the checkpoint that can be in the transaction of this one."""
        for other in self._warehouse.catalog.outbox.list(self._stream, outstanding=True):
            topic = session.topics.get(other.name)
            if topic is None or (other.checkpoint, other.lost) != (output.checkpoint, False):
                continue
            if other.name != output.name and not other.sink_files and len(left := _left(session, topic, other)) == 1:
                yield from left

    def _send(self, session: _Session, parts: Sequence[_Part]) -> None:
        """Send the rows of staged objects and their markers in one transaction."""
        producer, until_s = session.producer, time.monotonic() + min(part.topic.timeout_s for part in parts)
        producer.begin_transaction()
        for part in parts:
            self._produce(session, part, until_s)
        while producer.flush(1.0):
            _check_time(session, parts, until_s)
        markers = {part.topic.operator: after(part.output, part.number + 1) for part in parts}
        # Last, so that what a crash leaves open is hardly ever in the partition that all streams read.
        for operator, marker in markers.items():
            producer.produce(session.cluster.markers, marker.encode(), session.keys[operator], partition=PARTITION)
        producer.commit_transaction(max(until_s - time.monotonic(), _WAIT_S))
        session.markers |= markers

    def _produce(self, session: _Session, part: _Part, until_s: float) -> None:
        checkpoint = str(part.output.sink_id)
        headers: dict[str, str | bytes | None] = {STREAM_HEADER: self._stream, CHECKPOINT_HEADER: checkpoint}
        for records in part.topic.encode(part.output, part.number):
            for key, value, at in records:
                while True:
                    try:
                        session.producer.produce(part.topic.topic, value, key, timestamp=at, headers=headers)
                        break
                    except BufferError:  # its queue is full
                        session.producer.poll(_WAIT_S)
                        _check_time(session, [part], until_s)


def _left(session: _Session, topic: Topic, output: "OutputRecord") -> list[_Part]:
    """Return the staged objects of an output that its topic does not have.

    Raises:
        StateError: see `Marker.count_delivered`.
    """
    marker, done = session.markers.get(topic.operator), 0
    if marker is not None:
        key = session.keys[topic.operator]
        done = marker.count_delivered(output, session.clients.what, key, session.cluster.markers)
    return [_Part(topic, output, number) for number in range(done, len(output.objects))]


def _check_time(session: _Session, parts: Sequence[_Part], until_s: float) -> None:
    if time.monotonic() > until_s:
        named = " and ".join(part.topic.topic for part in parts)
        raise Unreachable(
            f"{session.clients.what}: the broker did not take the rows of one transaction, for {named}, within "
            f"{TIMEOUT}",
            advice="check that the broker answers; if it is only slow, raise that option, up to the broker's "
            "transaction.max.timeout.ms",
            transient=True,
        )
