"""Hosts that share a store and nothing else: one delivers what another's lost acknowledgement left."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from siltstone.catalog.records.steps import Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import NoLiveState, StateError, Unreachable
from siltstone.format.manifests import read_manifest, read_manifests
from siltstone.restore.compare import compare, compare_tasks
from siltstone.restore.export import unit_tasks
from siltstone.retention.sweep import sweep
from siltstone.run.region import Completed, ConsistentRegion, RegionOptions
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.run.task import StepTask
from siltstone.store.open import Warehouse
from siltstone.store.paths import LocalLayout
from tests import sums
from tests.examples import examples
from tests.orphans import check_whole
from tests.proofs import failures
from tests.region_run import RegionRun, run_tasks, shuffled
from tests.sums import NAME, POLICY, Sums, stream_of

STREAM = stream_of(Sums())
KEYS = 40


def added(n: int) -> pa.Table:
    """Rows that add `n` to each key."""
    return pa.table({"k": range(KEYS), "n": [n] * KEYS})


class Hosts:
    """One run whose tasks run on hosts with working state of their own."""

    def __init__(self, place: OpenWarehouse, checkpoint_steps: int = 1) -> None:
        self.place = place
        options = RegionOptions(parallelism=2, checkpoint_steps=checkpoint_steps)
        self.region = ConsistentRegion.open(STREAM, place.warehouse, place.catalog, POLICY, options, "a test")
        self.restored_bytes = 0
        self.attempts = 0

    def on(self, host: str) -> Warehouse:
        """The warehouse with the working state of one host."""
        warehouse = self.place.warehouse
        return replace(warehouse, local=LocalLayout(warehouse.local.root / "hosts" / host))

    def attempt(self, host: str, task: StepTask, n: int) -> list:
        """Run the task on one host, with rows that add `n`; another `n` stands for code that is not deterministic."""
        self.attempts += 1
        return list(
            run_tasks(replace(task, warehouse=self.on(host)), shuffled(task, added(n)), f"try{self.attempts}")[1]
        )

    def step(self, *attempts: tuple[str, int], ends: bool | None = None) -> Completed | None:
        """One step: of its attempts, each a host and what it adds, only the last one's acknowledgements arrive."""
        step = Step(self.region.step + 1, self.region.step, "v1\n{}\n")
        task = self.region.begin_step(step, ends=ends)[NAME]
        for host, n in attempts:
            received = self.attempt(host, task, n)
        self.restored_bytes = sum(a.restored_bytes for a in received)
        self.region.acknowledge(NAME, received)
        if not self.region.checkpoint_due:
            return None
        return self.region.complete()


def undisturbed(root: Path, accepted: Sequence[int]) -> str | None:
    """The digest after steps of these rows, on one host."""
    with OpenWarehouse.open_writable(str(root)) as place:
        run = RegionRun(place, STREAM, POLICY, parallelism=1)
        for n in accepted:
            run.step(added(n))
        return run.region.digest


def test_a_version_of_the_same_number_whose_acknowledgement_was_lost_is_not_gone_on_from(
    place: OpenWarehouse, tmp_path: Path
) -> None:
    hosts = Hosts(place)
    hosts.step(("a", 1))
    hosts.step(("a", 20), ("b", 2))
    completed = hosts.step(("a", 3))
    assert completed and completed.digest == undisturbed(tmp_path / "steady", [1, 2, 3])
    assert not hosts.restored_bytes, "host a takes its own step back, and applies what host b's attempt logged"
    assert not failures(place, NAME)


def test_an_attempt_that_came_to_the_same_is_gone_on_from(place: OpenWarehouse, tmp_path: Path) -> None:
    hosts = Hosts(place)
    hosts.step(("a", 1))
    hosts.step(("a", 2), ("b", 2))
    completed = hosts.step(("a", 3))
    assert completed and completed.digest == undisturbed(tmp_path / "steady", [1, 2, 3])
    assert not hosts.restored_bytes and not failures(place, NAME)


@pytest.mark.parametrize("host", ["a", "b", "c"])
def test_within_a_checkpoint_every_host_goes_on_from_what_counts(
    place: OpenWarehouse, tmp_path: Path, host: str
) -> None:
    """Host a came to something else, host c has nothing."""
    hosts = Hosts(place, checkpoint_steps=9)
    hosts.step(("a", 10), ("b", 1))
    completed = hosts.step((host, 2), ends=True)
    assert completed and completed.digest == undisturbed(tmp_path / "steady", [1, 2])
    assert not failures(place, NAME)


def test_the_next_run_on_the_host_of_a_lost_attempt_restores(place: OpenWarehouse, tmp_path: Path) -> None:
    """The checkpoint holds what host b came to; host a is asked to take its own working state over."""
    Hosts(place).step(("a", 10), ("b", 1))
    hosts = Hosts(place)
    completed = hosts.step(("a", 2))
    assert completed and completed.digest == undisturbed(tmp_path / "steady", [1, 2])
    assert hosts.restored_bytes and not failures(place, NAME)


def test_a_snapshot_is_of_the_attempt_that_was_accepted_and_of_no_other(place: OpenWarehouse) -> None:
    """Host a has the step's number, and what it came to does not count: a witness from there would accuse a restore."""
    hosts = Hosts(place)
    hosts.step(("a", 1), ("b", 1))
    hosts.step(("a", 20), ("b", 2))
    manifest = read_manifest(place.warehouse.store, place.catalog.checkpoints.get_latest(NAME).manifest)
    for task in snapshot_tasks(hosts.on("a"), manifest, "heap", "s1"):
        with pytest.raises(NoLiveState, match="is not the one that checkpoint 2 accepted"):
            take_snapshot(task)
    assert not any("snapshot" in name for name, _ in place.warehouse.store.list(""))
    parts = [take_snapshot(task) for task in snapshot_tasks(hosts.on("b"), manifest, "heap", "s1")]
    objects = [stored for part in parts for stored in part.objects]
    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, 2))
    tasks, _ = unit_tasks(manifests, 2, 1, None)
    compared = [table for task in compare_tasks(tasks, objects) for table in compare(place.warehouse.store, task)]
    assert compared and all(table.same for table in compared)


attempts = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), min_size=1, max_size=3)


@pytest.mark.slow
@given(plan=st.lists(st.tuples(attempts, st.booleans()), min_size=1, max_size=7))
@hypothesis_settings(max_examples=examples(12))
def test_whatever_attempts_there_were_the_accepted_ones_make_the_state(
    plan: list[tuple[list[tuple[str, int]], bool]],
) -> None:
    """Steps of one to three attempts on two hosts, in runs that begin anew where a host cannot go on."""
    with tempfile.TemporaryDirectory() as directory, OpenWarehouse.open_writable(f"{directory}/w") as place:
        hosts, accepted, open_steps = Hosts(place), [], []
        for step_attempts, ends in plan:
            try:
                hosts.step(*step_attempts, ends=ends)
            except StateError as error:
                assert "are in no checkpoint" in str(error)
                hosts, open_steps = Hosts(place), []
                continue
            open_steps.append(step_attempts[-1][1])
            if ends:
                accepted, open_steps = accepted + open_steps, []
        assert hosts.region.digest == undisturbed(Path(directory) / "steady", accepted)
        assert not failures(place, NAME)


def test_a_task_from_before_a_reset_wakes_up_and_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, place: OpenWarehouse
) -> None:
    """Its process was frozen while the run reset itself; the new epoch has taken its working state over."""
    with OpenWarehouse.open_writable(str(tmp_path_factory.mktemp("steady") / "w")) as elsewhere:
        steady = RegionRun(elsewhere, sums.STREAM, sums.POLICY)
        digests = [done.digest for done in (steady.step(sums.rows(n)) for n in range(1, 5)) if done]
    before = RegionRun(place, sums.STREAM, sums.POLICY)
    before.step(sums.rows(1))
    [frozen] = before.region.begin_step(ends=True).values()
    before.region.fail(Unreachable("a store was away"))
    before.region.close("reset")
    run = RegionRun(place, sums.STREAM, sums.POLICY)
    for n in (2, 3):
        done = run.step(sums.rows(n))
        assert done is not None and done.digest == digests[n - 1]
        work = place.warehouse.local.work(sums.NAME, run.region.epoch)
        state = {p: p.read_bytes() for p in work.rglob("*") if p.is_file()}
        _, received = run_tasks(frozen, shuffled(frozen, sums.rows(2)), attempt=f"late-{n}")
        assert state == {p: p.read_bytes() for p in work.rglob("*") if p.is_file()}, "of the new epoch"
        with pytest.raises(StateError, match="the region is ended"):
            before.region.acknowledge(frozen.operator.name, received)
    done = run.step(sums.rows(4))
    assert done is not None and done.digest == digests[3]
    run.region.close("done")
    sweep(place, sums.NAME)
    check_whole(place)
