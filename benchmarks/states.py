"""State to measure: an operator that keeps the last values per key, and chains of any length.

Chains are made by the production code, without Spark (`tests.region_run`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.model import Form
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.run.region import Completed
from siltstone.stream import Stream
from tests.region_run import RegionRun

OPERATOR, TABLE = "balances", "balance"
SUBTASKS = 2
MAX_PARALLELISM = 128
_VALUES = ("rows", "total", "least", "most")
_AMOUNT = 1_000_000
_SHARE_OF_ROOM = 0.97
"""fraction of the room within the bounds to use, because a policy's forecast of the next delta may be wrong"""


class Balances(Operator):
    """Keeps four numbers per key, replaced by each row; the same shape as the step benchmark's aggregates."""

    name = OPERATOR
    key = {"key": pa.int64()}  # noqa: RUF012
    balance = ValueState(value=dict.fromkeys(_VALUES, pa.int64()))

    def process(self, rows: Rows, state: State) -> None:
        first = np.zeros(len(rows.keys), np.int64)
        first[rows.key_index] = np.arange(len(rows))
        state.balance.put(rows.keys, rows.table.select(_VALUES).take(pa.array(first)))


def stream(name: str = "bench") -> Stream:
    """Make a stream of that operator."""
    no_source = lambda spark, options: spark.sql("")  # noqa: E731
    return Stream(name, source=no_source, operators=[Balances()], max_parallelism=MAX_PARALLELISM)


def rows_for(keys: np.ndarray, draw: np.random.Generator) -> pa.Table:
    """Make rows with random values for these keys."""
    amounts = np.sort(draw.integers(-_AMOUNT, _AMOUNT, (3, len(keys))), axis=0)
    values = (draw.integers(1, 20, len(keys)), amounts.sum(axis=0), amounts[0], amounts[2])
    return pa.table({"key": keys, **dict(zip(_VALUES, values, strict=True))})


def always_deltas(most: int = 1_000_000) -> PolicyOptions:
    """Make options with one base, then deltas without another bound."""
    return PolicyOptions(d0=most, d_max=most, size_ratio_max=None, space_amplification_max=None)


class Chain:
    """A stream of `rows` keys that is loaded and then changed; each step is a checkpoint."""

    def __init__(self, warehouse: OpenWarehouse, rows: int, options: PolicyOptions, seed: int = 1) -> None:
        self.warehouse, self.rows = warehouse, rows
        self._draw = np.random.default_rng(seed)
        self._run = RegionRun(warehouse, stream(), policy_by_name("adjust-d", options), SUBTASKS)
        self.base = self._step(self._draw.permutation(rows))

    def change(self, rows: int) -> Completed:
        """Make a checkpoint in which `rows` distinct random keys change."""
        return self._step(self._draw.choice(self.rows, rows, replace=False))

    def _step(self, keys: np.ndarray) -> Completed:
        completed = self._run.step(rows_for(keys, self._draw))
        assert completed is not None, "each step ends in a checkpoint"
        return completed

    def lengthen(self, options: PolicyOptions) -> tuple[int, float]:
        """Make deltas of one size until the bounds allow no more; return the newest checkpoint, and deltas over base.

        Raises:
            AssertionError: the policy took a base before that.
        """
        assert options.size_ratio_max is not None
        few, many = max(1, self.rows // 1000), self.rows // 50
        deltas = [self.change(few), self.change(many)]
        a_row = (deltas[1].bytes - deltas[0].bytes) / (many - few)
        beside = deltas[0].bytes - few * a_row
        left = options.d_max - len(deltas)
        room = _SHARE_OF_ROOM * options.size_ratio_max * self.base.bytes - sum(delta.bytes for delta in deltas)
        changed = max(1, min(self.rows, int((room / left - beside) / a_row)))
        deltas += [self.change(changed) for _ in range(left)]
        assert all(delta.forms[OPERATOR] is Form.DELTA for delta in deltas), "the chain is longer than the bounds allow"
        return deltas[-1].id, sum(delta.bytes for delta in deltas) / self.base.bytes


@contextmanager
def new_chain(url: str, rows: int, options: PolicyOptions) -> Iterator[Chain]:
    """Make a new warehouse with a loaded stream."""
    with OpenWarehouse.open_writable(url) as warehouse:
        yield Chain(warehouse, rows, options)
