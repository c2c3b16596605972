"""The operators of the flights stream, in process, against plain pandas."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from siltstone.model import KeyGroupRange
from siltstone.operator import SOURCE, Operator, Rows, State
from siltstone.state.backend import SubtaskState
from siltstone.state.backends.named import backend
from streams import FLIGHTS
from streams.flights import UNKNOWN
from streams.flights_data import SCHEMA, read_flights
from tests.oracle_flights import all_flights, check, expected

PART = 16_000
"""flights of the year's first weeks: enough for windows to slide and runs to cross every kind of cut"""
expect = cache(lambda count: expected(all_flights().head(count)))


@cache
def flights() -> pa.Table:
    """All flights as the source of the stream gives them."""
    table = read_flights()
    place = table.column_names.index("tailnum")
    return table.set_column(place, "tailnum", table["tailnum"].fill_null(UNKNOWN))


def batches(cut: str, count: int) -> Iterator[pa.Table]:
    """The first flights: a table a day or week, tables of a number of flights, or all at once."""
    table = flights().slice(0, count)
    day = table["event_time"].to_numpy().astype("datetime64[D]").astype(np.int64)
    part = {"day": day, "week": day // 7, "odd": np.arange(count) // 997, "all": np.zeros(count)}[cut]
    edges = [0, *(np.flatnonzero(np.diff(part)) + 1), count]
    for start, end in pairwise(edges):
        yield table.slice(start, end - start)


@dataclass
class InProcess:
    """The stream's operators with `parallelism` subtasks each; batches go through them as in the engine."""

    directory: Path
    parallelism: int
    states: dict[str, list[SubtaskState]] = field(default_factory=dict)
    outputs: dict[str, list[pa.Table]] = field(default_factory=lambda: defaultdict(list))
    step: int = 0

    def __post_init__(self) -> None:
        ranges = KeyGroupRange(0, FLIGHTS.max_parallelism).split(self.parallelism)
        for op in FLIGHTS.operators:
            self.states[op.name] = [
                backend("heap").open(
                    self.directory / op.name / str(i),
                    op.tables(),
                    op.opaque_variables(),
                    groups,
                    FLIGHTS.max_parallelism,
                )
                for i, groups in enumerate(ranges)
            ]

    def push(self, batch: pa.Table) -> None:
        self.step += 1
        made = {SOURCE: batch}
        for op in FLIGHTS.sort_operators():
            out = [self._subtask(op, state, made[op.reads]) for state in self.states[op.name]]
            if op.output is not None:
                made[op.name] = pa.concat_tables(table for table in out if table is not None)
                self.outputs[op.name].append(made[op.name])

    def tables(self) -> dict[tuple[str, str], pa.Table]:
        return {
            (op.name, table): pa.concat_tables(
                rows for state in self.states[op.name] for rows, _ in state.tables[table].scan(state.groups)
            )
            for op in FLIGHTS.operators
            for table in op.tables()
        }

    def delays(self) -> dict[int, bytes]:
        return {group: data for state in self.states["aircraft"] for group, data in state.opaque["delays"].items()}

    def _subtask(self, op: Operator, state: SubtaskState, table: pa.Table) -> pa.Table | None:
        everything = Rows.make(op, table, None, FLIGHTS.max_parallelism)
        own = (everything.key_groups >= state.groups.start) & (everything.key_groups < state.groups.end)
        mine = table.filter(pa.array(own))
        if op.order_by:
            mine = mine.sort_by([(name, "ascending") for name in op.order_by])
        state.begin(self.step, tracking=False)
        bound, output = State(op, state), op.output and op.output.empty_table()
        if mine.num_rows:
            output = op.process(Rows.make(op, mine, None, FLIGHTS.max_parallelism), bound)
        bound.flush()
        state.commit()
        state.release(self.step)
        return output

    def digests(self) -> dict[tuple[str, str], list[int]]:
        """(operator, table) -> digest of each key group."""
        return {
            (op.name, table): np.sum([s.tables[table].digests for s in self.states[op.name]], axis=0).tolist()
            for op in FLIGHTS.operators
            for table in op.tables()
        }


def run(directory: Path, parallelism: int, cut: str, count: int = PART) -> InProcess:
    stream = InProcess(directory, parallelism)
    for batch in batches(cut, count):
        stream.push(batch)
    return stream


def alerts(stream: InProcess) -> list[dict]:
    return pa.concat_tables(stream.outputs["aircraft"]).sort_by("sequence").to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "parallelism"), [("week", 1), ("day", 2), ("odd", 1), ("all", 3)])
def test_state_and_alerts_are_those_of_pandas(tmp_path: Path, cut: str, parallelism: int) -> None:
    stream = run(tmp_path, parallelism, cut)
    check(expect(PART), stream.tables(), stream.delays(), FLIGHTS.max_parallelism)
    assert alerts(stream) == expect(PART).alerts


@pytest.mark.slow
def test_digests_do_not_depend_on_batches_or_subtasks(tmp_path: Path) -> None:
    count = 8_000
    one = run(tmp_path / "one", 1, "week", count)
    other = run(tmp_path / "other", 5, "odd", count)
    assert one.digests() == other.digests()
    assert one.delays() == other.delays()


@pytest.mark.slow
def test_missing_tail_numbers_and_cancelled_flights_are_counted(tmp_path: Path) -> None:
    stream = run(tmp_path, 2, "week")
    theirs = all_flights().head(PART)
    totals = stream.tables()["aircraft", "totals"].to_pandas().set_index("tailnum")
    assert totals.loc[UNKNOWN, "flights"] == theirs.tailnum.isna().sum() > 0
    assert totals.flights.sum() == PART
    assert totals.cancelled.sum() == theirs.dep_time.isna().sum() > 0
    assert totals.diverted.sum() == (theirs.dep_time.notna() & theirs.arr_delay.isna()).sum() > 0


def test_an_alert_is_raised_once_a_run(tmp_path: Path) -> None:
    stream = InProcess(tmp_path, 1)
    #        a run of four with a cancellation inside, an end, a run of three across batches
    delays = [20, None, 15, 16, 99, 14, 30, 30, None, 31]
    for start, end in [(0, 4), (4, 7), (7, 10)]:
        stream.push(some_flights(delays).slice(start, end - start))
    raised = alerts(stream)
    assert [(a["sequence"], a["arr_delay"], a["run_minutes"]) for a in raised] == [(3, 16, 51), (9, 31, 91)]
    assert [(a["flights_last_week"], a["late_last_week"]) for a in raised] == [(4, 3), (8, 6)]
    totals = stream.tables()["carriers", "totals"].to_pylist()
    assert [(t["carrier"], t["alerts"], t["run_minutes"], t["worst_tailnum"]) for t in totals] == [("ZZ", 2, 142, "N1")]


def some_flights(delays: list[int | None]) -> pa.Table:
    """Flights of one aircraft, one a day; None is a cancelled one."""
    n = len(delays)
    columns = {
        "sequence": list(range(n)),
        "event_time": [datetime(2013, 5, 1 + day, tzinfo=UTC) for day in range(n)],
        "carrier": ["ZZ"] * n,
        "flight": [7] * n,
        "tailnum": ["N1"] * n,
        "origin": ["JFK"] * n,
        "dest": ["SFO"] * n,
        "cancelled": [delay is None for delay in delays],
        "dep_delay": delays,
        "arr_delay": delays,
        "air_time": [None if delay is None else 300 for delay in delays],
        "distance": [2586] * n,
    }
    return pa.table(columns, schema=SCHEMA)
