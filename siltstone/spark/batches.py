"""How many rows Spark hands to a Python task at once.

Newer versions of Spark bound the bytes of a batch (`spark.sql.execution.arrow.maxBytesPerBatch`). To know them, Spark
measures the batch after each row, which takes as long as all else that it does for the row in Python's stage, and
several times as long for the structs of several inputs (ADR 83). `BatchBounds` lifts the bound while rows are narrow,
and gives batches few rows instead. `join_batches` joins them again, because each takes a digest and a call of all that
handles it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.operator import Operator
from siltstone.spark.versions import has_setting

BYTES, ROWS = "spark.sql.execution.arrow.maxBytesPerBatch", "spark.sql.execution.arrow.maxRecordsPerBatch"
UNBOUNDED = str((1 << 31) - 1)
_BATCH_BYTES = 4 << 20
"""about what a batch has that is not measured; Spark's bound is 64 MiB"""
_LEAST_ROWS, _MOST_ROWS = 1 << 11, 1 << 13
NARROW_BYTES = _BATCH_BYTES // _LEAST_ROWS
"""the most bytes of a narrow row, on average over a subtask's rows of a step"""
_JOINED_ROWS = 1 << 17
_JOINED_BYTES = 64 << 20


class BatchBounds:
    """Lifts Spark's bound of bytes in the session of one query, and puts it back.

    It stays where a user has set one; where Python code of a user's runs in the source, since nobody knows how wide the
    rows are that it gets; and where rows are combined before the shuffle. It is lifted once the run has completed a
    checkpoint. So a run that comes after one which failed because rows were suddenly far wider gets past them.

    Args:
        operators: those of the stream.
    """

    def __init__(self, operators: Iterable[Operator]) -> None:
        self._may_lift = all(operator.combined is None for operator in operators)
        self._given: dict[str, str | None] = {}
        self._chosen: dict[str, str | None] = {}
        self._widest, self._is_proven = 0.0, False

    def begin(self, rows: DataFrame, plan: Any) -> None:
        """Look at the query's first micro-batch.

        Args:
            plan: the query's analyzed plan, of the JVM: that of `rows` does not have what comes before `foreachBatch`.
        """
        frame, jvm = cast("Any", rows)._jdf, cast("Any", rows.sparkSession)._jvm
        self._given = self._chosen = {name: rows.sparkSession.conf.get(name, None) for name in (BYTES, ROWS)}
        python = jvm.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()
        runs_python = any(each.containsPattern(python) for each in (plan, frame.queryExecution().analyzed()))
        is_bounded = has_setting(rows.sparkSession, BYTES) and self._given[BYTES] is None
        self._may_lift = self._may_lift and is_bounded and not runs_python

    def note(self, received: Iterable[Acknowledgement]) -> None:
        """Note how wide the rows of a step were."""
        self._widest = max([self._widest, *(each.bytes_in / each.rows_in for each in received if each.rows_in)])

    def note_checkpoint(self) -> None:
        """Note that the run has completed a checkpoint."""
        self._is_proven = True

    def choose(self, spark: SparkSession) -> None:
        """Set the session of the query for its next step."""
        lifts = self._may_lift and self._is_proven and 0 < self._widest <= NARROW_BYTES
        lifted: dict[str, str | None] = {BYTES: UNBOUNDED, ROWS: str(rows_a_batch(self._widest))} if lifts else {}
        chosen = lifted or self._given
        if chosen == self._chosen:
            return
        self._chosen = chosen
        for name, value in chosen.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def rows_a_batch(widest: float) -> int:
    """Return how many rows a batch has that is not measured: a power of two, since it seldom changes then."""
    fits = int(_BATCH_BYTES / widest)
    return 1 << (min(max(fits, _LEAST_ROWS), _MOST_ROWS).bit_length() - 1)


def join_batches(batches: Iterator[pa.RecordBatch], most_rows: int = _JOINED_ROWS) -> Iterator[pa.RecordBatch]:
    """Join consecutive batches to batches of at most `most_rows` and 64 MiB; one that is larger stays as it is."""
    waiting, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > most_rows or size + batch.nbytes > _JOINED_BYTES):
            joined, waiting, rows, size = _joined(waiting), [], 0, 0
            yield from joined
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    yield from _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return batches if len(batches) < 2 else pa.Table.from_batches(batches).combine_chunks().to_batches()
