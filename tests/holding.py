"""Operators whose rows leave at a checkpoint, and one that reads them: what is held back is state until then."""

import json

import pyarrow as pa

from siltstone.operator import OpaqueState, Operator, Rows, State, ValueState

HOLD, TOTAL = "hold", "total"


class Hold(Operator):
    """Holds its rows back until a checkpoint, as the docs of `drain` say."""

    name = HOLD
    key = {"key": pa.int64()}  # noqa: RUF012
    inputs = ("value",)
    output = pa.schema([("key", pa.int64()), ("value", pa.int64())])
    held = OpaqueState(create=list, serialize=lambda rows: json.dumps(rows).encode(), deserialize=json.loads)

    def process(self, rows: Rows, state: State) -> None:
        """Keep them."""
        values = zip(*(rows.table[name].to_pylist() for name in self.output.names), strict=True)
        for group, row in zip(rows.key_groups.tolist(), values, strict=True):
            state.held[group] = [*state.held[group], list(row)]

    def drain(self, state: State) -> pa.Table:
        """Let them go."""
        rows = [row for group in state.held for row in state.held[group]]
        for group in list(state.held):
            state.held[group] = []
        named = [dict(zip(self.output.names, row, strict=True)) for row in rows]
        return pa.Table.from_pylist(named, schema=self.output)


class Total(Operator):
    """Counts and adds what it reads of `Hold`; nulls count as nothing."""

    name, reads = TOTAL, HOLD
    key = {"key": pa.int64()}  # noqa: RUF012
    inputs = ("value",)
    totals = ValueState(value={"rows": pa.int64(), "sum": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        """Count and add."""
        old = state.totals.get(rows.keys)
        sums = {"rows": rows.count(initial=old["rows"]), "sum": rows.sum(self.inputs[0], initial=old["sum"])}
        state.totals.put(rows.keys, sums)
