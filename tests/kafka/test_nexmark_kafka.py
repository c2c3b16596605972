"""NEXMark's events in Kafka: each once and in order, however often the writer was cut off, and a query over them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from siltstone.spark.operations import RunRequest, replay, run
from streams.nexmark import QUERIES
from streams.nexmark.events import EPOCH, PER_EPOCH, SLOTS, Events
from streams.nexmark.kafka import TOPIC, write_topics
from tests.delta_run import read_sink
from tests.kafka_server import KafkaServer
from tests.nexmark_answers import answer_of, as_rows
from tests.spark_runs import at

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.usefixtures("spark")]
EPOCHS, EVENTS = 240, Events(seed=3, rate=1000)


def test_a_query_reads_what_was_written_in_parts(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {kind: EVENTS.make(kind, np.arange(EPOCHS * each)) for kind, each in PER_EPOCH.items()}
    made["side"] = EVENTS.make("side", np.arange(SLOTS))
    make = Events.make

    def cut_off(events: Events, kind: str, places: np.ndarray) -> pa.Table:
        if kind == "auctions":  # after the side table, and the persons of the first part
            raise KeyboardInterrupt
        return make(events, kind, places)

    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(Events, "make", cut_off)
        write_topics(kafka.address, EVENTS, EPOCHS // 2 * EPOCH)
    query, settings = QUERIES[9], at(tmp_path / "w")
    options = {"events": str(EPOCHS * EPOCH // 4), "kafka": kafka.address}
    has = write_topics(kafka.address, EVENTS, EPOCHS // 4 * EPOCH)
    run(settings, query, RunRequest(options=options))
    while has["bids"] < made["bids"].num_rows:
        has = write_topics(kafka.address, EVENTS, EPOCHS // 4 * EPOCH)
    run(settings, query, RunRequest(options=options, finish=True))
    assert has == {kind: len(table) for kind, table in made.items()}
    assert len(kafka.read_messages(TOPIC.format("bids"))) == has["bids"]
    expected = answer_of(9, made)
    rows = read_sink(tmp_path / "w", query.name, query.operators[-1].name).to_pylist()
    assert expected and as_rows(rows) == as_rows(expected)
    assert replay(settings, query).proven
