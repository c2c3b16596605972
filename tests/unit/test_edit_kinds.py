"""Edits of lists, windows, opaque and prepared values, sessions and broadcast tables, through a stream's steps."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import siltstone as st
from siltstone.aggregates.functions import Count
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Session
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.edit import Editable, cast_changes
from siltstone.errors import UsageError
from siltstone.format.manifests import read_manifests
from siltstone.operator import CheckpointWriter, OperatorCheckpoint
from siltstone.restore.table import LIMIT_BYTES, read_table
from siltstone.state.schema import DELETED
from siltstone.stream import Stream
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun

BACKENDS = pytest.mark.parametrize("backend", ["heap", "rocksdb"])
PARALLELISM = pytest.mark.parametrize("parallelism", [1, 3])
DELTAS = policy_by_name("marginal-cost", PolicyOptions())
HEARD: list[tuple[bytes, ...]] = []


class Kinds(st.Operator):
    """A variable of each kind, by key; a timer and a TTL beside them."""

    name = "kinds"
    key = pa.schema([("k", pa.int64())])
    items = st.ListState({"n": pa.int64()})
    brief = st.ListState({"n": pa.int64()}, ttl=st.TTL("365 days", clock="processing"))
    recent = st.WindowState({"n": pa.int64()}, order="n")
    words = st.OpaqueState(
        create=list, serialize=lambda w: " ".join(w).encode(), deserialize=lambda b: b.decode().split()
    )
    wake = st.Timer(clock="processing")

    def process(self, rows: st.Rows, state: st.State) -> None:
        for each in (state.items, state.brief):
            each.append(rows.keys, rows.key_index, rows.table)
        state.recent.insert(rows.keys, rows.key_index, rows.table)
        state.words[int(rows.key_groups.min())].append("seen")
        later = pa.array(np.full(len(rows.keys), 2**52), pa.timestamp("us", "UTC"))
        state.wake.set(rows.keys, later)

    def on_timer(self, due: st.Due, state: st.State) -> None:
        raise AssertionError("not in these tests")

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: st.State) -> None:
        checkpoint.write(b"%d" % checkpoint.id)

    def reset(self, checkpoint: OperatorCheckpoint, state: st.State) -> None:
        HEARD.append(checkpoint.prepared)


def contents(run: RegionRun, variable: str, operator: str = "kinds") -> pa.Table:
    """The rows of the newest checkpoint, as a restore reads them."""
    region = run.region
    store, stream = region.warehouse.store, region.stream.name
    manifests = read_manifests(store, region.catalog.chains.list_manifests(stream, region.completed), stream)
    with TemporaryDirectory() as scratch:
        return read_table(store, manifests, operator, variable, None, LIMIT_BYTES, Path(scratch)).to_table()


STREAM = Stream("s", None, [Kinds()], max_parallelism=8)


def rows(*pairs: tuple[int, int]) -> pa.Table:
    keys, values = zip(*pairs, strict=True)
    return pa.table({"k": pa.array(keys, pa.int64()), "n": pa.array(values, pa.int64())})


def lists(run: RegionRun, variable: str = "items") -> dict[int, list[tuple[int, int]]]:
    """Key -> (position, n) of its rows, in order, of which `ListAccess` must see all: those within the bounds."""
    found: dict[int, list[tuple[int, int]]] = {}
    bounds = {row["k"]: (row["head"], row["tail"]) for row in contents(run, f"{variable}.bounds").to_pylist()}
    for row in contents(run, variable).to_pylist():
        head, tail = bounds[row["k"]]
        assert head <= row["position"] < tail
        found.setdefault(row["k"], []).append((row["position"], row["n"]))
    return {key: sorted(held) for key, held in found.items()}


def changes(*given: tuple[int, int, int | None]) -> pa.Table:
    """(key, position, n) of rows to put; without n, to delete."""
    keys, places, values = zip(*given, strict=True)
    gone = pa.array([value is None for value in values])
    columns = {"k": pa.array(keys), "position": pa.array(places), "n": pa.array(values, pa.int64()), DELETED: gone}
    return pa.table(columns)


def counts(run: RegionRun, operator: str = "kinds") -> tuple[int, ...]:
    return tuple(sum(column.to_pylist()) for column in run.outputs[operator].columns)


@BACKENDS
@PARALLELISM
@pytest.mark.parametrize("variable", ["items", "brief", "recent"])
def test_rows_of_lists_are_put_at_their_places_and_next_to_their_ends(
    place: OpenWarehouse, backend: str, parallelism: int, variable: str
) -> None:
    run = RegionRun(place, STREAM, DELTAS, parallelism, backend=backend)
    run.step(rows(*((k, 10 * k + n) for k in range(4) for n in range(3))))
    edit = changes(
        *((0, 1, 99), (0, 7, 5), (0, 1000, 6), (0, -3, 4), (0, -9, 3)),  # in place, after, before
        *((1, 0, None), (1, 1, None), (1, 8, None)),  # the first two; one that is not there
        *(
            (2, 0, None),
            (2, 1, None),
            (2, 2, None),
            (2, 3, None),
            (2, 9, 7),
        ),  # all, and a row in place of 3
        (7, 5, 1),  # a new list
    )
    run.edit("kinds", variable, edit)
    assert counts(run) == (7, 6, 5, 2)
    expected = {
        0: [(-2, 3), (-1, 4), (0, 0), (1, 99), (2, 2), (3, 5), (4, 6)],
        1: [(2, 12)],
        2: [(3, 7)],
        3: [(0, 30), (1, 31), (2, 32)],
        7: [(0, 1)],
    }
    assert lists(run, variable) == expected
    run.edit("kinds", variable, changes((7, 0, None)))  # the last row: bounds stay, but of a list with a TTL
    there = {row["k"] for row in contents(run, f"{variable}.bounds").to_pylist()}
    assert (7 in there) == (variable != "brief")
    run.step(rows((0, 8), (1, 9), (7, 2)))
    del expected[7]
    grown = lists(run, variable)
    assert grown.pop(7) == [(0 if variable == "brief" else 1, 2)]
    expected[0].append((5, 8))
    expected[1].append((3, 9))
    assert grown == expected
    run.region.close("done")
    assert not failures(place, "s")
    for record in place.catalog.checkpoints.list("s"):
        assert restored_digest(place, "s", record.id, 2) == record.digest


def test_one_key_with_more_rows_than_a_call_takes_is_edited_at_once(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two calls, the second would find other bounds than the rows were given for."""
    monkeypatch.setattr("siltstone.run.processing.ROWS_A_CALL", 2)
    run = RegionRun(place, STREAM, DELTAS, 1)
    run.step(rows((1, 0), (1, 1)))
    edit = changes((1, 9, 9), (1, 3, 3), (1, 2, 2), (1, 7, 7), (1, 0, None), (1, 5, 5))
    batches = pa.Table.from_batches([batch for row in range(6) for batch in edit.slice(row, 1).to_batches()])
    run.edit("kinds", "items", batches)
    assert [n for _, n in lists(run)[1]] == [1, 2, 3, 5, 7, 9]


@BACKENDS
@PARALLELISM
def test_opaque_and_prepared_values_are_replaced_and_made_anew(
    place: OpenWarehouse, backend: str, parallelism: int
) -> None:
    run = RegionRun(place, STREAM, DELTAS, parallelism, backend=backend)
    run.step(rows(*((k, k) for k in range(8))))
    before = {row["key_group"]: row["value"] for row in contents(run, "words").to_pylist()}
    [first, *_] = before
    free = next(group for group in range(8) if group not in before)
    edit = pa.table(
        {
            "key_group": pa.array([first, free], pa.uint16()),
            "value": pa.array([None, b"two words"]),
            DELETED: [True, False],
        }
    )
    run.edit("kinds", "words", edit)
    assert counts(run) == (1, 1, 1, 0)
    after = {row["key_group"]: row["value"] for row in contents(run, "words").to_pylist()}
    assert after == before | {first: b"", free: b"two words"}
    run.edit("kinds", "prepared", pa.table({"key_group": pa.array([0], pa.uint16()), "value": [b"moved"]}))
    run.region.close("done")
    assert not failures(place, "s")
    HEARD.clear()
    going_on = RegionRun(place, STREAM, DELTAS, parallelism, backend=backend)
    going_on.step(rows((1, 1)))
    assert HEARD[0][0] == b"moved" and len(HEARD) == parallelism
    assert not failures(place, "s")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"two  words", "is not what serialize makes of what it stands for"),
        (b"\xff", "the value of key group 1 cannot be read: UnicodeDecodeError"),
        (None, "value is null in 1 rows, and an object is not"),
    ],
)
def test_bytes_that_no_object_has_are_refused(value: bytes | None, said: str) -> None:
    edited = Editable.find(STREAM, "kinds", "words")
    given = pa.table({"key_group": pa.array([1]), "value": pa.array([value], pa.binary())})
    with pytest.raises(UsageError, match=said):
        cast_changes(given, edited.schema, "rows", variable=edited.variable)


def test_a_row_of_a_window_needs_what_orders_it() -> None:
    edited = Editable.find(STREAM, "kinds", "recent")
    given = pa.table({"k": [1], "position": [0], "n": pa.nulls(1, pa.int64())})
    with pytest.raises(UsageError, match="n is null in 1 rows, and it orders the window"):
        cast_changes(given, edited.schema, "rows", variable=edited.variable)


# Sessions

BEGIN = datetime(2023, 11, 14, 20, tzinfo=UTC)
TIMES = pa.timestamp("us", "UTC")
SESSIONS = Stream(
    "sessions",
    None,
    [Aggregate("a", key={"k": pa.int64()}, aggregates=[Count("n")], window=Session(on="at", gap="10 minutes"))],
    event_time=st.EventTime("at", "1 hour"),
    max_parallelism=8,
)


def at(*minutes: int) -> pa.Array:
    return pa.array([BEGIN + timedelta(minutes=minute) for minute in minutes], TIMES)


def sessions(run: RegionRun) -> dict[int, list[tuple[int, int, int]]]:
    """Key -> (minute of the start, of the end, n) by slot; checks that slot 0 tells how many there are."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in contents(run, "totals", "a").to_pylist():
        found.setdefault(row["k"], []).append(row)
    for held in found.values():
        held.sort(key=lambda row: row["slot"])
        assert [row["slot"] for row in held] == list(range(len(held)))
        assert [row["open"] for row in held] == [len(held)] + [0] * (len(held) - 1)

    def minute(time: datetime) -> int:
        return (time - BEGIN) // timedelta(minutes=1)

    return {k: [(minute(row["start"]), minute(row["due"]), row["n"]) for row in held] for k, held in found.items()}


@PARALLELISM
def test_sessions_are_put_and_deleted_and_numbered_anew(place: OpenWarehouse, parallelism: int) -> None:
    run = RegionRun(place, SESSIONS, DELTAS, parallelism)
    run.step(pa.table({"k": [1] * 4 + [2, 3], "at": at(0, 1, 20, 40, 5, 6)}))
    assert sessions(run) == {1: [(0, 11, 2), (20, 30, 1), (40, 50, 1)], 2: [(5, 15, 1)], 3: [(6, 16, 1)]}
    edit = pa.table(
        {
            "k": [1, 1, 2, 3, 4],
            "slot": [0, 1, 9, 0, 0],
            "start": pa.array([None, *at(20, 30).to_pylist(), None, *at(7).to_pylist()], TIMES),
            "due": pa.array([None, *at(31, 35).to_pylist(), None, *at(9).to_pylist()], TIMES),
            "n": pa.array([None, 7, 5, None, 1]),
            DELETED: [True, False, False, True, False],
        }
    )
    run.edit("a", "totals", edit)
    assert counts(run, "a") == (3, 2, 2, 0)
    assert sessions(run) == {1: [(20, 31, 7), (40, 50, 1)], 2: [(5, 15, 1), (30, 35, 5)], 4: [(7, 9, 1)]}
    run.step(pa.table({"k": [1, 2, 3], "at": at(31, 20, 6)}))
    assert sessions(run) == {
        1: [(20, 50, 9)],
        2: [(5, 15, 1), (20, 35, 6)],
        3: [(6, 16, 1)],
        4: [(7, 9, 1)],
    }
    run.region.close("done")
    assert not failures(place, "sessions")


def test_sessions_that_overlap_are_refused_and_nothing_changes(place: OpenWarehouse) -> None:
    run = RegionRun(place, SESSIONS, DELTAS, 1)
    run.step(pa.table({"k": [1, 1], "at": at(0, 20)}))
    edit = pa.table({"k": [1], "slot": [0], "start": at(0), "due": at(20), "n": [5]})
    with pytest.raises(UsageError, match="sessions of k 1 would overlap"):
        run.edit("a", "totals", edit)
    assert place.catalog.checkpoints.get_latest("sessions").id == 1 and not failures(place, "sessions")
    edited = Editable.find(SESSIONS, "a", "totals")
    backwards = edit.set_column(3, "due", at(0))
    with pytest.raises(UsageError, match="start is not before due in 1 rows"):
        cast_changes(backwards, edited.schema, "rows", edited.optional, edited.variable)


# Broadcast tables


class Ruled(st.Operator):
    """Keeps the limit of each key's country."""

    name = "ruled"
    key = pa.schema([("k", pa.int64())])
    reads = {"source": {"k": "k"}}  # noqa: RUF012  (a declaration, which nobody changes)
    last = st.ValueState({"limit": pa.int64()})
    rules = st.BroadcastState(
        reads="rules", key={"of": pa.string()}, value={"limit": pa.int64(), "by": pa.int64()}, by="by"
    )

    def process(self, rows: st.Rows, state: st.State) -> None:
        found = state.rules.get({"of": pa.repeat("de", len(rows.keys))})
        state.last.put(rows.keys, {"limit": found["limit"]})


@BACKENDS
@PARALLELISM
def test_a_broadcast_table_is_edited_in_every_subtask(place: OpenWarehouse, backend: str, parallelism: int) -> None:
    stream = Stream("s", sources={"source": None, "rules": None}, operators=[Ruled()], max_parallelism=8)
    run = RegionRun(place, stream, DELTAS, parallelism, backend=backend)
    run.edit("ruled", "rules", pa.table({"of": ["de", "fr"], "limit": [5, 6], "by": [1, 1]}))
    assert counts(run, "ruled") == (2, 2, 0, 0)
    run.edit(
        "ruled", "rules", pa.table({"of": ["de", "fr"], "limit": [7, None], "by": [0, None], DELETED: [False, True]})
    )
    assert counts(run, "ruled") == (1, 0, 1, 0)
    assert contents(run, "rules", "ruled").to_pylist() == [{"of": "de", "limit": 7, "by": 0}]
    run.region.close("done")
    assert not failures(place, "s")
    edited = Editable.find(stream, "ruled", "rules")
    with pytest.raises(UsageError, match="by is null in 1 rows, and newer rows are told by it"):
        given = pa.table({"of": ["de"], "limit": [5], "by": pa.nulls(1, pa.int64())})
        cast_changes(given, edited.schema, "rows", variable=edited.variable)
