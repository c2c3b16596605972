"""Fuse operators: one that reads another's output by the same key runs in the same tasks, right behind it (ADR 85).

Spark has no part in what is between them: no job, no shuffle, no rows that leave Python and come back. Flink calls this
operator chaining. It changes nothing that can be seen: the reader gets the same rows in the same order, with the types
that Spark would have given them, and each operator acknowledges its own step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import StateError, UsageError
from siltstone.operator import Operator
from siltstone.run.inputs import HASH, hash_keys, list_columns
from siltstone.run.processing import ACKNOWLEDGEMENT, acknowledgement_batch, join_batches, rows_of_output
from siltstone.run.task import StepTask

RunSubtask = Callable[[StepTask, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""runs one step of one operator in a subtask, as `run.subtask.run_subtask`"""
_CARRIED = (
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_date32,
    pa.types.is_decimal128,
)
"""types that Spark returns as it got them; timestamps it gives its session's zone"""


def fuse(tasks: Mapping[str, StepTask]) -> dict[str, StepTask]:
    """Join the tasks of operators that run together: the first has the one behind it in `StepTask.fused`.

    Args:
        tasks: operator -> its task, of all operators that the step runs.

    Returns:
        The same of those alone that run behind no other.
    """
    behind = dict[str, str]()
    for name, task in tasks.items():
        readers = [other for other in tasks.values() if task.operator.outputs.keys() & {*other.operator.input_names}]
        if len(readers) == 1 and readers[0].operator.reads == name and _may_fuse(task.operator, readers[0]):
            behind[name] = readers[0].operator.name

    def whole(name: str) -> StepTask:
        return replace(tasks[name], fused=whole(behind[name])) if name in behind else tasks[name]

    return {name: whole(name) for name in tasks if name not in behind.values()}


def _may_fuse(maker: Operator, reader: StepTask) -> bool:
    """Whether the rows of an operator's output are in the subtasks of their reader already, and as Spark would bring
    them."""
    operator, output = reader.operator, maker.output
    if not maker.keeps_key or operator.reads_several or operator.combined is not None or operator.order_by:
        return False
    keys, names = [(field.name, field.type) for field in maker.key], [name.casefold() for name in output.names]
    if len(set(names)) < len(names) or any(name.startswith("__") for name in names):
        return False  # Spark does not tell them apart, or the engine uses them
    wanted = _columns(reader, output)
    return (
        keys == [(field.name, field.type) for field in operator.key]
        and {*wanted} <= {*output.names}
        and all(_is_carried(output.field(name).type) for name in wanted)
        and all(_is_carried(field.type, nested=True) for field in output)
    )


def _columns(reader: StepTask, output: pa.Schema) -> list[str]:
    """List the columns that an operator reads of its only input, the key's first."""
    (name,) = reader.operator.input_names
    read = list_columns(reader.operator, name, output.names, reader.times.get(name))
    return list(dict.fromkeys([*reader.operator.key.names, *read]))


def _is_carried(kind: pa.DataType, *, nested: bool = False) -> bool:
    """Whether Spark has columns of a type, and returns flat ones as they were but for the zone."""
    if nested and pa.types.is_struct(kind):
        return all(_is_carried(field.type, nested=True) for field in kind)
    if nested and pa.types.is_list(kind):
        return _is_carried(kind.value_type, nested=True)
    if pa.types.is_timestamp(kind):
        return kind.unit == "us"
    return any(is_kind(kind) for is_kind in _CARRIED)


def run_fused(
    tasks: Sequence[StepTask], subtask: int, batches: Iterator[pa.RecordBatch], zone: str, run: RunSubtask
) -> Iterator[pa.RecordBatch]:
    """Run a step of an operator and of those that are fused to it, each while the one before it returns rows.

    Args:
        tasks: theirs, each by itself.
        batches: the rows of the first one.
        zone: the time zone of Spark's session, which timestamps get.

    Yields:
        What the last one does, and before that the acknowledgements of the others.
    """
    task, *behind = tasks
    if not behind:
        yield from run(task, batches)
        return
    told = list[pa.RecordBatch]()

    def rows() -> Iterator[pa.RecordBatch]:
        for batch in run(task, batches):
            said = batch.column(ACKNOWLEDGEMENT)
            if not said.null_count:
                told.append(acknowledgement_batch(said, tasks[-1]))
                if Acknowledgement.from_bytes(said[0].as_py()).error is not None:
                    raise StateError(f"operator {task.operator.name}, whose output it reads, has failed")
                continue
            name, made = rows_of_output(task.operator, batch)
            if name == task.operator.name:  # else it is for a sink alone
                yield made

    for batch in run_fused(behind, subtask, _rows_behind(task, subtask, behind[0], rows(), zone), zone, run):
        while told:
            yield told.pop(0)
        yield batch


def _rows_behind(
    task: StepTask, subtask: int, reader: StepTask, batches: Iterator[pa.RecordBatch], zone: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that an operator returned as the one behind it reads them."""
    for batch in join_batches(batches):
        table = pa.Table.from_batches([batch.select(_columns(reader, batch.schema))])
        kinds = [pa.timestamp("us", zone) if getattr(f.type, "tz", None) else f.type for f in table.schema]
        table = table.cast(pa.schema(zip(table.column_names, kinds, strict=True)))
        hashes = check_keys(task, subtask, table)
        yield from table.append_column(HASH, pa.array(hashes.view(np.int64))).to_batches()


def check_keys(task: StepTask, subtask: int, output: pa.Table) -> np.ndarray:
    """Return the hashes of the keys of rows that an operator has returned which says that it keeps the key.

    Raises:
        UsageError: one has a key of another subtask.
    """
    hashes = hash_keys(output, task.operator)
    if not task.owns(subtask, hashes).all():
        raise UsageError(
            f"operator {task.operator.name} returned a row of another key than those of its rows: set keeps_key = False"
        )
    return hashes
