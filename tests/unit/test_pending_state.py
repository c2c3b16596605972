"""Pending checkpoints whose operators come and go, with chains of every length, and uploads that fail."""

import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import Policy, PolicyOptions, policy_by_name
from siltstone.errors import LostWorkingState, Unreachable
from siltstone.model import Form, StoredObject
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath
from siltstone.stream import Stream
from tests import sums
from tests.proofs import failures
from tests.region_run import RegionSteps
from tests.sums import Counted, stream_of


def definition(*names: str) -> Stream:
    return stream_of(*(Counted(name=name) for name in names), max_parallelism=4)


def opened(place: OpenWarehouse, stream: Stream, policy: Policy = sums.POLICY, **given: Any) -> RegionSteps:
    options = RegionOptions(**given)
    return RegionSteps(ConsistentRegion.open(stream, place.warehouse, place.catalog, policy, options, "a test"))


def contents(place: OpenWarehouse) -> list[tuple[str, ...]]:
    """The digest of each checkpoint, and the operators that it has."""
    assert not failures(place, sums.NAME)
    return [(record.digest, *sorted(record.forms)) for record in place.catalog.checkpoints.list(sums.NAME)]


@pytest.mark.parametrize("completed", [0, 1])
def test_a_reset_while_operators_come_and_go_goes_back_to_those_of_the_newest_checkpoint(
    place: OpenWarehouse, tmp_path: Path, completed: int
) -> None:
    """Their opaque variables, too; the state that was to be given up is given up once, whatever is pending."""
    first, then = definition("stays", "goes"), definition("stays", "comes")

    def begin(at: OpenWarehouse, max_pending: int) -> RegionSteps:
        run = opened(at, first, max_pending=max_pending)
        for n in (1, 2):
            run.step(sums.rows(n))
        run.complete_pending()
        return opened(at, then, drop=["goes"], max_pending=max_pending)

    run = begin(place, 2)
    for n in (3, 4):
        run.step(sums.rows(n))
    shutil.rmtree(place.warehouse.local.work(sums.NAME, run.region.epoch))  # all is restored and rolled forward
    for _ in range(completed):
        run.complete_oldest()
    if completed:
        run.step(sums.rows(5))
    run.region.close("reset")
    again = opened(place, then, drop=[] if completed else ["goes"], max_pending=2, parallelism=3)
    assert again.batches == 2 + completed
    while again.batches < 6:
        again.step(sums.rows(again.batches + 1))
    again.complete_pending()
    with OpenWarehouse.open_writable(str(tmp_path / "still")) as still:
        calm = begin(still, 0)
        for n in (3, 4, 5, 6):
            calm.step(sums.rows(n))
        assert contents(place) == contents(still)


@pytest.mark.parametrize("policy", ["nothing tracked", "one chain"])
def test_chains_of_no_and_of_any_length_are_the_same_with_checkpoints_pending(
    place: OpenWarehouse, tmp_path: Path, policy: str
) -> None:
    """Without tracking (D = 0), lost state is a reset; with it, state comes by the log, through what is pending."""
    d = 0 if policy == "nothing tracked" else 1000
    options = PolicyOptions(d0=d, d_max=d, size_ratio_max=None, space_amplification_max=None)
    given: dict[str, Any] = {"policy": policy_by_name("adjust-d", options), "checkpoint_steps": 2}
    run, resets, losses = opened(place, definition("counted"), max_pending=2, **given), 0, [5, 8]
    while run.batches < 12:
        if run.batches in losses:
            losses.remove(run.batches)
            shutil.rmtree(place.warehouse.local.work(sums.NAME, run.region.epoch), ignore_errors=True)
        try:
            run.step(sums.rows(run.batches + 1))
        except LostWorkingState as error:
            run.region.fail(error)
            run.region.close("reset")
            run, resets = opened(place, definition("counted"), max_pending=2, **given), resets + 1
    run.complete_pending()
    assert bool(resets) == (not d)
    with OpenWarehouse.open_writable(str(tmp_path / "still")) as still:
        calm = opened(still, definition("counted"), **given)
        for n in range(1, 13):
            calm.step(sums.rows(n))
        assert contents(place) == contents(still)
    forms = [record.forms["counted"] for record in place.catalog.checkpoints.list(sums.NAME)]
    assert set(forms[1:]) == {Form.DELTA if d else Form.BASE}


@pytest.mark.parametrize("max_pending", [0, 1, 2])
def test_uploads_that_fail_three_times_or_are_answered_late_complete_with_their_own_steps(
    place: OpenWarehouse, tmp_path: Path, max_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each segment is stored at its fourth attempt; of two that are pending, the first's after the second's."""
    put, tries, second = FilesystemStore.put, Counter[int](), threading.Event()

    def failing(self: FilesystemStore, name: str, data: Any) -> StoredObject:
        path = CheckpointPath.of(name)
        if path is not None and path.checkpoint > 1 and name.endswith(".segment"):
            tries[path.checkpoint] += 1
            if tries[path.checkpoint] <= 3:
                raise Unreachable("the test says so", transient=True)
            assert path.checkpoint != 2 or max_pending < 2 or second.wait(20)
            try:
                return put(self, name, data)
            finally:
                if path.checkpoint == 3:
                    second.set()
        return put(self, name, data)

    monkeypatch.setattr(FilesystemStore, "put", failing)
    run = opened(place, definition("counted"), max_pending=max_pending)
    run.step(sums.rows(1))
    run.complete_pending()
    for n in (2, 3):
        run.step(sums.rows(n))
    run.complete_pending()
    assert [tries[2], tries[3]] == [4, 4]
    with OpenWarehouse.open_writable(str(tmp_path / "still")) as still:
        calm = opened(still, definition("counted"))
        for n in (1, 2, 3):
            calm.step(sums.rows(n))
        assert contents(place) == contents(still)
