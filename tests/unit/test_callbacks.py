"""What an operator does where the region drains, is checkpointed and is reset (`StateHandler`)."""

import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.records.steps import StepKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.compare_digests import Digests, check_same_digests
from siltstone.change.export_savepoint import export_savepoint
from siltstone.change.fork import fork
from siltstone.change.import_savepoint import import_savepoint, prove_export
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import BadRow, StateError, UsageError
from siltstone.format.manifests import read_manifest
from siltstone.keyed import KeyedProcessor
from siltstone.operator import CheckpointWriter, Operator, OperatorCheckpoint, Rows, State, ValueState
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.savepoints import set_savepoint
from siltstone.run.subtask import run_subtask_again
from siltstone.run.users_code import OperatorFailed
from siltstone.stream import Stream
from tests.proofs import failures, in_order, restored_digest
from tests.region_run import RegionRun, acknowledgement_of, run_tasks, shuffled
from tests.sums import NAME, POLICY, Sums, rows, stream_of

HEARD: list[tuple[Any, ...]] = []
"""(callback, subtask or None on the driver, what it was told)"""


class Outside(Sums):
    """Keeps a position elsewhere: as many as the rows that it has seen in a step."""

    output = pa.schema([("k", pa.int64()), ("n", pa.int64())])

    def open(self, context: Any) -> None:
        """Begin to count."""
        self.subtask, self.seen = context.subtask, 0

    def process(self, rows: Rows, state: State) -> None:
        """Add and count."""
        super().process(rows, state)
        self.seen += len(rows)

    def drain(self, state: State) -> pa.Table:
        """Return a row of its own."""
        HEARD.append(("drain", self.subtask, self.seen))
        return pa.table({"k": [self.subtask], "n": [self.seen]})

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Name the position."""
        HEARD.append(("prepare", self.subtask, checkpoint.id))
        checkpoint.write(b"%d:%d:%d" % (self.subtask, checkpoint.id, self.seen))

    def checkpoint(self, checkpoint: OperatorCheckpoint) -> None:
        """Note it."""
        HEARD.append(("checkpoint", None, checkpoint))

    def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
        """Note it."""
        HEARD.append(("reset", self.subtask, checkpoint))

    def reset_to_initial_state(self) -> None:
        """Note it."""
        HEARD.append(("initial", self.subtask, None))


@pytest.fixture(autouse=True)
def _nothing_heard() -> None:
    HEARD.clear()


def run(place: OpenWarehouse, operator: Operator | None = None, **options: Any) -> RegionRun:
    return RegionRun(place, stream_of(operator or Outside(name="by_key")), POLICY, **options)


def test_callbacks_come_in_the_order_of_the_protocol(place: OpenWarehouse) -> None:
    steps = run(place, checkpoint_steps=2)
    steps.step(rows(1))
    assert HEARD == [("initial", 0, None)]
    steps.step(rows(2))
    made = OperatorCheckpoint(1, (b"0:1:10",))
    assert HEARD[1:] == [("drain", 0, 10), ("prepare", 0, 1), ("checkpoint", None, made)]
    assert steps.outputs["by_key"].to_pylist() == [{"k": 0, "n": 10}]
    steps.step(rows(3))
    again = run(place)
    HEARD.clear()
    again.step(rows(3))
    again.step(rows(4))
    assert [what for what in HEARD if what[0] == "reset"] == [("reset", 0, made)]
    assert not failures(place, NAME)


def test_what_was_prepared_follows_its_key_groups_when_the_parallelism_changes(place: OpenWarehouse) -> None:
    parts = (b"0:1:", b"1:1:")
    for parallelism, held in (
        (2, [()]),
        (1, [parts]),
        (4, [(b"0:2:",), (), (), ()]),
        (2, [(b"0:3:", b"1:3:"), (b"2:3:", b"3:3:")]),
    ):
        HEARD.clear()
        run(place, parallelism=parallelism).step(rows(1))
        told = [tuple(part[:4] for part in of.prepared) for what, _, of in HEARD if what == "reset"]
        assert told == ([] if held == [()] else held)
    assert not failures(place, NAME)


def heard(what: str) -> list[tuple[int, tuple[bytes, ...]]]:
    """The checkpoints that one callback was told of, and what was prepared for them."""
    return [(of.id, of.prepared) for callback, _, of in HEARD if callback == what]


def digests(place: OpenWarehouse, checkpoint: int) -> Digests:
    manifest = place.catalog.checkpoints.get(NAME, checkpoint).manifest
    return read_manifest(place.warehouse.store, manifest).digests


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("d_max", [0, 3])
def test_an_edit_keeps_what_was_prepared(place: OpenWarehouse, backend: str, d_max: int) -> None:
    """Issue 32, `edit_prepared.py` and `edit_bricks.py`: the edit's operator did not know of it."""
    policy = policy_by_name("marginal-cost", PolicyOptions(d_max=d_max))
    stream = stream_of(Outside(name="by_key"), Outside(name="beside"))

    def opened() -> RegionRun:
        HEARD.clear()
        return RegionRun(place, stream, policy, parallelism=2, backend=backend)

    opened().step(rows(1))
    [(_, parts), _] = heard("checkpoint")
    edit = opened()
    edit.edit("by_key", "totals", pa.table({"k": [1], "n": [1000]}))
    assert heard("checkpoint") == [(2, parts)] * 2 and "prepare" not in {what for what, *_ in HEARD}
    edit.region.close("done")
    assert [[*of] for of in digests(place, 2).values()] == [["totals", "prepared"]] * 2
    for kept in (True, False):
        if not kept:
            shutil.rmtree(place.warehouse.local.work(NAME, 1).parent, ignore_errors=True)
        for id in place.catalog.checkpoints.list(NAME):
            assert not failures(place, NAME, [id.id]) and restored_digest(place, NAME, id.id) == id.digest
        going_on = opened()
        going_on.step(rows(2))
        going_on.region.close("done")
        if kept:
            assert heard("reset") == [(2, parts[:1]), (2, parts[1:])] * 2
    assert not failures(place, NAME)


@pytest.mark.parametrize("parallelism", [1, 4])
def test_a_rescale_keeps_what_was_prepared(place: OpenWarehouse, parallelism: int) -> None:
    """Issue 32, `prepared_rescale.py`: it prepared anew, in other subtasks, and found other digests."""
    run(place, parallelism=2).step(rows(1))
    [(_, parts)] = heard("checkpoint")
    HEARD.clear()
    rescale = run(place, parallelism=parallelism)
    rescale.step_without_rows(StepKind.CHANGE)
    check_same_digests(*(digests(place, checkpoint) for checkpoint in (1, 2)))
    assert heard("checkpoint") == [(2, parts)] and not {"prepare", "drain"} & {what for what, *_ in HEARD}
    rescale.region.close("done")
    HEARD.clear()
    run(place, parallelism=parallelism).step(rows(2))
    held = [parts] if parallelism == 1 else [parts[:1], (), parts[1:], ()]
    assert heard("reset") == [(2, each) for each in held]
    assert not failures(place, NAME)


def test_a_fork_and_an_import_begin_with_what_was_prepared(place: OpenWarehouse, tmp_path: Path) -> None:
    steps = run(place, parallelism=2)
    for n in (1, 2):
        steps.step(rows(n))
    steps.region.close("done")
    parts = tuple(heard("checkpoint")[-1][1])
    fork(place, NAME, "forked")
    set_savepoint(place.catalog, NAME, "whole", at="2")
    materialize(place, NAME, "by_key", 2, id="m", parallelism=2, run=in_order)
    export_savepoint(place, NAME, "whole", str(tmp_path / "exported"))
    import_savepoint(place, prove_export(str(tmp_path / "exported")), "imported")
    for name, checkpoint in (("forked", 2), ("imported", 1)):
        HEARD.clear()
        RegionRun(place, replace(stream_of(Outside(name="by_key")), name=name), POLICY).step(rows(3))
        assert heard("reset") == [(checkpoint, parts)] and not failures(place, name)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_blocking_operator_is_checkpointed_before_the_next_step_another_behind_it(
    place: OpenWarehouse, blocking: bool
) -> None:
    operator = Outside(name="by_key")
    operator.blocking = blocking
    steps = run(place, operator, max_pending=2)
    steps.step(rows(1))
    assert ("checkpoint" in {what for what, *_ in HEARD}) == blocking
    steps.step(rows(2))
    steps.complete_pending()
    assert [of.id for what, _, of in HEARD if what == "checkpoint"] == [1, 2]


class Failing(Outside):
    """Raises, or hangs, in one callback."""

    def __init__(self, callback: str, how: Callable[[], Any]) -> None:
        super().__init__(name="by_key")
        self.callback, self.how = callback, how

    def _fail(self, callback: str) -> Any:
        return self.how() if callback == self.callback else None

    def drain(self, state: State) -> pa.Table:
        """Fail, perhaps."""
        return self._fail("drain") or super().drain(state)

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Fail, perhaps."""
        self._fail("prepare")
        super().prepare_for_nonblocking_checkpoint(checkpoint, state)

    def checkpoint(self, checkpoint: OperatorCheckpoint) -> None:
        """Fail, perhaps."""
        self._fail("checkpoint")

    def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
        """Fail, perhaps."""
        self._fail("reset")
        if self.callback == "change":
            state.totals.put(self.keys, {"n": [0]})

    def reset_to_initial_state(self) -> None:
        """Fail, perhaps."""
        self._fail("initial")


def divide() -> None:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        (divide, OperatorFailed, "operator by_key: ZeroDivisionError: division by zero (test_callbacks.py"),
        (lambda: time.sleep(2), StateError, "did not return within 0.2 s"),
    ],
    ids=["raises", "hangs"],
)
@pytest.mark.parametrize("max_pending", [0, 1, 2])
@pytest.mark.parametrize("callback", ["initial", "drain", "prepare", "checkpoint", "reset"])
def test_a_callback_that_fails_or_hangs_leaves_the_newest_checkpoint_as_it_is(
    place: OpenWarehouse, callback: str, how: Callable[[], Any], error: type[Exception], said: str, max_pending: int
) -> None:
    before = 0 if callback == "initial" else 1
    if before:
        run(place).step(rows(1))
    upload = UploadOptions(checkpoint_timeout_s=0.2) if error is StateError else UploadOptions()
    broken = run(place, Failing(callback, how), upload=upload, max_pending=max_pending)
    with pytest.raises(error) as raised:
        broken.step(rows(2))
        broken.complete_pending()
    assert said in str(raised.value)
    broken.region.close("failed")
    assert place.catalog.checkpoints.last_id(NAME) == before
    steps = run(place)
    assert steps.batches == before
    for n in range(before + 1, 4):
        steps.step(rows(n))
    assert place.catalog.checkpoints.last_id(NAME) == 3 and not failures(place, NAME)


@pytest.mark.parametrize("pending", [0, 1, 2])
@pytest.mark.parametrize("callback", ["drain", "prepare", "checkpoint"])
def test_a_callback_that_fails_while_checkpoints_are_pending_goes_back_to_the_newest_complete_one(
    place: OpenWarehouse, callback: str, pending: int
) -> None:
    failing: list[bool] = []
    broken = run(place, Failing(callback, lambda: divide() if failing else None), max_pending=pending + 1)
    broken.step(rows(1))
    broken.complete_pending()
    for n in range(pending):
        broken.step(rows(2 + n))
    assert len(broken.region.protocol.pending) == pending
    failing.append(True)
    with pytest.raises(OperatorFailed, match="division by zero"):
        broken.step(rows(2 + pending))
        broken.complete_pending()
    broken.region.close("failed")
    assert place.catalog.checkpoints.last_id(NAME) == 1
    steps = run(place)
    assert steps.batches == 1
    for n in range(2, 5):
        steps.step(rows(n))
    assert place.catalog.checkpoints.last_id(NAME) == 4 and not failures(place, NAME)


def test_what_is_prepared_is_checked(place: OpenWarehouse) -> None:
    with pytest.raises(UsageError, match=r"prepare_for_nonblocking_checkpoint returned something.*write"):
        run(place, Returning(name="by_key")).step(rows(1))
    with pytest.raises(UsageError, match="more than 1,048,576 bytes in a subtask, which `checkpoint` is to get on"):
        run(place, Writing((b"1" * 1000, bytes(1 << 20)), heard=True)).step(rows(1))
    with pytest.raises(UsageError, match="declares no output"):
        operator = Failing("drain", lambda: pa.table({"k": [1]}))
        operator.output = None
        run(place, operator).step(rows(1))


class Returning(Sums):
    """Returns what it is to write."""

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Return it."""
        return b"position"  # type: ignore[return-value]  # the mistake that is to be refused


class Writing(Sums):
    """Writes parts, and goes on if they are refused; notes what it reads at a reset."""

    def __init__(self, parts: Sequence[bytes], *, heard: bool = False) -> None:
        super().__init__(name="by_key")
        self.parts = parts
        if heard:
            self.__class__ = WritingForTheDriver

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Write them."""
        with suppress(UsageError):
            for part in self.parts:
                assert checkpoint.write(part) == len(part)

    def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
        """Note it."""
        HEARD.append(("reset", None, [file.read() for file in checkpoint.open()]))


class WritingForTheDriver(Writing):
    """The driver gets it."""

    def checkpoint(self, checkpoint: OperatorCheckpoint) -> None:
        """Note it."""
        HEARD.append(("checkpoint", None, [len(part) for part in checkpoint.prepared]))


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_much_may_be_written_to_a_checkpoint_where_the_driver_does_not_get_it(
    place: OpenWarehouse, backend: str
) -> None:
    parts = [Random(n).randbytes(1 << 20) for n in range(5)]
    steps = run(place, Writing(parts), parallelism=2, backend=backend)
    for n in range(1, 4):
        steps.step(rows(n))
    stored = [size for name, size in place.warehouse.store.list("") if name.endswith(".opaque")]
    assert len(stored) == 6 and min(stored) > 5 << 20, "written whole, and uploaded by itself"
    steps = run(place, Writing(parts), parallelism=1, backend=backend)
    steps.step(rows(4))
    assert [read for _, _, read in HEARD] == [[b"".join(parts)] * 2]
    truncated = delete_checkpoints(place, NAME, [1, 2, 3])
    assert truncated and sum(name.endswith(".opaque") for name, _ in place.warehouse.store.list("")) == 1
    assert not failures(place, NAME)


def test_the_driver_is_not_given_much_that_was_prepared_before_it_asked(place: OpenWarehouse) -> None:
    run(place, Writing([bytes(2 << 20)])).step(rows(1))
    asking = run(place, Writing([b"little"], heard=True), parallelism=2)
    with pytest.raises(UsageError, match="to get 2,097,152 bytes on the driver"):
        asking.step_without_rows(StepKind.CHANGE)
    asking.region.close("failed")
    HEARD.clear()
    run(place, Writing([b"little"], heard=True)).step(rows(2))
    assert ("checkpoint", None, [6]) in HEARD
    assert not failures(place, NAME)


def test_what_writes_to_files_writes_to_a_checkpoint(place: OpenWarehouse) -> None:
    class Model(Sums):
        def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
            with zipfile.ZipFile(checkpoint, "w") as archive, archive.open("weights", "w") as file:
                np.save(file, np.arange(checkpoint.id * 1000))

        def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
            (file,) = checkpoint.open()
            with zipfile.ZipFile(file) as archive, archive.open("weights") as weights:
                HEARD.append(("reset", np.load(weights)))

    steps = run(place, Model(name="by_key"))
    steps.step(rows(1))
    steps.step(rows(2))
    run(place, Model(name="by_key")).step(rows(3))
    ((_, weights),) = HEARD
    assert np.array_equal(weights, np.arange(2000))
    assert not failures(place, NAME)


def test_reset_leaves_the_state_as_it_is(place: OpenWarehouse) -> None:
    class Changing(Outside):
        def reset(self, checkpoint: OperatorCheckpoint, state: State) -> None:
            table = pa.table({"k": [1], "n": [1]})
            state.totals.put(Rows.make(self, table, None, 4).keys, {"n": [99]})

    run(place).step(rows(1))
    with pytest.raises(UsageError, match="reset changed state"):
        run(place, Changing(name="by_key")).step(rows(2))


def test_lost_output_is_made_again_with_what_drain_returned(place: OpenWarehouse) -> None:
    steps = run(place)
    task = replace(steps.region.begin_step()["by_key"], hands_on=True)
    parts = shuffled(task, rows(1))
    output, (first,) = run_tasks(task, parts)
    *made, last = run_subtask_again(task, 0, iter(parts[0].to_batches()))
    again = acknowledgement_of(last)
    assert again.receipt == first.receipt and not again.handles and not again.objects
    assert sum(batch.num_rows for batch in made) == len(output) == 1


def test_bad_rows_are_left_out_before_an_operator_drains(place: OpenWarehouse) -> None:
    class Choosy(Outside):
        def process(self, rows: Rows, state: State) -> None:
            odd = [k % 2 == 1 for k in rows.table["k"].to_pylist()]
            if any(odd):
                raise BadRow("odd", rows=odd)
            super().process(rows, state)

    stream = Stream(NAME, None, [Choosy(name="by_key")], max_parallelism=4, on_bad_row="dead-letter")
    RegionRun(place, stream, POLICY).step(rows(1))
    assert ("drain", 0, 50) in HEARD and [what for what, *_ in HEARD].count("drain") == 1


def test_a_step_says_that_it_wants_a_checkpoint(place: OpenWarehouse) -> None:
    class Asking(Sums):
        def process(self, rows: Rows, state: State) -> None:
            super().process(rows, state)
            if 7 in rows.table["k"].to_pylist():
                state.request_checkpoint()

    steps = run(place, Asking(name="by_key"))
    task = steps.region.begin_step()["by_key"]
    assert [a.wants_checkpoint for a in run_tasks(task, shuffled(task, rows(1, keys=9)))[1]] == [True]
    asked = run_tasks(task, shuffled(task, rows(1, keys=5)), attempt="other")[1]
    assert [a.wants_checkpoint for a in asked] == [False]


def test_names_of_what_is_prepared_are_taken() -> None:
    with pytest.raises(UsageError, match="'prepared' cannot be the name of a variable"):
        type("Mine", (Sums,), {"prepared": ValueState({"n": pa.int64()})})(name="by_key")
    assert Outside(name="by_key").definition()["variables"]["prepared"] == {"kind": "OpaqueState", "tables": {}}
    assert "prepared" not in Sums(name="by_key").definition()["variables"]


def test_an_operator_may_have_no_variable_but_what_it_prepares(place: OpenWarehouse) -> None:
    class Only(KeyedProcessor):
        name, key = NAME, {"k": pa.int64()}

        def handle_input(self, key: Any, rows: Any, state: Any) -> None:
            state.request_checkpoint()

        def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
            checkpoint.write(b"position")

    steps = run(place, Only(name="by_key"))
    steps.step(rows(1))
    steps.step(rows(2))
    assert not failures(place, NAME)
