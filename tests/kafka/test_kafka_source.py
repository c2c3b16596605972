"""Kafka as a source: each record counts once, whatever is killed, and what cannot be read again is refused by name."""

import json
import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from siltstone.aggregates.functions import Count
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Tumbling
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.inspect import show_checkpoint
from siltstone.errors import InputChanged, StateError, UsageError
from siltstone.format.manifests import read_manifests
from siltstone.restore.table import read_table
from siltstone.run import lag
from siltstone.run.region import ConsistentRegion
from siltstone.settings import Settings
from siltstone.sinks.delta import DeltaSink
from siltstone.spark.operations import RunRequest, replay, run, write_stream
from siltstone.stream import DEAD_LETTERS, Stream
from siltstone.time.event_time import EventTime
from tests.delta_run import read_sink
from tests.kafka_server import KafkaServer, Record
from tests.kafka_streams import ADDRESS, read_numbers, read_texts, tallied
from tests.kafka_trickle import kill_runs
from tests.spark_runs import at, check_proven
from tests.spark_streams import Counts

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.usefixtures("spark")]

Row = tuple[int, int]


@pytest.fixture
def topic() -> str:
    return f"t{uuid.uuid4().hex}"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return at(tmp_path / "w")


def rows_of(first: int, count: int) -> list[Row]:
    """Rows of seven keys whose values are all different."""
    return [(n % 7, n) for n in range(first, first + count)]


def counted(rows: Iterable[Row]) -> dict[int, tuple[int, int]]:
    """Key -> how many of the rows it has, and their sum."""
    found: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for key, value in rows:
        n, total = found[key]
        found[key] = n + 1, total + value
    return dict(found)


def kept(records: Sequence[Record]) -> list[Row]:
    return [(record.key, record.value) for record in records]


def state_of(settings: Settings, stream: str) -> dict[int, tuple[int, int]]:
    """What the newest checkpoint of a stream has per key."""
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        newest, store = place.catalog.checkpoints.last_id(stream), place.warehouse.store
        manifests = read_manifests(store, place.catalog.chains.list_manifests(stream, newest), stream)
        rows = read_table(store, manifests, "tallies", "totals").to_table().to_pylist()
    return {row["key"]: (row["n"], row["sum"]) for row in rows}


def digests_of(settings: Settings, stream: str) -> list[str]:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        return [c.digest for c in place.catalog.checkpoints.list(stream)]


def roll_back(settings: Settings, stream: str, checkpoint: int) -> None:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        epoch = place.catalog.runs.begin(stream, "a test")
        place.catalog.rollbacks.roll_back(stream, epoch, checkpoint, "a test", "a test")


def check_exact(settings: Settings, stream: Stream, rows: Iterable[Row]) -> None:
    """The state is that of these rows; every checkpoint restores; a replay of the input comes to the same."""
    assert state_of(settings, stream.name) == counted(rows)
    check_proven(settings, stream.name)
    assert replay(settings, stream).proven


def test_from_the_earliest_each_record_counts_once_also_after_a_rollback(
    kafka: KafkaServer, topic: str, settings: Settings
) -> None:
    stream = tallied(subscribe=topic)
    kafka.create_topic(topic, partitions=2)
    kafka.produce(topic, rows_of(0, 60))
    kafka.produce(topic, rows_of(60, 60), partition=1)
    assert len(run(settings, stream, RunRequest()).checkpoints) >= 3
    kafka.produce(topic, rows_of(120, 30))
    run(settings, stream, RunRequest())
    check_exact(settings, stream, rows_of(0, 150))
    before = digests_of(settings, "tallied")
    roll_back(settings, "tallied", 1)
    kafka.produce(topic, rows_of(150, 10))
    run(settings, stream, RunRequest())
    assert digests_of(settings, "tallied")[: len(before)] == before
    check_exact(settings, stream, rows_of(0, 160))


@pytest.mark.parametrize("sees_none", [True, False])
def test_from_the_latest_nothing_is_lost_between_runs(
    sees_none: bool, kafka: KafkaServer, topic: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even between a run that was stopped in its first step, or saw no record, and the next one."""
    stream = tallied(subscribe=topic, startingOffsets="latest")
    kafka.create_topic(topic)
    kafka.produce(topic, rows_of(0, 10))

    def stop(*_: object, **__: object) -> None:
        raise StateError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(ConsistentRegion, "begin_step", stop)
        with pytest.raises(StateError, match="stopped"):
            run(settings, stream, RunRequest())
    if sees_none:
        assert run(settings, stream, RunRequest()).rows == 0
    kafka.produce(topic, rows_of(10, 10))
    kafka.produce(topic, rows_of(20, 10))
    run(settings, stream, RunRequest())
    check_exact(settings, stream, rows_of(10, 20))
    kafka.produce(topic, rows_of(30, 10))
    run(settings, stream, RunRequest())
    check_exact(settings, stream, rows_of(10, 30))


def test_a_run_tells_how_far_it_is_behind(
    kafka: KafkaServer,
    topic: str,
    settings: Settings,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lag, "TELL_S", 0.0)
    caplog.set_level(logging.INFO, "siltstone")
    kafka.create_topic(topic)
    kafka.produce(topic, rows_of(0, 100))
    stream = tallied(subscribe=topic, maxOffsetsPerTrigger="25")
    begun = write_stream(settings, stream, read_numbers(spark, stream.options), RunRequest(follow=True))
    seen = set[float]()
    try:
        while 0.0 not in seen:
            assert begun.is_active, begun.exception
            seen |= {each["maxOffsetsBehindLatest"] for each in begun.status.get("reported", {}).values()}
            time.sleep(0.05)
    finally:
        begun.stop()
    assert seen <= {75.0, 50.0, 25.0, 0.0}
    told = [each for each in caplog.messages if each.startswith(("catching up", "caught up"))]
    behind = [int(each.split("rows_behind=")[1].split()[0]) for each in told[:-1]]
    assert behind and set(behind) <= {75, 50} and behind == sorted(behind, reverse=True)
    assert told[-1].startswith(f"caught up stream={stream.name} ")
    check_exact(settings, stream, rows_of(0, 100))


def test_assigned_partitions_alone_are_read_and_a_checkpoint_shows_their_offsets(
    kafka: KafkaServer, topic: str, settings: Settings
) -> None:
    kafka.create_topic(topic, partitions=3)
    for partition in range(3):
        kafka.produce(topic, rows_of(100 * partition, 30), partition=partition)
    stream = tallied(assign=json.dumps({topic: [0, 2]}))
    run(settings, stream, RunRequest())
    check_exact(settings, stream, rows_of(0, 30) + rows_of(200, 30))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        shown = show_checkpoint(place.catalog, place.warehouse.store, "tallied", "latest")
    assert json.loads(shown["steps"][-1]["offsets"].splitlines()[-1]) == {topic: {"0": 30, "2": 30}}


def test_a_pattern_reads_partitions_and_topics_that_are_added_while_it_runs(
    kafka: KafkaServer, topic: str, settings: Settings
) -> None:
    stream = tallied(subscribePattern=f"^{topic}-.*")
    kafka.create_topic(f"{topic}-a")
    kafka.create_topic(f"other-{topic}-a")
    kafka.produce(f"other-{topic}-a", rows_of(1000, 5))
    kafka.produce(f"{topic}-a", rows_of(0, 30))

    def grow(_: object) -> None:
        if not grown.is_set():
            grown.set()
            kafka.add_partitions(f"{topic}-a", 3)
            kafka.create_topic(f"{topic}-b")
            kafka.produce(f"{topic}-a", rows_of(100, 40), partition=2)
            kafka.produce(f"{topic}-b", rows_of(200, 40))

    grown = threading.Event()
    assert run(settings, stream, RunRequest(batches=2, follow=True), grow).rows > 30, "it sees what was added"
    run(settings, stream, RunRequest())  # what it did not see in that batch
    check_exact(settings, stream, rows_of(0, 30) + rows_of(100, 40) + rows_of(200, 40))


def test_aborted_transactions_never_count(kafka: KafkaServer, topic: str, settings: Settings) -> None:
    stream = tallied(subscribe=topic, **{"kafka.isolation.level": "read_committed"})
    kafka.create_topic(topic)
    for number in range(4):
        kafka.produce(topic, rows_of(100 * number, 20), commit=number % 2 == 0)
        run(settings, stream, RunRequest())
    kafka.produce(topic, rows_of(900, 3))
    run(settings, stream, RunRequest())
    assert len(kafka.read(topic, isolation="read_uncommitted")) == 83
    check_exact(settings, stream, rows_of(0, 20) + rows_of(200, 20) + rows_of(900, 3))


def compacted(kafka: KafkaServer, topic: str) -> list[Record]:
    """Wait until a topic has been compacted, and read what is left of it."""
    end = time.monotonic() + 120
    while len(left := kafka.read(topic)) > 60:
        assert time.monotonic() < end, "the broker does not compact"
        time.sleep(0.5)
    return left


def test_of_a_compacted_topic_what_is_left_counts_and_a_rollback_over_what_is_gone_is_refused(
    kafka: KafkaServer, topic: str, settings: Settings
) -> None:
    compact = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    kafka.create_topic(topic, options=compact)
    for n in range(5):
        kafka.produce(topic, rows_of(100 * n, 30))
        time.sleep(0.2)  # the next record begins a new segment
    left = compacted(kafka, topic)
    assert left[-1].offset == 149 and len(left) < 60, "most offsets have no record"
    stream = tallied(subscribe=topic, maxOffsetsPerTrigger="1000")
    run(settings, stream, RunRequest())
    assert state_of(settings, "tallied") == counted(kept(left))
    check_proven(settings, "tallied")
    for n in range(5, 9):
        kafka.produce(topic, rows_of(100 * n, 30))
        time.sleep(0.2)
    compacted(kafka, topic)
    changed = "step 1 is run again, and operator tallies has read "
    with pytest.raises(InputChanged, match=changed):
        replay(settings, stream)
    roll_back(settings, "tallied", 0)
    with pytest.raises(InputChanged, match=changed):
        run(settings, stream, RunRequest())
    assert digests_of(settings, "tallied") == []


GONE = "Kafka no longer has records that are to be read, and none is passed over: "


def test_retention_that_has_eaten_what_a_rollback_needs_is_named_and_nothing_is_lost(
    kafka: KafkaServer, topic: str, settings: Settings
) -> None:
    stream = tallied(subscribe=topic)
    kafka.create_topic(topic)
    kafka.produce(topic, rows_of(0, 120))
    assert run(settings, stream, RunRequest()).checkpoints == [1, 2, 3]
    kafka.delete_records(topic, {0: 60})
    kafka.produce(topic, rows_of(120, 10))
    run(settings, stream, RunRequest())
    assert state_of(settings, "tallied") == counted(rows_of(0, 130)), "what is gone had been read"
    check_proven(settings, "tallied")
    with pytest.raises(StateError, match=rf"step 1 of tallied, .* stopped the replay: {GONE}.*{topic}-0"):
        replay(settings, stream)
    roll_back(settings, "tallied", 1)
    for _ in range(2):
        with pytest.raises(StateError, match=rf"stopped in step 2: {GONE}.*offset=40.*{topic}-0; .*retention\.ms"):
            run(settings, stream, RunRequest())
    assert state_of(settings, "tallied") == counted(rows_of(0, 40)), "no checkpoint passes over what is gone"
    check_proven(settings, "tallied")


def test_records_that_are_gone_before_they_were_read_are_named(
    kafka: KafkaServer, topic: str, settings: Settings
) -> None:
    """Also if the topic was deleted, and another one has its name."""
    stream = tallied(subscribe=topic)
    kafka.create_topic(topic)
    kafka.produce(topic, rows_of(0, 120))
    run(settings, stream, RunRequest(batches=1))
    kafka.delete_records(topic, {0: 60})
    with pytest.raises(StateError, match=rf"stopped in step 2: {GONE}.*offset=40.*{topic}-0"):
        run(settings, stream, RunRequest())
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    kafka.produce(topic, rows_of(0, 20))
    with pytest.raises(StateError, match=rf"stopped in step 2: {GONE}.*{topic}-0") as refused:
        run(settings, stream, RunRequest())
    assert "failOnDataLoss" not in str(refused.value), str(refused.value)
    assert state_of(settings, "tallied") == counted(rows_of(0, 40))
    check_proven(settings, "tallied")


def test_a_source_that_passes_over_what_is_gone_is_refused(kafka: KafkaServer, topic: str, settings: Settings) -> None:
    kafka.create_topic(topic)
    with pytest.raises(UsageError, match=r"option failOnDataLoss=false .* let the source keep its input"):
        run(settings, tallied(subscribe=topic, failOnDataLoss="false"), RunRequest())


MINUTE_MS = 60_000


@pytest.mark.parametrize("per", ["partition", ("topic", "partition")])
def test_a_partition_that_lags_loses_nothing(
    per: str | tuple[str, ...], kafka: KafkaServer, topic: str, settings: Settings
) -> None:
    """The watermark waits for it, where that of the whole source would have its rows late."""
    hours = Aggregate("hours", {"key": pa.int64()}, [Count("n")], window=Tumbling("1 hour", on="timestamp"))
    late = {}
    for name, part in (("waits", per), ("goes", "source")):
        kafka.create_topic(f"{topic}-{name}", partitions=2)
        stream = Stream(
            name,
            read_numbers,
            [hours],
            event_time=EventTime("timestamp", delay="1 minute", per=part),
            options={"startingOffsets": "earliest", "subscribe": f"{topic}-{name}"},
            sinks={"hours": DeltaSink()},
            max_parallelism=4,
        )
        begin = int(time.time() * 1000) // (60 * MINUTE_MS) * 60 * MINUTE_MS - 24 * 60 * MINUTE_MS
        for step in range(4):  # a partition an hour a step, the other a minute
            for partition, pace in ((0, 60), (1, 1)):
                at_ms = [begin + step * pace * MINUTE_MS] * 5
                kafka.produce(f"{topic}-{name}", rows_of(5 * step, 5), partition=partition, at_ms=at_ms)
            late[name] = late.get(name, 0) + run(settings, stream, RunRequest(finish=step == 3)).late.get("hours", 0)
        check_proven(settings, name)
        assert replay(settings, stream).proven
    assert late["waits"] == 0 < late["goes"]
    counted_in = {name: read_sink(Path(settings.warehouse), name, "hours").to_pylist() for name in late}
    assert {name: sum(row["n"] for row in rows) for name, rows in counted_in.items()} == {
        "waits": 40,
        "goes": 40 - late["goes"],
    }


class Placed(Counts):
    """Counts, and reads where its rows are from."""

    inputs = ("value", "topic", "partition", "offset")


def test_a_dead_letter_tells_topic_partition_and_offset(kafka: KafkaServer, topic: str, settings: Settings) -> None:
    """In its row, if the operator reads them; in any case it has where its step ended, partition by partition."""
    kafka.create_topic(topic, partitions=2)
    kafka.produce(topic, rows_of(0, 3))
    kafka.produce(topic, [(1, 1), ("abc", 2), (3, 3)], partition=1)
    told = {}
    for name, operator in (("placed", Placed()), ("plain", Counts())):
        options = {"startingOffsets": "earliest", "subscribe": topic}
        stream = Stream(name, read_texts, [operator], options=options, on_bad_row="dead-letter", max_parallelism=4)
        assert run(settings, stream, RunRequest()).dead_letters == {"counts": 1}
        [letter] = read_sink(Path(settings.warehouse), name, DEAD_LETTERS).to_pylist()
        told[name] = json.loads(letter["row"])
        assert json.loads(letter["offsets"])["to"] == [{topic: {"0": 3, "1": 3}}]
        check_proven(settings, name)
    assert told["plain"] == {"key": "abc", "value": 2}
    assert told["placed"] == {"key": "abc", "value": 2, "topic": topic, "partition": 1, "offset": 1}


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[KafkaServer]:
    """A broker that the test kills."""
    server = KafkaServer()
    monkeypatch.setenv(ADDRESS, server.address)
    yield server
    server.remove()


def test_a_broker_is_killed_and_frozen_while_a_run_goes_on(mortal: KafkaServer, topic: str, settings: Settings) -> None:
    stream = tallied(subscribe=topic)
    mortal.create_topic(topic)
    mortal.produce(topic, rows_of(0, 40))
    turn = 0

    def hurt(_: object) -> None:
        """After each of the first checkpoints; the next batch is planned while the broker is away."""
        nonlocal turn
        turn += 1
        if turn == 2:
            mortal.freeze()
            threading.Timer(3, mortal.thaw).start()
        elif turn <= 3:
            mortal.kill()
            threading.Timer(1, start_and_produce, [turn]).start()
        if turn == 2:
            threading.Timer(4, mortal.produce, [topic, rows_of(200, 40)]).start()

    def start_and_produce(n: int) -> None:
        mortal.start()
        mortal.produce(topic, rows_of(100 * n, 40))

    result = run(settings, stream, RunRequest(batches=4, follow=True), hurt)
    assert result.rows == 160
    check_exact(settings, stream, [row for n in range(4) for row in rows_of(100 * n, 40)])


def test_a_run_is_killed_while_records_trickle_in(kafka: KafkaServer, tmp_path: Path, spark: SparkSession) -> None:
    """Twice, and goes on each time: counts and sums are exact, and every checkpoint is proven."""
    kafka.create_topic("trickle", partitions=2)
    settings, stream = at(tmp_path / "w"), tallied(subscribe="trickle", maxOffsetsPerTrigger="400")

    def produce(made: int) -> int:
        kafka.produce("trickle", rows_of(made, 20), partition=made // 20 % 2)
        return 20

    made = kill_runs(settings, "tallied", tmp_path, produce)
    run(settings, stream, RunRequest())
    assert sorted(kept(kafka.read("trickle", 2)), key=lambda row: row[1]) == rows_of(0, made)
    check_exact(settings, stream, rows_of(0, made))
