"""Run logged micro-batches again with the same rows and the same boundaries.

`SourceLog.rerun` makes a logged batch the first one of a query, and Spark runs it with the offsets, the watermark and
the `current_timestamp()` that were logged. This holds only for the first batch of a query, so each logged batch gets a
query of its own.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import DataFrame

from siltstone.catalog.records.source_entries import LoggedFile
from siltstone.catalog.records.steps import Step
from siltstone.errors import InputChanged, StateError
from siltstone.spark.queries import ReadFile, read_files, source_names
from siltstone.spark.source_log import SourceLog

POLL_S = 0.05
NAMED_FILES = 3
"""most files that an error names"""


def rerun_batch(source: DataFrame, log: SourceLog, step: Step, work: Callable[[DataFrame], None]) -> None:
    """Run one logged batch of a streaming DataFrame again, after all logged ones before it.

    Args:
        log: prepared with the batches up to a checkpoint; later ones before this batch were rerun with it.
        work: called once with the batch's rows, on another thread, while the caller waits.

    Raises:
        InputChanged: a file that the batch read does not exist any more, and Spark would run the batch without it; or
            it has another size, or `work` found other rows.
        Exception: an error of `work` or of Spark.
        StateError: Spark ended the query without running the batch.
    """

    def checked(rows: DataFrame) -> None:
        log.check_names(source_names(rows.sparkSession, log.query_id), step)
        logged = [file for file in log.files_of(step) if file.unread is None]
        found = read_files(rows.sparkSession, log.query_id) if logged else {}
        _check_files(step, logged, found)
        try:
            work(rows)
        except InputChanged as error:
            raise _with_files(error, logged, found) from error

    log.rerun(step)
    batch = _LoggedBatch(step, log.number(step.batch), checked)
    writer = source.writeStream.foreachBatch(batch).option("checkpointLocation", log.url)
    query = writer.trigger(availableNow=True).start()
    try:
        while not batch.done.wait(POLL_S) and query.isActive:
            pass
    finally:
        batch.stop()
        query.stop()
    if batch.failure is not None:
        raise batch.failure
    if not batch.done.is_set():
        raise query.exception() or StateError(f"Spark did not run batch {step.batch_id} again")


def _check_files(step: Step, logged: Sequence[LoggedFile], found: Mapping[str, ReadFile]) -> None:
    for file in logged:
        now = found.get(file.path)
        if now is None and file.size is None and len(found) >= len({each.path for each in logged}):
            continue  # Spark names it otherwise, so that its size was not found the first time, either
        if now is None:
            raise InputChanged(f"source data of step {step.step} are missing: {file.path} does not exist")
        if file.size is not None and now.size is not None and file.size != now.size:
            raise InputChanged(
                f"step {step.step} is run again, and {file.path} has {now.size} bytes, and had {file.size} before"
            )


def _with_files(error: InputChanged, logged: Sequence[LoggedFile], found: Mapping[str, ReadFile]) -> InputChanged:
    """Name the step's files: those that were modified since, if there are any. The modification time alone says
    nothing: files that were moved have another one, too."""
    modified = [each.path for each in logged if each.path in found and found[each.path].modified_ms != each.modified_ms]
    named = modified or [file.path for file in logged]
    if not named:
        return error
    shown = ", ".join(named[:NAMED_FILES]) + (f" and {len(named) - NAMED_FILES} more" if named[NAMED_FILES:] else "")
    said = "modified since then:" if modified else "its files:"
    return InputChanged(f"{error.message} ({said} {shown})", advice=error.advice)


class _LoggedBatch:
    """The function that the query calls: first with the logged batch, then, until it is stopped, with unwanted ones."""

    def __init__(self, step: Step, number: int, work: Callable[[DataFrame], None]) -> None:
        self.step = step
        self.number = number
        self.work = work
        self.done = threading.Event()
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._busy = threading.Lock()

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Do the work, then block, so that Spark plans no further batch until the query is stopped."""
        with self._busy:
            if not self.done.is_set() and not self._stopping.is_set():
                try:
                    if batch != self.number:
                        raise StateError(f"Spark ran batch {batch} where {self.number} was logged")
                    self.work(rows)
                except BaseException as error:
                    self.failure = error
                    raise
                finally:
                    self.done.set()
        self._stopping.wait()

    def stop(self) -> None:
        """Wait for work in progress, and let no more begin."""
        self._stopping.set()
        with self._busy:
            pass
