"""How far a run is behind: what it tells, when, and when it has caught up."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from siltstone.run.lag import TELL_S, Backlog, Lag, LagWatch
from siltstone.spark.queries import read_backlog


class Watched:
    """A watch on a clock that the test moves on."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog
        caplog.set_level(logging.INFO, "siltstone")
        self.now_s, self.asked = 0.0, 0
        self.watch = LagWatch("orders", lambda: self.now_s)

    def tell(self, after_s: float, rows: int | None, batch_rows: int = 100, batch: int | None = None) -> list[str]:
        """The log events of a refresh after some seconds, with `rows` rows that wait in the sources."""

        def read() -> Backlog | None:
            self.asked += 1
            return None if rows is None else Backlog(self.asked if batch is None else batch, rows, batch_rows)

        self.now_s += after_s
        self.caplog.clear()
        self.watch.refresh(read)
        return self.caplog.messages


def test_a_run_tells_rows_rate_and_time_left_until_it_has_caught_up(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(caplog)
    assert watched.tell(0, 3000) == ["catching up stream=orders rows_behind=3000"]
    assert watched.watch.lag == Lag(3000)
    assert watched.tell(TELL_S, 2000) == [
        "catching up stream=orders rows_behind=2000 rows_per_second=100 seconds_left=20"
    ]
    # More come than are processed.
    assert watched.tell(TELL_S, 4000) == ["catching up stream=orders rows_behind=4000 rows_per_second=-50"]
    assert watched.tell(TELL_S, 100) == ["caught up stream=orders seconds=30.0"]
    assert watched.watch.lag == Lag(100)
    assert watched.tell(TELL_S, 90) == []
    assert watched.tell(TELL_S, 101) == ["catching up stream=orders rows_behind=101"], "again, from now on"


def test_it_asks_only_so_often_and_says_nothing_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(caplog)
    assert watched.tell(0, None) == [] and watched.watch.lag is None
    watched.tell(TELL_S / 2, 5000)
    assert watched.asked == 1
    watched.tell(TELL_S / 2, 5000)
    assert watched.asked == 2 and watched.watch.lag == Lag(5000)


def test_a_long_micro_batch_does_not_count_as_a_slow_one(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(caplog)
    assert len(watched.tell(0, 5000, batch=1)) == 1
    assert watched.tell(TELL_S, 5000, batch=1) == [] and watched.watch.lag == Lag(5000)
    assert watched.tell(TELL_S, 4000, batch=2)[0].endswith("rows_per_second=50 seconds_left=80")


@pytest.mark.parametrize(
    ("sources", "rows"),
    [
        ([('{"t": {"0": 10, "1": 5}}', '{"t": {"0": 30, "1": 5}}')], 20),
        ([({"t": {"0": 10}}, {"t": {"0": 10, "1": 7}, "new": {"0": 3}})], 10),
        ([('{"t": {"0": 30}}', '{"t": {"0": 10}}')], 0),  # the topic was deleted, and created again
        ([('{"t": {"0": 1}}', '{"t": {"0": 2}}'), ('{"logOffset": 4}', None)], 1),
        ([('{"logOffset": 4}', None)], None),
        ([("6", "7")], None),
        ([("no JSON", '{"t": {"0": 2}}')], None),
        ([(None, '{"t": {"0": 2}}')], None),
        ([], None),
    ],
)
def test_rows_that_wait_are_counted_where_offsets_are_of_partitions(sources: Any, rows: int | None) -> None:
    told = [{"endOffset": end, "latestOffset": latest} for end, latest in sources]
    query = cast(Any, SimpleNamespace(lastProgress={"sources": told, "batchId": 7, "numInputRows": 4}))
    assert read_backlog(query) == (None if rows is None else Backlog(7, rows, 4))


def test_nothing_is_told_before_the_first_micro_batch() -> None:
    assert read_backlog(cast(Any, SimpleNamespace(lastProgress=None))) is None
