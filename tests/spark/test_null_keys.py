"""Null keys through a stream's whole life: steps, restores, rescaling, edits, verification, and the data source."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import siltstone as st
from siltstone.spark.operations import RunRequest, edit, rescale, restore, run
from siltstone.spark.state_scan import scan_frame
from tests.spark_runs import at, check_proven
from tests.spark_streams import source_of

OPERATOR = st.Aggregate("sums", {"k": pa.int64(), "s": pa.string()}, [st.Count("n"), st.Max("v", of="v")])
LONE = st.Aggregate("lone", {"k": pa.int64()}, [st.Max("v", of="v")], output=False)


def rows(*three: tuple[int | None, str | None, int | None]) -> pa.Table:
    columns = zip(*three, strict=True)
    kinds = {"k": pa.int64(), "s": pa.string(), "v": pa.int64()}
    return pa.table([pa.array(c, t) for c, t in zip(columns, kinds.values(), strict=True)], names=list(kinds))


STEPS = [
    rows((None, None, None), (1, None, 5), (None, "x", 6), (None, "", None)),
    rows((None, None, None), (1, "x", 7), (None, "x", 9)),
    rows((None, None, None), (2, None, 1)),
]
STREAM = st.Stream("nulls", source_of(STEPS), [OPERATOR, LONE], max_parallelism=8)


def test_null_keys_live_as_others_do(spark: SparkSession, tmp_path: Path) -> None:
    """The first steps run in the heap, the others in RocksDB."""
    settings = at(tmp_path / "w")
    out = tmp_path / "out"

    def totals(operator: str = "sums") -> dict[Any, Any]:
        shutil.rmtree(out, ignore_errors=True)
        restore(settings, "nulls", to=out)
        found = pq.read_table(out / operator / "totals").to_pylist()
        keys = ("k", "s") if operator == "sums" else ("k",)
        return {tuple(r[k] for k in keys): tuple(v for k, v in r.items() if k not in keys) for r in found}

    run(settings, STREAM, RunRequest(batches=2))
    expected = {
        (None, None): (2, None),
        (1, None): (1, 5),
        (None, "x"): (2, 9),
        (None, ""): (1, None),
        (1, "x"): (1, 7),
    }
    assert rescale(settings, STREAM, 3).proven
    run(settings.model_copy(update={"backend": "rocksdb"}), STREAM, RunRequest())
    expected |= {(None, None): (3, None), (2, None): (1, 1)}
    assert totals() == expected
    assert totals("lone") == {(None,): (9,), (1,): (7,), (2,): (1,)}
    changes = rows((None, None, 4), (None, "", None), (None, "new", 8)).append_column("n", pa.array([9, None, 1]))
    pq.write_table(changes.append_column("__deleted", pa.array([False, True, False])), tmp_path / "edit.parquet")
    done = edit(settings, STREAM, "sums", "totals", tmp_path / "edit.parquet")
    assert (done.upserts, done.inserts, done.deletes, done.absent, done.proven) == (2, 1, 1, 0, True)
    del expected[None, ""]
    expected |= {(None, None): (9, 4), (None, "new"): (1, 8)}
    check_proven(settings, "nulls")
    table = {"stream": "nulls", "operator": "sums", "variable": "totals", "warehouse": settings.warehouse}
    found = {(r.k, r.s): (r.n, r.v) for r in scan_frame(spark, table).collect()}
    assert found == expected
    keyed = scan_frame(spark, table | {"keys": '[{"k": null, "s": null}, {"k": 1, "s": null}]'})
    assert {(r.k, r.s): (r.n, r.v) for r in keyed.collect()} == {k: expected[k] for k in ((None, None), (1, None))}
    rows_here = st.open(settings.warehouse).stream("nulls").table("sums", "totals").to_table()
    assert {(r["k"], r["s"]): (r["n"], r["v"]) for r in rows_here.to_pylist()} == expected


def test_a_key_that_does_not_fit_is_no_null(spark: SparkSession, tmp_path: Path) -> None:
    """A cast that fails gives null, which must not be counted as a null key."""
    texts = pa.table({"k": ["1", None, "x"], "s": ["a", "b", "c"], "v": [1, 2, 3]})
    stream = st.Stream("texts", source_of([texts]), [LONE], max_parallelism=8)
    with pytest.raises(st.SiltstoneError, match=r'key column k cannot be cast to int64: \{"k":"x"\}'):
        run(at(tmp_path / "w"), stream, RunRequest())
