"""Rolling working state forward where the chain is not as it was when the state was written, or is damaged."""

from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import Policy, PolicyOptions, policy_by_name
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import LostWorkingState
from siltstone.retention.deletion import delete_checkpoints
from siltstone.store.paths import CheckpointPath
from tests.proofs import failures, in_order
from tests.property.test_log_laws import LONG, STREAM, Hosts, Move, OnHosts
from tests.sums import NAME, rows

APART = UploadOptions(inline_bytes=0)
"""each operator's changes are an object of their own"""


def on(*hosts: int) -> list[Move]:
    """A step per host, on which all of it runs; the last again and again."""
    return [Move([host], set()) for host in hosts]


def run_on(
    root: Path, place: OpenWarehouse, moves: list[Move], *, policy: Policy = LONG, checkpoint_steps: int = 1
) -> OnHosts:
    run = OnHosts(place, STREAM, policy, upload=APART, checkpoint_steps=checkpoint_steps)
    run.hosts = Hosts(root / "hosts", moves)
    return run


def test_state_from_before_a_materialization_is_not_rolled_forward_by_deleted_changes(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = run_on(tmp_path, place, on(0, 0, 1, 1, 1, 1, 0, 0))
        for n in range(1, 7):
            run.step(rows(n))
        materialize(place, NAME, "sums", 4, id="m1", parallelism=1, run=in_order)
        delete_checkpoints(place, NAME, [1, 2, 3, 4, 5])
        run.step(rows(7))
        run.step(rows(8))
        assert not failures(place, NAME)


def test_changes_that_are_damaged_in_the_log_reset_a_run_whose_state_is_older_too(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = run_on(tmp_path, place, on(0, 1, 1, 0), checkpoint_steps=3)
        for n in (1, 2, 3):
            run.step(rows(n))
        run.hosts.moves = on(0, 0, 0, 0, 1)
        run.step(rows(4))
        for name, _ in place.warehouse.store.list(CheckpointPath(NAME, 1, 2).prefix):
            path = place.warehouse.local.objects / name
            path.chmod(0o644)
            path.write_bytes(bytes(80) + path.read_bytes()[80:])
        with pytest.raises(LostWorkingState, match="damaged in the log"):
            run.step(rows(5))


def test_a_chain_that_is_replaced_between_two_steps_is_followed(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = run_on(tmp_path, place, on(0, 0, 0, 0, 1, 1))
        for n in (1, 2, 3):
            run.step(rows(n))
        run = run_on(tmp_path, place, on(0, 0, 0, 0, 1, 1), checkpoint_steps=3)
        run.step(rows(4))
        for operator in ("sums", "counted"):
            materialize(place, NAME, operator, 3, id=f"m{operator}", parallelism=1, run=in_order)
        delete_checkpoints(place, NAME, [1, 2])
        run.step(rows(5))
        assert run.step(rows(6))
        assert not failures(place, NAME)


def test_state_with_changes_that_were_not_tracked_is_not_used_for_a_step_that_logs_them(tmp_path: Path) -> None:
    """An epoch without tracking left it; the same step of the next epoch, with tracking, ran on another host."""
    untracked = policy_by_name("adjust-d", PolicyOptions(d0=0, d_max=0))
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = run_on(tmp_path, place, on(0), policy=untracked, checkpoint_steps=3)
        for n in (1, 2, 3, 4):
            run.step(rows(n))
        run = run_on(tmp_path, place, on(0, 0, 0, 1, 0), checkpoint_steps=3)
        for n in (4, 5, 6):
            run.step(rows(n))
        assert not failures(place, NAME)
