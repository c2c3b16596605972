"""What a replay runs and compares, and the way along logged steps: without Spark."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from siltstone.catalog.records.edits import Edit
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.compare_digests import Digests, check_same_digests
from siltstone.change.replay import (
    Recorded,
    ReplayPlan,
    check_replayed,
    plan_replay,
    resolve_range,
    restore_points,
)
from siltstone.errors import ProofFailed, SchemaConflict, UnknownCheckpoint, UsageError
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.savepoints import set_savepoint
from siltstone.run.region import Completed
from siltstone.state.digest import checkpoint_digest, opaque_digest
from siltstone.stream import Stream
from tests.region_run import RegionRun
from tests.spark_streams import COUNTS, STEPS, Grown

POLICY = policy_by_name("marginal-cost", PolicyOptions())
STREAM = replace(COUNTS, source=None)
GROWN = replace(STREAM, operators=[Grown()])


class EditRun(RegionRun):
    """Each of its checkpoints is an edit."""

    def complete(self) -> Completed:
        edit = Edit("counts", "totals", 1, 0, "here", None, "a test")
        return self.region.complete(edit=edit)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path)) as opened:
        yield opened


def runs(
    place: OpenWarehouse, steps: int, *, stream: Stream = STREAM, kind: type[RegionRun] = RegionRun, a: int = 1
) -> None:
    """A run of so many steps, `a` checkpoint; the last one takes what is left."""
    run = kind(place, stream, POLICY, checkpoint_steps=a)
    for n in range(steps):
        run.step(STEPS[n % len(STEPS)], last=n == steps - 1)
    run.region.close("done")


def plan(place: OpenWarehouse, to: int, since: int | None = None, stream: Stream = STREAM) -> ReplayPlan:
    return plan_replay(place, stream, to, since)


def told(planned: ReplayPlan) -> tuple[list[int], list[int], list[list[int]]]:
    """The newest steps before, steps to run, and what is compared when."""
    compared = [[one.checkpoint for one in part] for part in planned.compared]
    return [s.step for s in planned.position.newest], [s.step for s in planned.steps], compared


def test_every_recorded_checkpoint_on_the_way_is_compared(place: OpenWarehouse) -> None:
    runs(place, 5, a=2)
    assert told(plan(place, 3)) == ([], [1, 2, 3, 4, 5], [[], [], [1], [], [2], [3]])
    assert told(plan(place, 2)) == ([], [1, 2, 3, 4], [[], [], [1], [], [2]])
    assert told(plan(place, 3, 1)) == ([1, 2], [3, 4, 5], [[], [], [2], [3]])
    assert plan(place, 3).why == ""
    first = plan(place, 3).compared[2][0]
    assert first.digests is not None
    assert checkpoint_digest(first.digests) == first.digest == place.catalog.checkpoints.get("counts", 1).digest


def test_a_deleted_checkpoint_is_replayed_past_but_not_compared(place: OpenWarehouse) -> None:
    runs(place, 3)
    delete_checkpoints(place, "counts", [2])
    assert told(plan(place, 3)) == ([], [1, 2, 3], [[], [1], [], [3]])


@pytest.mark.slow
def test_a_damaged_manifest_leaves_the_digest_in_the_catalog(place: OpenWarehouse) -> None:
    runs(place, 2)
    record = place.catalog.checkpoints.get("counts", 1)
    (place.warehouse.local.objects / record.manifest.name).write_bytes(b"x")
    [one] = plan(place, 2).compared[1]
    assert (one.digest, one.digests) == (record.digest, None)


def test_nothing_brings_an_edit_about_again(place: OpenWarehouse) -> None:
    runs(place, 2)
    runs(place, 1, kind=EditRun)
    runs(place, 2)
    begins = plan(place, 5)
    assert (begins.since, begins.why) == (3, "checkpoint 3 of counts was edited")
    assert told(begins) == ([2, 3], [4, 5], [[], [4], [5]])
    assert plan(place, 5, 4).since == 4
    assert plan(place, 2).since == 0
    for since in (0, 2):
        with pytest.raises(UsageError, match=r"checkpoint 3 of counts was edited.*replay from 3 or later"):
            plan(place, 5, since)
    with pytest.raises(UsageError, match=r"checkpoint 3 of counts was edited.*to a later one"):
        plan(place, 3)
    delete_checkpoints(place, "counts", [3])
    assert plan(place, 5).since == 4


def test_an_edit_that_was_given_up_is_none(place: OpenWarehouse) -> None:
    runs(place, 1)
    runs(place, 1, kind=EditRun)
    epoch = place.catalog.runs.begin("counts", "a test")
    place.catalog.rollbacks.roll_back("counts", epoch, 1, "a test", "a test")
    runs(place, 2)
    assert told(plan(place, 3)) == ([], [1, 2, 3], [[], [1], [2], [3]])


def test_what_an_older_definition_did_is_not_replayed_with_a_newer_one(place: OpenWarehouse) -> None:
    runs(place, 2)
    runs(place, 2, stream=GROWN)
    begins = plan(place, 4, stream=GROWN)
    assert (begins.since, begins.why) == (
        2,
        "checkpoint 2 of counts was made by an older definition of its operators",
    )
    assert told(begins) == ([1, 2], [3, 4], [[], [3], [4]])
    with pytest.raises(UsageError, match=r"older definition.*replay from 2 or later"):
        plan(place, 4, 1, stream=GROWN)
    with pytest.raises(SchemaConflict, match="checkpoint 2 of counts was made by an older definition"):
        plan(place, 2, stream=GROWN)
    with pytest.raises(SchemaConflict):
        plan(place, 4)
    points = restore_points(place, GROWN, 2)
    assert (points["counts"].checkpoint, points["counts"].step) == (2, 2) and points["counts"].manifests


def test_another_max_parallelism_is_refused(place: OpenWarehouse) -> None:
    runs(place, 1)
    with pytest.raises(SchemaConflict, match="max_parallelism"):
        plan(place, 1, stream=replace(STREAM, max_parallelism=16))


def test_what_to_and_from_mean(place: OpenWarehouse) -> None:
    runs(place, 3)
    set_savepoint(place.catalog, "counts", "two", at="2")
    assert resolve_range(place.catalog, "counts", "latest", None) == (3, None)
    assert resolve_range(place.catalog, "counts", "two", "start") == (2, 0)
    assert resolve_range(place.catalog, "counts", "3", "two") == (3, 2)
    for to, since in (("2", "3"), ("two", "2")):
        with pytest.raises(UsageError, match="is not before 2"):
            resolve_range(place.catalog, "counts", to, since)
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 9"):
        resolve_range(place.catalog, "counts", "9", None)
    with pytest.raises(UnknownCheckpoint, match=r"'soon' is not a checkpoint.*or replay from start"):
        resolve_range(place.catalog, "counts", "3", "soon")


def digests(*groups: int) -> Digests:
    return {"counts": {"totals": np.array(groups, np.uint64), "sketch": np.zeros(len(groups), np.uint64)}}


def test_a_difference_names_checkpoint_operator_table_and_key_groups() -> None:
    found = digests(1, 2, 3, 4, 5, 6, 7)
    recorded = Recorded(7, checkpoint_digest(found), found)
    check_replayed("s", recorded, found)
    check_replayed("s", Recorded(7, checkpoint_digest(found), None), found)
    with pytest.raises(ProofFailed, match=r"checkpoint 7 of s: .* in counts\.totals, key groups 1, 3: "):
        check_replayed("s", recorded, digests(1, 0, 3, 0, 5, 6, 7))
    with pytest.raises(ProofFailed, match=r"counts\.totals, key groups 0, 1, 2, 3, 4 and 2 more: "):
        check_replayed("s", recorded, digests(*range(7)))
    with pytest.raises(
        ProofFailed, match=r"checkpoint 7 of s: the logged input gives digest \w+, not the recorded 00ff"
    ):
        check_replayed("s", Recorded(7, "00ff", found), found)


def prepared(*groups: int) -> Digests:
    return {"counts": {"totals": np.ones(4, np.uint64), "prepared": np.array(groups, np.uint64)}}


def test_what_was_prepared_is_compared_wherever_it_lies() -> None:
    nothing = opaque_digest(b"")
    recorded, moved, other = prepared(7, nothing, 9, 0), prepared(0, 9, 0, 7), prepared(7, 7, 9, 0)
    check_same_digests(recorded, moved)
    one = Recorded(2, checkpoint_digest(recorded), recorded, 2)
    check_replayed("s", one, moved)
    for differing in (other, prepared(7, 0, 0, 0)):
        with pytest.raises(ProofFailed, match=r"counts\.prepared: the digests of \d key groups"):
            check_same_digests(recorded, differing)
        with pytest.raises(ProofFailed, match=r"checkpoint 2 of s: .* in counts\.prepared, key groups"):
            check_replayed("s", one, differing)
        check_replayed("s", one, differing, prepared=False)
    with pytest.raises(ProofFailed, match=r"in counts\.totals, key groups"):
        check_replayed("s", one, {"counts": {**recorded["counts"], "totals": np.zeros(4, np.uint64)}}, prepared=False)
    with pytest.raises(UsageError, match=r"checkpoint 2 of s is damaged.*--parallelism 2"):
        check_replayed("s", replace(one, digests=None), moved, prepared=False)
    check_replayed("s", replace(one, digests=None), recorded)


def test_what_was_pruned_of_the_input_log_is_not_replayed(place: OpenWarehouse) -> None:
    runs(place, 5)
    delete_checkpoints(place, "counts", [1, 2])
    assert plan(place, 5).since == 0, "a deletion that is not told how much to keep keeps all"
    assert place.catalog.input_log.prune("counts", place.catalog.streams.get("counts").epoch, at_least=1) == 1
    begins = plan(place, 5)
    assert told(begins) == ([2, 3], [4, 5], [[], [4], [5]])
    assert begins.why == (
        "what counts read before checkpoint 3 is no longer in its input log (retention.input_log keeps more)"
    )
    with pytest.raises(
        UsageError, match=r"no longer in its input log \(retention.input_log .*: replay from 3 or later"
    ):
        plan(place, 5, 0)
    with pytest.raises(UsageError, match=r"no longer in its input log .*: replay counts to a later one"):
        plan(place, 3)
    assert told(plan(place, 5, 4)) == ([3, 4], [5], [[], [5]])
