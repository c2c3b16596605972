"""The changelog writer: what is persisted reads back, whatever failed meanwhile; what is not needed goes."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.changelog.changes import Change, ChangelogHandle, OpaqueChange, read_changes
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.changelog.writer import ChangelogWriter
from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.format.block import encode_block
from siltstone.model import KeyGroupRange, Kind
from siltstone.store.base import Store
from siltstone.store.paths import CheckpointPath
from tests.examples import examples
from tests.hooked_store import Failing, HookedStore

GROUPS = KeyGroupRange(4, 8)
PATH = CheckpointPath("s", 1, 1)


def delta(variable: str, value: int, rows: int = 1) -> Change:
    """Changes that all say `value`, their key groups as even as can be."""
    groups = np.sort(np.arange(rows, dtype=np.uint16) % 4 + 4)
    return Change(variable, encode_block(pa.table({"v": [value] * rows}), groups), 0, 0, digest=value)


def opaque(variable: str, value: int) -> OpaqueChange:
    return OpaqueChange(variable, {4: str(value).encode()})


def read(store: Store, handle: ChangelogHandle) -> list[tuple[int, str, int]]:
    """(sqn, variable, value) of each change, in order."""
    found = []
    for sqn, variable, table, groups in read_changes(store, handle):
        assert len(groups) == len(table)
        [value] = set(table.column(0).to_pylist())
        found.append((sqn, variable, int(value)))
    return found


def until(store: HookedStore, puts: int) -> None:
    """Wait until so many puts have begun."""
    for _ in range(1000):
        if len(store.puts) >= puts:
            return
        time.sleep(0.01)
    raise AssertionError(f"{store.puts} instead of {puts} puts")


@contextmanager
def a_writer(store: HookedStore, **options: object) -> Iterator[ChangelogWriter]:
    with (
        Uploader(store, UploadOptions(**options)) as uploader,  # pyright: ignore[reportArgumentType]
        ChangelogWriter(uploader, "o", GROUPS, PATH) as writer,
    ):
        yield writer


def test_each_time_the_number_is_asked_for_a_new_changeset_begins(tmp_path: Path) -> None:
    with a_writer(HookedStore(tmp_path)) as writer:
        assert writer.last_appended_sqn() == 0
        writer.append(GROUPS, delta("x", 1))
        writer.append(GROUPS, delta("y", 2))
        assert writer.last_appended_sqn() == 1
        assert writer.last_appended_sqn() == 1  # nothing was appended since
        writer.append(GROUPS, delta("x", 3))
        assert writer.last_appended_sqn() == 2
        writer.append(GROUPS, delta("x", 4))
        writer.append(GROUPS, delta("x", 5))  # a variable stands in a changeset once
        assert writer.last_appended_sqn() == 4


def test_a_persist_sends_only_what_was_not_sent_and_reads_back_by_key_group(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store) as writer:
        writer.append(GROUPS, delta("x", 1, rows=8))
        first = writer.persist(0).result(10)
        writer.append(GROUPS, delta("x", 2))
        writer.append(GROUPS, opaque("o", 3))
        second = writer.persist(0).result(10)
        again = writer.persist(0).result(10)
        only = writer.persist(1).result(10)
        none = writer.persist(2).result(10)
    assert len(store.puts) == 2
    assert read(store, first) == [(1, "x", 1)]
    assert read(store, second) == read(store, again) == [(1, "x", 1), (2, "o", 3), (2, "x", 2)]
    assert read(store, only) == [(2, "o", 3), (2, "x", 2)]
    assert len(second.objects) == 2 and only.objects == second.objects[1:]
    assert (none.handles, none.objects, none.after, none.to) == ([], [], 2, 2)
    assert [h.sqn for h in second.handles if h.kind is Kind.INDEX] == [1, 2]
    [(_, _, table, groups)] = read_changes(store, first, KeyGroupRange(5, 7))
    assert groups.tolist() == [5, 5, 6, 6] and len(table) == 4


def test_two_persists_under_way_share_what_both_need(tmp_path: Path) -> None:
    go = threading.Event()
    store = HookedStore(tmp_path, before=lambda _: go.wait(20) and None)
    with a_writer(store) as writer:
        writer.append(GROUPS, delta("x", 1))
        first = writer.persist(0)
        until(store, 1)
        writer.append(GROUPS, delta("x", 2))
        second = writer.persist(0)
        assert not first.done() and not second.done()
        go.set()
        assert read(store, second.result(10)) == [(1, "x", 1), (2, "x", 2)]
        assert read(store, first.result(10)) == [(1, "x", 1)]
    assert len(store.puts) == 2


def test_what_failed_goes_up_again_and_the_rest_does_not(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store) as writer:
        writer.append(GROUPS, delta("x", 1))
        writer.persist(0).result(10)
        store.before = Failing(1)
        writer.append(GROUPS, delta("x", 2))
        with pytest.raises(Unreachable, match="the test says so"):
            writer.persist(0).result(10)
        writer.append(GROUPS, delta("x", 3))
        handle = writer.persist(0).result(10)
        assert read(store, handle) == [(1, "x", 1), (2, "x", 2), (3, "x", 3)]
    assert len(store.puts) == 3 and len(store.names) == 2


def test_many_changes_go_up_before_anybody_asks(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    size = delta("x", 1).size_bytes
    with a_writer(store, preemptive_persist_bytes=2 * size + 5) as writer:
        for value in range(1, 4):
            assert writer.last_appended_sqn() == value - 1
            writer.append(GROUPS, delta("x", value))
        writer.append(GROUPS, delta("x", 4))
        handle = writer.persist(0).result(10)
    assert read(store, handle) == [(i, "x", i) for i in range(1, 5)]
    assert len(store.puts) == 2 or len(handle.objects) == 1  # one batch if the two met within the delay


def test_of_an_opaque_variable_the_newest_value_is_stored(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store) as writer:
        for value in (1, 2, 3):
            writer.append(GROUPS, opaque("o", value))
        assert read(store, writer.persist(0).result(10)) == [(3, "o", 3)]
        assert read(store, writer.persist(2).result(10)) == [(3, "o", 3)]


def test_closing_deletes_what_no_handle_refers_to(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with Uploader(store, UploadOptions(preemptive_persist_bytes=1)) as uploader:
        writer = ChangelogWriter(uploader, "o", GROUPS, PATH)
        writer.append(GROUPS, delta("x", 1))
        kept = writer.persist(0).result(10)
        writer.append(GROUPS, delta("x", 2))  # is stored, and nobody asks for it
        writer.close()
    assert len(store.puts) == 2
    assert store.names == [kept.objects[0].name]
    assert read(store, kept) == [(1, "x", 1)]


@pytest.mark.parametrize("truncated_first", [False, True])
def test_what_belonged_to_a_handle_that_failed_goes_too(tmp_path: Path, truncated_first: bool) -> None:
    go = threading.Event()
    store = HookedStore(tmp_path, before=lambda _: go.wait(20) and None)
    with Uploader(store, UploadOptions(persist_delay_s=0)) as uploader:
        writer = ChangelogWriter(uploader, "o", GROUPS, PATH)
        writer.append(GROUPS, delta("x", 1))
        writer.persist(0)
        until(store, 1)
        writer.append(GROUPS, delta("x", 2))
        claims = [writer.persist(1), writer.persist(0)]
        if truncated_first:
            writer.truncate(3)
        failing = Failing(1)

        def fail_second(name: str) -> None:
            if name.endswith("-2.segment"):
                failing(name)

        store.after = fail_second
        go.set()
        for claim in claims:
            with pytest.raises(Unreachable):
                claim.result(10)
        writer.close()
    first = next(name for name in store.puts if name.endswith("-1.segment"))
    assert store.names == [first]  # the first persist's handle refers to it


def test_a_declined_upload_leaves_nothing_when_its_log_ends(tmp_path: Path) -> None:
    store = HookedStore(tmp_path, ranged=False, after=Failing(suffix="INDEX"))
    with a_writer(store) as writer:
        writer.append(GROUPS, delta("x", 1))
        with pytest.raises(Unreachable):
            writer.persist(0).result(10)
    assert store.names == []


def test_bad_calls_change_nothing(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store) as writer:
        writer.append(GROUPS, delta("x", 1))
        for groups, change in (
            (KeyGroupRange(0, 8), delta("x", 2)),
            (KeyGroupRange(5, 8), delta("x", 2)),
            (GROUPS, OpaqueChange("o", {3: b""})),
        ):
            with pytest.raises(UsageError, match="cannot be logged"):
                writer.append(groups, change)
        with pytest.raises(UsageError, match="last change is 1"):
            writer.truncate(3)
        with pytest.raises(UsageError, match="changes 1 to 1"):
            writer.persist(2)
        writer.truncate(2)
        with pytest.raises(UsageError, match="changes 2 to 1"):
            writer.persist(0)
        assert writer.persist(1).result(10).handles == []
    with pytest.raises(UsageError, match="closed"):
        writer.append(GROUPS, delta("x", 1))
    assert store.puts == []


def test_an_altered_change_is_noticed_and_named(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store) as writer:
        writer.append(GROUPS, delta("x", 1))
        handle = writer.persist(0).result(10)
    part = handle.parts[0]
    bad = replace(handle, parts=((replace(part[0], checksum="00" * 16), *part[1:]),))
    with pytest.raises(CorruptObject, match=part[0].object):
        read(store, bad)


def test_two_writers_share_an_object_and_the_end_of_one_spares_the_other(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    options = UploadOptions(persist_delay_s=30, preemptive_persist_bytes=1)
    with Uploader(store, options) as uploader:
        one, other = (ChangelogWriter(uploader, "o", GROUPS, PATH) for _ in range(2))
        assert one.log_id != other.log_id
        one.append(GROUPS, delta("x", 1))
        other.append(GROUPS, delta("x", 2))
        handle = one.persist(0)
        other.close()
        assert read(store, handle.result(10)) == [(1, "x", 1)]
        one.close()
    assert len(store.puts) == 1 and store.names == store.puts


OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from(["x", "y", "opaque"])),
    st.tuples(st.sampled_from(["last", "persist", "persist", "truncate"]), st.floats(0, 1)),
)


@settings(max_examples=examples(60))
@given(
    operations=st.lists(OPERATIONS, min_size=10, max_size=40),
    seed=st.integers(0, 1 << 30),
    ranged=st.booleans(),
    preemptive_bytes=st.sampled_from([1, 250, 10_000]),
)
@pytest.mark.slow
def test_every_handle_reads_back_its_range(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[tuple[str, str | float]],
    seed: int,
    ranged: bool,
    preemptive_bytes: int,
) -> None:
    """Whatever was appended, persisted, truncated, and failed in between, in any order."""
    chance = random.Random(seed)
    failing = Failing(decide=lambda: chance.random() < 0.3)
    store = HookedStore(tmp_path_factory.mktemp("store"), before=failing, ranged=ranged)
    appended: list[tuple[str, int]] = []
    counts = {0: 0}  # sequence number -> how many changes were appended up to it, for those that were asked for
    least, pending = 0, []
    with a_writer(store, preemptive_persist_bytes=preemptive_bytes, persist_delay_s=0.001) as writer:
        for value, (operation, argument) in enumerate([*operations, ("persist", 0.0)]):
            if isinstance(argument, str):
                writer.append(GROUPS, opaque(argument, value) if argument == "opaque" else delta(argument, value))
                appended.append((argument, value))
                continue
            last = writer.last_appended_sqn()
            counts[last] = len(appended)
            known = [sqn for sqn in sorted(counts) if sqn >= least]
            chosen = known[round(argument * (len(known) - 1))]
            if operation == "persist":
                pending.append(writer.persist(chosen))
            elif operation == "truncate":
                writer.truncate(chosen + 1)
                least = chosen
        wait(pending, 20)
        failing.times = 0
        assert writer.persist(least).result(20).to == max(counts)  # no change was lost by a failure
        handles = [future.result() for future in pending if future.exception() is None]
        handles.append(writer.persist(least).result(20))
    for handle in handles:  # the writer has ended, and has deleted no object that they point to
        found = read(store, handle)
        assert [sqn for sqn, _, _ in found] == sorted(sqn for sqn, _, _ in found)
        assert all(handle.after < sqn <= handle.to for sqn, _, _ in found)
        wanted = appended[counts[handle.after] : counts[handle.to]]
        for variable in ("x", "y"):
            assert [v for _, name, v in found if name == variable] == [v for name, v in wanted if name == variable]
        newest = [v for name, v in wanted if name == "opaque"][-1:]
        assert [v for _, name, v in found if name == "opaque"][-1:] == newest
