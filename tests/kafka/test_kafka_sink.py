"""Kafka as a sink: readers of committed records see each row once, whatever dies, and only a sink's own zombies are
fenced."""

import random
import shutil
import threading
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastavro import schemaless_reader

from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, Fenced, StateError, Unreachable, UsageError
from siltstone.format import output as staged_output
from siltstone.model import StoredObject
from siltstone.run.processing import output_schema
from siltstone.sinks.kafka import MARKERS, KafkaSink, KafkaTopic
from siltstone.sinks.kafka_avro import avro_schema
from siltstone.sinks.kafka_marker import Marker
from siltstone.spark.failures import may_pass
from tests.jdbc_run import begin_stream, stage
from tests.kafka_server import KafkaServer
from tests.outbox_run import NAME, SINK, STREAM, batch, delete_stream, inputs
from tests.places import place_at
from tests.topic_run import DIED, MOMENTS, TopicRun, create_topics, die_at, rows_in, split_outputs, value_of, watch

pytestmark = [pytest.mark.server]

SCHEMA = output_schema(STREAM.operators[0])


@pytest.fixture
def topic(kafka: KafkaServer) -> str:
    name = f"t{uuid.uuid4().hex}"
    create_topics(kafka, name)
    return name


@pytest.fixture
def other(kafka: KafkaServer) -> str:
    """Another topic, for a second sink."""
    name = f"t{uuid.uuid4().hex}"
    create_topics(kafka, name)
    return name


@pytest.fixture
def two_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_output, "OBJECT_BYTES", staged_output.OBJECT_BYTES)  # brought back after the test
    split_outputs()


def newest_marker(kafka: KafkaServer, run: TopicRun) -> Marker:
    key = run.topic.key.encode()
    return [Marker.decode(m.value() or b"", "it") for m in kafka.read_messages(MARKERS) if m.key() == key][-1]


def watched_pair(kafka: KafkaServer, place: OpenWarehouse, topic: str, other: str) -> tuple[TopicRun, list[str]]:
    """A run with two sinks, and the calls of its producers, as they come."""
    run = TopicRun(place, KafkaSink(topic, kafka.address), second=KafkaSink(other, kafka.address))
    seen: list[str] = []
    watch(run.topic, seen.append)
    return run, seen


# Each row once


def test_readers_of_committed_records_see_each_row_with_its_key_and_headers(
    kafka: KafkaServer, place: OpenWarehouse
) -> None:
    topic = f"t{uuid.uuid4().hex}"
    create_topics(kafka, topic, partitions=3)
    run = TopicRun(place, KafkaSink(topic, kafka.address, key="k"))
    for n in (1, 2, 3):
        run.step(batch(n))
    found = kafka.read_messages(topic, partitions=3)
    assert rows_in(kafka, topic, 3) == inputs([1, 2, 3])
    by_key: dict[bytes, set[int | None]] = {}
    for message in found:
        row, checkpoint = value_of(message), value_of(message)["n"] // 1000
        assert set(row) == {"k", "n", "sum"} and message.key() == str(row["k"]).encode()
        headers = {"siltstone.stream": NAME.encode(), "siltstone.checkpoint": str(checkpoint).encode()}
        assert dict(message.headers() or {}) == headers
        by_key.setdefault(message.key() or b"", set()).add(message.partition())
    assert len(by_key) == 7 and all(len(where) == 1 for where in by_key.values())
    assert newest_marker(kafka, run).id == 3 and run.topic.list_published() == (set(), 4)


def test_small_outputs_of_a_checkpoint_are_one_transaction(
    kafka: KafkaServer, topic: str, other: str, place: OpenWarehouse
) -> None:
    run, seen = watched_pair(kafka, place, topic, other)
    for n in (1, 2, 3):
        run.step(batch(n))
    assert rows_in(kafka, topic) == rows_in(kafka, other) == inputs([1, 2, 3])
    assert sum(moment.startswith("before commit_transaction") for moment in seen) == 3
    assert [each.list_published() for each in run.topics.values()] == [(set(), 4), (set(), 4)]


@pytest.mark.parametrize("moment", [m for m in MOMENTS if m.endswith("1")] + ["before the mark"])
def test_a_process_that_dies_has_sent_the_outputs_of_a_checkpoint_to_all_topics_or_to_none(
    kafka: KafkaServer, topic: str, other: str, tmp_path: Path, moment: str
) -> None:
    sinks = KafkaSink(topic, kafka.address), KafkaSink(other, kafka.address)
    with place_at(tmp_path / "w") as place:
        TopicRun(place, sinks[0], second=sinks[1]).step(batch(1))
    assert die_at(tmp_path / "w", kafka.address, topic, moment, other) == DIED
    sent = moment in ("after commit_transaction 1", "before the mark")
    assert rows_in(kafka, topic) == rows_in(kafka, other) == inputs([1, 2] if sent else [1])
    with place_at(tmp_path / "w") as place:
        TopicRun(place, sinks[0], second=sinks[1]).step(batch(3))
    assert rows_in(kafka, topic) == rows_in(kafka, other) == inputs([1, 2, 3])


def test_topics_of_two_clusters_are_one_transaction_each(
    kafka: KafkaServer, topic: str, other: str, place: OpenWarehouse
) -> None:
    """The second address is of the same broker: its transactions have the same id, and must not fence each other."""
    elsewhere = KafkaSink(other, kafka.address.replace("127.0.0.1", "localhost"))
    run = TopicRun(place, KafkaSink(topic, kafka.address), second=elsewhere)
    for n in (1, 2):
        run.step(batch(n))
    assert rows_in(kafka, topic) == rows_in(kafka, other) == inputs([1, 2])


@pytest.mark.usefixtures("two_objects")
def test_large_outputs_of_a_checkpoint_are_a_transaction_per_object(
    kafka: KafkaServer, topic: str, other: str, place: OpenWarehouse
) -> None:
    run, seen = watched_pair(kafka, place, topic, other)
    run.step(batch(1))
    assert rows_in(kafka, topic) == rows_in(kafka, other) == inputs([1])
    assert sum(moment.startswith("before commit_transaction") for moment in seen) == 4


def test_records_have_the_event_time_of_their_rows(kafka: KafkaServer, topic: str, place: OpenWarehouse) -> None:
    at = datetime(2026, 1, 31, 12, 0, 0, 5000, tzinfo=UTC)
    rows = pa.table({"k": [1, 2], "at": pa.array([at, None], pa.timestamp("us", "UTC"))})
    begin_stream(place)
    KafkaTopic(KafkaSink(topic, kafka.address, value=["k"]), place, NAME, SINK, "at").deliver(stage(place, rows))
    first, second = kafka.read_messages(topic)
    assert first.timestamp()[1] == at.timestamp() * 1000 and second.timestamp()[1] > first.timestamp()[1]


@pytest.mark.parametrize("before", [[7], ["noon"], None])
def test_rows_of_an_earlier_definition_need_no_event_time(
    kafka: KafkaServer, topic: str, place: OpenWarehouse, before: list[Any] | None
) -> None:
    """A column of this name was no timestamp then: it says nothing of when a row was."""
    begin_stream(place)
    rows = pa.table({"k": [1]} if before is None else {"k": [1], "at": before})
    began = time.time()
    KafkaTopic(KafkaSink(topic, kafka.address), place, NAME, SINK, "at").deliver(stage(place, rows))
    [message] = kafka.read_messages(topic)
    assert value_of(message) == rows.to_pylist()[0] and message.timestamp()[1] >= began * 1000 - 1


def test_rows_are_avro_that_a_reader_with_the_schema_reads(
    kafka: KafkaServer, topic: str, place: OpenWarehouse
) -> None:
    at = datetime(2026, 1, 31, 12, 0, 0, 5000, tzinfo=UTC)
    spent = pa.struct({"sum": pa.decimal128(9, 2), "at": pa.timestamp("us", "UTC")})
    found: list[dict[str, Any]] = [
        {"k": 1, "name": "Köln", "of": [{"sum": Decimal("-0.05"), "at": at}, None]},
        {"k": 2, "name": None, "of": None},
    ]
    rows = pa.table({"k": [1, 2], "name": ["Köln", None], "of": pa.array([found[0]["of"], None], pa.list_(spent))})
    begin_stream(place)
    whole = KafkaSink(topic, kafka.address, key="k", format="avro")
    alone = KafkaSink(topic, kafka.address, key=["name"], value="name", format="avro")
    for id, sink in enumerate((whole, alone), 1):
        KafkaTopic(sink, place, NAME, SINK, None).deliver(stage(place, rows, id=id))
    *records, named, unnamed = kafka.read_messages(topic)
    schema, names = (
        avro_schema(rows.schema, "siltstone.tallies.by_key.Value"),
        avro_schema(rows.select(["name"]).schema),
    )
    assert [read_avro(each.value(), schema) for each in records] == found
    assert [read_avro(each.key(), "long") for each in records] == [1, 2]
    assert [read_avro(each.key(), names) for each in (named, unnamed)] == [{"name": "Köln"}, {"name": None}]
    assert (named.value(), unnamed.value()) == ("Köln".encode(), None)


def read_avro(data: bytes | str | None, schema: Any) -> Any:
    """What a datum is."""
    assert isinstance(data, bytes)
    return schemaless_reader(BytesIO(data), schema, None)


@pytest.mark.usefixtures("two_objects")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_that_dies_in_a_delivery_leaves_no_row_out_and_none_twice(
    kafka: KafkaServer, topic: str, tmp_path: Path, moment: str
) -> None:
    with place_at(tmp_path / "w") as place:
        TopicRun(place, KafkaSink(topic, kafka.address)).step(batch(1))
    assert die_at(tmp_path / "w", kafka.address, topic, moment) == DIED
    left = rows_in(kafka, topic, isolation="read_uncommitted")
    seen = rows_in(kafka, topic)
    if moment in ("after flush 1", "before commit_transaction 1"):
        assert len(seen) == 10 < len(left), "an open transaction has rows"
    if moment == "before the mark":
        assert seen == inputs([1, 2])
    with place_at(tmp_path / "w") as place:
        run = TopicRun(place, KafkaSink(topic, kafka.address))
        assert run.given == [2] and rows_in(kafka, topic) == inputs([1, 2])
        run.step(batch(3))
        marker = newest_marker(kafka, run)
    assert rows_in(kafka, topic) == inputs([1, 2, 3]) and (marker.id, marker.objects, marker.of) == (3, 2, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("two_objects")
def test_twenty_processes_that_die_one_after_the_other_leave_each_row_once(
    kafka: KafkaServer, topic: str, tmp_path: Path
) -> None:
    """The broker is killed and started again, too, each seventh time."""
    chance, count = random.Random(7), 20
    for n in range(1, count + 1):
        assert die_at(tmp_path / "w", kafka.address, topic, chance.choice(MOMENTS)) == DIED
        if n % 7 == 0:
            kafka.restart()
    with place_at(tmp_path / "w") as place:
        TopicRun(place, KafkaSink(topic, kafka.address))
        assert place.catalog.checkpoints.last_id(NAME) == count
    assert rows_in(kafka, topic) == inputs(range(1, count + 1))


@pytest.mark.usefixtures("two_objects")
def test_an_id_that_comes_again_adds_nothing(kafka: KafkaServer, topic: str, place: OpenWarehouse) -> None:
    sink = KafkaSink(topic, kafka.address)
    run = TopicRun(place, sink)
    for n in (1, 2):
        run.step(batch(n))
    before = kafka.read_messages(MARKERS)
    for output in place.catalog.outbox.list(NAME):
        run.topic.deliver(output)
        KafkaTopic(sink, place, NAME, SINK, None).deliver(output)
    assert rows_in(kafka, topic) == inputs([1, 2]) and len(kafka.read_messages(MARKERS)) == len(before)


@pytest.mark.usefixtures("two_objects")
def test_a_store_that_answers_wrongly_once_ends_no_run(
    kafka: KafkaServer, topic: str, place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second object of two; one that stays damaged brings none of its rows."""
    run = TopicRun(place, KafkaSink(topic, kafka.address), delivers=False)
    run.step(batch(1))
    [output] = place.catalog.outbox.list(NAME, outstanding=True)
    wrong = [output.objects[1].name]
    read = staged_output.read_output

    def misread(store: Any, stored: StoredObject, schema: bytes) -> Any:
        if stored.name in wrong:
            wrong.remove(stored.name)
            raise CorruptObject(f"object {stored.name} has another checksum")
        return read(store, stored, schema)

    monkeypatch.setattr("siltstone.sinks.kafka.read_output", misread)
    run.give(output)
    assert rows_in(kafka, topic) == inputs([1]) and not wrong
    wrong += [each.name for each in output.objects] * 2
    with pytest.raises(CorruptObject):
        run.give(replace(output, sink_id=2))
    assert rows_in(kafka, topic) == inputs([1])


def test_more_rows_than_the_client_holds_arrive(kafka: KafkaServer, topic: str, place: OpenWarehouse) -> None:
    options = {"queue.buffering.max.messages": 1000}
    TopicRun(place, KafkaSink(topic, kafka.address, options=options)).step(batch(1, 30_000))
    assert rows_in(kafka, topic) == inputs([1], 30_000)


def test_a_record_that_the_broker_refuses_ends_the_run_and_leaves_nothing(
    kafka: KafkaServer, topic: str, place: OpenWarehouse
) -> None:
    small = f"t{uuid.uuid4().hex}"
    kafka.create_topic(small, options={"max.message.bytes": "100"})
    run = TopicRun(place, KafkaSink(small, kafka.address))
    with pytest.raises(StateError, match=rf"topic {small}: MSG_SIZE_TOO_LARGE: .*the broker refuses this") as caught:
        run.step(batch(1))
    assert not may_pass(caught.value) and kafka.read_messages(small) == []
    TopicRun(place, KafkaSink(topic, kafka.address))
    assert rows_in(kafka, topic) == inputs([1])


# Older writers


@pytest.mark.usefixtures("two_objects")
def test_a_writer_that_wakes_up_in_its_transaction_is_fenced(
    kafka: KafkaServer, topic: str, place: OpenWarehouse
) -> None:
    sink = KafkaSink(topic, kafka.address, options={"transaction.timeout.ms": 600_000})  # which does not pass
    older = TopicRun(place, sink)
    newer: list[TopicRun] = []

    def take_over(moment: str) -> None:
        if moment == "before commit_transaction 4":
            newer.append(TopicRun(place, sink))
            newer[0].step(batch(3))

    watch(older.topic, take_over)
    older.step(batch(1))
    with pytest.raises(Unreachable, match="another process delivers for this stream") as caught:
        older.step(batch(2))
    assert may_pass(caught.value), "so that the run asks the catalog, which says that it is fenced"
    with pytest.raises(Fenced):
        older.region.check_fence()
    newer[0].step(batch(4))
    assert rows_in(kafka, topic) == inputs([1, 2, 3, 4])


def test_a_writer_that_wakes_up_before_its_delivery_sends_nothing(
    kafka: KafkaServer, topic: str, place: OpenWarehouse
) -> None:
    """It takes the transactions over from the newer one, which has to do so again."""
    sink = KafkaSink(topic, kafka.address)
    TopicRun(place, sink, delivers=False).step(batch(1))
    newer: list[TopicRun] = []

    class Freezing(TopicRun):
        def give(self, output: OutputRecord) -> None:
            newer.append(TopicRun(place, sink))
            newer[0].step(batch(2))
            super().give(output)

    with pytest.raises(Fenced):
        Freezing(place, sink)
    with pytest.raises(Unreachable, match="another process delivers"):
        newer[0].step(batch(3))
    TopicRun(place, sink).step(batch(4))
    assert rows_in(kafka, topic) == inputs([1, 2, 3, 4])


def test_streams_of_one_name_in_two_warehouses_do_not_disturb_each_other(
    kafka: KafkaServer, topic: str, tmp_path: Path
) -> None:
    with place_at(tmp_path / "a") as one, place_at(tmp_path / "b") as two:
        runs = [TopicRun(place, KafkaSink(topic, kafka.address)) for place in (one, two)]
        for n in range(1, 7):
            runs[n % 2].step(batch(n))
        assert [place.catalog.checkpoints.last_id(NAME) for place in (one, two)] == [3, 3]
    assert rows_in(kafka, topic) == inputs(range(1, 7))


@pytest.mark.parametrize("deletes", ["the warehouse", "the stream"])
def test_a_stream_that_was_deleted_and_begins_again_loses_nothing(
    kafka: KafkaServer, topic: str, tmp_path: Path, deletes: str
) -> None:
    """The checkpoints of the first one had the same ids, and the last was never delivered."""
    with place_at(tmp_path / "w") as place:
        run = TopicRun(place, KafkaSink(topic, kafka.address))
        for n in (1, 2, 3):
            run.step(batch(n))
        if deletes == "the stream":
            run.region.close("done")
            delete_stream(place)
    if deletes == "the warehouse":
        shutil.rmtree(tmp_path / "w")
    with place_at(tmp_path / "w") as place:
        again = TopicRun(place, KafkaSink(topic, kafka.address))
        for n in (4, 5):
            again.step(batch(n))
        assert again.given == [1, 2]
    assert rows_in(kafka, topic) == inputs([1, 2, 3, 4, 5])


# A broker that is away


@pytest.mark.slow
@pytest.mark.usefixtures("two_objects")
@pytest.mark.parametrize("moment", ["before flush 1", "before commit_transaction 1", "before begin_transaction 2"])
def test_a_broker_that_is_killed_in_a_delivery_and_comes_back_has_each_row_once(
    kafka: KafkaServer, topic: str, place: OpenWarehouse, moment: str
) -> None:
    sink, killed = KafkaSink(topic, kafka.address), []

    def kill(at: str) -> None:
        if at == moment and not killed:
            killed.append(at)
            kafka.restart()

    run = TopicRun(place, sink)
    watch(run.topic, kill)
    try:
        run.step(batch(1))
    except Unreachable:  # of what the broker had not acknowledged, or it took too long
        run = TopicRun(place, sink)
    run.step(batch(2))
    assert killed and rows_in(kafka, topic) == inputs([1, 2])


@pytest.mark.slow
def test_a_broker_that_stays_away_is_an_outage(kafka: KafkaServer, topic: str, place: OpenWarehouse) -> None:
    sink = KafkaSink(topic, kafka.address, options={"transaction.timeout.ms": 4000})
    run = TopicRun(place, sink)
    run.step(batch(1))
    kafka.kill()
    try:
        with pytest.raises(Unreachable, match=r"KafkaSink of by_key .*check that the broker answers") as caught:
            run.step(batch(2))
        assert may_pass(caught.value)
    finally:
        kafka.start()
    TopicRun(place, sink).step(batch(3))
    assert rows_in(kafka, topic) == inputs([1, 2, 3])


def test_the_open_transaction_of_another_sink_is_waited_for(kafka: KafkaServer, topic: str, tmp_path: Path) -> None:
    """Its marker may be before the sink's own, which readers of committed records get only after it."""
    with place_at(tmp_path / "a") as one, place_at(tmp_path / "b") as two:
        own, other = (TopicRun(place, KafkaSink(topic, kafka.address)) for place in (one, two))
        own.step(batch(1))
        reached, go_on = threading.Event(), threading.Event()

        def wait(moment: str) -> None:
            if moment == "before commit_transaction 1":
                session = other.topic._transactions._session  # noqa: SLF001 - its records have to be there
                assert session is not None
                session.producer.flush(60)
                reached.set()
                assert go_on.wait(60)

        watch(other.topic, wait)
        beside = threading.Thread(target=other.step, args=(batch(2),))
        beside.start()
        assert reached.wait(60)
        own.step(batch(3))
        output = one.catalog.outbox.list(NAME)[-1]
        threading.Timer(2, go_on.set).start()
        KafkaTopic(KafkaSink(topic, kafka.address), one, NAME, SINK, None).deliver(output)
        assert go_on.is_set()
        beside.join()
    assert rows_in(kafka, topic) == inputs([1, 2, 3])


# Topics


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (None, r"the topic for its markers, m\w+ does not exist: create it .*cleanup\.policy=compact"),
        (
            "delete",
            r"cleanup\.policy of the topic for its markers, m\w+, is delete, .*--add-config cleanup\.policy=compact",
        ),
        ("compact,delete", r"is compact,delete"),
    ],
)
def test_markers_that_could_be_lost_are_refused_before_the_run(
    kafka: KafkaServer, topic: str, place: OpenWarehouse, policy: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siltstone.sinks.kafka_marker.LOOK_S", 0.0)
    markers = f"m{uuid.uuid4().hex}"
    if policy:
        kafka.create_topic(markers, options={"cleanup.policy": policy})
    sink: Any = KafkaTopic(KafkaSink(topic, kafka.address, markers=markers), place, NAME, SINK, None)
    with pytest.raises(UsageError, match=said):
        sink.check(SCHEMA)


def test_a_topic_that_does_not_exist_is_refused_before_the_run(
    kafka: KafkaServer, topic: str, place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siltstone.sinks.kafka_marker.LOOK_S", 0.0)
    KafkaTopic(KafkaSink(topic, kafka.address), place, NAME, SINK, None).check(SCHEMA)
    with pytest.raises(UsageError, match="the topic missing does not exist: create it"):
        KafkaTopic(KafkaSink("missing", kafka.address), place, NAME, SINK, None).check(SCHEMA)
