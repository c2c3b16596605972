"""A stream whose sink is a topic of Kafka, run without Spark, and processes of it that end at any moment.

    python -m tests.topic_run WAREHOUSE SERVERS TOPIC MOMENT [SECOND]

takes the next micro-batch and dies at the moment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka import Message, Producer

from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.format import output as staged_output
from siltstone.run.outbox import Give
from siltstone.sinks.kafka import MARKERS, KafkaSink, KafkaTopic
from siltstone.sinks.kafka_calls import KafkaClients
from siltstone.sinks.resolve import resolve_sinks
from tests.kafka_server import KafkaServer
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, Tallies, batch
from tests.places import place_at

MOMENTS = (
    "before begin_transaction 1",
    "before flush 1",
    "after flush 1",
    "before commit_transaction 1",
    "after commit_transaction 1",
    "before begin_transaction 2",
    "after flush 2",
    "before commit_transaction 2",
    "after commit_transaction 2",
    "before the mark",
)
"""in the delivery of an output of two staged objects"""
SECOND = "second"
"""the operator with another topic"""
DIED = 9
ROWS = 10


class TopicRun(Outboxed):
    """One run of the stream, which delivers to a topic as the stream's runner does.

    Args:
        second: the sink of a second operator, which does the same.
    """

    def __init__(
        self,
        place: OpenWarehouse,
        sink: KafkaSink,
        *,
        name: str = NAME,
        second: KafkaSink | None = None,
        **options: Any,
    ) -> None:
        stream = replace(STREAM, name=name, sinks={SINK: sink})
        if second is not None:
            operators = (*STREAM.operators, Tallies(name=SECOND))
            stream = replace(stream, operators=operators, sinks={SINK: sink, SECOND: second})
        self.topics: dict[str, KafkaTopic] = resolve_sinks(stream, place)
        self.topic = self.topics[SINK]
        self.given: list[int] = []
        """ids that were handed to the topics"""
        super().__init__(place, Heard(), stream=stream, **options)

    @property
    def sinks(self) -> dict[str, Give]:
        """Those of all outputs."""
        return dict.fromkeys(self.topics, self.give)

    def give(self, output: OutputRecord) -> None:
        """Hand one output over."""
        self.given.append(output.sink_id)
        self.topics[output.name].deliver(output)


def create_topics(kafka: KafkaServer, topic: str, partitions: int = 1, markers: str = MARKERS) -> None:
    """Create a topic, and the one for the markers if it is not there."""
    kafka.create_topic(topic, partitions)
    create_markers(kafka, markers)


def create_markers(kafka: KafkaServer, markers: str = MARKERS) -> None:
    """Create the topic for the markers if it is not there."""
    if not kafka.has_topic(markers):
        kafka.create_topic(markers, options={"cleanup.policy": "compact"})


def rows_in(kafka: KafkaServer, topic: str, partitions: int = 1, isolation: str = "read_committed") -> list[int]:
    """Column `n` of the rows that a consumer is given, sorted."""
    return sorted(value_of(message)["n"] for message in kafka.read_messages(topic, partitions, isolation))


def value_of(message: Message) -> dict[str, Any]:
    """The row of a record."""
    return json.loads(message.value() or b"")


@dataclass
class Watched:
    """A producer that calls `at` before and after each call of its own."""

    producer: Producer
    at: Callable[[str], object]
    calls: dict[str, int]

    def __getattr__(self, name: str) -> Any:
        called = getattr(self.producer, name)

        def call(*arguments: Any, **named: Any) -> Any:
            number = self.calls[name] = self.calls.get(name, 0) + 1
            self.at(f"before {name} {number}")
            found = called(*arguments, **named)
            self.at(f"after {name} {number}")
            return found

        return call


def watch(topic: KafkaTopic, at: Callable[[str], object]) -> None:
    """Let a topic's producers tell their calls, as in `MOMENTS`."""
    clients: KafkaClients = topic._transactions._clients_of(topic.cluster)  # noqa: SLF001 - to come in between
    real, calls = clients.make_producer, dict[str, int]()
    clients.make_producer = lambda id: Watched(real(id), at, calls)  # pyright: ignore[reportAttributeAccessIssue]


def split_outputs() -> None:
    """Stage each subtask's rows as an object of its own, whatever their size, in this process."""
    staged_output.OBJECT_BYTES = 1


def die_at(root: Path, servers: str, topic: str, moment: str, second: str = "") -> int:
    """Take a micro-batch in a process that dies at a moment; return its exit code.

    Args:
        second: the topic of a second operator.
    """
    command = [sys.executable, "-m", __name__, str(root), servers, topic, moment, *([second] if second else [])]
    return subprocess.run(command, timeout=120, check=False).returncode


def _main(arguments: Sequence[str]) -> None:
    root, servers, topic, moment, *further = arguments
    if not further:
        split_outputs()
    with place_at(Path(root)) as place:
        sink, second = KafkaSink(topic, servers), KafkaSink(further[0], servers) if further else None
        TopicRun(place, sink, second=second)  # delivers what an earlier one left
        run = TopicRun(place, sink, second=second, delivers=False)
        run.step(batch(run.region.step + 1, ROWS))

        def die(at: str) -> None:
            if at == moment:
                os._exit(DIED)

        watch(run.topic, die)
        outputs = place.catalog.outbox.list(NAME, outstanding=True)
        assert [len(output.objects) for output in outputs] == ([1, 1] if further else [2]), "transactions"
        for output in outputs:
            run.give(output)
        die("before the mark")


if __name__ == "__main__":
    _main(sys.argv[1:])
