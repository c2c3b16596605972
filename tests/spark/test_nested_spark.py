"""Structs and lists in state through a stream's whole life: kills, restores, rescaling, edits, proofs, and readers."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import siltstone as st
from siltstone.keyed import KeyedProcessor
from siltstone.settings import RecoveryOptions
from siltstone.spark.operations import RunRequest, compare_snapshot, edit, materialize, rescale, restore, run, snapshot
from siltstone.spark.state_scan import scan_frame
from tests.spark_runs import at, check_proven
from tests.spark_streams import source_of

ITEM = pa.struct([("name", pa.string()), ("price", pa.float64())])
HISTORY = pa.list_(ITEM)
INPUT = pa.schema([("k", pa.int64()), ("item", ITEM), ("tags", pa.list_(pa.string()))])
TOTAL = {"newest": ITEM, "tags": pa.list_(pa.string())}
DIE = "die"


class Baskets(st.Operator):
    """The newest item and tags of each key; its worker is killed once at the item `DIE`."""

    name = "baskets"
    key = {"k": pa.int64()}  # noqa: RUF012
    output = pa.schema([("k", pa.int64()), ("newest", ITEM)])
    total = st.ValueState(TOTAL)

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        newest = dict(zip(rows.key_index.tolist(), range(len(rows)), strict=True))
        taken = rows.table.take(pa.array([newest[i] for i in range(len(rows.keys))]))
        state.total.put(rows.keys, {"newest": taken.column("item"), "tags": taken.column("tags")})
        if any(item and item["name"] == DIE for item in rows.table.column("item").to_pylist()) and self.mark.exists():
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return pa.table(
            [rows.keys.columns.column("k"), state.total.get(rows.keys).column("newest")], schema=self.output
        )


class Histories(KeyedProcessor):
    """Every item of each key and tag, as a list that grows."""

    name = "histories"
    key = {"k": pa.int64()}  # noqa: RUF012
    items = st.MapState({"tag": pa.string()}, {"history": HISTORY})

    def handle_input(self, key: tuple[int], rows: list[dict[str, Any]], state: Any) -> None:
        for row in rows:
            for tag in row["tags"] or ():
                found = state.items.get({"tag": tag}) or {"history": []}
                found["history"].append(row["item"])
                state.items.put({"tag": tag}, found)


def rows(*three: tuple[int, Any, Any]) -> pa.Table:
    return pa.table(
        [pa.array(list(c), t) for c, t in zip(zip(*three, strict=True), INPUT.types, strict=True)], schema=INPUT
    )


A, B, C = {"name": "a", "price": 1.5}, {"name": None, "price": -0.0}, {"name": DIE, "price": None}
STEPS = [rows((1, A, ["x", "y"]), (2, None, []), (3, B, None)), rows((1, C, ["x"]), (2, B, ["x"])), rows((4, B, ["z"]))]
BASKETS = {1: (C, ["x"]), 2: (B, ["x"]), 3: (B, None), 4: (B, ["z"])}
HISTORIES = {(1, "x"): [A, C], (1, "y"): [A], (2, "x"): [B], (4, "z"): [B]}


def of_baskets(found: list[Mapping[str, Any]]) -> dict[int, Any]:
    return {r["k"]: (r["newest"], r["tags"]) for r in found}


@pytest.mark.smoke
def test_structs_and_lists_live_as_other_values_do(spark: SparkSession, tmp_path: Path) -> None:
    """The first steps run in the heap, the others in RocksDB."""
    mark = tmp_path / "mark"
    mark.touch()
    heard: list[Any] = []
    stream = st.Stream(
        "nested",
        source_of(STEPS),
        [Baskets(mark), Histories()],
        sinks={"baskets": lambda frame, id: heard.extend(frame.collect())},
        max_parallelism=8,
    )
    settings = at(tmp_path / "w", recovery=RecoveryOptions(reset_delay_s=0.01))
    assert run(settings, stream, RunRequest(batches=2)).resets == 1 and not mark.exists()
    assert rescale(settings, stream, 3).proven
    run(settings.model_copy(update={"backend": "rocksdb"}), stream, RunRequest())
    assert {(r.k, r.newest and r.newest.name) for r in heard} >= {(1, "a"), (1, DIE), (2, None)}
    check_proven(settings, "nested")
    assert materialize(settings, "nested").operators
    snapshot(settings.model_copy(update={"backend": "rocksdb"}), "nested")
    assert all(table.same for table in compare_snapshot(settings, "nested").tables)

    restore(settings, "nested", to=tmp_path / "out")
    assert of_baskets(pq.read_table(tmp_path / "out" / "baskets" / "total").to_pylist()) == BASKETS
    found = pq.read_table(tmp_path / "out" / "histories" / "items").to_pylist()
    assert {(r["k"], r["tag"]): r["history"] for r in found} == HISTORIES

    given = pa.table({"k": pa.array([3, 4, 5], pa.int64()), "__deleted": [False, True, False]})
    kinds = {"newest": pa.struct([("price", pa.float32()), ("name", pa.string())]), "tags": TOTAL["tags"]}
    values = {"newest": [{"name": "e", "price": 0.5}, None, None], "tags": [[None], None, ["new"]]}
    for name, kind in kinds.items():
        given = given.append_column(name, pa.array(values[name], kind))
    pq.write_table(given, tmp_path / "edit.parquet")
    done = edit(settings, stream, "baskets", "total", tmp_path / "edit.parquet")
    assert (done.upserts, done.inserts, done.deletes, done.proven) == (2, 1, 1, True)
    expected = {k: v for k, v in BASKETS.items() if k != 4} | {
        3: ({"name": "e", "price": 0.5}, [None]),
        5: (None, ["new"]),
    }
    lossy = pa.table(
        {"k": pa.array([1], pa.int64()), "newest": pa.array([A], ITEM), "tags": pa.array([[1]], pa.list_(pa.int64()))}
    )
    pq.write_table(lossy, tmp_path / "lossy.parquet")
    with pytest.raises(st.SiltstoneError, match="column tags is list"):
        edit(settings, stream, "baskets", "total", tmp_path / "lossy.parquet")

    named = {"stream": "nested", "operator": "baskets", "variable": "total", "warehouse": settings.warehouse}
    frame = scan_frame(spark, named)
    assert frame.dtypes == [("k", "bigint"), ("newest", "struct<name:string,price:double>"), ("tags", "array<string>")]
    assert of_baskets([r.asDict(recursive=True) for r in frame.collect()]) == expected
    assert [r.name for r in frame.where("newest.price > 0").select("newest.name").orderBy("k").collect()] == ["a", "e"][
        1:
    ]
    tags = scan_frame(spark, named | {"columns": "tags", "keys": '[{"k": 5}]'})
    assert [r.asDict() for r in tags.collect()] == [{"tags": ["new"]}]
    table = st.open(settings.warehouse).stream("nested").table("baskets", "total").to_table()
    assert of_baskets(table.to_pylist()) == expected and table.schema.field("newest").type == ITEM
