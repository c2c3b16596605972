"""The log of every step: wherever subtasks run, however their changes travel and whatever is lost on the way, each step
finds its state, and every checkpoint is the one of a run on one machine."""

import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog import log
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import LostWorkingState
from siltstone.model import Form
from siltstone.run import persist
from siltstone.run.processing import ACKNOWLEDGEMENT
from siltstone.run.subtask import run_subtask
from siltstone.run.task import StepTask
from siltstone.store.paths import CheckpointPath, LocalLayout
from tests.examples import examples
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun, acknowledgement_of
from tests.sums import NAME, Counted, Sums, rows, stream_of

STREAM = stream_of(Counted(name="counted"), Sums(name="sums"), max_parallelism=8)
LONG = policy_by_name("marginal-cost", PolicyOptions(d_max=30, size_ratio_max=None, space_amplification_max=None))
SHORT = policy_by_name("adjust-d", PolicyOptions(d0=1, d_max=2))


@dataclass
class Move:
    """Where each subtask of a step runs, and whose directories are lost before it."""

    hosts: list[int]
    lost: set[int]
    attempts: int = 1


@dataclass
class Hosts:
    """Machines that share nothing, below one directory."""

    root: Path
    moves: list[Move]
    ways: Counter[str] = field(default_factory=Counter)
    """how often working state was restored or rolled forward"""

    def run(self, task: StepTask, given: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        """One step of one operator: each subtask on its host, some more than once, of which any attempt counts."""
        move = self.moves[(task.step - 1) % len(self.moves)]
        for host in move.lost:
            shutil.rmtree(self.root / str(host), ignore_errors=True)
        received: list[Acknowledgement] = []
        for subtask in range(task.parallelism):
            for attempt in range(move.attempts):
                host = move.hosts[(subtask + attempt) % len(move.hosts)]
                local = LocalLayout(self.root / str(host))
                there = replace(task, warehouse=replace(task.warehouse, local=local))
                batches = given[subtask].to_batches() if subtask in given else []
                [*_, last] = run_subtask(there, subtask, f"t{host}-{attempt}", iter(batches))
                answered = acknowledgement_of(last)
                answered.raise_failure()
                self.ways.update({"restore", "forward"} & answered.seconds.keys())
            received.append(answered)  # the last attempt's
        assert task.operator.output is None and ACKNOWLEDGEMENT in last.schema.names
        return pa.table({}), received


class OnHosts(RegionRun):
    """A run whose subtasks wander."""

    hosts: Hosts

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        return self.hosts.run(task, rows)


def moves(draw: random.Random, steps: int, hosts: int, losses: float, again: float) -> list[Move]:
    return [
        Move(
            [draw.randrange(hosts) for _ in range(4)],
            {host for host in range(hosts) if draw.random() < losses},
            1 + (draw.random() < again),
        )
        for _ in range(steps)
    ]


@settings(max_examples=examples(15), phases=[Phase.explicit, Phase.generate])  # an example takes too long to shrink
@given(
    seed=st.integers(0, 1 << 30),
    per_checkpoint=st.integers(1, 4),
    inline_bytes=st.sampled_from([0, 700, 1 << 14]),
    waiting_bytes=st.sampled_from([0, 2000, 1 << 18]),
    short=st.booleans(),
    losses=st.sampled_from([0.0, 0.2]),
    again=st.sampled_from([0.0, 0.2]),
    max_pending=st.integers(0, 3),
    crashes=st.sampled_from([0.0, 0.0, 0.2]),
    backend=st.sampled_from(["heap", "heap", "rocksdb"]),
)
@pytest.mark.slow
def test_wherever_subtasks_run_the_checkpoints_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    per_checkpoint: int,
    inline_bytes: int,
    waiting_bytes: int,
    short: bool,
    losses: float,
    again: float,
    max_pending: int,
    crashes: float,
    backend: str,
) -> None:
    """However many checkpoints are pending, too, when a run ends and another one goes on."""
    draw, root = random.Random(seed), tmp_path_factory.mktemp("hosts")
    policy, upload = SHORT if short else LONG, UploadOptions(inline_bytes=inline_bytes)
    batches = [rows(n, changed=draw.choice([0, 1, 10, 60])) for n in range(1, 10)]
    with pytest.MonkeyPatch.context() as patch, OpenWarehouse.open_writable(str(root / "w")) as place:
        patch.setattr(log, "INLINE_BYTES", waiting_bytes)
        patch.setattr(persist, "DELTA_ROWS", 20)
        wandering = Hosts(root / "hosts", moves(draw, 9, 3, losses, again))

        def begin() -> OnHosts:
            options = {"checkpoint_steps": per_checkpoint, "upload": upload, "backend": backend}
            run = OnHosts(place, STREAM, policy, parallelism=3, max_pending=max_pending, **options)
            run.hosts = wandering
            return run

        run = begin()
        while run.batches < len(batches):
            if draw.random() < crashes:
                run = begin()
                continue
            run.step(batches[run.batches])
            if run.region.protocol.pending and draw.random() < 0.3:
                run.complete_oldest()
        run.complete_pending()
        found = [record.digest for record in place.catalog.checkpoints.list(NAME)]
        assert not failures(place, NAME)
        assert restored_digest(place, NAME, len(found), parallelism=2) == found[-1]
        if not (again or crashes):  # what did not count leaves objects for a sweep
            stored = {name for name, _ in place.warehouse.store.list(f"{NAME}/")}
            known = {o.name for o in place.catalog.objects.list(NAME, list(range(1, len(found) + 1)))}
            begun = CheckpointPath(NAME, run.region.epoch, run.region.checkpoint).prefix
            assert all(name.startswith(begun) for name in stored - known)
    with OpenWarehouse.open_writable(str(root / "still")) as place:
        run = RegionRun(place, STREAM, policy, checkpoint_steps=per_checkpoint)
        expected = [done.digest for batch in batches if (done := run.step(batch))]
    assert found == expected


def test_a_host_that_has_had_a_subtask_never_restores_it_again(tmp_path: Path) -> None:
    """Steps between checkpoints, checkpoints between visits: what is missing there is rolled forward."""
    draw = random.Random(7)
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = OnHosts(place, STREAM, LONG, parallelism=2, checkpoint_steps=3)
        run.hosts = Hosts(tmp_path / "hosts", moves(draw, 30, 2, losses=0, again=0))
        for n in range(1, 10):
            run.step(rows(n))
        assert run.hosts.ways["restore"] <= 2 * 2 * 2  # each operator's subtasks, on each host
        run.hosts.ways.clear()
        for n in range(10, 31):
            run.step(rows(n))
        assert run.hosts.ways["forward"] > 10 and not run.hosts.ways["restore"]
        assert not failures(place, NAME)


def test_changes_that_are_damaged_in_the_log_are_never_used(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = RegionRun(place, STREAM, LONG, checkpoint_steps=3, upload=UploadOptions(inline_bytes=0))
        for n in (1, 2, 3, 4):
            run.step(rows(n))
        state = place.warehouse.local.work(NAME, 1) / "state"
        begun = CheckpointPath(NAME, 1, 2).prefix
        [*segments] = [name for name, _ in place.warehouse.store.list(begun)]
        assert segments
        shutil.rmtree(state)
        for name in segments:
            path = place.warehouse.local.objects / name
            path.chmod(0o644)
            path.write_bytes(bytes(80) + path.read_bytes()[80:])
        with pytest.raises(LostWorkingState, match=r"steps 4 to 4 of sums/counted subtask 0 .* damaged in the log"):
            run.step(rows(5))
        again = RegionRun(place, STREAM, LONG, checkpoint_steps=3)
        found = [again.step(rows(n)) for n in (4, 5, 6)][-1]
    with OpenWarehouse.open_writable(str(tmp_path / "still")) as place:
        still = RegionRun(place, STREAM, LONG, checkpoint_steps=3)
        expected = [still.step(rows(n)) for n in range(1, 7)][-1]
    assert found and expected and found.digest == expected.digest


def test_without_tracking_nothing_is_logged_and_lost_state_has_to_come_again(tmp_path: Path) -> None:
    policy = policy_by_name("adjust-d", PolicyOptions(d0=0, d_max=0))
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = RegionRun(place, STREAM, policy, checkpoint_steps=3, upload=UploadOptions(inline_bytes=0))
        for n in (1, 2, 3, 4):
            run.step(rows(n))
        assert not list(place.warehouse.store.list(CheckpointPath(NAME, 1, 2).prefix))
        shutil.rmtree(place.warehouse.local.work(NAME, 1) / "state")
        with pytest.raises(LostWorkingState, match=r"steps 4 to 4 of .* were not logged"):
            run.step(rows(5))


def test_subtasks_that_are_not_placed_log_each_step_although_each_checkpoint_is_a_base(tmp_path: Path) -> None:
    """Otherwise they leave behind in nearly each step what was not logged, and the run never comes to a checkpoint."""
    draw, policy = random.Random(3), policy_by_name("adjust-d", PolicyOptions(d0=0, d_max=0))
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = OnHosts(place, STREAM, policy, parallelism=2, checkpoint_steps=3, placed=False)
        run.hosts = Hosts(tmp_path / "hosts", moves(draw, 12, 2, losses=0, again=0))
        found = [done.digest for n in range(1, 13) if (done := run.step(rows(n)))]
        checkpoints = place.catalog.checkpoints.list(NAME)
        assert run.hosts.ways["forward"] and not failures(place, NAME)
        assert {form for checkpoint in checkpoints for form in checkpoint.forms.values()} == {Form.BASE}
    with OpenWarehouse.open_writable(str(tmp_path / "still")) as place:
        still = RegionRun(place, STREAM, policy, checkpoint_steps=3)
        expected = [done.digest for n in range(1, 13) if (done := still.step(rows(n)))]
    assert found == expected
