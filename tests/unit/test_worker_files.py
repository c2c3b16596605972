"""The working files of a cluster's machines are where the machine says, and earlier epochs' do not stay."""

from dataclasses import replace
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError
from siltstone.run.working_state import remove_older_epochs
from siltstone.spark.worker_files import LOCAL_DIRS, worker_warehouse
from siltstone.store.open import Warehouse
from siltstone.store.paths import LocalLayout

STORE = "s3://bucket/state?endpoint=http://127.0.0.1:1&region=us-east-1"


def test_the_machine_names_the_disks_and_subtasks_are_spread_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse = Warehouse.at(f"{STORE}&local=/home/of/the/driver")
    monkeypatch.setenv(LOCAL_DIRS, f"{tmp_path}/one,{tmp_path}/two")
    roots = [worker_warehouse(warehouse, subtask).local.root for subtask in range(3)]
    assert [root.parent.name for root in roots] == ["one", "two", "one"] and roots[0] == roots[2]
    assert worker_warehouse(warehouse, 0).store_url == warehouse.store_url


def test_warehouses_and_replays_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCAL_DIRS, str(tmp_path))
    warehouse = Warehouse.at(f"{STORE}&local=/one")
    replay = replace(warehouse, local=LocalLayout(Path("/scratch")))
    other = Warehouse.at(f"{STORE.replace('state', 'other')}&local=/one")
    same_name = replace(Warehouse.at(f"{STORE.replace('127.0.0.1:1', '127.0.0.1:2')}&local=/one"), identity="2" * 32)
    assert same_name.label == warehouse.label
    assert len({worker_warehouse(each, 0).local.root for each in (warehouse, replay, other, same_name)}) == 4


def test_an_open_warehouse_has_the_identity_that_its_catalog_and_store_have(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        assert place.warehouse.identity == place.catalog.identity.read().identity
    with OpenWarehouse.open_existing(str(tmp_path / "w")) as again:
        assert again.warehouse == place.warehouse and len(again.warehouse.identity) == 32


def test_without_disks_of_its_own_a_machine_takes_its_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCAL_DIRS, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    root = worker_warehouse(Warehouse.at(STORE), 0).local.root
    assert root.is_relative_to(tmp_path) and root.parent.stat().st_mode & 0o777 == 0o700
    elsewhere = tmp_path / "elsewhere"
    root.parent.rename(elsewhere)
    root.parent.symlink_to(elsewhere)
    with pytest.raises(StateError, match="is a link or belongs to another user"):
        worker_warehouse(Warehouse.at(STORE), 0)


def test_only_earlier_epochs_of_the_same_stream_are_removed(tmp_path: Path) -> None:
    local = LocalLayout(tmp_path)
    kept = [local.work("mine", 3), local.work("mine", 4), local.work("other", 1)]
    for path in (*kept, local.work("mine", 1), local.work("mine", 2)):
        (path / "state").mkdir(parents=True)
    remove_older_epochs(local, "mine", oldest=3)
    assert sorted(tmp_path.glob("work/*/*")) == sorted(kept)
    remove_older_epochs(local, "mine", oldest=1)  # a process of an older epoch wakes up
    assert sorted(tmp_path.glob("work/*/*")) == sorted(kept)
