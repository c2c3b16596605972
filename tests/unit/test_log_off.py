"""Steps that are not logged (`log_steps`): what they store, what their checkpoint holds, and what a loss costs."""

import shutil
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import StateError
from siltstone.model import Form
from siltstone.run.task import StepTask
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun
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
