"""Crafted table files of RocksDB end a process of their own, or are refused: they never end the one that wants rows."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocksdict import Options, Rdict

from siltstone.errors import StateError, Unreachable
from siltstone.model import KeyGroupRange
from siltstone.state.backends.rocksdb import RocksDBBackend
from siltstone.state.backends.rocksdb.coding import KeyCoding, RowCoding
from siltstone.state.backends.rocksdb.files import RowFiles, manifest_of, table_files
from siltstone.state.backends.rocksdb.packing import from_list
from siltstone.state.backends.rocksdb.subtask import RocksDBState
from siltstone.state.digest import group_sums, row_digests
from siltstone.state.protocol import get_state, set_state
from siltstone.state.schema import TableSchema
from tests.crafted_files import CLAIM, blocks_of, craft, mend_manifest, mend_table

GROUPS = KeyGroupRange(0, 8)
VALUES = pa.schema([("n", pa.int64()), ("note", pa.string()), ("d", pa.decimal128(20, 2)), ("b", pa.bool_())])
SCHEMAS = {
    "sums": TableSchema(pa.schema([pa.field("k", pa.string(), nullable=True)]), pa.schema([("i", pa.int64())]), VALUES),
    "tally": TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("n", pa.int64())])),
}
BLOCKS = cache(blocks_of)


def _rows(name: str, step: int) -> pa.Table:
    count = 120 if step == 1 else 20
    numbers = [step * i for i in range(count)]
    if name == "tally":
        return pa.table([list(range(count)), numbers], schema=SCHEMAS[name].rows)
    keys, notes = [f"key {n}" if n else None for n in numbers], [f"note {n}" * (n % 4) for n in numbers]
    decimals = [Decimal(n) for n in numbers]
    return pa.table(
        [keys, list(range(count)), numbers, notes, decimals, [n % 2 == 0 for n in numbers]], SCHEMAS[name].rows
    )


@dataclass(frozen=True)
class Written:
    """Three small table files, and what they hold."""

    directory: Path
    rows: Mapping[str, int]
    digests: Mapping[str, np.ndarray]

    def read(self, directory: Path) -> dict[str, list[int]]:
        """The digests of the rows in a copy of the files, by key group."""
        files = RowFiles(directory, SCHEMAS, sum((directory / name).stat().st_size for name in table_files(directory)))
        found = {name: np.zeros(8, np.uint64) for name in SCHEMAS}
        try:
            for name in SCHEMAS:
                for rows, owners in files.scan(name, GROUPS):
                    found[name] += group_sums(row_digests(rows), owners, 8)
        finally:
            files.close()
        return {name: sums.tolist() for name, sums in found.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("written")
    for step in (1, 2, 3):
        state = RocksDBBackend().open(root / "state", SCHEMAS, (), GROUPS, 8)
        state.begin(step, tracking=True)
        for name in SCHEMAS:
            set_state(state, name, _rows(name, step))
        state.copy_rows(root / f"files-{step}")
        rows = {name: table.rows for name, table in state.tables.items()}
        digests = {name: table.digests for name, table in state.tables.items()}
        for table in state.tables.values():
            table.mark()
        state.commit()
        state.close()
    assert len(table_files(root / "files-3")) == 3
    return Written(root / "files-3", rows, digests)


def _copy(written: Written, tmp_path: Path) -> Path:
    shutil.copytree(written.directory, tmp_path / "files")
    return tmp_path / "files"


def _replace(path: Path, data: bytes) -> None:
    path.unlink()  # it may be a link
    path.write_bytes(data)


def _start(directory: Path) -> RowFiles:
    return RowFiles(directory, SCHEMAS, 20_000)


def _children() -> list[int]:
    """The processes that this one has started."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_genuine_files_are_read_and_mending_changes_nothing(written: Written) -> None:
    assert written.read(written.directory) == {name: sums.tolist() for name, sums in written.digests.items()}
    for name in table_files(written.directory):
        data = (written.directory / name).read_bytes()
        assert mend_table(data, BLOCKS(data)) == data
    manifest = manifest_of(written.directory).read_bytes()
    assert mend_manifest(manifest) == manifest


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_crafted_files_are_refused_or_read(written: Written, tmp_path: Path, seed: int) -> None:
    directory = _copy(written, tmp_path)
    for attempt in range(2):
        craft(directory, random.Random(seed + attempt), BLOCKS)
        try:
            written.read(directory)
        except ValueError:
            break


@pytest.mark.parametrize(
    ("block", "claim", "ends_by"),
    [(-3, CLAIM, "SIGSEGV"), (-2, b"\0\3\xff\xff\xff\xff\x0f", "SIGABRT")],
    ids=["index", "properties"],
)
def test_files_that_end_the_process_are_refused(
    written: Written, tmp_path: Path, block: int, claim: bytes, ends_by: str
) -> None:
    """A key or a value claims to be gigabytes long, and the checksum is right."""
    path = _copy(written, tmp_path) / table_files(written.directory)[-1]
    data = path.read_bytes()
    start, _ = BLOCKS(data)[block]
    _replace(path, mend_table(data[:start] + claim + data[start + len(claim) :], BLOCKS(data)))
    with pytest.raises(ValueError, match=f"reading them ended a process \\({ends_by}\\)"):
        written.read(path.parent)


def test_a_block_that_claims_a_gigabyte_is_refused(written: Written, tmp_path: Path) -> None:
    """A file of 17 kB took 1.5 GB: its blocks say what they become when they are decompressed."""
    path = _copy(written, tmp_path) / table_files(written.directory)[0]
    data = bytearray(path.read_bytes())
    blocks = BLOCKS(bytes(data))
    for start, end in blocks[:2]:
        data[start : start + 5], data[end] = b"\x80\x80\x80\x80\x06", 7  # 1.5 GiB, of zstd
    _replace(path, mend_table(bytes(data), blocks))
    with pytest.raises(ValueError, match=r"ended a process|orrupt"):
        written.read(path.parent)


def test_a_process_has_memory_in_proportion_to_the_files(written: Written) -> None:
    files = _start(written.directory)
    list(files.scan("tally", GROUPS))
    lines = Path(f"/proc/{_children()[-1]}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[0] for line in lines}
    files.close()
    assert int(limits["Max address space"]) < 256 << 20 and int(limits["Max cpu time"]) < 100
    assert int(limits["Max core file size"]) == 0


def test_a_scan_that_is_given_up_does_not_disturb_the_next(written: Written) -> None:
    files = _start(written.directory)
    first = _children()[-1]
    for _ in files.scan("sums", GROUPS):
        break
    assert sum(len(owners) for _, owners in files.scan("sums", GROUPS)) == written.rows["sums"]
    files.close()
    files.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_something_else_ends_is_no_damage(written: Written, by: signal.Signals) -> None:
    """Else what the machine does when memory is scarce would let a recovery give up checkpoints."""
    files = _start(written.directory)
    list(files.scan("tally", GROUPS))
    os.kill(_children()[-1], by)
    with pytest.raises(Unreachable, match=f"was ended \\({by.name}\\)"):
        list(files.scan("tally", GROUPS))
    files.close()


def test_a_python_that_does_not_start_is_no_damage(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unreachable, match="cannot start a process"):
        _start(written.directory)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    files = _start(written.directory)
    with pytest.raises(Unreachable, match="did not start"):
        list(files.scan("tally", GROUPS))
    files.close()


def test_a_process_has_no_secrets_and_needs_no_temporary_directory(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    monkeypatch.setenv("TMPDIR", "/nowhere")
    files = _start(written.directory)
    assert list(files.scan("tally", GROUPS))
    assert b"planted" not in Path(f"/proc/{_children()[-1]}/environ").read_bytes()
    files.close()


def test_a_process_ends_with_the_one_that_started_it(written: Written) -> None:
    """Even while it is stopped in the middle of a scan, and however the other one ends."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from siltstone.state.backends.rocksdb.scan_process import ScanProcess\n"
        f"process = ScanProcess(Path({str(written.directory)!r}), 0)\n"
        "next(process.scan(b't\\0\\0\\0\\0', b't\\0\\0\\0\\x08'))\n"
        "print(process._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    status = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 60
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", SCHEMAS)
@given(st.data())
def test_whatever_keys_and_values_are_they_are_decoded_or_refused(name: str, data: st.DataObject) -> None:
    schema, prefix = SCHEMAS[name], b"t\0\0"
    keys, values = KeyCoding(schema, prefix), RowCoding(schema)
    ends = st.binary(max_size=20).map(lambda key: key + (len(key) + 1).to_bytes(4, "big"))
    some = data.draw(st.lists(st.one_of(st.binary(max_size=20), ends), max_size=3))
    with suppress(ValueError):
        keys.decode(from_list([prefix + each for each in some]))
    with suppress(ValueError):
        keys.decode(from_list(some))
    packed = from_list(data.draw(st.lists(st.binary(max_size=2 * values.dtype.itemsize), max_size=3)))
    with suppress(ValueError):
        values.decode(packed, values.records(packed))


def test_rows_in_order_are_loaded_as_if_they_were_put(written: Written, tmp_path: Path) -> None:
    state = RocksDBBackend().open(tmp_path / "state", SCHEMAS, (), GROUPS, 8)
    files = _start(written.directory)
    for attempt in ("rolled back", "committed"):
        state.begin(1, tracking=False)
        for name in SCHEMAS:
            for part in GROUPS.split(2):
                state.load_rows(name, files.scan(name, part))
        assert {name: table.digests.tolist() for name, table in state.tables.items()} == written.read(written.directory)
        if attempt == "rolled back":
            state.rollback()
            check_empty(state)
    files.close()
    for table in state.tables.values():
        table.mark()
    state.commit()
    state.begin(2, tracking=True)
    for name in SCHEMAS:
        with pytest.raises(StateError, match="only into an empty table"):
            state.load_rows(name, [])
        for rows, owners in list(get_state(state, name, GROUPS)):
            set_state(state, name, rows, owners)
        assert {name: table.rows for name, table in state.tables.items()}[name] == written.rows[name]
        assert state.tables[name].count_changed().sum() == written.rows[name]
    assert {name: table.digests.tolist() for name, table in state.tables.items()} == written.read(written.directory)
    state.close()


def check_empty(state: RocksDBState) -> None:
    """Check that nothing is left, also of what a table without rows would not look for."""
    state.begin(state.version + 1, tracking=False)
    for name, table in state.tables.items():
        assert not table.rows
        set_state(state, name, _rows(name, 1)[:1])
        assert [len(rows) for rows, _ in table.scan(GROUPS)] == [1]
    state.rollback()


@pytest.mark.parametrize("damage", ["twice", "in another order", "of another subtask"])
def test_rows_that_are_out_of_order_are_not_loaded(written: Written, tmp_path: Path, damage: str) -> None:
    files = _start(written.directory)
    [(rows, owners)] = files.scan("tally", GROUPS)
    files.close()
    batches = {
        "twice": [(rows, owners)] * 2,
        "in another order": [(rows.take(list(range(len(rows)))[::-1]), owners[::-1])],
        "of another subtask": [(rows, owners + np.uint16(8))],
    }
    state = RocksDBBackend().open(tmp_path / "state", SCHEMAS, (), GROUPS, 8)
    state.begin(1, tracking=False)
    with pytest.raises(StateError):
        state.load_rows("tally", batches[damage])
    state.close()
    state = RocksDBBackend().open(tmp_path / "state", SCHEMAS, (), GROUPS, 8)
    assert not state.version
    check_empty(state)
    state.close()


def test_damaged_working_state_says_what_to_do(tmp_path: Path) -> None:
    """A key and a value that are too short, written behind the backend's back."""
    state = RocksDBBackend().open(tmp_path / "state", SCHEMAS, (), GROUPS, 8)
    state.begin(1, tracking=False)
    set_state(state, "tally", _rows("tally", 1))
    state.commit()
    state.close()
    options = Options(raw_mode=True)
    database = Rdict(str(tmp_path / "state" / "rocksdb"), options, {"default": options, "local": options})
    database[b"t\0\1\0\1"] = b"short"
    database.close()
    state = RocksDBBackend().open(tmp_path / "state", SCHEMAS, (), GROUPS, 8)
    with pytest.raises(StateError, match="delete this working state and restore it"):
        list(get_state(state, "tally", GROUPS))
    state.close()
