"""The changelog writer: what is persisted reads back, whatever failed beside it; what is not needed goes."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.changelog.changes import Change, OpaqueChange, WholeTable
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.changelog.writer import ChangelogWriter, Changeset
from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.model import KeyGroupRange, Kind
from siltstone.store.paths import StepPath
from tests.changes import GROUPS, base, delta, names, opaque, read
from tests.examples import examples
from tests.hooked_store import Failing, HookedStore

PATH = StepPath("s", 1, 2, 7)


def until(store: HookedStore, puts: int) -> None:
    """Wait until so many puts have begun."""
    for _ in range(3000):
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


@pytest.mark.parametrize(("ranged", "objects"), [(True, 1), (False, 3)])
def test_what_is_persisted_reads_back_with_the_number_of_its_step(tmp_path: Path, ranged: bool, objects: int) -> None:
    store = HookedStore(tmp_path, ranged=ranged)
    with a_writer(store) as writer:
        writer.append(delta("x", 1, rows=9))
        writer.append(base("whole", "s/1/2/whole.parquet"))
        writer.append(delta("y", 5))
        writer.append(opaque("o", 3))
        changes = writer.persist().result(10)
    assert sorted(read(store, changes.handles, changes.objects)) == [
        (7, "o", 3),
        (7, "whole", "s/1/2/whole.parquet"),
        (7, "x", 1),
        (7, "y", 5),
    ]
    assert {handle.sqn for handle in changes.handles} == {7}
    assert [h.kind for h in changes.handles].count(Kind.INDEX) == 1
    assert {h.key_groups for h in changes.handles} == {GROUPS} and {h.operator for h in changes.handles} == {"o"}
    assert store.names == sorted(names(changes.objects)) and len(store.names) == objects
    assert all(name.startswith(f"{PATH.prefix}s000000000007-") for name in store.names)


def test_a_step_without_changes_stores_nothing(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store) as writer:
        assert writer.persist().result(10) == Changeset()
    assert store.puts == []


def test_many_changes_go_up_before_anybody_asks(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    size = delta("x", 1).size_bytes
    with a_writer(store, preemptive_persist_bytes=2 * size + 5) as writer:
        for value, variable in enumerate("abc"):
            assert store.puts == []
            writer.append(delta(variable, value))
        until(store, 1)
        writer.append(delta("d", 3))
        changes = writer.persist().result(10)
    assert read(store, changes.handles, changes.objects) == [(7, variable, i) for i, variable in enumerate("abcd")]
    assert len(store.puts) == len(changes.objects) == 2


@pytest.mark.parametrize("fails", [".segment", ".NON", ".INCR", ".INDEX"])
def test_a_failed_upload_fails_the_future_and_leaves_nothing(tmp_path: Path, fails: str) -> None:
    """What was stored before goes, too, and what may have been stored though its answer was lost."""
    store = HookedStore(tmp_path, ranged=fails == ".segment")
    with a_writer(store, preemptive_persist_bytes=1) as writer:
        writer.append(delta("x", 1))
        until(store, 1)
        while len(store.names) < (1 if store.ranged else 2):
            time.sleep(0.01)
        store.after = Failing(suffix=fails)
        writer.append(delta("y", 2))
        writer.append(opaque("o", 3))
        with pytest.raises(Unreachable, match="the test says so"):
            writer.persist().result(10)
        assert store.names == []
    assert len(store.puts) > 1


def test_a_writer_that_is_left_without_persist_leaves_nothing(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with pytest.raises(ZeroDivisionError), a_writer(store, preemptive_persist_bytes=1) as writer:
        writer.append(delta("x", 1))
        raise ZeroDivisionError
    assert len(store.puts) == 1 and store.names == []


def test_two_writers_share_an_object_and_the_end_of_one_spares_the_other(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    options = UploadOptions(persist_delay_s=30, preemptive_persist_bytes=1)
    with Uploader(store, options) as uploader, ChangelogWriter(uploader, "o", GROUPS, PATH) as one:
        with ChangelogWriter(uploader, "o", GROUPS, PATH) as other:
            assert one.log_id != other.log_id
            one.append(delta("x", 1))
            other.append(delta("x", 2))
            kept = one.persist()
        changes = kept.result(10)
    assert read(store, changes.handles, changes.objects) == [(7, "x", 1)]
    assert len(store.puts) == 1 and store.names == store.puts


def test_bad_calls_change_nothing(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store) as writer:
        writer.append(delta("x", 1))
        for change in delta("y", 2, groups=KeyGroupRange(0, 8), rows=8), OpaqueChange("o", {3: b"", 4: b""}):
            with pytest.raises(UsageError, match=r"key groups [03] to . cannot be logged by o's writer of 4 to 8"):
                writer.append(change)
        for change in delta("x", 2), base("x", "s/1/2/whole.parquet"), opaque("x", 2):
            with pytest.raises(UsageError, match="x of o changed twice in step 7"):
                writer.append(change)
        changes = writer.persist().result(10)
        with pytest.raises(UsageError, match="changes of o in step 7 are persisted already"):
            writer.append(delta("y", 2))
        with pytest.raises(UsageError, match="changes of o in step 7 are persisted already"):
            writer.persist()
    assert read(store, changes.handles, changes.objects) == [(7, "x", 1)]
    assert store.names == store.puts and len(store.puts) == 1


def test_a_variable_changes_once_in_a_step_though_its_change_was_sent_already(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store, preemptive_persist_bytes=1) as writer:
        writer.append(delta("x", 1))
        until(store, 1)
        with pytest.raises(UsageError, match="x of o changed twice in step 7"):
            writer.append(delta("x", 2))
        changes = writer.persist().result(10)
    assert read(store, changes.handles, changes.objects) == [(7, "x", 1)]


def test_an_altered_change_is_noticed_and_named(tmp_path: Path) -> None:
    store = HookedStore(tmp_path)
    with a_writer(store) as writer:
        writer.append(delta("x", 1))
        changes = writer.persist().result(10)
    part, *rest = changes.handles
    with pytest.raises(CorruptObject, match=part.object):
        read(store, [replace(part, checksum="xxh3-128:" + "00" * 16), *rest], changes.objects)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["x", "y", "z"]), st.sampled_from("dob")), max_size=3, unique_by=itemgetter(0)
)
WRITERS = st.lists(st.tuples(CHANGES, st.booleans()), min_size=1, max_size=5)


def change_of(variable: str, way: str, value: int) -> Change | OpaqueChange | WholeTable:
    if way == "b":
        return base(variable, f"s/1/2/{value}.parquet")
    return delta(variable, value) if way == "d" else opaque(variable, value)


@settings(max_examples=examples(60))
@given(
    writers=WRITERS,
    seed=st.integers(0, 1 << 30),
    ranged=st.booleans(),
    preemptive_bytes=st.sampled_from([1, 250, 10_000]),
    threshold_bytes=st.sampled_from([1, 600, 10_000]),
)
@pytest.mark.slow
def test_every_changeset_reads_back_and_nothing_else_stays(
    tmp_path_factory: pytest.TempPathFactory,
    writers: list[tuple[list[tuple[str, str]], bool]],
    seed: int,
    ranged: bool,
    preemptive_bytes: int,
    threshold_bytes: int,
) -> None:
    """Whatever writers of one process log, whichever of them end without persist, and whatever fails."""
    chance = random.Random(seed)
    failing = Failing(decide=lambda: chance.random() < 0.2)
    store = HookedStore(tmp_path_factory.mktemp("store"), before=failing, ranged=ranged)
    options = UploadOptions(
        preemptive_persist_bytes=preemptive_bytes, size_threshold_bytes=threshold_bytes, persist_delay_s=0.001
    )
    persisted = []
    with Uploader(store, options) as uploader:
        for number, (changes, persists) in enumerate(writers):
            with ChangelogWriter(uploader, "o", GROUPS, PATH) as writer:
                logged = [(variable, way, 10 * number + i) for i, (variable, way) in enumerate(changes)]
                for each in logged:
                    writer.append(change_of(*each))
                if persists:
                    persisted.append((writer.persist(), logged))
    needed: set[str] = set()
    for future, logged in persisted:
        if future.exception() is None:
            found = future.result()
            expected = [(7, variable, f"s/1/2/{v}.parquet" if way == "b" else v) for variable, way, v in logged]
            assert sorted(read(store, found.handles, found.objects), key=str) == sorted(expected, key=str)
            needed |= {name.partition(".")[0] for name in names(found.objects)}
    # Where sections are objects of their own, those of a batch stay together.
    assert {name.partition(".")[0] for name in store.names} == needed
