"""Files of RocksDB that several checkpoints and streams share: nothing that is needed goes, everything else may."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.export_savepoint import export_savepoint
from siltstone.change.fork import fork
from siltstone.change.rebuild import rebuild_catalog
from siltstone.change.recover import recover
from siltstone.errors import CorruptObject, LostWorkingState, UsageError
from siltstone.model import Form, Handle
from siltstone.restore.live_rules import state_handles
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.savepoints import set_savepoint
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.retention.truncate import truncate
from siltstone.store.paths import CheckpointPath, is_row_file
from tests.files_cases import (
    check,
    check_after_failure,
    expected,
    files_of,
    lose_state,
    manifest_of,
    rows,
    run_of,
    steps,
)
from tests.proofs import in_order
from tests.rebuild_cases import check_same, rebuilt, what_it_knows
from tests.stored import stream_objects
from tests.sums import NAME

pytestmark = pytest.mark.slow
DELTAS = policy_by_name("marginal-cost", PolicyOptions(size_ratio_max=None))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        yield place


def test_a_fork_shares_files_and_both_go_their_own_way(place: OpenWarehouse) -> None:
    run = run_of(place)
    steps(run, 1, 4)
    run.region.close("stopped")
    fork(place, NAME, "other", "3")
    other = run_of(place, name="other")
    assert all(name.startswith(f"{NAME}/") for name in files_of(place, 3, "other"))
    assert steps(other, 4, 7) == expected(7)[-4:]
    assert not any(name.startswith(f"{NAME}/") for name in files_of(place, 4, "other"))  # they are another run's
    run = run_of(place)
    steps(run, 5, 9)
    for stream in (NAME, "other"):
        truncate(place, stream, RetentionOptions(keep_last=1))
        sweep(place, stream, SweepOptions(age_guard=timedelta(0)))
    check(place, NAME, "other")
    assert steps(other, 8, 9) == expected(9)[-2:]
    assert steps(run, 10, 11) == expected(11)[-2:]
    for each in (run, other):
        each.region.close("stopped")
    check(place, NAME, "other")


def test_pending_checkpoints_refer_to_each_others_files(place: OpenWarehouse) -> None:
    run = run_of(place, max_pending=3)
    for n in range(1, 9):
        run.step(rows(n))
    run.complete_pending()
    run.region.close("stopped")
    sizes = [c.bytes for c in place.catalog.checkpoints.list(NAME)]
    assert max(sizes[1:6]) < sizes[0] / 3  # later ones have what compaction made
    assert [c.digest for c in place.catalog.checkpoints.list(NAME)] == expected(8)
    check(place)


def test_pending_files_that_are_given_up_leave_nothing_that_is_referred_to(place: OpenWarehouse) -> None:
    run = run_of(place, max_pending=3)
    for n in range(1, 6):
        run.step(rows(n))
    run.complete_oldest()
    check_after_failure(place, run)


@pytest.mark.parametrize("placed", [True, False])
def test_steps_between_checkpoints(place: OpenWarehouse, placed: bool) -> None:
    """They are logged only where state may be left behind; then lost state is rolled forward from files, too."""
    run = run_of(place, checkpoint_steps=3, placed=placed)
    for n in range(1, 6):
        run.step(rows(n))
    lose_state(place)
    if placed:
        with pytest.raises(LostWorkingState):
            run.step(rows(6))
        run.region.close("failed")
        run = run_of(place, checkpoint_steps=3)
        for n in range(4, 6):
            run.step(rows(n))
    done = run.step(rows(6))
    assert done is not None and done.digest == expected(6)[-1]
    run.region.close("stopped")
    check(place)


def test_a_catalog_is_rebuilt_from_files(place: OpenWarehouse, tmp_path: Path) -> None:
    run = run_of(place)
    steps(run, 1, 6)
    truncate(place, NAME, RetentionOptions(keep_last=2))
    steps(run, 7, 8)
    run.region.close("stopped")
    known = what_it_knows(place.catalog)
    check_same(rebuilt(place, f"sqlite:///{tmp_path / 'again.db'}")[1], known)


def test_materialized_files_become_bases_that_can_be_exported(place: OpenWarehouse, tmp_path: Path) -> None:
    run = run_of(place)
    steps(run, 1, 3)
    set_savepoint(place.catalog, NAME, "three", at="3")
    with pytest.raises(UsageError, match=r"has sums as files of RocksDB: make it bases with `siltstone materialize"):
        export_savepoint(place, NAME, "three", str(tmp_path / "export"))
    materialize(place, NAME, NAME, 3, id="m1", parallelism=2, run=in_order)
    check(place)
    assert steps(run, 4, 6) == expected(6)[-3:]
    assert any(CheckpointPath.of(name) != CheckpointPath.of(min(files_of(place, 4))) for name in files_of(place, 4))
    assert export_savepoint(place, NAME, "three", str(tmp_path / "export")).digest == expected(3)[-1]
    delete_checkpoints(place, NAME, [1, 2])
    run.region.close("stopped")
    check(place)


def test_a_manifest_cannot_refer_to_files_of_later_checkpoints(place: OpenWarehouse) -> None:
    from siltstone.format.manifest import encode_manifest
    from siltstone.format.manifest_decoding import decode_manifest

    run = run_of(place)
    steps(run, 1, 2)
    run.region.close("stopped")
    manifest = manifest_of(place, 2)

    def renamed(handle: Handle, name: str) -> Handle:
        return replace(handle, object=name) if handle.form is Form.FILES else handle

    late = CheckpointPath(NAME, 1, 3).row_file(NAME, 0, "a", 0)
    for name in (late, "x/y.sst", CheckpointPath(NAME, 1, 1).manifest()):
        bad = replace(manifest, handles=[renamed(h, name) for h in manifest.handles])
        with pytest.raises(CorruptObject, match="not of a file that holds a table"):
            decode_manifest(encode_manifest(bad))


def test_a_rebuilt_catalog_goes_on_from_materialized_files(tmp_path: Path) -> None:
    """It has not kept files that no restore reads."""
    root, url = str(tmp_path / "w"), f"sqlite:///{tmp_path / 'again.db'}"
    with OpenWarehouse.open_writable(root) as place:
        run = run_of(place)
        steps(run, 1, 3)
        materialize(place, NAME, NAME, 3, id="m1", parallelism=2, run=in_order)
        run.region.close("stopped")
        rebuild_catalog(place.warehouse, url)
    with OpenWarehouse.open_writable(root, url) as place:
        truncate(place, NAME, RetentionOptions(keep_last=1))
        run = run_of(place)
        assert steps(run, 4, 6) == expected(6)[-3:]
        run.region.close("stopped")
        check(place)


def row_files(place: OpenWarehouse) -> set[str]:
    return {name for name, _ in stream_objects(place.warehouse.store) if is_row_file(name)}


def deltas(place: OpenWarehouse, first: int, last: int, stream: str = NAME) -> None:
    """A run that changes little, whose checkpoints are deltas of every variable: no chain begins anew."""
    run = run_of(place, name=stream, policy=DELTAS)
    for n in range(first, last + 1):
        run.step(rows(n, changed=2))
    run.region.close("stopped")
    forms = {h.form for id in range(first, last + 1) for h in state_handles(manifest_of(place, id, stream).handles)}
    assert forms == {Form.DELTA}


@pytest.mark.parametrize("at", [3, 5])
def test_a_run_of_deltas_lets_go_of_files_that_bases_stand_for(place: OpenWarehouse, at: int) -> None:
    """Whether they were materialized where they were written, or later, while nothing ran."""
    run = run_of(place)
    steps(run, 1, 3)
    run.region.close("stopped")
    deltas(place, 4, 5)
    materialize(place, NAME, NAME, at, id="m1", parallelism=2, run=in_order)
    deltas(place, 6, 6)
    assert row_files(place)
    delete_checkpoints(place, NAME, range(1, 6))
    assert not row_files(place)
    check(place)


def fork_after_materialization(place: OpenWarehouse) -> set[str]:
    """A fork, where a materialization has replaced files whose intervals no run of the parent had closed; and then runs
    of both. Returns the files that the fork got."""
    run = run_of(place)
    steps(run, 1, 3)
    run.region.close("stopped")
    deltas(place, 4, 4)
    materialize(place, NAME, NAME, 3, id="m1", parallelism=2, run=in_order)
    fork(place, NAME, "other", "3")
    got = {o.name for o in place.catalog.objects.list("other") if is_row_file(o.name)}
    deltas(place, 4, 6, "other")
    deltas(place, 5, 5)
    return got


def test_a_fork_lets_go_of_files_that_bases_stand_for(place: OpenWarehouse) -> None:
    got = fork_after_materialization(place)
    assert got and {o.until for o in place.catalog.objects.list("other") if o.name in got} == {3}
    delete_checkpoints(place, NAME, range(1, 5))
    assert row_files(place) == got
    delete_checkpoints(place, "other", [3])
    assert not row_files(place)
    check(place, NAME, "other")


@pytest.mark.parametrize("deleted", [range(0), range(1, 5)])
def test_a_rebuilt_catalog_has_no_files_for_a_fork_that_bases_stand_for(
    place: OpenWarehouse, tmp_path: Path, deleted: range
) -> None:
    got = fork_after_materialization(place)
    delete_checkpoints(place, NAME, deleted)
    write_extract(place, NAME)  # as the parent's next run does
    known = what_it_knows(place.catalog)
    _, found = rebuilt(place, f"sqlite:///{tmp_path / 'again.db'}")
    check_same(found, known)
    assert not any(o.is_needed_by(4) for o in found["other"]["objects"] if o.name in got)


def test_a_run_refers_to_no_damaged_file_that_a_materialization_stands_for(place: OpenWarehouse) -> None:
    run = run_of(place)
    steps(run, 1, 4)
    materialize(place, NAME, NAME, 4, id="m1", parallelism=2, run=in_order)
    run.region.close("stopped")
    for name in files_of(place, 4):
        path = place.warehouse.local.objects / name
        path.chmod(0o600)
        path.write_bytes(b"\0" * path.stat().st_size)
    assert recover(place, NAME, run=in_order).checkpoint == 4  # its bases are intact
    run = run_of(place)
    assert steps(run, 5, 6) == expected(6)[-2:]
    run.region.close("stopped")
    delete_checkpoints(place, NAME, [1, 2, 3])
    check(place)
