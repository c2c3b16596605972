"""Statistics of a sink's files, by which readers skip them: those of the column itself, whatever it is called."""

import json

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from siltstone.format.table_file import file_statistics

COLUMNS = {
    "a.b": pa.array([2, 100, None], pa.int64()),
    "a": pa.array([{"b": -5}, {"b": 7}, None], pa.struct([("b", pa.int64())])),
    "b": pa.array(["x", None, None]),
    "l.list.element": pa.array([1, 2, 3], pa.int32()),
    "l": pa.array([[7], [], None], pa.list_(pa.int32())),
    "m": pa.array([[("k", {"v": [9]})], None, []], pa.map_(pa.string(), pa.struct([("v", pa.list_(pa.int64()))]))),
    "m.key_value.key": pa.array(["a", "b", "c"]),
    "deep": pa.array([{"x": {"y": 1, "z": "t"}, "w": [2]}] * 3),
    "deep.x.y": pa.array([11, 12, 13], pa.int8()),
}


@given(st.permutations(list(COLUMNS)).flatmap(lambda names: st.integers(1, len(names)).map(lambda n: names[:n])))
def test_each_column_has_its_own_statistics(names: list[str]) -> None:
    table = pa.table({name: COLUMNS[name] for name in names})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2)
    said = json.loads(file_statistics(pq.read_metadata(pa.BufferReader(sink.getvalue())), table.schema))
    flat = [name for name in names if not pa.types.is_nested(COLUMNS[name].type)]
    assert said["nullCount"] == {name: COLUMNS[name].null_count for name in flat}
    assert said["minValues"] == {name: pc.min(COLUMNS[name]).as_py() for name in flat}  # pyright: ignore[reportAttributeAccessIssue]
    assert said["maxValues"] == {name: pc.max(COLUMNS[name]).as_py() for name in flat}  # pyright: ignore[reportAttributeAccessIssue]
