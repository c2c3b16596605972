"""The sink for Kafka without a broker: names, records, markers, and what it refuses. tests/kafka has the rest."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from sqlalchemy import create_engine, text

from siltstone import extras
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import fork
from siltstone.change.rebuild import rebuild_catalog
from siltstone.errors import SiltstoneError, StateError, Unreachable, UsageError
from siltstone.model import StoredObject
from siltstone.secret import Secret
from siltstone.sinks import kafka_marker
from siltstone.sinks.kafka import TIMEOUT, KafkaSink, KafkaTopic
from siltstone.sinks.kafka_calls import KafkaClients
from siltstone.sinks.kafka_marker import Marker, after
from siltstone.sinks.kafka_rows import Columns, Record, encode_records
from siltstone.sinks.resolve import check_sinks, resolve_sinks, tables_of
from siltstone.spark.failures import may_pass
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, batch
from tests.places import place_at
from tests.rebuild_cases import catalog_url
from tests.servers import free_port

TOPIC = KafkaSink("sums", "127.0.0.1:1", key="k")
INTO_TOPIC = replace(STREAM, sinks={SINK: TOPIC})


def topic_of(place: OpenWarehouse, sink: KafkaSink = TOPIC, stream: str = NAME) -> KafkaTopic:
    found = resolve_sinks(replace(STREAM, name=stream, sinks={SINK: sink}), place)[SINK]
    assert isinstance(found, KafkaTopic)
    return found


# Names


def test_a_transaction_id_names_the_warehouse_the_stream_its_beginning_and_the_operator(tmp_path: Path) -> None:
    ids = []
    for where in ("a", "b"):
        with place_at(tmp_path / where) as place:
            Outboxed(place, Heard(), delivers=False).step(batch(1))
            fork(place, NAME, "what-if", "1")
            identity, began = place.catalog.identity.read().identity, place.catalog.streams.get(NAME).created_at
            ids += [topic_of(place).key, topic_of(place, stream="what-if").key]
            assert ids[-2] == f"siltstone/{identity}/{NAME}/{began:%Y%m%dT%H%M%S%f}/{SINK}"
        with OpenWarehouse.open_existing(str(tmp_path / where)) as again:
            assert topic_of(again).key == ids[-2]
    assert len(set(ids)) == 4


def test_a_rebuilt_catalog_has_the_same_ids(tmp_path: Path) -> None:
    with place_at(tmp_path / "w") as place:
        Outboxed(place, Heard(), delivers=False).step(batch(1))
        before = topic_of(place).key
        rebuild_catalog(place.warehouse, catalog_url(tmp_path))
    with OpenWarehouse.open_existing(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        assert topic_of(again).key == before


def test_a_stream_that_was_deleted_and_began_again_has_another_id(place: OpenWarehouse) -> None:
    place.catalog.streams.register(NAME, 4, {})
    before = topic_of(place).key
    engine = create_engine(place.catalog.url)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM stream"))
    engine.dispose()
    place.catalog.streams.register(NAME, 4, {})
    assert topic_of(place).key != before


# Records

ROWS = pa.record_batch(
    {
        "name": pa.array(["Köln", None]),
        "raw": pa.array([b"\xff", None]),
        "n": pa.array([1, None]),
        "at": pa.array([datetime(2026, 1, 31, 12, 0, 0, 1999), None], pa.timestamp("us")),
        "of": pa.array([{"a": "x"}, None]),
    }
)


@pytest.mark.parametrize(
    ("key", "value", "records"),
    [
        (None, ["name", "n"], [(None, '{"name": "Köln", "n": 1}', 0), (None, '{"name": null, "n": null}', 0)]),
        ("name", "raw", [("Köln".encode(), b"\xff", 0), (None, None, 0)]),
        ("n", "of", [("1", '{"a": "x"}', 0), (None, None, 0)]),
        (["name", "n"], "n", [('{"name": "Köln", "n": 1}', "1", 0), ('{"name": null, "n": null}', None, 0)]),
        (
            "n",
            None,
            [
                (
                    "1",
                    '{"name": "Köln", "raw": "/w==", "n": 1, "at": "2026-01-31T12:00:00.001999", "of": {"a": "x"}}',
                    0,
                ),
                (None, '{"name": null, "raw": null, "n": null, "at": null, "of": null}', 0),
            ],
        ),
    ],
)
def test_keys_and_values_of_rows(key: Columns, value: Columns, records: list[Record]) -> None:
    assert list(chain(*encode_records(ROWS, key, value, None))) == records


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("ns", "Europe/Berlin"), pa.timestamp("s")])
def test_timestamps_are_milliseconds_from_1970_to_now(kind: pa.DataType) -> None:
    """A record's timestamp of 0 is the time at which it is sent."""
    far = 4_000_000_000_000
    times = pa.array([1_769_860_800_000, 0, -5000, None, far], pa.timestamp("ms")).cast(kind)
    [records] = encode_records(pa.record_batch({"at": times}), None, "at", "at")
    *bounded, newest = [at for _, _, at in records]
    assert bounded == [1_769_860_800_000, 1, 1, 0] and bounded[0] < newest < far


def test_many_rows_come_in_parts_and_in_order() -> None:
    n = 50_001
    parts = list(encode_records(pa.record_batch({"n": range(n)}), "n", "n", None))
    assert len(parts) == 3 and [int(key or 0) for part in parts for key, _, _ in part] == list(range(n))


# Markers


def output_of(*names: str, id: int = 5) -> OutputRecord:
    objects = tuple(StoredObject(name, 1, "sha256:0") for name in names)
    return OutputRecord(SINK, b"", 9, objects, NAME, id, id, 1, False, None)


@pytest.mark.parametrize(
    ("marker", "delivered"),
    [
        (Marker(4, 1, 1, "z"), 0),
        (Marker(4, 1, 3, "z"), 0),
        (Marker(5, 1, 3, "a"), 1),
        (Marker(5, 3, 3, "c"), 3),
        (Marker(5, 7, 7, "it was staged again in fewer objects"), 3),
        (Marker(6, 1, 2, "z"), 3),
    ],
)
def test_a_repeat_goes_on_after_the_objects_that_the_topic_has(marker: Marker, delivered: int) -> None:
    assert marker.count_delivered(output_of("a", "b", "c"), "the sink", "key", "topic") == delivered


@pytest.mark.parametrize("marker", [Marker(5, 1, 3, "x"), Marker(5, 1, 2, "a"), Marker(5, 4, 9, "d")])
def test_rows_that_were_staged_again_after_a_part_had_arrived_are_not_guessed_at(marker: Marker) -> None:
    with pytest.raises(StateError, match=r"a part of the rows of checkpoint 5, .* key 'key' and no value .* topic m"):
        marker.count_delivered(output_of("a", "b", "c"), "the sink", "key", "m")


def test_a_marker_says_what_was_sent() -> None:
    marker = after(output_of("a", "b", "c"), 2)
    assert marker == Marker(5, 2, 3, "b") == Marker.decode(marker.encode(), "it")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"id": 0, "objects": 1, "of": 1, "last": "a"}', b'{"id": 1}', b"[" * 9999]
)
def test_what_is_no_marker_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="record x cannot be read as a marker"):
        Marker.decode(data, "record x")


# What is refused


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (lambda: KafkaSink("a b", "x"), "names the topic 'a b'"),
        (lambda: KafkaSink("a", "x", format="Avro"), "has the format 'Avro': use json or avro"),
        (lambda: KafkaSink("a", "x", markers="a"), "writes rows and markers to the topic a"),
        (lambda: KafkaSink("a", "x", options={"transactional.id": "mine"}), "sets transactional.id itself"),
        (lambda: KafkaSink("a", "x", options={TIMEOUT: "1 minute"}), "is a whole number of milliseconds"),
        (lambda: KafkaSink("a", "x", options={TIMEOUT: Secret("T")}), "is a whole number of milliseconds"),
    ],
)
def test_a_sink_that_cannot_work_is_refused_where_it_is_defined(sink: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sink()


def test_options_are_not_shown() -> None:
    sink = KafkaSink("sums", Secret("SERVERS"), options={"sasl.password": "a-password"})
    assert "a-password" not in repr(replace(STREAM, sinks={SINK: sink})) and "sums" in repr(sink)


@pytest.mark.parametrize("named", [{"key": "who"}, {"value": ["k", "who"]}])
def test_a_column_that_the_output_lacks_is_refused_before_the_run(place: OpenWarehouse, named: dict[str, Any]) -> None:
    stream = replace(STREAM, sinks={SINK: KafkaSink("sums", "127.0.0.1:1", **named)})
    with pytest.raises(UsageError, match=rf"{NAME}: the KafkaSink of {SINK}: .* 'who', .*: use k, n, sum"):
        check_sinks(stream, resolve_sinks(stream, place))


def test_a_name_that_avro_does_not_have_is_refused_before_the_run(place: OpenWarehouse) -> None:
    columns = pa.schema({"k": pa.int64(), "größe": pa.int64()})
    with pytest.raises(UsageError, match=rf"{NAME}: the KafkaSink of {SINK}: column größe has a name .*: rename it"):
        topic_of(place, replace(TOPIC, format="avro")).check(columns)


def test_the_missing_package_is_named(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"a KafkaSink needs .* pip install 'siltstone\[kafka\]'"):
        topic_of(place).check(STREAM.operators[0].output)


def test_a_fork_does_not_write_to_the_topic_of_its_parent() -> None:
    with pytest.raises(UsageError, match="would write to its sink of"):
        INTO_TOPIC.as_fork("what-if", NAME)


def test_a_topic_stages_no_files(place: OpenWarehouse) -> None:
    assert tables_of(resolve_sinks(INTO_TOPIC, place)) == frozenset()


# Errors


@pytest.fixture
def clients() -> Iterator[KafkaClients]:
    yield KafkaClients("the sink", "127.0.0.1:1", {})


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *(
            (code, Unreachable)
            for code in ("NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE")
        ),
        *((code, Unreachable) for code in ("_TIMED_OUT", "_ALL_BROKERS_DOWN", "_TRANSPORT", "NOT_ENOUGH_REPLICAS")),
        *((code, Unreachable) for code in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "_MSG_TIMED_OUT")),
        *((code, StateError) for code in ("TOPIC_AUTHORIZATION_FAILED", "MSG_SIZE_TOO_LARGE", "INVALID_TIMESTAMP")),
        *((code, StateError) for code in ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "INVALID_TRANSACTION_TIMEOUT")),
    ],
)
def test_an_error_that_may_pass_resets_a_run_and_no_other(
    clients: KafkaClients, code: str, kind: type[SiltstoneError]
) -> None:
    with pytest.raises(SiltstoneError, match=f"the sink: {code}") as caught, clients.translate_errors():
        raise KafkaException(KafkaError(getattr(KafkaError, code)))
    assert type(caught.value) is kind and may_pass(caught.value) is (kind is Unreachable)


def test_an_option_that_the_client_does_not_know_is_named(place: OpenWarehouse) -> None:
    sink = replace(TOPIC, options={"security.protocoll": "ssl"})
    with pytest.raises(UsageError, match=r"security\.protocoll"):
        topic_of(place, sink).check(STREAM.operators[0].output)


@pytest.mark.server
def test_a_broker_that_is_away_is_an_outage(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_marker, "REQUEST_S", 0.5)
    monkeypatch.setenv("SERVERS", f"127.0.0.1:{free_port()}")
    with pytest.raises(
        Unreachable, match=rf"KafkaSink of {SINK}, topic sums: .*check that the broker answers"
    ) as caught:
        topic_of(place, replace(TOPIC, servers=Secret("SERVERS"))).check(STREAM.operators[0].output)
    assert may_pass(caught.value)
