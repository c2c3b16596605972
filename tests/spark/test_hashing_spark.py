"""The hash of siltstone equals the hash of Spark, for every type, by Spark's own word."""

from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.state.hashing import key_groups, xxhash64
from tests.arrow_frames import to_arrow
from tests.arrow_strategies import TYPES, random_array

ROWS = 1500


def test_every_type_alone_and_all_chained(spark, tmp_path):
    random = Random(2013)
    table = pa.table({f"c{i}": random_array(random, kind, ROWS) for i, kind in enumerate(TYPES)})
    # Through Parquet, because there Spark turns unsigned integers into the signed ones it holds.
    pq.write_table(table.append_column("row", pa.array(range(ROWS))), tmp_path / "rows.parquet")
    names = table.column_names
    chained = f"xxhash64({', '.join(names)})"
    frame = spark.read.parquet(str(tmp_path / "rows.parquet"))
    hashed = frame.selectExpr(
        "row",
        *(f"xxhash64({name}) AS {name}" for name in names),
        f"{chained} AS chained",
        f"pmod({chained}, 100L) AS key_group",
    )
    expected = to_arrow(hashed).sort_by("row")
    for name, kind in zip(names, TYPES, strict=True):
        ours = xxhash64([table[name]]).view(np.int64)
        assert ours.tolist() == expected[name].to_pylist(), f"the hash of {kind} differs from Spark's"
    hashes = xxhash64(table.columns)
    assert hashes.view(np.int64).tolist() == expected["chained"].to_pylist()
    assert key_groups(hashes, 100).tolist() == expected["key_group"].to_pylist()
