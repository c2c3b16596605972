"""The heap backend against a plain dictionary, step by step, with everything that can happen to a step."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from siltstone.errors import StateError
from siltstone.state.backends.heap import HeapBackend, HeapTable, records, table
from siltstone.state.hashing import normalise_keys
from siltstone.state.schema import TableSchema
from tests.arrow_strategies import TYPES, random_array
from tests.examples import examples
from tests.state_model import ALL, MAX_PARALLELISM, Rows, batch_of, changed, contents, rows_of, texts

KEYS = 12
ENDINGS = ["commit", "commit", "release", "release", "rollback", "reopen"]


@contextmanager
def small_limits() -> Iterator[None]:
    """So that a dozen rows are many: scans come in batches and dead rows are dropped."""
    with patch.object(records, "BATCH_ROWS", 4), patch.object(table, "COMPACT_ROWS", 3):
        yield


# Rows come from a seed, not from Hypothesis: a step then costs one draw, and examples can be long.
seeds = st.integers(0, 2**32).map(Random)


def random_schema(random: Random) -> TableSchema:
    """One or two key columns, perhaps a subkey, some of them nullable, up to nine values, of any types."""
    sizes = {"k": random.randint(1, 2), "s": random.randint(0, 1), "v": random.choice([0, 1, 2, 9])}

    def columns(name: str, count: int) -> pa.Schema:
        nullable = [name == "v" or random.random() < 0.5 for _ in range(count)]
        return pa.schema([pa.field(f"{name}{i}", random.choice(TYPES), may) for i, may in enumerate(nullable)])

    return TableSchema(*(columns(name, count) for name, count in sizes.items()))


def random_table(random: Random, schema: pa.Schema, size: int) -> pa.Table:
    """Rows with nulls where the schema has them; without columns they are still rows."""
    if not len(schema):
        return pa.table({"none": pa.nulls(size)}).select([])
    return pa.Table.from_arrays([random_array(random, f.type, size) for f in schema], schema=schema)


def random_keys(random: Random, schema: TableSchema) -> pa.Table:
    """At most `KEYS` distinct keys, normalised."""
    loose = pa.schema([f.with_nullable(True) for f in schema.primary_key])
    keys = random_table(random, loose, KEYS * 2)
    for each in schema.primary_key:
        keys = keys if each.nullable else keys.filter(keys.column(each.name).is_valid())
    keys = normalise_keys(keys.cast(schema.primary_key))
    first = {row: i for i, row in reversed(list(enumerate(texts(keys.columns))))}
    return keys.take(pa.array(sorted(first.values())[:KEYS], pa.int64()))


def some(random: Random, keys: pa.Table) -> pa.Table:
    """A few of the keys, in any order."""
    return keys.take(pa.array(random.sample(range(len(keys)), random.randint(0, len(keys))), pa.int64()))


@dataclass(frozen=True)
class Version:
    """What the state must be."""

    step: int = 0
    rows: Rows = field(default_factory=dict)
    changed: frozenset = frozenset()
    known: bool = True
    opaque: dict[int, bytes] = field(default_factory=dict)


class HeapMachine(RuleBasedStateMachine):
    """`now` is the model; `undo` holds the versions that can be rolled back to, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = small_limits()
        self.limits.__enter__()
        self.directory = Path(tempfile.mkdtemp(prefix="heap"))
        self.state = None

    @initialize(random=seeds, buckets=st.sampled_from([1, 3, 2**64]))
    def start(self, random: Random, buckets: int) -> None:
        self.schema = random_schema(random)
        self.keys = random_keys(random, self.schema)
        self.buckets = buckets
        self.now, self.undo, self.tracking = Version(), [], True
        self.state = self.reopened()

    def reopened(self):
        return HeapBackend().open(self.directory, {"t": self.schema}, ("o",), ALL, MAX_PARALLELISM)

    @rule(random=seeds, tracking=st.booleans(), skip=st.integers(1, 2), ending=st.sampled_from(ENDINGS))
    def step(self, random: Random, tracking: bool, skip: int, ending: str) -> None:
        before, self.tracking = self.now, tracking
        self.state.begin(before.step + skip, tracking=tracking)
        for _ in range(random.randint(0, 5)):
            random.choice([self.put, self.put, self.delete, self.delete_all, self.mark, self.set_opaque])(random)
        self.check()
        if ending in ("commit", "release"):
            self.state.commit()
            self.undo.append(before)
            self.now = replace(self.now, step=before.step + skip)
            if ending == "release":
                self.release(self.now.step)
            return
        self.now = before
        if ending == "rollback":
            self.state.rollback()
        else:
            self.reopen()

    @rule(action=st.sampled_from(["roll back", "release", "reopen"]), back=st.integers(0, 3))
    def between_steps(self, action: str, back: int) -> None:
        if action == "roll back" and self.undo:
            self.state.rollback()
            self.now = self.undo.pop()
        elif action == "release":
            self.release(self.now.step - back)
        else:
            self.reopen()

    def release(self, released: int) -> None:
        self.state.release(released)
        # Version i of `undo` is what rolling back the next version leads to.
        steps = [*(version.step for version in self.undo[1:]), self.now.step][: len(self.undo)]
        self.undo = [v for v, step in zip(self.undo, steps, strict=True) if step > released]

    def reopen(self) -> None:
        self.state.close()
        self.state = self.reopened()

    def touch(self, keys: list[tuple[str, ...]], rows: Rows) -> None:
        known = self.now.known and (self.tracking or not keys)
        told = self.now.changed | frozenset(keys) if self.tracking else self.now.changed
        self.now = replace(self.now, rows=rows, changed=told, known=known)

    def put(self, random: Random) -> None:
        keys = some(random, self.keys)
        values = random_table(random, self.schema.value, len(keys))
        batch = batch_of(self.schema, keys, self.buckets)
        if random.random() < 0.5:
            self.state.tables["t"].get(batch)
        self.state.tables["t"].put(batch, values)
        self.touch(texts(keys.columns), self.now.rows | rows_of(keys, values))
        assert rows_of(keys, self.state.tables["t"].get(batch).values) == rows_of(keys, values)

    def delete(self, random: Random) -> None:
        self.delete_these(some(random, self.keys))

    def delete_all(self, random: Random) -> None:
        self.delete_these(self.keys)

    def delete_these(self, keys: pa.Table) -> None:
        self.state.tables["t"].delete(batch_of(self.schema, keys, self.buckets))
        gone = [key for key in texts(keys.columns) if key in self.now.rows]
        self.touch(gone, {key: row for key, row in self.now.rows.items() if key not in gone})

    def mark(self, random: Random) -> None:
        self.state.tables["t"].mark()
        self.now = replace(self.now, changed=frozenset(), known=True)

    def set_opaque(self, random: Random) -> None:
        change = {random.randrange(MAX_PARALLELISM): random.randbytes(random.randint(0, 5))}
        self.state.set_opaque("o", change)
        self.now = replace(self.now, opaque=self.now.opaque | change)

    @invariant()
    def is_what_the_model_says(self) -> None:
        if self.state is not None:
            assert self.state.version == self.now.step
            self.check()
            if not self.undo:
                with pytest.raises(StateError, match="are gone"):
                    self.state.rollback()

    def check(self) -> None:
        kept = self.state.tables["t"]
        assert contents(kept) == self.now.rows
        assert self.state.opaque == {"o": self.now.opaque}
        found = kept.get(batch_of(self.schema, self.keys, self.buckets))
        keys = texts(self.keys.columns)
        assert found.found.tolist() == [key in self.now.rows for key in keys]
        absent = ("None",) * len(self.schema.value)
        assert rows_of(self.keys, found.values) == {key: self.now.rows.get(key, absent) for key in keys}
        if self.now.known:
            assert changed(kept) == {key: self.now.rows.get(key) for key in self.now.changed}
        else:
            with pytest.raises(StateError, match="take a base"):
                kept.changes()

    def teardown(self) -> None:
        if self.state is not None:
            self.state.close()
        shutil.rmtree(self.directory)
        self.limits.__exit__(None, None, None)


TestHeapMachine = HeapMachine.TestCase
TestHeapMachine.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)


@settings(max_examples=examples(40))
@given(random=seeds, buckets=st.sampled_from([1, 3, 2**64]))
def test_a_table_in_memory_is_a_dictionary(random: Random, buckets: int):
    schema = random_schema(random)
    keys = random_keys(random, schema)
    model: Rows = {}
    with small_limits():
        merged = HeapTable.in_memory(schema, MAX_PARALLELISM)
        for _ in range(random.randint(1, 12)):
            part = some(random, keys)
            if random.random() < 0.4:
                merged.delete(batch_of(schema, part, buckets))
                model = {key: row for key, row in model.items() if key not in texts(part.columns)}
            else:
                values = random_table(random, schema.value, len(part))
                merged.put(batch_of(schema, part, buckets), values)
                model |= rows_of(part, values)
        assert contents(merged) == model
        found = merged.get(batch_of(schema, keys, buckets))
        assert found.found.tolist() == [key in model for key in texts(keys.columns)]
