"""A small stream: sums by key, whose deltas are much smaller than its bases."""

import numpy as np
import pyarrow as pa

from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.operator import OpaqueState, Operator, Rows, State, ValueState
from siltstone.stream import Stream

NAME = "sums"
POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=3, size_ratio_max=None))


class Sums(Operator):
    """Adds up `n` by key."""

    name = NAME
    key = {"k": pa.int64()}  # noqa: RUF012
    totals = ValueState(value={"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        old = state.totals.get(rows.keys)["n"].fill_null(0).to_numpy()
        new = np.bincount(rows.key_index, weights=rows.table.column("n").to_numpy(), minlength=len(rows.keys))
        state.totals.put(rows.keys, {"n": old + new.astype(np.int64)})


class Tally(OpaqueState[int]):
    """A number per key group."""


class Counted(Sums):
    """Counts calls by key group, too."""

    calls = Tally(create=int, serialize=lambda n: n.to_bytes(8, "big"), deserialize=int.from_bytes)

    def process(self, rows: Rows, state: State) -> None:
        """Add, and count the call."""
        super().process(rows, state)
        for group in np.unique(rows.key_groups).tolist():
            state.calls[group] += 1


def stream_of(*operators: Operator, max_parallelism: int = 4) -> Stream:
    """Stream sums with these operators, all of them over the source, which `RegionRun` does not ask for."""
    return Stream(NAME, lambda spark, _: spark.sql(""), list(operators), max_parallelism=max_parallelism)


STREAM = stream_of(Sums(name="by_key"))


def rows(n: int, *, keys: int = 100, changed: int = 10) -> pa.Table:
    """All keys first, then a few, so that deltas are small."""
    chosen = np.arange(keys) if n == 1 else (np.arange(changed) + 7 * n) % keys
    return pa.table({"k": chosen, "n": np.full(len(chosen), n)})
