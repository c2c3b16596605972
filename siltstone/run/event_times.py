"""The event times of the rows that an operator reads: which are bad, which are late, and how far each source is."""

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from siltstone.errors import BadRow
from siltstone.operator import COMBINED_ROWS
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import StepTask
from siltstone.state.columns import fixed_values, null_mask, one_array, read_times
from siltstone.time.clock_rules import FOREVER, check_partitions, describe_watermark
from siltstone.time.event_time import partition_name
from siltstone.times import show_us


def find_bad_times(task: StepTask, table: pa.Table) -> Iterator[BadRow]:
    """Find the rows whose event time is null, or too far ahead: an error for each of the two."""
    times, clock = task.times, task.clock
    if times is None or clock is None or not times.is_checked:
        return
    what = f"operator {task.operator.name}: event time {times.column}"
    column = table.column(times.column)
    at, null = read_times(column), null_mask(column)
    if null.any():
        yield BadRow(f"{what} is null in {count_rows(task, table, null)} rows", rows=null, reason=f"{what} is null")
    if times.max_ahead_us is None:
        return
    ahead = ~null & (at > min(clock.now_us + times.max_ahead_us, FOREVER))
    if ahead.any():
        reason = f"{what} is too far ahead of the time of day (max_ahead of EventTime)"
        first = show_us(int(at[ahead][0]))
        yield BadRow(f"{reason}: {first} in a step of {show_us(clock.now_us)}", rows=ahead, reason=reason)


def find_late(task: StepTask, table: pa.Table) -> np.ndarray | None:
    """Return which rows are late (bool[n]); None if none can be."""
    times, clock = task.times, task.clock
    if times is None or times.late is None or clock is None or clock.before_us is None:
        return None
    column = table.column(times.column)
    at, null = read_times(column), null_mask(column)
    late = ~null & task.operator.find_late(at, clock.before_us)
    return late if late.any() else None


def count_rows(task: StepTask, table: pa.Table, which: np.ndarray) -> int:
    """Count some rows (bool[n]); one that was combined before the shuffle counts as those that it stands for."""
    if task.operator.combined is None or COMBINED_ROWS not in table.column_names:  # a source may have such a column
        return int(which.sum())
    return int(fixed_values(one_array(table.column(COMBINED_ROWS)))[which].sum())


def late_reason(task: StepTask) -> str:
    """Say why a row is late."""
    assert task.times is not None and task.clock is not None, "it was told late by them"
    watermark = describe_watermark(task.clock.before_us)
    return f"operator {task.operator.name}: late: event time {task.times.column} is before the watermark {watermark}"


class HeardTimes:
    """Measures how far each partition of the source is in the rows of one subtask.

    Attributes:
        heard: partition -> its highest event time (microseconds since 1970) that is not bad.
    """

    def __init__(self, task: StepTask) -> None:
        self.heard: dict[str, int] = {}
        self._task = task

    def watch(self, batches: Iterator[pa.RecordBatch], clock: PhaseTimer) -> Iterator[pa.RecordBatch]:
        """Yield the rows, and measure them.

        Raises:
            UsageError: the source has too many partitions.
        """
        times, step = self._task.times, self._task.clock
        if times is None or times.max_ahead_us is None or step is None:
            yield from batches
            return
        most = min(step.now_us + times.max_ahead_us, FOREVER)
        for batch in batches:
            with clock.phase("digest"):
                self._measure(batch, times.column, times.partition, most)
            yield batch

    def _measure(self, batch: pa.RecordBatch, column: str, partition: tuple[str, ...], most: int) -> None:
        at, null = read_times(batch.column(column)), null_mask(batch.column(column))
        fits = ~null & (at <= most)
        if not fits.any():
            return
        if not partition:
            self._hear({"": int(at[fits].max())})
            return
        parts = pa.table({f"p{n}": batch.column(name) for n, name in enumerate(partition)})
        highs = parts.append_column("at", pa.array(at)).filter(pa.array(fits)).group_by(parts.column_names)
        found = highs.aggregate([("at", "max")]).to_pylist()
        names = parts.column_names
        self._hear({partition_name(partition, (row[n] for n in names)): row["at_max"] for row in found})

    def _hear(self, found: Mapping[str, int]) -> None:
        for name, high in found.items():
            self.heard[name] = max(high, self.heard.get(name, high))
        check_partitions(len(self.heard))
