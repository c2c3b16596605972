"""What is made on disk is its user's alone, unless somebody asks otherwise."""

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from siltstone.catalog.open import open_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import UsageError
from siltstone.model import KeyGroupRange
from siltstone.restore.export import staged_directory, write_state
from siltstone.restore.restore import MemoryState
from siltstone.run.working_state import lock_directory
from siltstone.store.private import VARIABLE, make_private_file, own_umask, replace_file
from tests.command_line import siltstone
from tests.delta_run import TableRun
from tests.fault.small_stream import SMALL, purchases
from tests.outbox_run import SINK, batch
from tests.region_run import RegionRun


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """A process whose own umask keeps nobody out."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("asked", "directory", "file"), [(None, 0o700, 0o600), ("027", 0o750, 0o640)])
def test_warehouse_catalog_and_working_state_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, directory: int, file: int
) -> None:
    if asked:
        monkeypatch.setenv(VARIABLE, asked)
    root = tmp_path / "w"
    OpenWarehouse.open_writable(str(root)).catalog.close()
    assert (mode(root), mode(root / "catalog.db")) == (directory, file)
    with open_catalog(f"sqlite:///{tmp_path}/elsewhere.db"):
        found = {path.name: mode(path) for path in tmp_path.glob("elsewhere.db*")}
    assert found and set(found.values()) == {file}
    # On a host that only runs tasks nobody made the warehouse's directory.
    with lock_directory(tmp_path / "host" / "work" / "s" / "state" / "00000", 1.0):
        assert mode(tmp_path / "host" / "work" / "s" / "state") == directory


@pytest.mark.parametrize(
    ("scheme", "backend", "policy", "tables"),
    [
        ("file", "heap", "adjust-d", frozenset({SINK})),
        ("file", "rocksdb", "files", frozenset()),
        ("rocksdb", "heap", "adjust-d", frozenset()),
    ],
)
def test_what_a_library_makes_in_a_directory_of_everybody_is_private(
    tmp_path: Path, scheme: str, backend: str, policy: str, tables: frozenset[str]
) -> None:
    """Seen: all that a run of `st.open` made was readable for everybody, since only commands set the umask."""
    root = tmp_path / "w"
    root.mkdir(0o755)
    with OpenWarehouse.open_writable(f"{scheme}://{root}") as place:
        run = (
            TableRun(place)
            if tables
            else RegionRun(place, SMALL, policy_by_name(policy, PolicyOptions()), backend=backend)
        )
        for n, rows in enumerate(islice(purchases(), 3), 1):
            run.step(batch(n) if tables else rows)
        run.region.close("done")
    made = {path: mode(path) for path in root.rglob("*")}
    private = {path for path, bits in made.items() if not bits & 0o077}
    assert {path for path in made if path not in private and private.isdisjoint(path.parents)} == set()
    theirs = {path for path in made if {"rocksdb", "files", ".db", "_delta_log"} & set(path.relative_to(root).parts)}
    assert made.keys() - theirs <= private
    assert len(made) > 20


def test_a_restore_makes_private_files(tmp_path: Path) -> None:
    with staged_directory(tmp_path / "out") as staged:
        state = MemoryState.make_empty({}, KeyGroupRange(0, 4), 4)
        state.opaque["counts"] = {0: b"1"}
        write_state(state, staged / "op")
    assert {mode(path) for path in (tmp_path / "out").rglob("*.parquet")} == {0o600}
    assert {mode(path) for path in (tmp_path / "out", tmp_path / "out" / "op" / "counts")} == {0o700}


def test_what_a_command_writes_elsewhere_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(*_: object) -> None:
        (tmp_path / "made").touch()
        seen.append(mode(tmp_path / "made"))

    monkeypatch.setattr("siltstone.chains.inspect.list_checkpoints", look)
    OpenWarehouse.open_writable(str(tmp_path / "w")).catalog.close()
    siltstone("checkpoints", "none", "--warehouse", str(tmp_path / "w"))
    assert seen == [0o600]
    assert os.umask(0) == 0, "this process has its own again"


@pytest.mark.parametrize("asked", ["", "7", "777", "0o77", "u=rwx", "-77"])
def test_what_is_no_umask_is_refused(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(UsageError, match="write three octal digits"):
        own_umask()
    siltstone("checkpoints", "none").failed(2, "write three octal digits")


def test_a_file_that_is_there_keeps_the_locks_of_this_process(tmp_path: Path) -> None:
    """Seen: a catalog was malformed, since opening it once more ended the locks that SQLite had on it."""
    path = tmp_path / "catalog.db"
    make_private_file(path)
    assert mode(path) == 0o600 and list(tmp_path.iterdir()) == [path]
    with path.open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        make_private_file(path)
        other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        ended = subprocess.run([sys.executable, "-c", other, str(path)], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in ended.stderr


def test_a_replaced_file_has_the_mode_asked_for_and_leads_nowhere_else(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "made"
    other.write_bytes(b"another's")
    path.symlink_to(other)
    replace_file(path, b"new")
    assert (path.read_bytes(), mode(path), path.is_symlink()) == (b"new", 0o600, False)
    assert other.read_bytes() == b"another's" and sorted(tmp_path.iterdir()) == [path, other]


def test_a_file_that_cannot_be_replaced_stays_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(path, b"new")
    assert list(tmp_path.iterdir()) == [path] and path.is_dir()
