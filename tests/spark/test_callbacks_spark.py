"""Callbacks of operators, and their requests for checkpoints, while a stream runs in Spark."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError
from siltstone.operator import CheckpointWriter, OperatorCheckpoint, OperatorContext, Rows, State
from siltstone.spark.operations import RunRequest, replay, rescale, run
from tests.examples import long_form
from tests.spark_runs import at, check_proven
from tests.spark_streams import COUNTS, STEPS, Counts, keyed, source_of

pytestmark = pytest.mark.usefixtures("spark")
WANTED = keyed([1, 4], [7, 77])
SIX = source_of([STEPS[0], STEPS[3], WANTED, STEPS[0], STEPS[3], STEPS[0]])


class Asking(Counts):
    """Asks for a checkpoint at one value, and says at each checkpoint what it has seen elsewhere."""

    output = pa.schema([("key", pa.int64())])

    def process(self, rows: Rows, state: State) -> None:
        """Count, and ask."""
        super().process(rows, state)
        if 77 in rows.table["value"].to_pylist():
            state.request_checkpoint()

    def drain(self, state: State) -> pa.Table:
        """One row for each subtask."""
        return pa.table({"key": [0]})

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Name the checkpoint."""
        checkpoint.write(str(checkpoint.id).encode())

    def checkpoint(self, checkpoint: OperatorCheckpoint) -> None:
        """Both subtasks have prepared it."""
        assert checkpoint.prepared == (str(checkpoint.id).encode(),) * 2

    def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
        """Each subtask gets its own."""
        assert checkpoint.prepared == (str(checkpoint.id).encode(),)


class Refusing(Asking):
    """Cannot be checkpointed twice."""

    def checkpoint(self, checkpoint: OperatorCheckpoint) -> None:
        """Fail."""
        assert checkpoint.id < 2, "the other system is full"


@pytest.mark.parametrize("max_pending", [0, 2])
def test_a_checkpoint_that_an_operator_asks_for_follows_its_step(tmp_path: Path, max_pending: int) -> None:
    stream = replace(COUNTS, source=SIX, operators=[Asking()], sinks={"counts": None})
    settings = at(tmp_path / "w", checkpoint_steps=1000, max_pending=max_pending)
    run(settings, stream, RunRequest(batches=5))
    run(settings, stream, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        newest = place.catalog.checkpoints.last_id("counts")
        log = place.catalog.input_log.list("counts", newest)
        assert [[s.step for s in log if s.checkpoint == n] for n in range(1, newest + 1)] == [
            [1, 2, 3, 4],
            [5, 6],
            [7, 8],
        ]
    check_proven(settings, "counts")


class Draining(Counts):
    """Hands on what it has counted only when it drains, and prepares a name of it."""

    output = pa.schema([("key", pa.int64()), ("value", pa.int64())])

    def open(self, context: OperatorContext) -> None:
        """Every key of a checkpoint has its subtask's number."""
        self.context = context

    def drain(self, state: State) -> pa.Table:
        """One row, which changes with each checkpoint."""
        assert self.context.checkpoint is not None
        return pa.table({"key": [self.context.subtask], "value": [self.context.checkpoint]})

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Name the checkpoint and the subtask."""
        checkpoint.write(b"%d:%d" % (checkpoint.id, self.context.subtask))

    def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
        """Several subtasks may have prepared it, or none."""
        assert len(checkpoint.prepared) <= 2


def test_a_stream_that_prepares_and_drains_is_rescaled_and_replayed(tmp_path: Path) -> None:
    """Issue 32, `prepared_rescale.py`. The second checkpoint ends with a step without rows."""
    stream = replace(COUNTS, source=SIX, operators=[Draining(), Counts(name="reader", reads="counts")])
    settings = at(tmp_path / "w", checkpoint_steps=2)
    assert run(settings, stream, RunRequest(batches=3)).checkpoints == [1, 2]
    rescaled = rescale(settings, stream, 4)
    found = replay(settings, stream)
    assert (found.compared, found.digest) == (3, rescaled.digest)
    check_proven(settings, "counts")


@pytest.mark.parametrize("max_pending", [long_form(0), 2])
def test_a_callback_that_fails_ends_the_run_with_its_error(tmp_path: Path, max_pending: int) -> None:
    settings = at(tmp_path / "w", max_pending=max_pending)
    stream = replace(COUNTS, source=SIX, operators=[Refusing()])
    with pytest.raises(StateError, match="operator counts: AssertionError: the other system is full"):
        run(settings, stream, RunRequest())
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.checkpoints.last_id("counts") == 1
    assert run(settings, replace(stream, operators=[Asking()]), RunRequest()).checkpoints == [2, 3, 4, 5, 6]
    check_proven(settings, "counts")
