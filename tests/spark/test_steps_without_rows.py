"""Steps without rows: what operators drain reaches their sinks and their readers, and comes again the same."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.spark.operations import RunRequest, open_region, replay, rescale, run
from siltstone.spark.step import run_step
from siltstone.stream import Stream
from tests.examples import long_form
from tests.holding import HOLD, TOTAL, Hold, Total
from tests.outbox_run import roll_back
from tests.spark.test_levels import counted_jobs, rows_in
from tests.spark_runs import at, check_proven, state
from tests.spark_streams import keyed, source_of

STREAM = "held"
BATCHES = [keyed([1, 2, 3], [10 * n + 1, 10 * n + 2, 10 * n + 3]) for n in range(1, 4)]
SENT = sorted(row for table in BATCHES for row in zip(*table.to_pydict().values(), strict=True))


class Got:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, rows: DataFrame, id: int) -> None:
        assert id not in self.rows
        self.rows[id] = [tuple(row) for row in rows.collect()]


def held(got: Got) -> Stream:
    """What `Hold` returns goes to a sink and to `Total`."""
    return Stream(STREAM, source_of(BATCHES), [Hold(), Total()], sinks={HOLD: got}, max_parallelism=8)


@pytest.mark.parametrize("max_pending", [long_form(0), 2])
def test_what_is_drained_at_the_end_of_a_run_reaches_the_sink_and_the_reader_and_comes_again_the_same(
    spark: SparkSession, tmp_path: Path, max_pending: int
) -> None:
    got = Got()
    stream, settings = held(got), at(tmp_path / "w", checkpoint_steps=2, max_pending=max_pending)
    assert run(settings, stream, RunRequest()).checkpoints == [1, 2]
    assert sorted(row for rows in got.rows.values() for row in rows) == SENT and sorted(got.rows) == [1, 2]
    total = state(settings, STREAM, TOTAL, "totals", tmp_path / "one")
    assert sum(total["rows"].to_pylist()) == len(SENT) and sum(total["sum"].to_pylist()) == sum(v for _, v in SENT)
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        digest = place.catalog.checkpoints.get_latest(STREAM).digest
        kinds = [(s.checkpoint, s.kind, s.batch_id) for s in place.catalog.input_log.list(STREAM, 2)]
        assert kinds == [(1, "batch", 0), (1, "batch", 1), (2, "batch", 2), (2, "empty", None)]
        roll_back(place, 0, STREAM)
    again = run(settings, stream, RunRequest())
    assert (again.checkpoints, again.digest) == ([1, 2], digest) and sorted(got.rows) == [1, 2], "no output comes again"
    assert rescale(settings, stream, 4).digest == digest
    found = replay(settings, stream)
    assert (found.proven, found.compared, found.steps, found.digest) == (True, 3, 5, digest)
    check_proven(settings, STREAM)


class Times(Hold):
    """Lets its rows go with instants as keys, of which `Clocks` makes times without a zone."""

    output = pa.schema([("key", pa.timestamp("us", tz="UTC")), ("value", pa.int64())])


class Clocks(Total):
    """Has keys that a cast of Spark's would make by the session's time zone."""

    key = pa.schema({"key": pa.timestamp("us")})


def test_instants_are_the_same_keys_as_in_micro_batches_whatever_zone_is_set_meanwhile(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also where subtasks are placed: their frame is of another session."""
    zone, settings = "spark.sql.session.timeZone", at(tmp_path / "w", checkpoint_steps=2, placement=True)
    before = spark.conf.get(zone)
    spark.conf.set(zone, "Asia/Tokyo")
    try:
        stream = Stream(STREAM, source_of(BATCHES), [Times(), Clocks()], max_parallelism=8)
        run(settings, stream, RunRequest(), lambda _: spark.conf.set(zone, "America/New_York"))
        spark.conf.set(zone, "Asia/Tokyo")
        assert replay(settings, stream).proven
    finally:
        spark.conf.set(zone, before)
    total = state(settings, STREAM, TOTAL, "totals", tmp_path / "out")
    assert total["rows"].to_pylist() == [3, 3, 3], "each key is one, in steps with rows and without"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


def test_a_reader_waits_only_for_rows_that_there_are(spark: SparkSession, place: OpenWarehouse) -> None:
    settings = at(Path(place.warehouse.local.root), parallelism=3)
    region = open_region(settings, held(Got()), place, {}, 3)
    for ends, jobs in ((False, 1), (True, 2)):
        with counted_jobs(spark) as counted:
            done = run_step(spark, None, region.begin_step(ends=ends))
        assert len(counted) == jobs and rows_in(done.received) == {n: dict.fromkeys(range(3), 0) for n in (HOLD, TOTAL)}
        for name, received in done.received.items():
            region.acknowledge(name, received)
