"""When an operator is opened and closed: around each task, whatever becomes of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import BadRow, UsageError
from siltstone.model import KeyGroupRange
from siltstone.operator import OperatorContext, Rows, State
from siltstone.run.processing import combine
from siltstone.run.users_code import OperatorFailed
from siltstone.stream import Stream
from tests import sums
from tests.region_run import RegionRun
from tests.sums import POLICY, Sums, stream_of

GROUPS = 4


class Opened(Sums):
    """Notes what is called; fails where it is told to."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        super().__init__(name="opened")
        self.fails, self.calls = fails, list[Any]()

    def note(self, call: str, what: Any) -> None:
        self.calls.append(what)
        if call in self.fails:
            raise ZeroDivisionError(f"{call} failed")

    def open(self, context: OperatorContext) -> None:
        self.note("open", context)

    def close(self) -> None:
        self.note("close", "close")

    def process(self, rows: Rows, state: State) -> None:
        super().process(rows, state)
        self.note("process", len(rows))
        if "bad row" in self.fails and (bad := rows.table["n"].to_numpy() == 13).any():
            raise BadRow("13 is unlucky", rows=bad)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


def context(subtask: int, step: int, checkpoint: int | None) -> OperatorContext:
    return OperatorContext("opened", subtask, 2, KeyGroupRange(0, GROUPS).split(2)[subtask], step, checkpoint)


def test_each_task_opens_first_and_closes_last(place: OpenWarehouse) -> None:
    operator = Opened()
    run = RegionRun(place, stream_of(operator), POLICY, parallelism=2, checkpoint_steps=2)
    run.step(pa.table({"k": np.arange(40), "n": np.ones(40, np.int64)}))
    first = operator.calls
    assert first[0] == context(0, 1, None) and first[2:4] == ["close", context(1, 1, None)] and first[5:] == ["close"]
    assert first[1] + first[4] == 40
    operator.calls = []
    run.step_without_rows()
    assert operator.calls == [context(0, 2, 1), "close", context(1, 2, 1), "close"], "rows or none"


@pytest.mark.parametrize(
    ("fails", "said", "called"),
    [
        (("process",), "process failed", ["process", "close"]),
        (("process", "close"), "process failed", ["process", "close"]),
        (("close",), "close failed", ["process", "close"]),
        (("open",), "open failed", []),
    ],
)
def test_close_follows_whenever_open_returned(
    place: OpenWarehouse, fails: tuple[str, ...], said: str, called: list[str]
) -> None:
    """The first error is the one that is told, and nothing of the step counts."""
    operator = Opened(fails)
    run = RegionRun(place, stream_of(operator), POLICY)
    with pytest.raises(OperatorFailed, match=f"operator opened: ZeroDivisionError: {said}"):
        run.step(sums.rows(1))
    assert [call if isinstance(call, str) else "process" for call in operator.calls[1:]] == called
    assert place.catalog.checkpoints.last_id(sums.NAME) == 0
    operator.fails = ()
    assert RegionRun(place, stream_of(operator), POLICY).step(sums.rows(1)) is not None


def test_a_step_that_begins_anew_without_its_bad_rows_is_one_task(place: OpenWarehouse) -> None:
    operator = Opened(("bad row",))
    stream = Stream(sums.NAME, lambda spark, _: spark.sql(""), [operator], on_bad_row="dead-letter", max_parallelism=4)
    run = RegionRun(place, stream, POLICY)
    run.step(pa.table({"k": [1, 2, 3], "n": [1, 13, 2]}))
    assert operator.calls[1:] == [3, 2, "close"] and isinstance(operator.calls[0], OperatorContext)


class Combines(Sums):
    """Adds up rows of each key ahead of the shuffle."""

    def combine(self, table: pa.Table) -> pa.Table:
        added = table.group_by("k", use_threads=False).aggregate([("n", "sum")])
        return added.rename_columns(["k", "n"])


def test_combined_rows_have_the_columns_that_were_declared() -> None:
    rows = pa.table({"k": [1, 2, 1, None], "n": pa.array([1, 2, 3, 4], pa.int32())})
    made = combine(Combines(name="a", combined={"n": pa.int64(), "k": pa.int64()}), rows)
    assert made.schema == pa.schema([("n", pa.int64()), ("k", pa.int64())])
    assert sorted(map(str, made.to_pylist())) == ["{'n': 2, 'k': 2}", "{'n': 4, 'k': 1}", "{'n': 4, 'k': None}"]
    with pytest.raises(UsageError, match="combined rows of operator a: column extra is missing"):
        combine(Combines(name="a", combined={"k": pa.int64(), "extra": pa.int64()}), rows)
    with pytest.raises(OperatorFailed, match="operator a: "):
        combine(Combines(name="a", combined={"k": pa.int64()}), pa.table({"other": [1]}))
