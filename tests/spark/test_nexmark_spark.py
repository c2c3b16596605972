"""NEXMark's sources and a query under Spark: what Spark counts becomes the events, in each run the next ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, replay, run
from streams.nexmark import QUERIES
from streams.nexmark.events import EPOCH, KINDS, PER_EPOCH, SLOTS, Events
from tests.delta_run import read_sink
from tests.nexmark_answers import answer_of, as_rows

RUNS, EPOCHS = 3, 80
EVENTS = Events(seed=3, rate=1000)


def made(kind: str) -> pa.Table:
    return EVENTS.make(kind, np.arange(SLOTS if kind == "side" else RUNS * EPOCHS * PER_EPOCH[kind]))


@pytest.fixture(autouse=True)
def in_another_zone(with_settings: Callable[[dict[str, str]], None]) -> None:
    """A session whose zone is not UTC."""
    with_settings({"spark.sql.session.timeZone": "Asia/Kolkata"})


@pytest.mark.parametrize("number", [9, 13])
def test_a_query_answers_what_sql_does_over_the_events_of_its_runs(number: int, tmp_path: Path) -> None:
    query, settings = QUERIES[number], Settings(warehouse=str(tmp_path / "w"), parallelism=2)
    options = {"events": str(EPOCHS * EPOCH), "rate": str(EVENTS.rate), "seed": str(EVENTS.seed)}
    for each in range(RUNS):
        run(settings, query, RunRequest(options=options, finish=each == RUNS - 1))
    rows = read_sink(tmp_path / "w", query.name, query.operators[-1].name).to_pylist()
    expected = answer_of(number, {kind: made(kind) for kind in KINDS})
    assert expected and as_rows(rows) == as_rows(expected)
    assert replay(settings, query).steps >= RUNS
