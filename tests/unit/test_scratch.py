"""Files that a process needs only while it reads: they are not in the system's temporary directory, and do not stay."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.restore.files import OpenFiles
from siltstone.restore.proof import prove_checkpoints
from siltstone.run.working_state import remove_older_epochs
from siltstone.store import scratch
from siltstone.store.paths import LocalLayout
from siltstone.store.scratch import LOCK, SCRATCH, hold_directory, remove_abandoned
from tests.fault.small_stream import SMALL, purchases
from tests.region_run import RegionRun

FORK = multiprocessing.get_context("fork")


def hold(parent: Path, told: Connection) -> None:
    with hold_directory(parent, SCRATCH) as made:
        (made / "files").mkdir()
        told.send(made)
        signal.pause()


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory is too new."""
    monkeypatch.setattr(scratch, "NEW_S", 0.0)


@pytest.mark.usefixtures("old")
def test_the_next_run_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    local = LocalLayout(tmp_path)
    here, there = FORK.Pipe()
    processes = [FORK.Process(target=hold, args=(local.scratch(), there)) for _ in range(2)]
    made: list[Path] = []
    for process in processes:
        process.start()
        made.append(here.recv())
    os.kill(processes[0].pid or 0, signal.SIGKILL)
    processes[0].join()
    remove_older_epochs(local, "s", 1)
    assert [path.exists() for path in made] == [False, True]
    processes[1].kill()
    processes[1].join()
    remove_older_epochs(local, "s", 1)
    assert list(local.scratch().iterdir()) == []


def test_a_directory_that_is_not_locked_yet_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{SCRATCH}new").mkdir()
    remove_abandoned(tmp_path, SCRATCH)
    assert (tmp_path / f"{SCRATCH}new").exists()


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("before", ["open", "flock"])
def test_a_process_that_was_stopped_before_its_lock_does_not_get_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Seen: it was given the path of a directory that another process had removed."""
    opened, locked = scratch.open_private, fcntl.flock

    def sweep_first(path: str, flags: int) -> int:
        remove_abandoned(tmp_path, SCRATCH)
        return opened(path, flags)

    def sweep_before_lock(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            remove_abandoned(tmp_path, SCRATCH)
        locked(file, operation)

    if before == "open":
        monkeypatch.setattr(scratch, "open_private", sweep_first)
    else:
        monkeypatch.setattr(fcntl, "flock", sweep_before_lock)
    with pytest.raises(FileNotFoundError), hold_directory(tmp_path, SCRATCH):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("old")
def test_a_directory_is_removed_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its process, which wakes up in between, would lock and use what is about to be removed."""
    (tmp_path / f"{SCRATCH}left").mkdir()
    (tmp_path / f"{SCRATCH}left" / LOCK).touch()
    remove, waits = shutil.rmtree, list[bool]()

    def removing(path: Path, **options: Any) -> None:
        with open(path / LOCK, "w") as late, pytest.raises(BlockingIOError):
            fcntl.flock(late, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waits.append(True)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", removing)
    remove_abandoned(tmp_path, SCRATCH)
    assert waits == [True] and list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("old")
def test_a_link_that_somebody_put_there_is_not_followed(tmp_path: Path) -> None:
    """The system's temporary directory is also others'."""
    (tmp_path / f"{SCRATCH}theirs").mkdir()
    (tmp_path / f"{SCRATCH}theirs" / LOCK).symlink_to(tmp_path / "made by us")
    (tmp_path / "kept").mkdir()
    (tmp_path / f"{SCRATCH}link").symlink_to(tmp_path / "kept")
    remove_abandoned(tmp_path, SCRATCH)
    assert not (tmp_path / "made by us").exists() and (tmp_path / "kept").is_dir()


def test_a_proof_of_files_keeps_them_in_the_warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    enter = OpenFiles.__enter__

    def look(opened: OpenFiles) -> OpenFiles:
        enter(opened)
        seen.append(opened.directory)
        return opened

    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = RegionRun(place, SMALL, policy_by_name("files", PolicyOptions()), backend="rocksdb")
        for rows in list(purchases())[:2]:
            run.step(rows)
        run.region.close("done")
        monkeypatch.setattr(OpenFiles, "__enter__", look)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
        proof = prove_checkpoints(place, SMALL.name, [1, 2], lambda f, tasks: [f(task) for task in tasks])
        assert proof.failures == {}
        below = place.warehouse.local.scratch()
    assert seen and {path.parents[1] for path in seen} == {below}
    assert list(below.iterdir()) == []
