"""Streams with an operator that keeps no state."""

import pyarrow as pa
import pyarrow.compute as pc

from siltstone.operator import Operator, Rows, State
from siltstone.stream import Stream
from tests.sums import Sums

ROWS = {"k": pa.int64(), "n": pa.int64()}


class Positive(Operator):
    """Passes on what is above 0."""

    name = "positive"
    key = pa.schema({"k": pa.int64()})
    inputs = ("n",)
    output = ROWS

    def process(self, rows: Rows, state: State) -> pa.Table:
        return rows.table.filter(pc.greater(rows.table["n"], 0)).select(["k", "n"])


ALONE = Stream("positive", None, [Positive()], sinks={"positive": None}, max_parallelism=16)
BEFORE = Stream("sums", None, [Positive(), Sums(reads="positive")], sinks={"positive": None}, max_parallelism=16)
