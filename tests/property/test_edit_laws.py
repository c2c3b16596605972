"""Edits of lists: whatever was appended and edited before, the rows are those that the changes name, in order."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from siltstone.model import KeyGroupRange
from siltstone.rows import Rows
from siltstone.state.access import ListAccess
from siltstone.state.backend import SubtaskState
from siltstone.state.backends.named import backend as backend_by_name
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.ttl import TTL
from siltstone.state.variables import ListState

KEY = pa.schema([pa.field("k", pa.int64(), nullable=False)])
GROUPS = 4
Lists = dict[int, dict[int, int]]
"""key -> position -> n"""

keys = hs.integers(0, 2)
appends = hs.tuples(hs.just("append"), hs.lists(keys, min_size=1, max_size=5))
places = hs.one_of(hs.integers(-4, 9), hs.sampled_from([-(2**63), -(2**40), 2**40, 2**63 - 1]))
edits = hs.tuples(hs.just("edit"), hs.dictionaries(hs.tuples(keys, places), hs.booleans(), min_size=1, max_size=8))
lives = hs.lists(hs.one_of(appends, edits), min_size=1, max_size=6)


class Life:
    """Lists in working state, and what they must be."""

    def __init__(self, state: SubtaskState, variable: ListState) -> None:
        self.state, self.variable = state, variable
        self.lists = ListAccess("items", state.tables, drops_bounds=variable.drops_bounds)
        self.next = 0

    def append(self, to: list[int]) -> None:
        table = pa.table({"k": pa.array(to, pa.int64()), "n": pa.array(range(self.next, self.next + len(to)))})
        self.next += len(to)
        expected = self.values()
        for key, n in zip(*table.to_pydict().values(), strict=True):
            expected.setdefault(key, []).append(n)
        rows = Rows(table, xxhash64([table["k"]]), key_groups(xxhash64([table["k"]]), GROUPS), ["k"])
        self.lists.append(rows.keys, rows.key_index, table)
        assert self.values() == expected

    def edit(self, named: dict[tuple[int, int], bool]) -> None:
        before = self.read()
        puts = {at: self.next + number for number, (at, put) in enumerate(named.items()) if put}
        self.next += len(named)
        merged = {(key, place): n for key, rows in before.items() for place, n in rows.items()}
        there = {at for at in named if at in merged}
        merged = {at: n for at, n in merged.items() if at not in named} | puts
        expected: dict[int, list[int]] = {}
        for (key, _), n in sorted(merged.items()):
            expected.setdefault(key, []).append(n)
        owners, place = zip(*named, strict=True)
        columns = [pa.array(owners), pa.array(place, pa.int64()), pa.array([puts.get(at) for at in named], pa.int64())]
        if self.variable.ttl:
            columns.append(pa.nulls(len(named), pa.timestamp("us", "UTC")))
        changes = self.variable.edit_schema("items", KEY).changes
        table = pa.table([*columns, pa.array([at not in puts for at in named])], schema=changes)
        hashes = xxhash64([table["k"]])
        done = self.variable.edit("items", self.state, table, key_groups(hashes, GROUPS))
        assert self.values() == expected
        gone = sum(not put for put in named.values())
        assert (done.upserts, done.deletes + done.absent) == (len(named) - gone, gone)
        assert done.deletes == sum(not named[at] for at in there)
        assert done.upserts - done.inserts == sum(named[at] for at in there)

    def values(self) -> dict[int, list[int]]:
        return {key: [rows[place] for place in sorted(rows)] for key, rows in self.read().items()}

    def read(self) -> Lists:
        """Return the rows, once it is checked that the bounds of each list hold them and little more."""
        every = KeyGroupRange(0, GROUPS)
        found: Lists = {}
        for rows, _ in self.state.tables["items"].scan(every):
            for row in rows.to_pylist():
                found.setdefault(row["k"], {})[row["position"]] = row["n"]
        bounds = {}
        for rows, _ in self.state.tables["items.bounds"].scan(every):
            bounds |= {row["k"]: (row["head"], row["tail"]) for row in rows.to_pylist()}
        assert found.keys() <= bounds.keys()
        for key, (head, tail) in bounds.items():
            held = found.get(key)
            if held is None:
                assert head == tail and not self.variable.drops_bounds
            else:
                assert head == min(held) and max(held) < tail and tail - head <= self.next
        return found


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("ttl", [None, TTL("1 day", clock="processing")])
@given(life=lives)
def test_a_list_has_the_rows_that_edits_name_in_the_order_of_their_positions(
    backend: str, ttl: TTL | None, life: list[tuple[str, object]]
) -> None:
    variable = ListState({"n": pa.int64()}, ttl=ttl)
    with TemporaryDirectory() as directory:
        path, every = Path(directory) / "state", KeyGroupRange(0, GROUPS)
        state = backend_by_name(backend).open(path, variable.tables("items", KEY), (), every, GROUPS)
        try:
            state.begin(1, tracking=True)
            lists = Life(state, variable)
            for what, given_rows in life:
                if what == "append" and ttl is not None:
                    continue  # who appends stamps rows
                getattr(lists, what)(given_rows)
        finally:
            state.close()
