"""Keep each subtask on the executor that has its working state.

Spark sends the tasks of a shuffle to any executor. So a step's rows are joined with a frame of one row per subtask,
partitioned like the rows and persisted: the join needs no further exchange, and its tasks prefer the executors that
hold the persisted partitions. Spark lets the side of the rows decide instead, by where most of the shuffle's input is,
unless `spark.shuffle.reduceLocality.enabled` is false.

A subtask whose executor dies stays on the one that computes its partition again. When executors have come or gone,
the frame is persisted anew after the next checkpoint: subtasks per core then differ by at most one, and as few as
possible move (`placement_rules`). Between checkpoints nothing is moved on purpose: another machine would have to
restore the state, or roll it forward.
"""

import threading
from functools import cached_property
from itertools import count
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from siltstone.log import get_logger
from siltstone.spark.masters import is_local
from siltstone.spark.placement_rules import assign_subtasks
from siltstone.spark.types import quote
from siltstone.spark.versions import PARTITION, repartition_by_id
from siltstone.store.open import Warehouse

SUBTASK = "__subtask"
"""the column of a placement's frame that the rows of a step are joined on"""
_GENERATION = "__generation"
PLACED = (SUBTASK, _GENERATION, PARTITION)
"""the columns of a placement's frame, and of rows while they are shuffled"""
REDUCE_LOCALITY = "spark.shuffle.reduceLocality.enabled"
_LOG = get_logger(__name__)
_GENERATIONS = count()
_DRIVER = "driver"
_placements: dict[tuple[str, str, str], "Placement"] = {}
"""(application, warehouse's identity, stream) -> its placement"""
_lock = threading.Lock()


def placement_of(spark: Any, warehouse: Warehouse, stream: str, chosen: bool | None = None) -> "Placement | None":
    """Return the placement of the subtasks of a warehouse's stream in this Spark application; None if there is none.

    It outlives a run: the next one of the same application finds the working state where this one left it.

    Args:
        spark: the session that runs the steps; a Spark Connect session has no placement.
        chosen: whether subtasks are placed; None places them unless the master is local.
    """
    if not isinstance(spark, SparkSession):
        return None
    context: Any = spark.sparkContext
    if chosen is False or (chosen is None and is_local(context.master)):
        return None
    key = (context.applicationId or "", warehouse.identity, stream)
    with _lock:
        if key not in _placements:
            _placements[key] = Placement(spark)
    placement = _placements[key]
    return placement if placement.is_possible else None


def shuffle(rows: DataFrame, parallelism: int, subtask: str, placed: DataFrame | None) -> DataFrame:
    """Shuffle rows to the partitions of their subtasks.

    Args:
        subtask: the subtask of a row, an integer in SQL.
        placed: the frame of a placement, which decides on which executors the tasks run; None leaves it to Spark.
    """
    shuffled, ours = repartition_by_id(rows, parallelism, subtask, joined=placed is not None)
    if placed is None:
        return shuffled
    theirs = placed[PARTITION if PARTITION in placed.columns else SUBTASK]
    # An outer join: no row depends on it, and no column of it is used.
    return shuffled.join(placed.hint("shuffle_hash"), ours == theirs, "left").select(*map(quote, rows.columns))


def stays_in_place(spark: Any, warehouse: Warehouse, stream: str, chosen: bool | None = None) -> bool:
    """Whether each subtask runs where its working state is as long as no executor is lost: on one machine, or placed.

    Args: see `placement_of`.
    """
    if isinstance(spark, SparkSession) and is_local(spark.sparkContext.master):
        return True
    return placement_of(spark, warehouse, stream, chosen) is not None


class Placement:
    """The executors of one stream's subtasks; used by one thread at a time.

    Args:
        spark: a session of the application.
    """

    def __init__(self, spark: SparkSession) -> None:
        # The frame must keep its partitions, which adaptive execution would coalesce.
        self._spark = spark.newSession()
        self._spark.conf.set("spark.sql.adaptive.enabled", "false")
        self._context: Any = spark.sparkContext
        self._frame: DataFrame | None = None
        self._parallelism = 0
        self._located: list[str | None] = []
        """per subtask, the executor that held its partition when it was last looked up"""
        self._moves = 0
        self._cores: dict[str, int] = {}
        """the executors that the subtasks were assigned to, as of the last assignment"""

    @cached_property
    def is_possible(self) -> bool:
        """Whether the session's settings let placement work; warns once if they do not."""
        possible = self._context.getConf().get(REDUCE_LOCALITY, "true") == "false"
        if not possible:
            _LOG.warning(
                f"subtasks are not placed, so their state is often restored: start Spark with {REDUCE_LOCALITY}=false"
            )
        return possible

    def frame(self, parallelism: int, *, movable: bool) -> DataFrame:
        """Return the persisted frame: `parallelism` partitions, each with the row of one subtask.

        Args:
            movable: whether subtasks may move, because the newest checkpoint has all their state.
        """
        if self._frame is None or parallelism != self._parallelism:
            self._place(parallelism, [None] * parallelism)
        elif movable and (executors := self._executors()) != self._cores:
            located = self._locate()
            self._count_moves(located)
            self._cores = executors
            if assign_subtasks(located, executors) != located:
                self._place(parallelism, located)
        assert self._frame is not None
        return self._frame

    def _place(self, parallelism: int, current: list[str | None]) -> None:
        """Persist a frame anew, with each partition on the executor that is assigned to its subtask."""
        self._cores = self._executors()
        assigned = assign_subtasks(current, self._cores)
        # Spark takes equal plans for one persisted frame, so each has a number of its own.
        subtasks = self._spark.range(0, parallelism, 1, 1).select(
            F.col("id").cast("int").alias(SUBTASK), F.lit(next(_GENERATIONS)).alias(_GENERATION)
        )
        placed, _ = repartition_by_id(subtasks, parallelism, SUBTASK, joined=True)
        before, self._frame = self._frame, placed.persist()
        self._parallelism, self._located = parallelism, current
        if assigned:
            self._compute_at(assigned)
            located = self._locate()
            if located != assigned:  # an executor was busy or has died: try again after the next checkpoint
                self._cores = {}
            moved = self._count_moves(located)
            _LOG.info("subtasks placed", executors=len(set(located)), subtasks=parallelism, moved=moved)
        if before is not None:
            before.unpersist()

    def take_moves(self) -> int:
        """Return how often a subtask was moved to another executor since the last call, as far as it was looked up."""
        moves, self._moves = self._moves, 0
        return moves

    def _count_moves(self, located: list[str | None]) -> int:
        before = self._located or located
        moved = sum(old not in (None, new) for old, new in zip(before, located, strict=True))
        self._moves, self._located = self._moves + moved, located
        return moved

    def _compute_at(self, executors: list[str]) -> None:
        """Compute each partition of the frame on its executor, by zipping the frame with partitions located there."""
        jvm = self._context._jvm
        located = [jvm.scala.Tuple2(n, jvm.PythonUtils.toSeq([executor])) for n, executor in enumerate(executors)]
        tag = getattr(getattr(jvm.scala.reflect, "ClassTag$"), "MODULE$").Object()
        there = self._context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq(located), tag).toJavaRDD()
        there.zip(self._rdd().toJavaRDD()).count()

    def _locate(self) -> list[str | None]:
        """Find, per subtask, the executor that holds its partition of the frame."""
        context, rdd, found = self._context._jsc.sc(), self._rdd(), []
        rdd.count()  # Spark knows the locations as of the begin of its newest job
        for subtask in range(self._parallelism):
            locations = context.getPreferredLocs(rdd, subtask)
            found.append(locations.head().toString() if locations.nonEmpty() else None)
        return found

    def _rdd(self) -> Any:
        assert self._frame is not None
        frame: Any = self._frame._jdf
        return frame.queryExecution().toRdd()

    def _executors(self) -> dict[str, int]:
        """Map each living executor, named as Spark names the location of a task, to its cores."""
        listed = self._context._jsc.sc().statusStore().executorList(True)
        executors = [listed.apply(n) for n in range(listed.size())]
        return {
            f"executor_{each.hostPort().rpartition(':')[0]}_{each.id()}": each.totalCores()
            for each in executors
            if each.id() != _DRIVER and each.totalCores() > 0
        }
