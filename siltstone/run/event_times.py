"""The event times of the rows that an operator reads: which are bad, which are late, and how far each source is."""

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from siltstone.errors import BadRow
from siltstone.operator import COMBINED_ROWS
from siltstone.rows import spread
from siltstone.run.inputs import read_column
from siltstone.run.phase_timer import PhaseTimer
from siltstone.run.task import StepTask
from siltstone.state.columns import fixed_values, null_mask, one_array, read_times
from siltstone.time.clock_rules import FOREVER, OperatorClock, check_partitions, describe_watermark
from siltstone.time.event_time import RowTimes, partition_name
from siltstone.times import show_us


def find_bad_times(task: StepTask, table: pa.Table) -> Iterator[BadRow]:
    """Find the rows whose event time is null, or too far ahead: an error for each of the two, and each input."""
    for name, times in task.times.items():
        if task.clock is not None and times.is_checked:
            yield from _find_bad_times(task, table, name, times, task.clock)


def _find_bad_times(
    task: StepTask, table: pa.Table, name: str, times: RowTimes, clock: OperatorClock
) -> Iterator[BadRow]:
    what = f"operator {task.operator.name}: event time {times.column}"
    places, column = read_column(task.operator, name, table, times.column)
    at, null, count = read_times(column), null_mask(column), table.num_rows
    if null.any():
        rows = spread(null, places, count)
        yield BadRow(f"{what} is null in {count_rows(task, table, rows)} rows", rows=rows, reason=f"{what} is null")
    if times.max_ahead_us is None:
        return
    ahead = ~null & (at > min(clock.now_us + times.max_ahead_us, FOREVER))
    if ahead.any():
        reason = f"{what} is too far ahead of the time of day (max_ahead of EventTime)"
        said = f"{reason}: {show_us(int(at[ahead][0]))} in a step of {show_us(clock.now_us)}"
        yield BadRow(said, rows=spread(ahead, places, count), reason=reason)


def find_late(task: StepTask, table: pa.Table) -> list[tuple[np.ndarray, str]]:
    """Return which rows are late (bool[n]), and why; no row twice, and nothing if none is."""
    clock, found = task.clock, list[tuple[np.ndarray, str]]()
    if task.late is None or clock is None or clock.before_us is None:
        return []
    for name, times in task.times.items():
        places, column = read_column(task.operator, name, table, times.column)
        late = ~null_mask(column) & task.operator.find_late(read_times(column), clock.before_us)
        if late.any():
            watermark = describe_watermark(clock.before_us)
            what = f"operator {task.operator.name}: late: event time {times.column}"
            found.append((spread(late, places, table.num_rows), f"{what} is before the watermark {watermark}"))
    return found


def count_rows(task: StepTask, table: pa.Table, which: np.ndarray) -> int:
    """Count some rows (bool[n]); one that was combined before the shuffle counts as those that it stands for."""
    if task.operator.combined is None or COMBINED_ROWS not in table.column_names:  # a source may have such a column
        return int(which.sum())
    return int(fixed_values(one_array(table.column(COMBINED_ROWS)))[which].sum())


class HeardTimes:
    """Measures how far each partition of the sources is in the rows of one subtask.

    Attributes:
        heard: source -> partition -> its highest event time (microseconds since 1970) that is not bad.
    """

    def __init__(self, task: StepTask) -> None:
        self.heard: dict[str, dict[str, int]] = {}
        self._task = task

    def watch(self, batches: Iterator[pa.RecordBatch], clock: PhaseTimer) -> Iterator[pa.RecordBatch]:
        """Yield the rows, and measure them.

        Raises:
            UsageError: a source has too many partitions.
        """
        step = self._task.clock
        if step is None or all(times.max_ahead_us is None for times in self._task.times.values()):
            yield from batches
            return
        for batch in batches:
            with clock.phase("digest"):
                for name, times in self._task.times.items():
                    if times.max_ahead_us is not None:
                        self._measure(batch, name, times, min(step.now_us + times.max_ahead_us, FOREVER))
            yield batch

    def _measure(self, batch: pa.RecordBatch, name: str, times: RowTimes, most: int) -> None:
        operator = self._task.operator
        _, column = read_column(operator, name, batch, times.column)
        at, null = read_times(column), null_mask(column)
        fits = ~null & (at <= most)
        if not fits.any():
            return
        if not times.partition:
            self._hear(name, {"": int(at[fits].max())})
            return
        told = [read_column(operator, name, batch, each)[1] for each in times.partition]
        parts = pa.table({f"p{n}": column for n, column in enumerate(told)})
        highs = parts.append_column("at", pa.array(at)).filter(pa.array(fits)).group_by(parts.column_names)
        found = highs.aggregate([("at", "max")]).to_pylist()
        names = parts.column_names
        self._hear(name, {partition_name(times.partition, (row[n] for n in names)): row["at_max"] for row in found})

    def _hear(self, source: str, found: Mapping[str, int]) -> None:
        heard = self.heard.setdefault(source, {})
        for name, high in found.items():
            heard[name] = max(high, heard.get(name, high))
        check_partitions(len(heard))
