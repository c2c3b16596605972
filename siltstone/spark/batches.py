"""How many rows Spark hands to a Python task at once.

Newer versions of Spark bound the bytes of a batch (`spark.sql.execution.arrow.maxBytesPerBatch`). To know them, Spark
measures the batch after each row, which takes as long as all else that it does for the row in Python's stage, and
several times as long for the structs of several inputs (ADR 83). `BatchBounds` lifts the bound while rows are narrow,
and gives batches few rows instead. `run.processing.join_batches` joins them again, because each takes a digest and a
call of all that handles it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.operator import Operator
from siltstone.spark.plans import runs_python
from siltstone.spark.versions import has_setting

BYTES, ROWS = "spark.sql.execution.arrow.maxBytesPerBatch", "spark.sql.execution.arrow.maxRecordsPerBatch"
UNBOUNDED = str((1 << 31) - 1)
_BATCH_BYTES = 4 << 20
"""about what a batch has that is not measured; Spark's bound is 64 MiB"""
_LEAST_ROWS, _MOST_ROWS = 1 << 11, 1 << 13
NARROW_BYTES = _BATCH_BYTES // _LEAST_ROWS
"""the most bytes of a narrow row (`Acknowledgement.row_bytes`)"""


class BatchBounds:
    """Lifts Spark's bound of bytes in the session of one query, during its steps.

    It stays where a user has set one; where Python code of a user's runs in the query or in `foreachBatch`, since
    nobody knows how wide the rows are that it gets; and where rows are combined before the shuffle. It stays until the
    query has completed a checkpoint: a run that failed because rows were suddenly far wider is followed by one with at
    least one more checkpoint, and in the end by one that has seen them.

    Args:
        operators: those of the stream.
    """

    def __init__(self, operators: Iterable[Operator]) -> None:
        self._combines = any(operator.combined is not None for operator in operators)
        self._may_lift, self._is_proven, self._widest = False, False, 0.0

    def begin(self, spark: SparkSession, plan: Any) -> None:
        """Begin a query.

        Args:
            spark: the session of its micro-batches.
            plan: its analyzed plan, of the JVM: that of a micro-batch does not have what comes before `foreachBatch`.
        """
        given = spark.conf.get(BYTES, None)
        is_bounded = given is None and has_setting(spark, BYTES) and UNBOUNDED not in str(spark.conf.get(BYTES))
        self._is_proven = False
        self._may_lift = is_bounded and not self._combines and not runs_python(spark, plan)

    def note(self, received: Iterable[Acknowledgement]) -> None:
        """Note how wide the rows of a step were."""
        self._widest = max([self._widest, *(each.row_bytes for each in received)])

    def note_checkpoint(self) -> None:
        """Note that a checkpoint is complete."""
        self._is_proven = True

    @contextmanager
    def lifted(self, rows: DataFrame | None) -> Iterator[None]:
        """Lift the bound while a step runs, if that is allowed."""
        narrow = self._is_proven and 0 < self._widest <= NARROW_BYTES
        if rows is None or not (self._may_lift and narrow) or runs_python(rows.sparkSession, _plan_of(rows)):
            yield
            return
        conf = rows.sparkSession.conf
        given = {name: conf.get(name, None) for name in (BYTES, ROWS)}
        conf.set(BYTES, UNBOUNDED)
        conf.set(ROWS, str(rows_a_batch(self._widest, given[ROWS])))
        try:
            yield
        finally:
            for name, value in given.items():
                if value is None:
                    conf.unset(name)
                else:
                    conf.set(name, value)


def _plan_of(rows: DataFrame) -> Any:
    return cast("Any", rows)._jdf.queryExecution().analyzed()


def rows_a_batch(widest: float, given: str | None = None) -> int:
    """Return how many rows a batch has that is not measured.

    Args:
        given: the bound of rows that the session has, if any was set.
    """
    fits = min(max(int(_BATCH_BYTES / widest), _LEAST_ROWS), _MOST_ROWS)
    return min(fits, int(given)) if given is not None and int(given) > 0 else fits
