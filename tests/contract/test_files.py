"""Checkpoints as files of RocksDB: only new ones are stored, and what works on checkpoints works on them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.catalog.epochs import Tenure
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import policy_by_name
from siltstone.change.fork import fork
from siltstone.change.rebuild import rebuild_catalog
from siltstone.change.recover import recover
from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.format.manifests import read_manifests
from siltstone.model import Form, StoredObject
from siltstone.restore.local_files import LocalFiles
from siltstone.restore.table import read_table
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.truncate import truncate
from siltstone.spark.operations.materializing import find_in_files
from siltstone.state.backends.rocksdb import RocksDBState
from siltstone.state.backends.rocksdb.files import RowFiles
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import is_files_index
from tests.examples import long_form
from tests.files_cases import (
    KEYS,
    check,
    check_after_failure,
    craft_checkpoint,
    expected,
    files_of,
    is_old,
    lose_state,
    manifest_of,
    rows,
    run_of,
    steps,
)
from tests.proofs import failures, in_order
from tests.store_reads import counted_reads
from tests.stored import stream_objects
from tests.sums import NAME

pytestmark = pytest.mark.slow


@pytest.fixture(params=["file", "rocksdb"])
def any_place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenWarehouse]:
    """A warehouse in files, and in a store of keys and values."""
    root = str(tmp_path / "w")
    url = root if request.param == "file" else f"rocksdb://{root}-kv"
    with OpenWarehouse.open_writable(url) as place:
        yield place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        yield place


def test_only_new_files_are_stored_and_all_prove(any_place: OpenWarehouse) -> None:
    run = run_of(any_place)
    assert steps(run, 1, 6) == expected(6)
    run.region.close("stopped")
    check(any_place)
    record = any_place.catalog.checkpoints.get(NAME, 6)
    assert record.forms == {NAME: Form.FILES}
    files = files_of(any_place, 6)
    old = {name for name in files if is_old(any_place, 6, name)}
    assert old and files - old and not any(map(is_files_index, old))
    first = any_place.catalog.checkpoints.get(NAME, 1)
    assert record.bytes < first.bytes / 3


def test_a_run_goes_on_with_its_working_state_and_refers_to_the_same_files(place: OpenWarehouse) -> None:
    for first in (1, 3, 5):
        run = run_of(place)
        assert steps(run, first, first + 1) == expected(first + 1)[-2:]
        run.region.close("stopped")
    sizes = [place.catalog.checkpoints.get(NAME, id).bytes for id in range(1, 7)]
    assert max(sizes[1:]) < sizes[0] / 3
    check(place)


def _refuse(*_: object) -> None:
    raise AssertionError("this must not be called")


def test_lost_state_of_a_run_is_taken_over_without_reading_a_row(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a worker is lost: another machine fetches the files, which the same run has stored. It may have reset
    itself meanwhile."""
    tenure = Tenure()
    run = run_of(place, tenure=tenure)
    steps(run, 1, 4)
    lose_state(place)
    monkeypatch.setattr(RowFiles, "scan", _refuse)
    assert steps(run, 5, 5) == expected(5)[-1:]
    run.region.close("reset")
    lose_state(place)
    run = run_of(place, tenure=tenure)
    assert steps(run, 6, 7) == expected(7)[-2:]
    assert list(tenure.files) == [7]
    monkeypatch.undo()
    sizes = [place.catalog.checkpoints.get(NAME, id).bytes for id in (1, 5, 6)]
    assert max(sizes[1:]) < sizes[0] / 3
    run.region.close("stopped")
    check(place)


def test_files_of_another_run_and_machine_are_read_and_written_anew(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB opens them in a process of its own only: somebody may have crafted them, and catalog and store, too."""
    run = run_of(place)
    steps(run, 1, 4)
    run.region.close("stopped")
    lose_state(place)
    monkeypatch.setattr(RocksDBState, "adopt_rows", _refuse)
    run = run_of(place)
    assert steps(run, 5, 7) == expected(7)[-3:]
    sizes = [place.catalog.checkpoints.get(NAME, id).bytes for id in (1, 5, 6)]
    assert sizes[1] > sizes[0] / 2 and sizes[2] < sizes[0] / 3
    run.region.close("stopped")
    check(place)


def test_a_warehouse_that_an_enemy_wrote_is_refused_by_name(tmp_path: Path) -> None:
    """A table file ends each process that reads it, and a rebuilt catalog has the checksums that lead to it."""
    root, url = str(tmp_path / "w"), f"sqlite:///{tmp_path}/rebuilt.db"
    with OpenWarehouse.open_writable(root) as place:
        run = run_of(place, parallelism=1)
        steps(run, 1, 3)
        run.region.close("stopped")
        index = craft_checkpoint(place, 3)
        lose_state(place)
        rebuild_catalog(place.warehouse, url)
    with OpenWarehouse.open_writable(root, url) as place:
        [failure] = failures(place, NAME)
        assert (failure.checkpoint, failure.object) == (3, index) and "ended a process (SIGSEGV)" in failure.reason
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, 3), NAME)
        with pytest.raises(CorruptObject, match=index):
            read_table(place.warehouse.store, manifests, NAME, "largest").to_table()
        for backend, policy in (("rocksdb", "files"), ("heap", "adjust-d")):
            run = run_of(place, 1, backend, policy=policy_by_name(policy))
            with pytest.raises(CorruptObject, match=f"{index} cannot be read.*ended a process"):
                run.step(rows(4))
            run.region.close("failed")
        assert recover(place, NAME, run=in_order).checkpoint == 2
        run = run_of(place, parallelism=1)
        assert steps(run, 3, 4) == expected(4)[-2:]
        run.region.close("stopped")


@pytest.mark.parametrize("parallelism", [1, long_form(4), 8])
def test_rescaled_files_are_clipped_by_key_group(place: OpenWarehouse, parallelism: int) -> None:
    run = run_of(place)
    steps(run, 1, 3)
    run.region.close("stopped")
    run = run_of(place, parallelism)
    assert steps(run, 4, 6) == expected(6)[-3:]
    run.region.close("stopped")
    check(place)


@pytest.mark.parametrize(
    ("backend", "policy"),
    [
        ("heap", "marginal-cost"),
        ("rocksdb", "adjust-d"),
        long_form("heap", "adjust-d"),
        long_form("rocksdb", "marginal-cost"),
    ],
)
def test_other_policies_and_backends_go_on_from_files_and_back(place: OpenWarehouse, policy: str, backend: str) -> None:
    run = run_of(place)
    steps(run, 1, 3)
    run.region.close("stopped")
    run = run_of(place, backend=backend, policy=policy_by_name(policy))
    assert steps(run, 4, 7) == expected(7)[-4:]
    run.region.close("stopped")
    run = run_of(place)
    assert steps(run, 8, 9) == expected(9)[-2:]
    run.region.close("stopped")
    assert set(place.catalog.checkpoints.get(NAME, 9).forms.values()) == {Form.FILES}
    check(place)


def test_files_need_the_backend_whose_they_are(place: OpenWarehouse) -> None:
    with pytest.raises(UsageError, match="add --backend rocksdb, or use another policy"):
        run_of(place, backend="heap")


def test_a_scan_reads_some_columns_and_keys(place: OpenWarehouse) -> None:
    run = run_of(place)
    steps(run, 1, 3)
    run.region.close("stopped")
    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, 3), NAME)
    found = read_table(place.warehouse.store, manifests, NAME, "largest").to_table().sort_by("k")
    assert found.column("k").to_pylist() == list(range(KEYS))
    assert set(found.column("note").to_pylist()) == {"note 1", "note 2", "note 3"}
    notes = read_table(place.warehouse.store, manifests, NAME, "largest", ["note"]).to_table()
    assert notes.column_names == ["note"] and len(notes) == KEYS


@pytest.mark.parametrize("what", [".sst", ".files"])
def test_verify_names_a_damaged_file(place: OpenWarehouse, what: str) -> None:
    run = run_of(place)
    steps(run, 1, 3)
    run.region.close("stopped")
    name = sorted(n for n in files_of(place, 3) if n.endswith(what) and not is_old(place, 3, n))[0]
    path = place.warehouse.local.objects / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    [failure] = failures(place, NAME)
    assert (failure.checkpoint, failure.object) == (3, name) and name in failure.reason


def test_two_latest_retained(place: OpenWarehouse) -> None:
    """The figure of Flink's slides: with two checkpoints retained, a file goes with the last that needs it."""
    run = run_of(place, parallelism=1)
    shared: set[str] = set()
    for n in range(1, 15):
        run.step(rows(n))
        truncate(place, NAME, RetentionOptions(keep_last=2))
        kept = [c.id for c in place.catalog.checkpoints.list(NAME)]
        assert kept == list(range(max(1, n - 1), n + 1))
        needed = set().union(*(files_of(place, id) for id in kept))
        there = {name for name, _ in stream_objects(place.warehouse.store) if name.endswith((".sst", ".files"))}
        assert there == needed
        shared |= files_of(place, n) & files_of(place, max(1, n - 1))
    # Files of the first checkpoint were shared, and compaction has replaced them since.
    assert any(is_old(place, 2, name) for name in shared)
    assert not any(is_old(place, 2, name) for name in files_of(place, 14))
    run.region.close("stopped")
    check(place)


def test_a_restore_fetches_only_files_that_are_not_on_this_machine(place: OpenWarehouse) -> None:
    run = run_of(place, parallelism=1)
    steps(run, 1, 4)
    run.region.close("stopped")
    [state] = (place.warehouse.local.root / "work" / NAME).glob(f"*/state/{NAME}/00000")
    shutil.rmtree(state / "rocksdb")  # the state is lost, the files of checkpoint 4 are not
    run = run_of(place, parallelism=1)
    with counted_reads() as reads:
        assert steps(run, 5, 5) == expected(5)[-1:]
    assert not {name for name in reads.names if name.endswith(".sst")}
    run.region.close("stopped")
    [state] = (place.warehouse.local.root / "work" / NAME).glob(f"*/state/{NAME}/00000")
    shutil.rmtree(state / "rocksdb")
    sets = LocalFiles(state / "files").sets
    [kept] = [each.directory for each in sets if each.index.name in files_of(place, 5)]
    for each in sets:  # that of checkpoint 4 shares files with it
        if each.directory != kept:
            shutil.rmtree(each.directory)
    damaged, *others = sorted(kept.glob("*.sst"))  # only one, if RocksDB has just merged them
    for missing in others[:1]:
        missing.unlink()
    data = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(b"\0" * len(data))
    run = run_of(place, parallelism=1)
    with counted_reads() as reads:
        assert steps(run, 6, 6) == expected(6)[-1:]
    assert len({name for name in reads.names if name.endswith(".sst")}) == 1 + len(others[:1])
    run.region.close("stopped")
    check(place)


@pytest.mark.parametrize("at", [0, long_form(1), long_form(2), 5])
def test_an_upload_that_fails_in_the_middle_is_done_again(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    run = run_of(place)
    steps(run, 1, 3)
    put, left = FilesystemStore.put, [at]

    def failing(self: FilesystemStore, name: str, data: bytes) -> StoredObject:
        if name.endswith((".sst", ".files")):
            left[0] -= 1
            if left[0] < 0:
                raise Unreachable(f"cannot write {name}: the test says so", transient=False)
        return put(self, name, data)

    monkeypatch.setattr(FilesystemStore, "put", failing)
    with pytest.raises(Unreachable):
        for n in (4, 5):
            run.step(rows(n))
    monkeypatch.undo()
    check_after_failure(place, run)


def test_an_unchanged_subtask_refers_to_what_it_has(place: OpenWarehouse) -> None:
    run = run_of(place)
    steps(run, 1, 2)
    before = files_of(place, 2)
    for _ in range(2):
        done = run.step(rows(3).slice(0, 0))
        assert done is not None and done.digest == expected(2)[-1]
        assert files_of(place, done.id) == before
        assert not any(stored.name.endswith((".sst", ".files")) for stored in manifest_of(place, done.id).objects)
    truncate(place, NAME, RetentionOptions(keep_last=1))
    assert steps(run, 3, 4) == expected(4)[-2:]
    run.region.close("stopped")
    check(place)


def test_files_after_a_materialization_can_be_made_bases_again(place: OpenWarehouse) -> None:
    """They were thought to be bases because the checkpoint before them had some: an export was refused for ever."""
    run = run_of(place)
    for n in range(1, 4):
        run.step(rows(n))
    fork(place, NAME, "forked", "3")
    [operator] = place.catalog.checkpoints.get("forked", 3).forms
    run = run_of(place, name="forked")
    for checkpoint in (3, 4):
        record = place.catalog.checkpoints.get("forked", checkpoint)
        assert find_in_files(place, record) == {operator}
        materialize(place, "forked", operator, checkpoint, id=f"m{checkpoint}", parallelism=1, run=in_order)
        assert find_in_files(place, record) == set()
        run.step(rows(checkpoint + 1, changed=1))  # most opaque values stay those of the materialization
    assert not failures(place, "forked")
