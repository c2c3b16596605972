"""Steps that are not logged (`log_steps`): what they store, what their checkpoint holds, and what a loss costs."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from siltstone.catalog.records.steps import Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import LostWorkingState, StateError
from siltstone.model import Form
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.run.roll_forward import is_logged
from siltstone.run.task import StepTask
from siltstone.store.paths import LocalLayout
from tests import sums
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun, run_tasks, shuffled
from tests.stored import stream_objects
from tests.tiny_stream import NAME, STREAM, rows_of

DELTAS = policy_by_name("adjust-d", PolicyOptions(d0=50, d_max=60, size_ratio_max=None, space_amplification_max=None))


def opened(place: OpenWarehouse, backend: str = "heap", *, log_steps: bool = False, steps: int = 4) -> RegionRun:
    return RegionRun(place, STREAM, DELTAS, parallelism=2, backend=backend, log_steps=log_steps, checkpoint_steps=steps)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("max_pending", [0, 2])
def test_a_checkpoint_holds_what_all_steps_of_its_interval_changed(
    place: OpenWarehouse, backend: str, max_pending: int
) -> None:
    """The same digests, and the same forms, as of a stream whose steps are logged."""
    run = RegionRun(
        place,
        STREAM,
        DELTAS,
        parallelism=2,
        backend=backend,
        log_steps=False,
        checkpoint_steps=4,
        max_pending=max_pending,
    )
    taken, attempt = list[Acknowledgement](), run.attempt

    def watched(task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        output, taken[:] = attempt(task, rows)
        return output, taken

    run.attempt = watched
    for number in range(1, 17):
        run.step(rows_of(number))
        if number % 4:
            names = [name for name, _ in stream_objects(place.warehouse.store)]
            assert not any(f"s{number:012}" in name for name in names), "a step between checkpoints stores nothing"
            assert len(taken) == 2 and not any(a.inline or a.handles for a in taken)
        if number % 8 == 0:
            run.complete_pending()
    run.region.close("done")
    records = place.catalog.checkpoints.list(NAME)
    assert [record.forms["tiny"] for record in records] == [Form.BASE, Form.DELTA, Form.DELTA, Form.DELTA]
    assert not failures(place, NAME)
    for record in records:
        assert restored_digest(place, NAME, record.id, 3) == record.digest


def test_state_that_is_lost_within_an_interval_takes_the_stream_back(place: OpenWarehouse) -> None:
    run = opened(place)
    for number in range(1, 7):
        run.step(rows_of(number))
    work = place.warehouse.local.state(NAME, run.region.epoch, "tiny", 1)
    shutil.rmtree(work)
    with pytest.raises(StateError):
        run.step(rows_of(7))
    run.region.close("failed")
    again = opened(place)
    assert again.region.completed == 1
    for number in range(5, 9):
        again.step(rows_of(number))
    assert place.catalog.checkpoints.get_latest(NAME).forms["tiny"] is Form.DELTA
    assert not failures(place, NAME)


@pytest.mark.parametrize("before", [True, False])
def test_a_run_may_begin_to_log_and_cease(place: OpenWarehouse, before: bool) -> None:
    for log_steps in (before, not before, before):
        run = opened(place, log_steps=log_steps, steps=2)
        for number in range(1, 5):
            run.step(rows_of(number))
        run.step(rows_of(9))  # is given up
        run.region.close("failed")
    assert place.catalog.checkpoints.get_latest(NAME).id == 6 and not failures(place, NAME)


class Hosts:
    """Steps of a stream with one subtask, each on a host of one's choice."""

    def __init__(self, place: OpenWarehouse, backend: str, *, log_steps: bool = False, max_pending: int = 0) -> None:
        self.place = place
        options = RegionOptions(checkpoint_steps=99, log_steps=log_steps, backend=backend, max_pending=max_pending)
        self.region = ConsistentRegion.open(STREAM, place.warehouse, place.catalog, DELTAS, options, "a test")

    def begin(self, *, ends: bool = False) -> tuple[StepTask, Step]:
        step = Step(self.region.step + 1, self.region.step, "v1\n{}\n")
        return self.region.begin_step(step, ends=ends)["tiny"], step

    def step(self, host: str, *, ends: bool = False) -> None:
        task, step = self.begin(ends=ends)
        own = LocalLayout(self.place.warehouse.local.root / "hosts" / host)
        task = replace(task, warehouse=replace(self.place.warehouse, local=own))
        received = run_tasks(task, shuffled(task, rows_of(step.step)), f"{self.region.epoch}-{host}")[1]
        self.region.acknowledge("tiny", received)
        if ends and self.region.options.max_pending:
            self.region.prepare()
        elif ends:
            self.region.complete()


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("before", ["logged", "pending"])
def test_state_of_another_epoch_is_not_taken_over_within_an_interval(
    place: OpenWarehouse, backend: str, before: str
) -> None:
    """Seen: it had the digest, and a list of changes since a mark of its own; the checkpoint lacked some of them."""
    dies = Hosts(place, backend, log_steps=before == "logged", max_pending=2 if before == "pending" else 0)
    dies.step("b", ends=True)
    if before == "pending":
        dies.region.store()
        dies.region.commit()
    dies.step("b")
    dies.step("b", ends=before == "pending")
    if before == "pending":
        dies.step("b")
    then = Hosts(place, backend)
    for _ in range(2):
        then.step("a")
    with pytest.raises(LostWorkingState, match="were not logged"):
        then.step("b", ends=True)
    again = Hosts(place, backend)
    for ends in (False, False, True):
        again.step("b", ends=ends)
    assert place.catalog.checkpoints.get_latest(NAME).forms["tiny"] is Form.DELTA and not failures(place, NAME)


def test_state_may_move_where_a_checkpoint_is_pending(place: OpenWarehouse) -> None:
    """The last step of its interval has stored what all of them changed."""
    run = Hosts(place, "heap", max_pending=2)
    run.step("a", ends=True)
    run.region.store()
    run.region.commit()
    for ends in (False, True):
        run.step("a", ends=ends)
    task, _ = run.begin()
    assert is_logged(task, task.restore.step)
    run = Hosts(place, "heap", max_pending=2)
    for ends in (False, True):
        run.step("a", ends=ends)
    run.step("b")  # restores, and rolls forward
    run.step("b", ends=True)
    for _ in range(2):
        run.region.store()
        run.region.commit()
    assert not failures(place, NAME)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_a_decision_that_turns_within_an_interval_makes_a_base(place: OpenWarehouse, backend: str) -> None:
    """A pending checkpoint commits in its middle, from which the policy learns that deltas pay."""
    options = {"d0": 0, "probe_after": 1, "size_ratio_max": None, "space_amplification_max": None}

    def run_of(**further: float) -> RegionRun:
        policy = policy_by_name("adjust-d", PolicyOptions(**options, **further))
        return RegionRun(
            place, sums.STREAM, policy, backend=backend, log_steps=False, checkpoint_steps=2, max_pending=2
        )

    run = run_of()
    run.step(sums.rows(1))
    run.step(sums.rows(2))
    run.complete_pending()
    base_s = max(state.base_s for state in run.region.chains.policies["by_key"].values())
    run.region.close("done")
    run = run_of(restore_budget_s=base_s * 0.3)
    for number in (3, 4):
        run.step(sums.rows(number))
    run.complete_pending()
    for number in (5, 6):
        run.step(sums.rows(number))
    run.step(sums.rows(1)[:0])
    latest = place.catalog.checkpoints.get_latest(sums.NAME)
    read = int(run.region.chains.policies["by_key"]["totals"].base_bytes)
    place.catalog.checkpoints.record_restore(
        sums.NAME, latest.id, epoch=latest.epoch, restore_s=1e-6, restore_bytes=read
    )
    run.complete_oldest()
    run.step(sums.rows(7))
    run.complete_pending()
    assert not failures(place, sums.NAME)
