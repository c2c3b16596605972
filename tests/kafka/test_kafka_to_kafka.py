"""From Kafka to Kafka under Spark: a killed driver, and a broker that goes away in a delivery."""

import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from siltstone.settings import Settings
from siltstone.sinks.kafka_transactions import KafkaTransactions
from siltstone.spark.operations import RunRequest, replay, run
from tests.kafka_server import KafkaServer
from tests.kafka_streams import PASSED, passed
from tests.kafka_trickle import kill_runs
from tests.spark_runs import at, check_proven
from tests.topic_run import create_topics, value_of

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.usefixtures("spark")]


def rows_of(first: int, count: int) -> list[tuple[int, int]]:
    return [(n % 7, n) for n in range(first, first + count)]


def check_passed(kafka: KafkaServer, settings: Settings, topic: str, rows: list[tuple[int, int]]) -> None:
    """Readers of committed records see each row once; the last sum of a key is that of all its rows."""
    found = [value_of(message) for message in kafka.read_messages(topic, partitions=2)]
    assert sorted((row["key"], row["value"]) for row in found) == sorted(rows)
    for key in {key for key, _ in rows}:
        assert max(row["sum"] for row in found if row["key"] == key) == sum(n for of, n in rows if of == key)
    check_proven(settings, "passed")


def test_each_row_passes_once_while_the_driver_is_killed(kafka: KafkaServer, tmp_path: Path) -> None:
    kafka.create_topic("passing")
    create_topics(kafka, "passed", partitions=2)
    settings = at(tmp_path / "w")

    def produce(made: int) -> int:
        kafka.produce("passing", rows_of(made, 100))
        return 100

    made = kill_runs(settings, "passed", tmp_path, produce)
    run(settings, PASSED, RunRequest())
    check_passed(kafka, settings, "passed", rows_of(0, made))
    assert replay(settings, PASSED).proven


def test_a_run_resets_itself_when_the_broker_goes_away_in_a_delivery(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, topic, settings = f"s{uuid.uuid4().hex}", f"t{uuid.uuid4().hex}", at(tmp_path / "w")
    kafka.create_topic(source)
    create_topics(kafka, topic, partitions=2)
    kafka.produce(source, rows_of(0, 200))
    real, sent = KafkaTransactions._send, 0  # noqa: SLF001 - the broker goes away in it
    back = threading.Thread(target=lambda: (time.sleep(6), kafka.start()))

    def send(self: KafkaTransactions, *arguments: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == 3:
            kafka.kill()
            back.start()
        real(self, *arguments)

    monkeypatch.setattr(KafkaTransactions, "_send", send)
    result = run(settings, passed(topic, subscribe=source), RunRequest())
    back.join()
    assert result.resets >= 1 and len(result.checkpoints) >= 5
    check_passed(kafka, settings, topic, rows_of(0, 200))
