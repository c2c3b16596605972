"""Every state backend: structs and lists are values like others, in steps and rollbacks, blocks, bases and digests."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.errors import UsageError
from siltstone.format.base import read_base, write_base
from siltstone.format.block import decode_block, encode_block
from siltstone.restore.restore import MemoryState
from siltstone.state.backend import Backend, Keys
from siltstone.state.backends.heap import HeapTable
from siltstone.state.protocol import apply_delta, key_batch, set_state
from siltstone.state.schema import TableSchema
from siltstone.state.variables import ListState, MapState, ValueState, WindowState
from tests.state_model import ALL, MAX_PARALLELISM, contents
from tests.state_tables import Open

KEY = pa.schema([pa.field("k", pa.int64(), nullable=False)])
PLACE = pa.struct([("city", pa.string()), ("at", pa.struct([("lat", pa.float64()), ("lon", pa.float64())]))])
VALUE = {"place": PLACE, "tags": pa.list_(pa.string()), "visits": pa.list_(PLACE), "n": pa.int32()}
A = {"city": "Å", "at": {"lat": -0.0, "lon": None}}
B = {"city": None, "at": None}
ROWS: list[dict[str, Any]] = [
    {"place": A, "tags": ["x", None, ""], "visits": [A, None, B], "n": 1},
    {"place": B, "tags": [], "visits": [], "n": None},
    {"place": None, "tags": None, "visits": None, "n": 3},
    {"place": A, "tags": ["long " * 1000], "visits": [B] * 50, "n": 4},
]
NOTHING = dict.fromkeys(VALUE)
SCHEMA = ValueState(VALUE).tables("t", KEY)["t"]


def _keys(schema: TableSchema, *keys: int) -> Keys:
    return key_batch(schema, pa.table({"k": pa.array(keys, pa.int64())}, schema=schema.key), MAX_PARALLELISM)


def _values(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), pa.schema(list(VALUE.items())))


def test_a_value_comes_back_and_a_rollback_brings_the_older_one(reopen: Open) -> None:
    state = reopen(SCHEMA)
    keys = _keys(SCHEMA, 1, 2, 3, 4)
    state.begin(1, tracking=True)
    ValueState(VALUE).bind("t", state).put(keys, _values(*ROWS))
    state.commit()
    first = contents(state.tables["t"])
    state.begin(2, tracking=True)
    value = ValueState(VALUE).bind("t", state)
    value.put(_keys(SCHEMA, 1, 4), _values(ROWS[3], ROWS[0]))
    value.delete(_keys(SCHEMA, 2))
    assert value.get(_keys(SCHEMA, 4, 2, 1, 9)).to_pylist() == [ROWS[0], NOTHING, ROWS[3], NOTHING]
    state.commit()
    state = reopen(SCHEMA)
    assert state.version == 2
    state.rollback()
    state = reopen(SCHEMA)
    value = ValueState(VALUE).bind("t", state)
    found = value.get(keys)
    assert found.to_pylist() == ROWS and found.schema.types == list(VALUE.values())
    assert repr(found.column("place")[0].as_py()["at"]["lat"]) == "-0.0"
    assert contents(state.tables["t"]) == first


def test_a_map_a_list_and_a_window_have_them_too(reopen: Open) -> None:
    entries = MapState({"m": pa.string()}, VALUE)
    state = reopen(entries.tables("t", KEY)["t"])
    state.begin(1, tracking=True)
    access = entries.bind("t", state)
    keys = state.tables["t"].schema.primary_key
    named = pa.table({"k": pa.array([1, 1, 2], pa.int64()), "m": ["a", "b", "a"]}, schema=keys)
    given = _values(ROWS[0], ROWS[3], ROWS[1])
    access.put(pa.table([*named.columns, *given.columns], names=[*named.column_names, *given.column_names]))
    assert access.get(named).to_pylist() == [ROWS[0], ROWS[3], ROWS[1]]
    # Of equal entries the last wins.
    twice = pa.concat_tables([named.slice(0, 1)] * 2)
    both = _values(ROWS[1], ROWS[2])
    access.put(pa.table([*twice.columns, *both.columns], names=[*twice.column_names, *both.column_names]))
    assert access.get(twice).to_pylist() == [ROWS[2]] * 2


@pytest.mark.parametrize("variable", [ListState(VALUE), WindowState(VALUE, order="n")], ids=lambda v: type(v).__name__)
def test_rows_of_a_list_and_a_window(kind: Backend, variable: Any, tmp_path: Any) -> None:
    state = kind.open(tmp_path / "s", variable.tables("t", KEY), (), ALL, MAX_PARALLELISM)
    state.begin(1, tracking=True)
    access = variable.bind("t", state)
    keys, at = _keys(SCHEMA, 1, 2), np.array([0, 1, 0])
    rows = [ROWS[3], ROWS[0], ROWS[2]]
    if isinstance(variable, WindowState):
        access.insert(keys, at, _values(*rows))
        access.evict(keys, 2)
        found_at, found = access.get(keys)
        assert (found_at.tolist(), found.to_pylist()) == ([0, 0], [ROWS[2], ROWS[3]])
    else:
        access.append(keys, at, _values(*rows))
        found_at, found = access.get(keys)
        assert (found_at.tolist(), found.to_pylist()) == ([0, 0, 1], [ROWS[3], ROWS[2], ROWS[0]])
    state.close()


def test_blocks_and_bases_carry_them_to_any_backend_with_equal_digests(reopen: Open) -> None:
    state = reopen(SCHEMA)
    state.begin(1, tracking=True)
    value = ValueState(VALUE).bind("t", state)
    value.put(_keys(SCHEMA, 1, 2, 3, 4), _values(*ROWS))
    table = state.tables["t"]
    changes, groups = table.changes()
    block = encode_block(changes, groups)
    base = io.BytesIO()
    assert write_base(base, SCHEMA, table.scan(ALL)) == 4
    by_block, by_base = (MemoryState.make_empty({"t": SCHEMA}, ALL, MAX_PARALLELISM) for _ in range(2))
    apply_delta(by_block, "t", *decode_block(block.data))
    for rows, owners in read_base(base.getvalue(), SCHEMA):
        set_state(by_base, "t", rows, owners)
    for other in (by_block, by_base):
        assert isinstance(other.tables["t"], HeapTable)
        assert other.tables["t"].digests.tolist() == table.digests.tolist()
        assert contents(other.tables["t"]) == contents(table)
    state.rollback()


def test_the_memory_of_a_value_does_not_change_the_state(reopen: Open) -> None:
    """What lies below a null, a slice, another order of fields, other lists and strings: the digests are equal."""
    state = reopen(SCHEMA)
    state.begin(1, tracking=True)
    value, table = ValueState(VALUE).bind("t", state), state.tables["t"]
    value.put(_keys(SCHEMA, 1), _values(ROWS[0]))
    digests = table.digests.tolist()
    large = pa.struct([("at", PLACE.field("at").type), ("city", pa.large_string())])
    garbage = pa.array([["below"], ROWS[0]["tags"]], pa.large_list(pa.dictionary(pa.int8(), pa.string())))
    other = {
        "place": pa.array([B, ROWS[0]["place"]], large).slice(1),
        "tags": garbage.slice(1),
        "visits": pa.array([[B], [A, None, B]], pa.list_(large)).slice(1),
        "n": pa.array([1], pa.int64()),
    }
    value.put(_keys(SCHEMA, 1), other)
    assert table.digests.tolist() == digests
    assert value.get(_keys(SCHEMA, 1)).to_pylist() == [ROWS[0]]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (pa.array([{"city": "x"}]), "field at is missing"),
        (pa.array([{"city": "x", "at": None, "zip": 1}]), "field zip is not declared"),
        (pa.array([{"city": "x", "at": {"lat": 1.0}}]), "field lon is missing"),
        (pa.array([{"city": "x", "at": {"lat": "north", "lon": 1.0}}]), "place does not fit"),
        (pa.array(["x"]), "place does not fit"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_value_of_another_shape_is_refused(reopen: Open, place: pa.Array, why: str) -> None:
    state = reopen(SCHEMA)
    state.begin(1, tracking=True)
    with pytest.raises(UsageError, match=why):
        columns = _values(ROWS[0]).drop(["place"]).append_column("place", place)
        ValueState(VALUE).bind("t", state).put(_keys(SCHEMA, 1), columns)
