"""Value columns become wider between two runs: state goes on, as if it had been wide from the beginning."""

from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import Policy, PolicyOptions, policy_by_name
from siltstone.errors import SchemaConflict
from siltstone.operator import ListState, MapState, Operator, Rows, State, ValueState, WindowState
from siltstone.state.digest import row_digests
from siltstone.state.schema import TableSchema
from siltstone.state.types import is_wider
from siltstone.stream import Stream
from tests.arrow_strategies import arrays
from tests.examples import usually
from tests.proofs import check_restores
from tests.region_run import RegionRun

NAME = "widened"
NARROW = pa.schema(
    {"i": pa.int8(), "u": pa.uint16(), "f": pa.float32(), "d": pa.decimal128(5, 2), "s": pa.struct({"x": pa.int8()})}
)
STRUCT = pa.struct({"x": pa.int8(), "y": pa.string()})
WIDE = pa.schema(
    {
        "i": pa.int64(),
        "u": pa.int32(),
        "f": pa.float64(),
        "d": pa.decimal128(38, 2),
        "s": pa.struct({"x": pa.int8(), "y": pa.string()}),
    }
)
LADDERS = [
    [pa.int8(), pa.int16(), pa.int32(), pa.int64()],
    [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()],
    [pa.uint8(), pa.int16(), pa.int32()],
    [pa.float32(), pa.float64()],
    [pa.decimal128(3, 1), pa.decimal128(18, 1), pa.decimal128(19, 1), pa.decimal128(38, 1)],
]


@given(st.sampled_from([pair for ladder in LADDERS for pair in pairwise(ladder)]), st.data())
def test_a_wider_column_has_the_same_digests(pair: tuple[pa.DataType, pa.DataType], data: st.DataObject) -> None:
    narrow, wide = pair
    column = data.draw(arrays(narrow, 5))
    assert is_wider(wide, narrow) and not is_wider(narrow, wide) and not is_wider(narrow, narrow)
    before, after = (row_digests(pa.table({"c": each})) for each in (column, column.cast(wide)))
    assert before.tolist() == after.tolist()


@pytest.mark.parametrize(
    ("recorded", "now"),
    [
        (pa.int64(), pa.int32()),
        (pa.int8(), pa.uint16()),
        (pa.uint64(), pa.int64()),
        (pa.int32(), pa.float64()),
        (pa.decimal128(5, 2), pa.decimal128(7, 3)),
        (pa.int64(), pa.decimal128(38, 0)),
        (pa.string(), pa.binary()),
        (pa.date32(), pa.timestamp("us")),
        (pa.struct({"x": pa.int8()}), pa.struct({"x": pa.int16()})),
        (pa.list_(pa.int8()), pa.list_(pa.int16())),
        (pa.struct({"x": pa.int8()}), pa.struct({"y": pa.int8(), "x": pa.int8()})),
        (pa.struct({"x": pa.int8(), "y": pa.int8()}), pa.struct({"x": pa.int8()})),
        (pa.list_(pa.struct({"x": pa.int8()})), pa.list_(pa.struct({"x": pa.int8(), "y": pa.int8()}))),
        (pa.struct({"x": pa.int8()}), pa.int8()),
    ],
)
def test_any_other_change_is_refused(recorded: pa.DataType, now: pa.DataType) -> None:
    key, nothing = pa.schema({"k": pa.int64()}), pa.schema([])
    old, new = (TableSchema(key, nothing, pa.schema({"v": kind})) for kind in (recorded, now))
    with pytest.raises(SchemaConflict, match="value columns may be added, or get a wider integer"):
        new.check_follows(old, "w/keeper.values")


def test_a_key_stays_as_it_is() -> None:
    old, new = (TableSchema(pa.schema({"k": kind}), pa.schema([]), WIDE) for kind in (pa.int32(), pa.int64()))
    with pytest.raises(SchemaConflict, match="changed shape"):
        new.check_follows(old, "w/keeper.values")


class Keeper(Operator):
    """Keeps a row's values in a variable of each kind, and puts them out."""

    name = "keeper"
    key = pa.schema({"k": pa.int64()})
    output = pa.schema({"k": pa.int64(), **dict(zip(NARROW.names, NARROW.types, strict=True))})
    VALUE = NARROW
    values = ValueState(NARROW)
    entries = MapState({"m": pa.int32()}, NARROW)
    lists = ListState(NARROW)
    windows = WindowState(NARROW, order="i")

    def process(self, rows: Rows, state: State) -> pa.Table:
        n = rows.table["n"].to_numpy()
        made = made_of(n, self.VALUE)
        newest = np.zeros(len(rows.keys), np.int64)
        newest[rows.key_index] = np.arange(len(n))
        state.values.put(rows.keys, made.take(pa.array(newest)))
        entries = rows.table.select(["k"]).append_column("m", pa.array(n, pa.int32()))
        for name in made.column_names:
            entries = entries.append_column(name, made[name])
        state.entries.put(entries)
        state.lists.append(rows.keys, rows.key_index, made)
        state.windows.insert(rows.keys, rows.key_index, made)
        return rows.table.select(["k"]).append_column("i", made["i"].cast(self.output.field("i").type))


class WideKeeper(Keeper):
    VALUE = WIDE
    values = ValueState(WIDE)
    entries = MapState({"m": pa.int32()}, WIDE)
    lists = ListState(WIDE)
    windows = WindowState(WIDE, order="i")


for kind in (Keeper, WideKeeper):
    kind.output = pa.schema({"k": pa.int64(), "i": pa.int64()})


def made_of(n: np.ndarray, schema: pa.Schema) -> pa.Table:
    """Values for numbers, some of them null; those from 100 on need the wide types."""
    columns: dict[str, list[Any]] = {
        "i": [int(each) * (1 if each < 100 else 1 << 40) for each in n],
        "u": [int(each) * (1 if each < 100 else 1000) for each in n],
        "f": [0.1 * int(each) if each % 7 else None for each in n],
        "d": [Decimal(int(each)) / 4 * (1 if each < 100 else 10**20) for each in n],
        "s": [{"x": int(each) % 100, **({"y": str(each)} if each > 110 else {})} if each % 5 else None for each in n],
    }
    columns["f"] = [
        None if f is None or each >= 100 else float(np.float32(f)) for f, each in zip(columns["f"], n, strict=True)
    ]
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in schema}, schema=schema)


def rows(step: int, wide: bool) -> pa.Table:
    keys = np.arange(40) if step == 1 else (np.arange(9) * 5 + step) % 40
    return pa.table({"k": keys, "n": (keys + step) % 90 + (100 if wide else 0)})


DELTAS = policy_by_name("adjust-d", PolicyOptions(d_max=100, size_ratio_max=None, space_amplification_max=None))
BASES = policy_by_name("adjust-d", PolicyOptions(d_max=0))
CASES: dict[str, tuple[Policy, dict[str, Any], dict[str, Any]]] = {
    "deltas in the heap": (DELTAS, {}, {}),
    "bases": (BASES, {}, {}),
    "deltas in RocksDB": (DELTAS, {"backend": "rocksdb"}, {"backend": "rocksdb"}),
    "from the heap to RocksDB": (DELTAS, {}, {"backend": "rocksdb"}),
    "files": (policy_by_name("files"), {"backend": "rocksdb"}, {"backend": "rocksdb"}),
    "files, then the heap": (policy_by_name("files"), {"backend": "rocksdb"}, {"policy": DELTAS}),
    "pending": (DELTAS, {"max_pending": 2}, {"max_pending": 2}),
    "rescaled": (DELTAS, {}, {"parallelism": 3}),
}


@pytest.mark.parametrize("case", usually(CASES, "deltas in the heap", "files, then the heap", "pending", "rescaled"))
def test_state_goes_on_as_if_it_had_been_wide_from_the_beginning(tmp_path: Path, case: str) -> None:
    policy, before, after = CASES[case]
    digests: dict[str, list[str]] = {}
    for history in ("widened", "wide"):
        with OpenWarehouse.open_writable(str(tmp_path / history)) as place:
            for first, last, operator, options in (
                (1, 4, WideKeeper() if history == "wide" else Keeper(), before),
                (5, 8, WideKeeper(), after),
            ):
                stream = Stream(NAME, None, [operator], max_parallelism=8)
                run = RegionRun(place, stream, **{"policy": policy, "parallelism": 2, **options})
                for step in range(first, last + 1):
                    run.step(rows(step, wide=step > 4))
                run.complete_pending()
                run.region.close("done")
            check_restores(place, NAME, (1, 3))
            digests[history] = [each.digest for each in place.catalog.checkpoints.list(NAME)]
    assert digests["widened"] == digests["wide"] and len(digests["wide"]) == 8


def test_a_narrower_definition_is_refused_and_one_of_before_reads_what_it_wrote(tmp_path: Path) -> None:
    narrow, wide = (Stream(NAME, None, [kind()], max_parallelism=8) for kind in (Keeper, WideKeeper))
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        for stream, step in ((narrow, 1), (wide, 2)):
            run = RegionRun(place, stream, DELTAS)
            run.step(rows(step, wide=step == 2))
            run.region.close("done")
        with pytest.raises(SchemaConflict, match=r"widened/keeper\.values changed shape"):
            RegionRun(place, narrow, DELTAS)
