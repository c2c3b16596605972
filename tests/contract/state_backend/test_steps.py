"""Every state backend: steps, their changes, and how they are undone."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from siltstone.errors import BadRow, StateError, UsageError
from siltstone.model import KeyGroupRange
from siltstone.restore.restore import digests_of
from siltstone.run.task import identity
from siltstone.state.backend import Backend, Keys, SubtaskState
from siltstone.state.schema import TableSchema
from tests.state_model import ALL, MAX_PARALLELISM, batch_of, changed
from tests.state_tables import LONG, TEXT, Open, longs, now, put, told, values


def test_rollback_undoes_steps_newest_first(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    versions = [(now(table), table.digests.tolist())]
    for step, rows in ((1, {"k1": 1, "k2": 2}), (2, {"k1": 11, "k3": 3}), (5, {"k2": 22, "k4": 4})):
        state.begin(step, tracking=True)
        put(state, **rows)
        table.delete(longs(3 if step == 5 else 9))
        table.put(longs(1), values(step))
        state.commit()
        versions.append((now(table), table.digests.tolist()))
    assert state.version == 5
    state.begin(6, tracking=True)
    put(state, k7=7)
    for version, wanted in ((5, 3), (2, 2), (1, 1), (0, 0)):
        state.rollback()
        assert state.version == version
        assert (now(table), table.digests.tolist()) == versions[wanted]
        state.close()
        state = reopen()
        table = state.tables["t"]
        assert (now(table), table.digests.tolist()) == versions[wanted]
    with pytest.raises(StateError, match="step 0 are gone"):
        state.rollback()


def test_release_lets_before_images_go(reopen: Open):
    state = reopen()
    for step in (1, 2, 3):
        state.begin(step, tracking=True)
        put(state, k1=step)
        state.commit()
    state.release(2)
    state.close()
    state = reopen()
    state.rollback()
    assert (state.version, now(state.tables["t"])) == (2, {1: 2})
    with pytest.raises(StateError, match="step 2 are gone"):
        state.rollback()
    assert (state.version, now(state.tables["t"])) == (2, {1: 2})


def test_a_step_that_was_not_committed_is_gone_at_open(reopen: Open):
    state = reopen()
    state.begin(1, tracking=True)
    put(state, k1=1)
    state.set_opaque("model", {3: b"one"})
    state.commit()
    state.begin(2, tracking=True)
    put(state, k1=2, k2=2)
    state.set_opaque("model", {3: b"two"})
    state.close()
    state = reopen()
    assert (state.version, now(state.tables["t"])) == (1, {1: 1})
    assert state.opaque == {"model": {3: b"one"}}
    assert told(state.tables["t"]) == {1: 1}


def test_a_step_run_again_yields_the_same(reopen: Open):
    state = reopen()
    outcomes = []
    for _ in range(3):
        state.begin(1, tracking=True)
        put(state, k1=1, k2=2)
        state.tables["t"].delete(longs(2))
        outcomes.append((told(state.tables["t"]), state.tables["t"].digests.tolist()))
        state.commit()
        state.rollback()
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_changes_tell_each_key_once_and_newest(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    put(state, k1=1, k2=2, k3=3)
    put(state, k1=11, k4=4)
    assert told(table) == {1: 11, 2: 2, 3: 3, 4: 4}
    table.mark()
    assert told(table) == {}
    state.commit()
    state.begin(2, tracking=True)
    put(state, k1=12)
    table.delete(longs(2, 77))
    state.commit()
    state.release(2)
    state.close()
    state = reopen()
    table = state.tables["t"]
    state.begin(3, tracking=True)
    put(state, k1=13, k5=5)
    assert told(table) == {1: 13, 2: None, 5: 5}
    state.rollback()
    assert told(table) == {1: 12, 2: None}


@pytest.mark.parametrize("kept_bytes", [0, 100, 1 << 20])
def test_changes_are_the_same_whether_what_was_written_is_kept_or_read(
    reopen: Open, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
):
    monkeypatch.setattr("siltstone.state.backends.rocksdb.table._FRESH_BYTES", kept_bytes)
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    put(state, k1=1, k2=2, k3=3)
    table.delete(longs(2, 9))
    put(state, k2=22, k4=4)
    table.delete(longs(1))
    assert told(table) == {1: None, 2: 22, 3: 3, 4: 4}
    put(state, k1=10)
    assert told(table) == {1: 10, 2: 22, 3: 3, 4: 4}
    table.mark()
    put(state, k5=5)
    table.delete(longs(3))
    assert told(table) == {3: None, 5: 5}
    state.commit()
    state.begin(2, tracking=True)
    put(state, k6=6)
    assert told(table) == {3: None, 5: 5, 6: 6}
    state.rollback()
    assert told(table) == {3: None, 5: 5}


def test_a_mark_is_undone_with_its_step(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=True)
    put(state, k1=1)
    state.commit()
    for how in ("open", "committed", "torn"):
        state.begin(2, tracking=True)
        put(state, k2=2)
        table.mark()
        put(state, k3=3)
        assert told(table) == {3: 3}
        if how == "committed":
            state.commit()
        if how == "torn":
            state.close()
            state = reopen()
            table = state.tables["t"]
        else:
            state.rollback()
        assert told(table) == {1: 1}


def test_changes_made_untracked_are_not_known(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=False)
    put(state, k1=1)
    for ask in (table.changes, table.count_changed):
        with pytest.raises(StateError, match="take a base"):
            ask()
    state.commit()
    state.begin(2, tracking=True)
    put(state, k2=2)
    with pytest.raises(StateError, match="take a base"):
        table.changes()
    table.mark()
    put(state, k3=3)
    assert told(table) == {3: 3}
    state.commit()
    state.begin(3, tracking=False)
    put(state, k4=4)
    # A base is taken at the end of the step, and the next interval is tracked from its first change on.
    table.mark()
    state.commit()
    state.begin(4, tracking=True)
    put(state, k5=5)
    assert told(table) == {5: 5}
    state.rollback()
    state.rollback()
    assert told(table) == {3: 3}


@pytest.mark.slow
def test_scan_is_in_order_and_of_the_groups_asked_for(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    state.begin(1, tracking=False)
    keys = np.random.default_rng(1).permutation(300_000)[:200_000] - 150_000
    table.put(longs(*keys), values(*keys))
    table.delete(longs(*keys[:1000]))
    state.commit()
    everything = []
    for part, groups in table.scan(ALL):
        assert len(part) <= 1 << 17
        everything += list(zip(groups.tolist(), part.column("k").to_pylist(), strict=True))
    assert everything == sorted(everything)
    assert sorted(key for _, key in everything) == sorted(keys[1000:].tolist())
    middle = KeyGroupRange(3, 6)
    some = [k for part, _ in table.scan(middle) for k in part.column("k").to_pylist()]
    assert some == [key for group, key in everything if group in middle]
    assert list(table.scan(KeyGroupRange(5, 5))) == []


def test_opaque_values_belong_to_the_step(reopen: Open):
    state = reopen()
    state.begin(1, tracking=True)
    state.set_opaque("model", {1: b"a", 2: b"b"})
    state.commit()
    state.begin(2, tracking=True)
    state.set_opaque("model", {2: b"B", 3: b""})
    assert state.opaque["model"] == {1: b"a", 2: b"B", 3: b""}
    state.commit()
    state.close()
    state = reopen()
    assert state.opaque["model"] == {1: b"a", 2: b"B", 3: b""}
    state.rollback()
    assert state.opaque["model"] == {1: b"a", 2: b"b"}
    state.begin(2, tracking=True)
    with pytest.raises(UsageError, match="'other' is not an opaque variable"):
        state.set_opaque("other", {1: b""})
    with pytest.raises(UsageError, match="key group 16 belongs to another subtask"):
        state.set_opaque("model", {MAX_PARALLELISM: b""})
    state.rollback()
    state.rollback()
    assert state.opaque["model"] == {}


def test_changes_need_a_step_and_steps_follow_one_another(reopen: Open):
    state = reopen()
    table = state.tables["t"]
    for change in (
        lambda: put(state, k1=1),
        table.mark,
        lambda: state.set_opaque("model", {1: b""}),
        state.commit,
    ):
        with pytest.raises(StateError, match="call begin first"):
            change()
    state.begin(3, tracking=True)
    with pytest.raises(StateError, match="step 3 is still open"):
        state.begin(4, tracking=True)
    put(state, k1=1)
    state.commit()
    with pytest.raises(StateError, match="step 3 is not after version 3"):
        state.begin(3, tracking=True)
    assert now(table) == {1: 1}


def test_bad_input_is_refused_and_changes_nothing(reopen: Open):
    state = reopen(groups=KeyGroupRange(0, 8))
    table = state.tables["t"]
    everyone = [longs(key) for key in range(200)]
    mine = [key for key, batch in enumerate(everyone) if batch.key_groups[0] < 8]
    foreign = next(key for key in range(200) if key not in mine)
    state.begin(1, tracking=True)
    table.put(longs(*mine[:3]), values(1, 2, 3))
    before = (now(table), told(table), table.digests.tolist())
    null = Keys(pa.table({"k": pa.array([None], pa.int64())}), np.zeros(1, np.uint64), np.zeros(1, np.uint16))
    narrow = pa.table({"k": pa.array([1], pa.int32())})
    other = Keys(narrow, np.zeros(1, np.uint64), np.zeros(1, np.uint16))
    uneven = Keys(pa.table({"k": [1, 2]}), np.zeros(1, np.uint64), np.zeros(1, np.uint16))
    for batch, rows, error, text in (
        (longs(foreign), values(1), UsageError, "another subtask"),
        (null, values(1), BadRow, "key column k is null in 1 rows"),
        (other, values(1), UsageError, "k int32: this table has k int64"),
        (uneven, values(1), UsageError, "equally many"),
        (longs(mine[0]), values(1, 2), UsageError, "2 rows of values for 1 keys"),
        (longs(mine[0]), pa.table({"w": [1]}), UsageError, "w int64: this table has v int64"),
    ):
        with pytest.raises(error, match=text):
            table.put(batch, rows)
    for batch in (longs(foreign), null, other, uneven):
        with pytest.raises(UsageError):
            table.get(batch)
        with pytest.raises(UsageError):
            table.delete(batch)
    assert (now(table), told(table), table.digests.tolist()) == before


@pytest.mark.parametrize("what", ["column", "opaque", "groups", "parallelism"])
def test_state_of_another_shape_is_not_opened(reopen: Open, kind: Backend, tmp_path: Path, what: str):
    reopen().close()
    wider = TableSchema(LONG.key, LONG.subkey, pa.schema([*LONG.value, pa.field("w", pa.int64())]))
    with pytest.raises(StateError, match="delete this working state and restore it"):
        kind.open(
            tmp_path / "state",
            {"t": wider if what == "column" else LONG},
            ("other",) if what == "opaque" else ("model",),
            KeyGroupRange(0, 8) if what == "groups" else ALL,
            MAX_PARALLELISM * 2 if what == "parallelism" else MAX_PARALLELISM,
        )


def test_an_empty_batch_is_no_error(reopen: Open):
    state = reopen(TEXT)
    table = state.tables["t"]
    batch = batch_of(TEXT, TEXT.primary_key.empty_table())
    state.begin(1, tracking=True)
    table.put(batch, TEXT.value.empty_table())
    table.delete(batch)
    assert table.get(batch).values.equals(TEXT.value.empty_table())
    assert changed(table) == {}
    assert json.dumps(table.digests.tolist()) == json.dumps([0] * MAX_PARALLELISM)
    state.commit()
    assert state.version == 1


def test_attempts_at_one_version_have_an_identity_each_that_lasts(reopen: Open):
    """It is of what the version holds, opaque values included: a rollback brings the one before back, so does a
    reopening, and an attempt that comes to the same has the same."""

    def attempt(state: SubtaskState, value: int, model: bytes) -> str:
        state.begin(2, tracking=True)
        put(state, k1=value)
        state.set_opaque("model", {0: model})
        state.commit()
        return identity("op", digests_of(state))

    state = reopen()
    state.begin(1, tracking=True)
    put(state, k1=1, k2=2)
    state.commit()
    first = identity("op", digests_of(state))
    found = []
    for value, model in ((5, b"a"), (6, b"a"), (5, b"b"), (5, b"a")):
        found.append(attempt(state, value, model))
        state.close()
        state = reopen()
        assert (state.version, identity("op", digests_of(state))) == (2, found[-1])
        state.rollback()
        assert (state.version, identity("op", digests_of(state))) == (1, first)
    assert found[0] == found[3]
    assert len({first, *found}) == 4
    state.close()
