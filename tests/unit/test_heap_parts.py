"""The parts of the heap backend: its index, its upkeep, and what it says of files it cannot trust."""

import errno
import os
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest

from siltstone.errors import StateError, Unreachable
from siltstone.state.backends.heap import HeapBackend, HeapState, HeapTable, index, subtask, table
from siltstone.state.backends.heap.index import Index, tags
from siltstone.state.backends.heap.mapped_array import MappedArray
from siltstone.state.schema import TableSchema
from tests.state_model import ALL, MAX_PARALLELISM, batch_of, changed, contents

WORDS = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("v", pa.string())]))


def open_state(directory: Path) -> HeapState:
    return HeapBackend().open(directory, {"t": WORDS}, ("o",), ALL, MAX_PARALLELISM)


def state_of(directory: Path, keys: range) -> tuple[HeapState, HeapTable]:
    """State whose first step put these keys, and its table."""
    state = open_state(directory)
    state.begin(1, tracking=True)
    put(state.tables["t"], keys)
    state.commit()
    return state, state.tables["t"]


def put(table: HeapTable, keys: range, text: str = "x") -> None:
    values = pa.table({"v": [f"{text}{key}" for key in keys]}, schema=WORDS.value)
    table.put(batch_of(WORDS, pa.table({"k": list(keys)}).cast(WORDS.primary_key)), values)


def delete(table: HeapTable, keys: range) -> None:
    table.delete(batch_of(WORDS, pa.table({"k": list(keys)}).cast(WORDS.primary_key)))


def found(index: Index, of: np.ndarray, rows: int) -> list[int]:
    """The rows that a search comes upon first; tags are distinct in these tests."""
    return index.probe(index.home(of), of, rows).tolist()


def one_slot(count: int) -> np.ndarray:
    """Different tags that all start their search at slot 0."""
    return np.arange(1, count + 1, dtype=np.uint64) << np.uint64(32)


def random_tags(seed: int, count: int) -> np.ndarray:
    """The tags of random hashes; those of these seeds are distinct."""
    made = tags(np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64))
    assert len(np.unique(made)) == count
    return made


@pytest.mark.parametrize("alike", [True, False])
def test_taking_out_the_newest_rows_breaks_no_search_for_older_ones(alike: bool):
    """Also after segments were split, which enters old and new rows together."""
    made = one_slot(300) if alike else random_tags(3, 9000)
    half = len(made) // 2
    entries = Index(None)
    entries.make_room(half, 0)
    entries.insert(made[:half], np.arange(half))
    entries.make_room(len(made), half)
    entries.insert(made[half:], np.arange(half, len(made)))
    assert found(entries, made, len(made)) == list(range(len(made)))
    for keep in (len(made) - 7, half, half // 3):
        entries.truncate(keep)
        assert found(entries, made, len(made)) == [*range(keep), *[-1] * (len(made) - keep)]
    entries.truncate(0)
    assert not entries.slots.any()


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 64 slots, split early: few of them fill up by chance."""
    monkeypatch.setattr(index, "SEGMENT_BITS", 6)
    monkeypatch.setattr(index, "MAX_LOAD", 0.2)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("seed", range(3))
def test_segments_are_split_in_turn_and_every_row_stays_found(tmp_path: Path, seed: int):
    rng, rows = np.random.default_rng(seed), 0
    made = random_tags(seed, 4000)
    grown = Index(tmp_path)
    sizes = [grown.segments]
    while rows < len(made):
        more = min(len(made) - rows, int(rng.integers(1, 300)))
        grown.make_room(rows + more, rows)
        grown.insert(made[rows : rows + more], np.arange(rows, rows + more))
        rows += more
        sizes.append(grown.segments)
        assert found(grown, made, rows) == [*range(rows), *[-1] * (len(made) - rows)]
        if rng.random() < 0.3:
            grown.close()
            grown = Index(tmp_path, rows)
    assert sizes == sorted(sizes)
    assert sum(size.bit_count() > 1 for size in sizes) > len(sizes) / 2, "most sizes are not a power of two"
    assert sizes[-1] == -(-rows // int(0.2 * 64)), "no larger than it must be"


@pytest.mark.usefixtures("small_segments")
def test_a_split_that_a_process_did_not_finish_is_repeated(tmp_path: Path):
    made = random_tags(5, 900)
    torn = Index(tmp_path)
    torn.make_room(700, 0)
    torn.insert(made[:700], np.arange(700))

    def die(position: np.ndarray, entry: np.ndarray) -> None:
        torn.slots[position[::3]] = entry[::3]
        raise KeyboardInterrupt

    with patch.object(torn, "_enter", die), pytest.raises(KeyboardInterrupt):
        torn.make_room(900, 700)
    assert (tmp_path / "split").exists()
    torn = Index(tmp_path, 700)
    assert not (tmp_path / "split").exists()
    assert found(torn, made, 900) == [*range(700), *[-1] * 200]


@pytest.mark.usefixtures("small_segments")
def test_keys_with_hashes_that_are_too_much_alike_are_refused():
    with pytest.raises(StateError, match="more than 64 keys of one table are alike"):
        Index(None).insert(one_slot(65), np.arange(65))


def test_rows_are_entered_oldest_first_whatever_their_order():
    made = one_slot(50)
    entries = Index(None)
    order = np.random.default_rng(4).permutation(50)
    for part in np.array_split(order, 3):
        entries.insert(made[part], part)
    assert (entries.slots[:50] & np.uint64(0xFFFFFFFF)).tolist() == list(range(1, 51))


def test_entries_of_rows_that_are_no_more_are_stepped_over():
    """As a rollback leaves them that was itself cut short."""
    made = one_slot(20)
    entries = Index(None)
    entries.insert(made, np.arange(20))
    assert found(entries, made, 10) == [*range(10), *[-1] * 10]
    # The same row numbers go to other keys now; an entry left behind may name a row, but never hides one.
    entries.insert(made[10:][::-1], np.arange(10, 20))
    for i, row in enumerate([*range(10), *range(19, 9, -1)]):
        position, tag, candidates = entries.home(made[i : i + 1]), made[i : i + 1], []
        while not candidates or candidates[-1] >= 0:
            candidates += entries.probe(position, tag, 20).tolist()
            position = entries.advance(position)
        assert row in candidates


def test_rollback_leaves_neither_entries_nor_values_behind(tmp_path: Path):
    state, kept = state_of(tmp_path / "s", range(100))
    slots, counts = kept.records.index.slots.copy(), kept.counts
    for _ in range(3):
        state.begin(2, tracking=True)
        put(kept, range(50, 3000), "y")
        state.rollback()
        assert np.array_equal(kept.records.index.slots, slots)
        assert kept.counts == counts
        assert kept.records.arena.entries == counts.entries


@pytest.mark.usefixtures("small_segments")
def test_a_rollback_finishes_a_split_that_an_error_cut_short(tmp_path: Path):
    state, kept = state_of(tmp_path / "s", range(200))
    expected = contents(kept)
    state.begin(2, tracking=True)
    with patch.object(kept.records.index, "_enter", side_effect=MemoryError), pytest.raises(MemoryError):
        put(kept, range(200, 300))
    state.rollback()
    state.begin(2, tracking=True)
    put(kept, range(200))
    state.commit()
    assert contents(kept) == expected


def test_dead_rows_and_values_are_dropped_when_no_step_can_be_rolled_back(tmp_path: Path):
    state = open_state(tmp_path / "s")
    kept = state.tables["t"]
    with patch.object(table, "COMPACT_ROWS", 100):
        state.begin(1, tracking=True)
        put(kept, range(5000), "long" * 20)
        kept.mark()
        delete(kept, range(10, 4990))
        state.commit()
        expected, told = contents(kept), changed(kept)
        state.begin(2, tracking=True)
        assert kept.counts.generation == 0, "step 1 could still be rolled back"
        state.rollback()
        state.release(1)
        state.begin(2, tracking=True)
        kept.mark()
        assert (kept.counts.generation, kept.counts.rows) == (1, 5000), "its deletes were not told yet"
        state.commit()
        state.release(2)
        assert [path.name for path in (tmp_path / "s" / "tables" / "t").iterdir()] == ["1"]
        state.begin(3, tracking=True)
        assert (kept.counts.generation, kept.counts.rows, kept.counts.entries) == (2, 20, 21)
        state.commit()
    assert len(told) == 4980
    assert contents(kept) == expected
    state.close()
    assert contents(open_state(tmp_path / "s").tables["t"]) == expected


def test_a_table_in_memory_does_not_keep_replaced_values():
    merged = HeapTable.in_memory(WORDS, MAX_PARALLELISM)
    with patch.object(table, "COMPACT_ROWS", 10):
        for i in range(20):
            put(merged, range(100), str(i))
        assert merged.counts.entries < 400
    assert len(contents(merged)) == 100


def test_a_full_disk_is_said_plainly_and_rolled_back(tmp_path: Path):
    state, kept = state_of(tmp_path / "s", range(10))
    before = contents(kept)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for what in ("posix_fallocate", "pwrite"):
        state.begin(2, tracking=True)
        with (
            patch.object(os, what, side_effect=full, create=True),
            pytest.raises(Unreachable, match="No space left on device; free some space"),
        ):
            put(state.tables["t"], range(50_000))
        state.rollback()
        assert contents(state.tables["t"]) == before


@pytest.mark.parametrize("name", ["header", "tables/t/0/rows", "tables/t/0/slots", "tables/t/0/bytes", "opaque/o.1"])
@pytest.mark.parametrize("how", ["removed", "cut"])
def test_files_missing_or_cut_short_are_noticed(tmp_path: Path, name: str, how: str):
    state = open_state(tmp_path / "s")
    state.begin(1, tracking=True)
    put(state.tables["t"], range(20_000))
    state.set_opaque("o", {1: b"value"})
    state.commit()
    state.release(1)
    state.close()
    path = tmp_path / "s" / name
    if how == "removed":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 4)
    with pytest.raises(StateError, match="delete this working state and restore it"):
        open_state(tmp_path / "s")


def test_state_from_before_a_restart_of_the_machine_is_not_trusted(tmp_path: Path):
    open_state(tmp_path / "s").close()
    with (
        patch.object(subtask, "boot_id", return_value="another"),
        pytest.raises(StateError, match="before this machine restarted"),
    ):
        open_state(tmp_path / "s")
    open_state(tmp_path / "s").close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unreachable, match=r"cannot use .*file/s: Not a directory"):
        open_state(tmp_path / "file" / "s")


def test_pages_are_written_without_being_prepared_if_no_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = MappedArray(tmp_path / "a", np.uint64, scattered=True)
    array.reserve(5000)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    array.expect_writes(5000, ahead=True)
    array.items[:5000] = 7
    array.close()
    assert (MappedArray(tmp_path / "a", np.uint64, held=5000).items[:5000] == 7).all()
