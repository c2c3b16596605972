"""Which operators are fused, and what the one behind gets."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import UsageError
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.run.fusing import fuse, run_fused
from siltstone.run.processing import ACKNOWLEDGEMENT, result_schema
from siltstone.run.subtask import run_subtask
from siltstone.run.task import StepTask
from siltstone.state.hashing import xxhash64
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from tests.region_run import RegionRun, shuffled
from tests.sums import POLICY

KEY = {"key": pa.int64()}
TEXT = {"text": pa.string()}
ROWS = pa.schema(
    {"key": pa.int64(), "at": pa.timestamp("us", "UTC"), "text": pa.string(), "many": pa.list_(pa.int64())}
)
SUBTASKS = 3


class Passing(Operator):
    """Counts its rows, and returns them."""

    key = KEY
    inputs = ("at", "text", "many")
    output = ROWS
    keeps_key = True
    counts = ValueState(value={"rows": pa.int64()})

    def process(self, rows: Rows, state: State) -> Any:
        """Count."""
        state.counts.put(rows.keys, {"rows": rows.count(initial=state.counts.get(rows.keys)["rows"])})
        return rows.table.select(self.output.names)


class Behind(Passing):
    """Reads what `first` returns."""

    reads = "first"
    inputs = ("at", "text")
    output = pa.schema([(name, ROWS.field(name).type) for name in ("key", "at", "text")])


class Other(Passing):
    """Is by another key."""

    key = TEXT
    inputs = ("key",)
    output = pa.schema(TEXT | KEY)


class Swapping(Passing):
    """Returns rows of other keys."""

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Give each row the key after its own."""
        made = super().process(rows, state)
        return made.set_column(0, "key", pa.array(made["key"].to_numpy() + 1))


def of(kind: type[Operator], name: str, **fields: Any) -> Operator:
    return type(kind.__name__, (kind,), {"name": name, **fields})()


def tasks_of(place: OpenWarehouse, *operators: Operator, name: str = "fused") -> dict[str, StepTask]:
    stream = Stream(name, None, list(operators), max_parallelism=16)
    return dict(RegionRun(place, stream, POLICY, SUBTASKS).region.begin_step())


def names(fused: dict[str, StepTask]) -> list[list[str]]:
    return [[each.operator.name for each in task.together] for task in fused.values()]


def test_operators_by_one_key_run_together(place: OpenWarehouse) -> None:
    third = of(Behind, "third", reads="second")
    tasks = tasks_of(place, third, of(Passing, "first"), of(Behind, "second"), of(Other, "other", reads="third"))
    fused = fuse(tasks)
    assert names(fused) == [["first", "second", "third"], ["other"]]
    assert [replace(each, fused=None) for each in fused["first"].together] == [
        tasks[n] for n in ("first", "second", "third")
    ]
    assert result_schema(fused["first"]) == result_schema(tasks["third"])


@pytest.mark.parametrize(
    ("first", "behind", "together"),
    [
        ({}, {}, True),
        ({}, {"nullable": ("key",)}, True),
        ({"keeps_key": False}, {}, False),
        ({}, {"inputs": ("many",)}, False),
        ({}, {"inputs": ()}, False),
        ({}, {"order_by": ("at",)}, False),
        ({}, {"key": {"key": pa.int32()}, "output": None}, False),
        ({}, {"key": {"key": pa.int64(), "text": pa.string()}}, False),
        ({}, {"reads": {"first": {"key": "key"}}, "inputs": {}}, False),
        ({"output": pa.schema([*ROWS, ("__hash", pa.int64())])}, {}, False),
        ({"output": pa.schema([*ROWS, ("Text", pa.string())])}, {}, False),
        ({"output": ROWS.set(1, pa.field("at", pa.timestamp("ns", "UTC")))}, {}, False),
        ({"output": ROWS.set(2, pa.field("text", pa.large_string()))}, {}, False),
        ({"output": ROWS.set(2, pa.field("text", pa.uint8()))}, {}, False),
        ({"output": pa.schema([*ROWS, ("half", pa.float16())])}, {}, False),
        ({"output": pa.schema([*ROWS, ("__subtask", pa.int64())])}, {}, False),
        ({"side_outputs": {"more": ROWS}}, {}, True),
        ({"output": None, "side_outputs": {"more": ROWS}}, {"reads": "first-more"}, False),
    ],
)
def test_only_rows_that_are_there_as_spark_would_bring_them(
    place: OpenWarehouse, first: dict[str, Any], behind: dict[str, Any], together: bool
) -> None:
    tasks = tasks_of(place, of(Passing, "first", **first), of(Behind, "behind", **behind))
    assert names(fuse(tasks)) == ([["first", "behind"]] if together else [["first"], ["behind"]])


@pytest.mark.parametrize("output", [ROWS.set(0, pa.field("key", pa.int32())), ROWS.remove(0)])
def test_who_keeps_the_key_returns_it(output: pa.Schema) -> None:
    with pytest.raises(UsageError, match="its output needs the key columns, of their types: add key, or set keeps_key"):
        of(Passing, "first", output=output)


def test_two_readers_are_not_fused(place: OpenWarehouse) -> None:
    both = [of(Behind, "one"), of(Behind, "another")]
    assert names(fuse(tasks_of(place, of(Passing, "first"), *both))) == [["first"], ["one"], ["another"]]
    first = of(Passing, "first", side_outputs={"more": ROWS})
    tasks = tasks_of(place, first, both[0], of(Behind, "aside", reads="first-more"), name="aside")
    assert names(fuse(tasks)) == [["first"], ["one"], ["aside"]]


def test_an_operator_of_which_the_step_has_no_task_is_not_waited_for(place: OpenWarehouse) -> None:
    tasks = tasks_of(place, of(Passing, "first"), of(Behind, "behind"))
    assert names(fuse({"behind": tasks["behind"]})) == [["behind"]]


INPUT = pa.table(
    {
        "key": [*range(40), *range(0, 40, 3)],
        "at": pa.array(range(54), pa.timestamp("us", "UTC")),
        "text": [f"text {n}" for n in range(54)],
        "many": [[n] for n in range(54)],
    },
    schema=ROWS,
)


def run(task: StepTask, subtask: int, zone: str = "Asia/Kolkata") -> tuple[list[Acknowledgement], list[pa.RecordBatch]]:
    def one(own: StepTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return run_subtask(own, subtask, "test", batches)

    tasks = [replace(each, fused=None) for each in task.together]
    made = list(run_fused(tasks, subtask, iter(shuffled(task, INPUT)[subtask].to_batches()), zone, one))
    assert {batch.schema for batch in made} == {result_schema(task)}
    said = [batch.column(ACKNOWLEDGEMENT) for batch in made]
    told = [Acknowledgement.from_bytes(each[0].as_py()) for each in said if not each.null_count]
    return told, [batch for batch, each in zip(made, said, strict=True) if each.null_count]


class Looking(Behind):
    """Notes what it gets."""

    seen: Any = None

    def process(self, rows: Rows, state: State) -> Any:
        """Note it."""
        assert self.seen is not None
        self.seen.append(rows)
        return super().process(rows, state)


def test_the_one_behind_gets_all_rows_in_order_with_sparks_types(place: OpenWarehouse) -> None:
    seen: list[Rows] = []
    last = of(Looking, "behind", seen=seen)
    tasks = tasks_of(place, of(Passing, "first"), last, of(Other, "other", reads="behind"))
    task = fuse(tasks)["first"]
    for subtask, own in shuffled(task, INPUT).items():
        told, rows = run(task, subtask)
        assert [(each.operator, each.rows_in, each.error) for each in told] == [
            ("first", len(own), None),
            ("behind", len(own), None),
        ]
        got = seen.pop()
        assert got.table.column_names == ["key", "at", "text"]
        assert got.table.schema.field("at").type == pa.timestamp("us", "Asia/Kolkata")
        assert got.table["text"].to_pylist() == own["text"].to_pylist()
        assert got.hashes.tolist() == xxhash64([own["key"].combine_chunks()]).tolist()
        assert pa.Table.from_batches(rows)["text"].to_pylist() == own["text"].to_pylist()


class ByKey(Passing):
    """Returns a batch per row."""

    def process(self, rows: Rows, state: State) -> Any:
        """Cut its rows."""
        made = super().process(rows, state)
        return pa.concat_tables([made.slice(n, 1) for n in range(len(made))])


def test_the_one_behind_gets_small_batches_together(place: OpenWarehouse) -> None:
    seen: list[Rows] = []
    tasks = tasks_of(place, of(ByKey, "first"), of(Looking, "behind", seen=seen))
    run(fuse(tasks)["first"], 0)
    assert len(seen[0]) > 10 and seen[0].table["text"].num_chunks == 1


class Refusing(Passing):
    """Refuses its rows."""

    def process(self, rows: Rows, state: State) -> Any:
        """Refuse."""
        raise UsageError("not today")


def test_an_operator_that_fails_says_so_first(place: OpenWarehouse) -> None:
    tasks = tasks_of(place, of(Refusing, "first"), of(Behind, "behind"))
    told, rows = run(fuse(tasks)["first"], 0)
    assert [(each.operator, each.error and each.error[1]) for each in told] == [
        ("first", "not today"),
        ("behind", "operator first, whose output it reads, has failed"),
    ]
    assert not rows
    with pytest.raises(UsageError, match="not today"):
        told[0].raise_failure()


def test_the_one_behind_may_fail_alone(place: OpenWarehouse) -> None:
    tasks = tasks_of(place, of(Passing, "first"), of(Refusing, "behind", reads="first", inputs=("at",)))
    told, _ = run(fuse(tasks)["first"], 0)
    assert [(each.operator, each.error and each.error[1]) for each in told] == [
        ("first", None),
        ("behind", "not today"),
    ]


def test_rows_of_other_subtasks_are_an_error_that_says_what_to_do(place: OpenWarehouse) -> None:
    with (
        StreamTester(Stream("alone", None, [of(Swapping, "first")]), parallelism=2) as tester,
        pytest.raises(UsageError, match="operator first returned a row of another key"),
    ):
        tester.step(INPUT)
    tasks = tasks_of(place, of(Swapping, "first"), of(Behind, "behind"))
    told, _ = run(fuse(tasks)["first"], 0)
    assert told[-1].error is not None
    assert "operator first returned a row of another key" in told[-1].error[1]
    with pytest.raises(UsageError, match="set keeps_key = False"):
        told[-1].raise_failure()
