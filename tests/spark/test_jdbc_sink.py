"""A stream whose output goes to a table of a database, run by Spark."""

from pathlib import Path

import pyarrow as pa
import pytest

from siltstone.catalog.records.runs import RunRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster.checks.facts import Subject, sinks
from siltstone.errors import StateError, UsageError
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.settings import Settings
from siltstone.sinks.jdbc import JdbcSink
from siltstone.spark.operations import RunRequest, run
from siltstone.stream import Stream
from tests.jdbc_run import rows_in, run_sql
from tests.spark_runs import at, check_proven, recorded
from tests.spark_streams import keyed, source_of

pytestmark = pytest.mark.usefixtures("spark")
ROWS = [keyed(range(20), range(20)), keyed(range(5, 30), range(25)), keyed(range(4), range(4))]


class Running(Operator):
    """The sum of each key so far, as rows."""

    name = "running"
    key = {"key": pa.int64()}  # noqa: RUF012
    output = pa.schema([("key", pa.int64()), ("sum", pa.int64())])
    totals = ValueState(value={"sum": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        sums = rows.sum("value", initial=state.totals.get(rows.keys)["sum"])
        state.totals.put(rows.keys, {"sum": sums})
        return rows.keys.with_columns({"sum": sums})


def test_a_run_delivers_to_a_database_and_checks_know_what_is_there(tmp_path: Path) -> None:
    settings, url = at(tmp_path / "w"), f"sqlite:///{tmp_path}/sums.db"
    sink = JdbcSink(url, "sums", key="key")
    stream = Stream("sums", source_of(ROWS), [Running()], sinks={"running": sink}, max_parallelism=8)
    assert run(settings, stream, RunRequest(batches=2)).checkpoints == [1, 2]
    run_sql(url, "UPDATE siltstone_sinks SET id = 1")
    told = [(row.checkpoint, row.completed, row.published) for row in sinks(Subject(settings, stream)).itertuples()]
    assert told == [(1, True, True), (2, True, False)]
    run_sql(url, "UPDATE siltstone_sinks SET id = 2", "ALTER TABLE sums RENAME COLUMN sum TO total")
    before = recorded(settings, "sums")
    with pytest.raises(UsageError, match=r"table sums in .* has no column sum"):
        run(settings, stream, RunRequest())
    assert recorded(settings, "sums") == before, "it was refused before it took the stream over"
    run_sql(url, "ALTER TABLE sums RENAME COLUMN total TO sum")
    assert run(settings, stream, RunRequest()).checkpoints == [3]
    expected = dict[int, int]()
    for rows in ROWS:
        for key, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
            expected[key] = expected.get(key, 0) + value
    assert rows_in(url, "SELECT key, sum FROM sums ORDER BY key") == sorted(expected.items())
    assert all(row.completed and row.published for row in sinks(Subject(settings, stream)).itertuples())
    check_proven(settings, "sums")


def test_what_the_database_refuses_ends_the_run_and_comes_first_in_the_next(tmp_path: Path) -> None:
    settings, url = at(tmp_path / "w"), f"sqlite:///{tmp_path}/sums.db"
    stream = Stream("sums", source_of(ROWS), [Running()], sinks={"running": JdbcSink(url, "sums")}, max_parallelism=8)
    run_sql(url, "CREATE TABLE sums (key BIGINT, sum BIGINT CHECK (sum <> 33))")
    with pytest.raises(StateError, match="which refuses the rows of checkpoint 2: CHECK constraint failed"):
        run(settings, stream, RunRequest())
    assert len(rows_in(url, "SELECT key FROM sums")) == 20 and len(runs_of(settings)) == 1, "it did not reset itself"
    run_sql(url, "ALTER TABLE sums RENAME TO old", "CREATE TABLE sums AS SELECT * FROM old")
    assert run(settings, stream, RunRequest()).checkpoints == [3]
    assert len(rows_in(url, "SELECT key FROM sums")) == sum(map(len, ROWS))


def runs_of(settings: Settings) -> list[RunRecord]:
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        return place.catalog.runs.list("sums")
