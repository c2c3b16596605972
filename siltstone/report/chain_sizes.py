"""Tell from the catalog's records alone what a restore of each checkpoint reads of an operator.

Each variable has a chain of its own, called a table's here. Records say what each checkpoint wrote of it, and how long
the chain is, as the run knew it; they are followed from one to the next. A materialization counts from its checkpoint
on, also for checkpoints that were made before the run knew of it.

The result is exact where all subtasks wrote the same form of a variable. Where only some wrote a base, it takes all key
groups to be of the same size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.chains.chain_rules import next_base
from siltstone.chains.costs import recorded_chains
from siltstone.chains.policy_rules import PolicyState
from siltstone.model import Form


@dataclass(frozen=True, slots=True)
class ChainSize:
    """What a restore reads of one operator, or of one of its variables.

    Attributes:
        first: the checkpoint that the chain begins with; of an operator, its longest chain.
        base_bytes: bytes of the bases that the chain begins with.
        delta_bytes: bytes of the deltas after these.
        deltas: the number of deltas; of an operator, those of the longest chain.
    """

    first: int
    base_bytes: float = 0
    delta_bytes: float = 0
    deltas: int = 0

    def extend(self, checkpoint: int, base_bytes: float, delta_bytes: float, anew: float) -> "ChainSize":
        """Return the chain after a checkpoint.

        Args:
            base_bytes: bytes that it wrote in bases.
            delta_bytes: bytes that it wrote in deltas.
            anew: the part of the key groups of which it wrote bases.
        """
        if anew >= 1:
            return ChainSize(checkpoint, base_bytes)
        return ChainSize(
            first=self.first,
            base_bytes=self.base_bytes * (1 - anew) + base_bytes,
            delta_bytes=self.delta_bytes * (1 - anew) + delta_bytes,
            deltas=self.deltas + (1 if base_bytes or delta_bytes else 0),
        )


class ChainSizes:
    """Follows one operator from checkpoint to checkpoint, oldest first."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._tables: dict[str, ChainSize] = {}
        self._recorded: dict[str, int] = {}
        """table -> the checkpoint that its chain began with, in the newest record"""

    def follow(self, record: CheckpointRecord, materialized_bytes: int | None) -> ChainSize:
        """Go on to the next checkpoint, given the bytes of its materialization's bases if it has one."""
        said: Mapping[str, Any] = record.statistics.get("operators", {}).get(self._operator, {})
        chains = recorded_chains(record, self._operator)
        self._tables = {
            table: self._table(record.id, table, first, state, said["tables"][table])
            for table, (first, state) in chains.items()
        }
        self._recorded = {table: first for table, (first, _) in chains.items()}
        if materialized_bytes is not None:
            self._materialize(record.id, materialized_bytes, {table: state for table, (_, state) in chains.items()})
        every = self._tables.values()
        return ChainSize(
            first=min((of.first for of in every), default=record.id),
            base_bytes=round(sum(of.base_bytes for of in every)),
            delta_bytes=round(sum(of.delta_bytes for of in every)),
            deltas=max((of.deltas for of in every), default=0),
        )

    def _table(self, checkpoint: int, table: str, first: int, state: PolicyState, said: Mapping[str, Any]) -> ChainSize:
        """Return a table's chain after a checkpoint, given what its record says (`costs.table_statistics`)."""
        before, size = self._tables.get(table), said.get("bytes", 0)
        # Where it begins later than it did, and not here, the run has noticed a materialization.
        if before is None or checkpoint > first != self._recorded.get(table):
            return ChainSize(first, state.base_bytes, state.deltas_bytes, state.deltas)
        base_bytes, anew = said.get("whole", (size, 1) if said.get("form") == Form.BASE.value else (0, 0))
        return before.extend(checkpoint, base_bytes, size - base_bytes, anew)

    def _materialize(self, checkpoint: int, size: int, states: Mapping[str, PolicyState]) -> None:
        """Let chains begin with the bases of a materialization, whose bytes are divided by the sizes of the tables.

        It leaves out what no checkpoint has changed since it was written all at once, but for tables of this one.
        """
        whole = {table for table, of in self._tables.items() if not of.delta_bytes}
        own = {table for table in whole if self._tables[table].first == checkpoint and states[table].base_rows}
        live = {table: next_base(state)[0] for table, state in states.items() if table not in whole - own}
        total = sum(live.values())
        self._tables |= {
            table: ChainSize(checkpoint, size * (of / total if total else 1 / len(live))) for table, of in live.items()
        }
