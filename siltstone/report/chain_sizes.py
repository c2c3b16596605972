"""Tell from the catalog's records alone what a restore of each checkpoint reads of an operator.

Each table has a chain of its own, and the record of a checkpoint has its sizes. Two things are not in a record, and are
followed from one to the next: the chains of opaque values, and materializations that completed after it was made.

Where only some subtasks wrote a base of a table, or of an opaque variable, its size is an estimate. For a table that is
at least what a restore reads (`CheckpointCost`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from siltstone.catalog.checkpoints import CheckpointRecord
from siltstone.chains.chain_rules import next_base
from siltstone.chains.costs import recorded_chains
from siltstone.chains.policy_rules import PolicyState
from siltstone.model import Form


@dataclass(frozen=True, slots=True)
class ChainSize:
    """What a restore reads of one operator.

    Attributes:
        first: the checkpoint that its longest chain begins with.
        base_bytes: bytes of the bases that its chains begin with.
        delta_bytes: bytes of the deltas after these.
        deltas: the number of deltas of the longest chain.
    """

    first: int
    base_bytes: int
    delta_bytes: int
    deltas: int


@dataclass(frozen=True, slots=True)
class _OpaqueChain:
    """The checkpoint that wrote all values of an opaque variable, their bytes, and those of values written since."""

    first: int
    whole: float
    changed: float


@dataclass(slots=True)
class _Materialized:
    """Bases that a materialization wrote, as long as the records of some tables do not know them."""

    checkpoint: int
    bases: Mapping[str, float]
    """table -> the size of its base"""
    deltas: dict[str, list[int]]
    """table -> the sizes of the deltas since"""

    def add_deltas(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on to a checkpoint that wrote these (`costs.table_statistics`)."""
        for table, of in tables.items():
            if written := int(of.get("bytes", 0)):
                self.deltas.setdefault(table, []).append(written)


class ChainSizes:
    """Follows one operator from checkpoint to checkpoint, oldest first."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._before = ChainSize(0, 0, 0, 0)
        self._opaque: dict[str, _OpaqueChain] = {}
        self._materialized: _Materialized | None = None

    def follow(self, record: CheckpointRecord, materialized_bytes: int | None) -> ChainSize:
        """Go on to the next checkpoint, given the bytes of its materialization's bases if it has one."""
        said: Mapping[str, Any] = record.statistics.get("operators", {}).get(self._operator, {})
        if "tables" in said:
            self._before = self._by_table(record, said, materialized_bytes)
        else:
            self._before = self._by_form(record, int(said.get("bytes", 0)), materialized_bytes)
        return self._before

    def _by_form(self, record: CheckpointRecord, size: int, materialized_bytes: int | None) -> ChainSize:
        """Return the size by a record from before tables had chains of their own: it tells the operator's form."""
        before = self._before
        if materialized_bytes is not None:
            return ChainSize(record.id, materialized_bytes, 0, 0)
        if record.forms[self._operator] is not Form.DELTA:
            return ChainSize(record.id, size, 0, 0)
        first = before.first or record.id
        return ChainSize(first, before.base_bytes, before.delta_bytes + size, before.deltas + 1)

    def _by_table(self, record: CheckpointRecord, said: Mapping[str, Any], materialized_bytes: int | None) -> ChainSize:
        chains = recorded_chains(record, self._operator)
        self._follow_opaque(record.id, said.get("opaque", {}))
        if materialized_bytes is not None:
            states = {table: state for table, (_, state) in chains.items()}
            self._materialized = self._materialize(record.id, materialized_bytes, states)
        elif self._materialized:
            self._materialized.add_deltas(said["tables"])
        first, base, delta, deltas = record.id, 0.0, 0.0, 0
        for table, (recorded, state) in chains.items():
            late = self._materialized
            if late and (recorded < late.checkpoint or record.id == late.checkpoint):
                since = late.deltas.get(table, [])
                begins, own, changed, count = late.checkpoint, late.bases.get(table, 0.0), sum(since), len(since)
            else:
                begins, own, changed, count = recorded, state.base_bytes, state.deltas_bytes, state.deltas
            first, base, delta, deltas = min(first, begins), base + own, delta + changed, max(deltas, count)
        for opaque in self._opaque.values():
            first, base, delta = min(first, opaque.first), base + opaque.whole, delta + opaque.changed
        return ChainSize(first, round(base), round(delta), deltas)

    def _follow_opaque(self, checkpoint: int, said: Mapping[str, Sequence[float]]) -> None:
        """Go on to what a checkpoint wrote of opaque variables (`costs.opaque_statistics`)."""
        before, self._opaque = self._opaque, {}
        for variable, (written, anew) in said.items():
            old = before.get(variable, _OpaqueChain(checkpoint, 0.0, 0.0))
            self._opaque[variable] = _OpaqueChain(
                first=checkpoint if anew == 1 else old.first,
                whole=old.whole * (1 - anew) + (written if anew else 0),
                changed=old.changed * (1 - anew) + (0 if anew else written),
            )

    def _materialize(self, checkpoint: int, size: int, states: Mapping[str, PolicyState]) -> _Materialized:
        """Divide the bytes of a materialization's bases among the variables whose chains begin with them."""
        chained = {name: replace(of, first=checkpoint, changed=0.0) for name, of in self._opaque.items() if of.changed}
        self._opaque |= chained
        tables_bytes = max(0.0, size - sum(of.whole for of in chained.values()))
        live = {table: next_base(state)[0] for table, state in states.items()}
        total = sum(live.values())
        shares = {table: of / total if total else 1 / len(live) for table, of in live.items()}
        return _Materialized(checkpoint, {table: tables_bytes * share for table, share in shares.items()}, {})
