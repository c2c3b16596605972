"""A real Kafka broker on loopback, from its jars: `make test-kafka` fetches them by Maven and starts it.

    python -m tests.kafka_server            fetches the broker and Spark's connector, or says why that is impossible
    python -m tests.kafka_server --where    prints the directory of the broker's jars, then that of the connector's

One node that is broker and controller (KRaft), with a heap of 512 MB. What it has acknowledged is in the page cache,
and outlives a kill -9.
"""

import base64
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tests.java_server import JavaServer
from tests.jvm import java
from tests.maven import fetch_jars
from tests.servers import free_port

VERSION, CONNECTOR_VERSION = "4.4.0", "4.2.0"
JARS = Path(os.environ.get("KAFKA_JARS") or Path(sys.prefix) / f"kafka-{VERSION}")
CONNECTOR = Path(os.environ.get("KAFKA_CONNECTOR") or Path(sys.prefix) / f"spark-kafka-{CONNECTOR_VERSION}")
_CONNECTOR_JARS = (
    "spark-sql-kafka-0-10_2.13",
    "spark-token-provider-kafka-0-10_2.13",
    "kafka-clients",
    "commons-pool2",
)
"""the connector and what it needs that Spark does not bring"""
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={root}/data
auto.create.topics.enable=false
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
# One that is killed and started again need not wait until its old session has ended.
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=2000
log.cleaner.backoff.ms=200
log.cleaner.dedupe.buffer.size=4194304
num.network.threads=1
num.io.threads=2
background.threads=2
"""
_TUNED = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
WAIT_S = 60.0
"""seconds that a client waits for the broker"""


@dataclass(frozen=True)
class Record:
    """A record of a topic."""

    partition: int
    offset: int
    key: int
    value: int


class KafkaServer(JavaServer):
    """One broker on free ports, its data in a directory of its own."""

    def __init__(self) -> None:
        super().__init__("Kafka")
        properties = _PROPERTIES.format(root=self.root, port=self.port, controller=free_port())
        (self.root / "server.properties").write_text(properties)
        self._admin = AdminClient(self._client)
        # It begins with an A: what begins with a hyphen would be an option.
        cluster = base64.urlsafe_b64encode(bytes(1) + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        with (self.root / "output").open("ab") as output:
            command = self._command("kafka.tools.StorageTool", "format", "-t", cluster, "-c")
            subprocess.run(command, stdout=output, stderr=output, check=True)
        self.start()

    @property
    def address(self) -> str:
        """What clients connect to (`bootstrap.servers`)."""
        return f"127.0.0.1:{self.port}"

    @property
    def _client(self) -> dict[str, Any]:
        """Settings of every client, which tell nobody that the broker is away."""
        return {"bootstrap.servers": self.address, "log_level": 2, "reconnect.backoff.max.ms": 500}

    def command(self) -> list[str]:
        return self._command("kafka.Kafka")

    def answers(self) -> bool:
        try:
            return bool(self._admin.list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def _command(self, main: str, *arguments: str) -> list[str]:
        return [java(), *_TUNED, "-cp", f"{JARS}/*", main, *arguments, str(self.root / "server.properties")]

    # Topics

    def create_topic(self, topic: str, partitions: int = 1, options: Mapping[str, str] = MappingProxyType({})) -> None:
        """Create a topic with these options of Kafka's."""
        _wait(self._admin.create_topics([NewTopic(topic, partitions, 1, config=dict(options))]))

    def has_topic(self, topic: str) -> bool:
        """Whether there is such a topic."""
        return topic in self._admin.list_topics(timeout=WAIT_S).topics

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its records, and wait until its name is free."""
        _wait(self._admin.delete_topics([topic]))
        while self.has_topic(topic):
            time.sleep(0.1)

    def add_partitions(self, topic: str, total: int) -> None:
        """Add partitions to a topic, until it has this many."""
        _wait(self._admin.create_partitions([NewPartitions(topic, total)]))

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Delete the records of partitions before offsets, as retention does."""
        _wait(self._admin.delete_records([TopicPartition(topic, p, offset) for p, offset in before.items()]))

    # Records

    def produce(
        self,
        topic: str,
        rows: Iterable[tuple[int | str, int]],
        partition: int = 0,
        at_ms: Sequence[int] | None = None,
        commit: bool | None = None,
    ) -> None:
        """Write records of (key, value) into a partition, and wait until they are acknowledged.

        Args:
            at_ms: the records' timestamps; by default the time of day.
            commit: in one transaction, which is committed or aborted; by default in none.
        """
        transactional = {} if commit is None else {"transactional.id": uuid.uuid4().hex}
        producer = Producer({**self._client, "queue.buffering.max.messages": 0, **transactional})  # no limit
        if commit is not None:
            producer.init_transactions(WAIT_S)
            producer.begin_transaction()
        for number, (key, value) in enumerate(rows):
            timed: dict[str, Any] = {} if at_ms is None else {"timestamp": at_ms[number]}
            producer.produce(topic, key=str(key), value=str(value), partition=partition, **timed)
        assert producer.flush(WAIT_S) == 0, "records were not acknowledged"
        if commit is not None:
            (producer.commit_transaction if commit else producer.abort_transaction)(WAIT_S)

    def read(self, topic: str, partitions: int = 1, isolation: str = "read_committed") -> list[Record]:
        """Read all records of a topic that are there, of numbers, partition by partition."""
        return [_record(message) for message in self.read_messages(topic, partitions, isolation)]

    def read_messages(self, topic: str, partitions: int = 1, isolation: str = "read_committed") -> list[Message]:
        """Read all records of a topic that such a consumer is given, partition by partition."""
        of_its_own = {"group.id": uuid.uuid4().hex, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        consumer = Consumer(
            {
                **self._client,
                **of_its_own,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
                "isolation.level": isolation,
            }
        )
        found: list[Message] = []
        try:
            for number in range(partitions):
                consumer.assign([TopicPartition(topic, number, 0)])
                while (message := consumer.poll(WAIT_S)) is not None and message.error() is None:
                    found.append(message)
                assert message is not None, f"nothing of partition {number} of {topic} came"
                error = message.error()
                assert error is not None and error.code() == KafkaError._PARTITION_EOF, error  # noqa: SLF001 - its own name
        finally:
            consumer.close()
        return found


def _record(message: Message) -> Record:
    numbers: list[Any] = [message.partition(), message.offset(), message.key(), message.value()]
    return Record(*map(int, numbers))


def _wait(asked: Mapping[Any, Any]) -> None:
    """Wait until all that was asked of the broker is done."""
    for future in asked.values():
        future.result(WAIT_S)


@cache
def shared_kafka() -> KafkaServer:
    """The broker that tests share, each with topics of its own."""
    return KafkaServer()


def connector_jars() -> str:
    """Return the value of `spark.jars` with which Spark has its connector."""
    return ",".join(str(path) for path in sorted(CONNECTOR.glob("*.jar")))


if __name__ == "__main__":
    if "--where" in sys.argv:
        print(JARS, CONNECTOR)
    else:
        fetch_jars(f"org.apache.kafka:kafka_2.13:{VERSION}", JARS, "Kafka's tests")
        connector = f"org.apache.spark:{_CONNECTOR_JARS[0]}:{CONNECTOR_VERSION}"
        fetch_jars(connector, CONNECTOR, "Kafka's tests", _CONNECTOR_JARS)
