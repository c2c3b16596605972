"""The operators of `partial_machine`, and what they make of an input log, computed without any of Siltstone's state.

source --> several --> keyed      several drains counts of its calls; the key of keyed may be null, its values nest
       --> beside
       --> combined               only in the grown definition, as is the variable notes of keyed
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from siltstone.format.manifests import read_manifests
from siltstone.keyed import KeyedProcessor
from siltstone.model import KeyGroupRange, StoredObject
from siltstone.operator import CheckpointWriter, MapState, Operator, OperatorContext, Rows, State, ValueState
from siltstone.restore.export import rebuild, unit_tasks
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.state.nested import nested_columns
from siltstone.store.base import Store
from tests.sums import Tally, stream_of

GROUPS = 4
TABLES = ("busy", "often", "rare")
CALLS = "calls"
DROPPED = ("combined", "keyed.notes")
"""what the grown definition has besides"""


def group_by_key(k: int | None) -> int | None:
    """The other key of a row: of a fifth of them, null."""
    return None if k is None or k % 5 == 0 else k % 5


class Several(Operator):
    """Three tables, an opaque variable and what it prepares. Each micro-batch changes those that its rows name.

    It hands on its rows and, where an interval ends, the number of calls of each key group.
    """

    name = "several"
    key = pa.schema([("k", pa.int64())])
    inputs = ("n", "changed")
    output = pa.schema({"g": pa.int64(), "n": pa.int64()})
    busy = ValueState(value={"n": pa.int64()})
    often = ValueState(value={"n": pa.int64()})
    rare = ValueState(value={"n": pa.int64()})
    calls = Tally(create=int, serialize=lambda n: n.to_bytes(8, "big"), deserialize=int.from_bytes)

    def open(self, context: OperatorContext) -> None:
        """Keep the key groups."""
        self.groups = range(context.key_groups.start, context.key_groups.end)

    def process(self, rows: Rows, state: State) -> pa.Table | None:
        """Write the number."""
        if not len(rows):
            return None
        changed = rows.table.column("changed")[0].as_py()
        for bit, table in enumerate(TABLES):
            if changed >> bit & 1:
                getattr(state, table).put(rows.keys, {"n": rows.last("n")})
        if changed >> len(TABLES) & 1:
            for group in set(rows.key_groups.tolist()):
                state.calls[group] += 1
        keys = rows.table.column("k").to_pylist()
        return pa.table({"g": pa.array(map(group_by_key, keys), pa.int64()), "n": rows.table.column("n")})

    def drain(self, state: State) -> pa.Table | None:
        """Hand on and forget how many calls there were."""
        counts = {group: count for group in self.groups if (count := state.calls[group])}
        for group in counts:
            state.calls[group] = 0
        return pa.table(
            {"g": pa.array(map(group_by_key, counts), pa.int64()), "n": pa.array(counts.values(), pa.int64())}
        )

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: State) -> None:
        """Name the checkpoint, most of the time."""
        checkpoint.write(b"position %d" % checkpoint.id if checkpoint.id % 5 else b"")


class Nested(KeyedProcessor):
    """Key by key, with a key that may be null, and values that nest."""

    name = "keyed"
    reads = "several"
    key = pa.schema({"g": pa.int64()})
    nullable = ("g",)
    totals = ValueState(
        value={"sum": pa.int64(), "shape": pa.struct([("rows", pa.int64()), ("odd", pa.list_(pa.bool_()))])}
    )
    parts = MapState(key={"part": pa.int64()}, nullable=("part",), value={"newest": pa.list_(pa.int64())})

    def handle_input(self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any) -> None:
        """Add, and keep the newest of each part."""
        old = state.totals.get() or {"sum": 0, "shape": {"rows": 0}}
        state.totals.put(total_of(old, [row["n"] for row in rows]))
        for part, numbers in by_part(row["n"] for row in rows).items():
            before = (state.parts.get({"part": part}) or {"newest": []})["newest"]
            state.parts.put({"part": part}, {"newest": [*before, *numbers][-3:]})


class Grown(Nested):
    """`Nested` with one more variable."""

    notes = ValueState(value={"newest": pa.string()})

    def handle_input(self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any) -> None:
        """Note the highest number, too."""
        super().handle_input(key, rows, state)
        state.notes.put({"newest": str(max(row["n"] for row in rows))})


class Combined(Operator):
    """Sums of rows that are combined before the shuffle."""

    name = "combined"
    key = pa.schema({"g": pa.int64()})
    nullable = ("g",)
    inputs = ("n",)
    combined = pa.schema({"g": pa.int64(), "n": pa.int64(), "rows": pa.int64()})
    sums = ValueState(value={"n": pa.int64(), "rows": pa.int64()})

    def combine(self, table: pa.Table) -> pa.Table:
        """Add up by key."""
        found = table.group_by("g").aggregate([("n", "sum"), ("n", "count")])
        return found.rename_columns({"n_sum": "n", "n_count": "rows"}).select(["g", "n", "rows"])

    def process(self, rows: Rows, state: State) -> None:
        """Add up."""
        old = state.sums.get(rows.keys)
        state.sums.put(rows.keys, {name: rows.sum(name, initial=old[name]) for name in ("n", "rows")})


STREAM = stream_of(Several(), Several(name="beside"), Nested(), max_parallelism=GROUPS)
GROWN = stream_of(Several(), Several(name="beside"), Grown(), Combined(), max_parallelism=GROUPS)
Model = dict[str, dict[str, dict[Any, Any]]]
"""operator -> variable -> key, with the map key if there is one -> value"""


def total_of(old: Mapping[str, Any], numbers: list[int]) -> dict[str, Any]:
    """Add numbers to a total."""
    odd = [number % 2 == 1 for number in sorted(numbers)[:2]]
    return {"sum": old["sum"] + sum(numbers), "shape": {"rows": old["shape"]["rows"] + len(numbers), "odd": odd}}


def by_part(numbers: Iterable[int]) -> dict[int | None, list[int]]:
    """Numbers by what is left of them, ascending."""
    found = defaultdict[int | None, list[int]](list)
    for number in sorted(numbers):
        found[number % 3 or None].append(number)
    return found


def rows_of(offsets: str) -> pa.Table:
    """The rows that a step of the input log read."""
    read = json.loads(offsets)
    keys, count = read["keys"], len(read["keys"])
    columns = {"k": pa.array(keys, pa.int64()), "n": [read["n"]] * count, "changed": [read["changed"]] * count}
    return pa.table({**columns, "g": pa.array(map(group_by_key, keys), pa.int64())})


def advance(model: Model, offsets: str, drains: bool) -> None:
    """Take a step of the input log; without offsets, it read nothing.

    Args:
        drains: whether an interval ends with it, so that what is held back is handed on.
    """
    rows = rows_of(offsets).to_pylist() if offsets else []
    handed: list[tuple[int | None, int]] = []
    for operator in ("several", "beside"):
        tables, changed = model[operator], rows[0]["changed"] if rows else 0
        for bit, table in enumerate(TABLES):
            tables[table] |= {row["k"]: {"n": row["n"]} for row in rows if changed >> bit & 1}
        calls = tables[CALLS]
        if changed >> len(TABLES) & 1:
            hashes = xxhash64([pa.array([row["k"] for row in rows], pa.int64())])
            for group in set(key_groups(hashes, GROUPS).tolist()):
                calls[group] = calls.get(group, 0) + 1
        if operator == "several":
            handed = [(row["g"], row["n"]) for row in rows]
            handed += [(group_by_key(group), count) for group, count in calls.items()] if drains else []
        if drains:
            calls.clear()
    by_key = defaultdict[int | None, list[int]](list)
    for g, n in handed:
        by_key[g].append(n)
    keyed = model["keyed"]
    for g, numbers in by_key.items():
        keyed["totals"][g] = total_of(keyed["totals"].get(g, {"sum": 0, "shape": {"rows": 0}}), numbers)
        for part, some in by_part(numbers).items():
            before = keyed["parts"].get((g, part), {"newest": []})["newest"]
            keyed["parts"][g, part] = {"newest": [*before, *some][-3:]}
        if "notes" in keyed:
            keyed["notes"][g] = {"newest": str(max(numbers))}
    for row in rows if "combined" in model else ():
        old = model["combined"]["sums"].get(row["g"], {"n": 0, "rows": 0})
        model["combined"]["sums"][row["g"]] = {"n": old["n"] + row["n"], "rows": old["rows"] + 1}


def restored_rows(store: Store, stored: Iterable[StoredObject], checkpoint: int, stream: str) -> Model:
    """The tables of a checkpoint, restored alone, as `advance` has them; nothing of opaque variables."""
    manifests = read_manifests(store, [*stored], stream)
    defined = {op.name: op.tables() for op in GROWN.operators}
    found: Model = defaultdict(lambda: defaultdict(dict))
    for task in unit_tasks(manifests, checkpoint, 1, None)[0]:
        for name, table in rebuild(store, task).tables.items():
            schema = defined[task.unit.operator][name]
            keys, own = schema.primary_key.names, found[task.unit.operator][name]
            for rows, _ in table.scan(KeyGroupRange(0, GROUPS)):
                for row in nested_columns(rows, schema.nested).to_pylist():
                    key = tuple(row.pop(name) for name in keys)
                    own[key if len(keys) > 1 else next(iter(key))] = row
    return found
