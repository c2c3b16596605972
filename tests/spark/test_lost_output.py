"""An operator's output whose cached blocks are lost after its acknowledgements, before the next operator reads it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import StateError, UsageError
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.settings import RecoveryOptions, Settings
from siltstone.sinks.parquet import ParquetSink
from siltstone.spark import step as step_module
from siltstone.spark.operations import RunRequest, run
from siltstone.stream import Stream
from tests.spark_runs import read_parquet_sink
from tests.spark_streams import keyed, source_of

pytestmark = pytest.mark.usefixtures("spark")
ROWS = [keyed(range(20), range(20)), keyed(range(5, 30), range(25))]


class Running(Operator):
    """The sum of each key so far, as rows; it notes each of its calls in a directory, and `again` says what a call
    does that is not the first with its rows."""

    name = "running"
    key = {"key": pa.int64()}  # noqa: RUF012
    output = pa.schema([("key", pa.int64()), ("sum", pa.int64())])
    totals = ValueState(value={"sum": pa.int64()})

    def __init__(self, calls: Path, again: str) -> None:
        super().__init__()
        self.calls, self.again = calls, again

    def process(self, rows: Rows, state: State) -> Any:
        """The rows, as its output or, in `SideRunning`, its side output."""
        made = self.add_up(rows, state)
        return made if self.output is not None else {"sums": made}

    def add_up(self, rows: Rows, state: State) -> pa.Table:
        old = state.totals.get(rows.keys)["sum"].fill_null(0).to_numpy()
        value = rows.table.column("value").to_numpy()
        new = old + [int(value[rows.key_index == k].sum()) for k in range(len(rows.keys))]
        state.totals.put(rows.keys, {"sum": new})
        table = pa.table({"key": rows.keys.columns.column("key"), "sum": new})
        call = f"{sorted(rows.table.column('key').to_pylist())}".replace(", ", "_")
        first = self.calls / f"{call}-first"
        if first.exists():
            if self.again == "fails at first" and not list(self.calls.glob("*-again")):
                (self.calls / f"{call}-again").touch()
                raise UsageError("this machine is another one")
            (self.calls / f"{call}-again").touch()
            if self.again == "fails":
                raise UsageError("this machine is another one")
            if self.again == "differs":
                return table.slice(1)
        first.touch()
        return table


class SideRunning(Running):
    """The same by a side output."""

    output = None
    side_outputs = {"sums": Running.output}  # noqa: RUF012


def chained(calls: Path, again: str, kind: type[Running] = Running) -> Stream:
    """Two operators read what `running` returns. In its job another one comes before it, so its tasks have other
    numbers there than where its output is computed again."""
    calls.mkdir()
    key = {"key": pa.int64()}
    read = "running-sums" if kind is SideRunning else "running"
    operators = [
        Aggregate("before", key, [Count("rows")], output=False),
        kind(calls, again),
        Aggregate("after", key, [Count("rows"), Sum("sum", of="sum")], reads=read),
        Aggregate("beside", key, [Count("rows")], reads=read, output=False),
    ]
    return Stream("chained", source_of(ROWS), operators, sinks={"after": ParquetSink()}, max_parallelism=8)


def settings(path: Path, resets: int = 1) -> Settings:
    return Settings(warehouse=str(path), parallelism=2, recovery=RecoveryOptions(resets=resets, reset_delay_s=0.0))


def lose_blocks(spark: SparkSession) -> int:
    """Drop what is cached of every frame, as the death of an executor does; they stay marked as cached."""
    java: Any = vars(spark.sparkContext)["_jsc"]
    cached = list(java.getPersistentRDDs())
    for rdd in cached:
        java.sc().unpersistRDD(rdd, True)
    return len(cached)


@pytest.fixture
def losing(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Path], dict[Path, tuple[int, int]]]:
    """Lose the blocks of the first operator in one step, once its acknowledgements are there; tells what its working
    state was then."""

    def arm(at_step: int, work: Path) -> dict[Path, tuple[int, int]]:
        seen: dict[Path, tuple[int, int]] = {}
        steps = 0
        genuine = step_module.output_rows

        def lost(frame: DataFrame, received: Sequence[Acknowledgement], *of: Any) -> DataFrame:
            nonlocal steps
            steps += received[0].operator == "running"
            if steps == at_step and not seen:
                assert lose_blocks(spark)
                seen.update(state_files(work))
            return genuine(frame, received, *of)

        monkeypatch.setattr(step_module, "output_rows", lost)
        return seen

    return arm


def state_files(work: Path) -> dict[Path, tuple[int, int]]:
    """Which files an operator's working state is made of, and when each was written."""
    found = [p for p in work.glob("chained/*/state/running/**/*") if p.is_file() and not p.name.endswith(".lock")]
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in found}


def undisturbed(tmp_path: Path) -> tuple[str | None, pa.Table]:
    result = run(settings(tmp_path / "steady"), chained(tmp_path / "steady-calls", "fails"), RunRequest())
    assert result.checkpoints == [1, 2]
    return result.digest, sink(tmp_path / "steady")


def sink(warehouse: Path) -> pa.Table:
    table = read_parquet_sink(warehouse, "chained", "after")
    return table.sort_by([("checkpoint", "ascending"), ("key", "ascending")])


@pytest.mark.parametrize("kind", [Running, SideRunning])
@pytest.mark.parametrize(
    ("again", "reason"), [("fails", "this machine is another"), ("differs", "different rows, or a")]
)
def test_a_recomputation_that_fails_or_differs_fails_the_step(
    losing: Callable[[int, Path], dict[Path, tuple[int, int]]],
    tmp_path: Path,
    again: str,
    reason: str,
    kind: type[Running],
) -> None:
    at = settings(tmp_path / "w", resets=0)
    losing(2, tmp_path / "w" / "work")
    with pytest.raises(StateError, match=f"lost and computed again: .*{reason}"):
        run(at, chained(tmp_path / "calls", again, kind), RunRequest())
    assert list((tmp_path / "calls").glob("*-again")), "it was computed again"
    with OpenWarehouse.open_existing(at.warehouse) as place:
        assert place.catalog.checkpoints.last_id("chained") == 1
    assert set(sink(tmp_path / "w").column("checkpoint").to_pylist()) == {1}


def test_a_run_resets_itself_after_a_recomputation_that_fails(
    losing: Callable[[int, Path], dict[Path, tuple[int, int]]], tmp_path: Path
) -> None:
    digest, rows = undisturbed(tmp_path)
    losing(2, tmp_path / "w" / "work")
    result = run(settings(tmp_path / "w"), chained(tmp_path / "calls", "fails at first"), RunRequest())
    assert (result.resets, result.digest, result.checkpoints) == (1, digest, [1, 2])
    assert sink(tmp_path / "w").equals(rows)


def test_a_recomputation_gives_the_same_rows_and_leaves_the_state_alone(
    losing: Callable[[int, Path], dict[Path, tuple[int, int]]], tmp_path: Path
) -> None:
    digest, rows = undisturbed(tmp_path)
    stream, at = chained(tmp_path / "calls", "repeats"), settings(tmp_path / "w")
    before = losing(2, tmp_path / "w" / "work")
    assert run(at, stream, RunRequest()).digest == digest
    assert len(list((tmp_path / "calls").glob("*-again"))) == 2, "both subtasks, in the second step"
    assert before and state_files(tmp_path / "w" / "work") == before
    assert sink(tmp_path / "w").equals(rows)
