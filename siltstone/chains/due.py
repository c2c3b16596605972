"""Read from the catalog whether each operator's chain is due to be materialized, and whether materialization keeps up.

Each checkpoint's record holds the sizes of its chains, so the newest record is enough, however long the chain. Only
right after a materialization, until the stream notices it, the few checkpoints since are added up.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.records.materializations import MaterializationRecord
from siltstone.catalog.repository import Catalog
from siltstone.chains import chain_rules as chain
from siltstone.chains.costs import first_of, recorded_chains, recorded_cost
from siltstone.chains.materialization_rules import (
    ChainFacts,
    Health,
    MaterializationOptions,
    Trigger,
    decide_trigger,
    health,
)
from siltstone.chains.policy_rules import CheckpointCost, PolicyOptions, PolicyState
from siltstone.model import Form
from siltstone.store.paths import is_materialization_manifest, materialization_of, materialized_variable


@dataclass(frozen=True, slots=True)
class OperatorHealth:
    """The health of one operator's materialization at a time; `trigger` is set if it is due."""

    facts: ChainFacts
    health: Health
    trigger: Trigger | None
    at: datetime

    @property
    def seconds_since(self) -> float:
        """Seconds since the newest success, or since the chain's base if that is later or there was no success."""
        return (self.at - max(self.facts.since, self.facts.succeeded_at or self.facts.since)).total_seconds()

    @property
    def fine(self) -> bool:
        """Whether materialization keeps up."""
        return self.health is Health.FINE

    @property
    def reason(self) -> str:
        """One line for people: which operator's materialization fails, and how."""
        facts = self.facts
        line = f"{facts.operator} is {self.health.value}: {facts.deltas} deltas, "
        line += f"no success for {self.seconds_since:.0f} s, {facts.failures} failures in a row"
        return f"{line}, the last: {facts.error}" if facts.error else line

    def to_dict(self) -> dict[str, Any]:
        """Return the health as JSON values."""
        facts = self.facts
        return {
            "state": self.health.value,
            "reason": None if self.fine else self.reason,
            "failures": facts.failures,
            "error": facts.error,
            "last_success": facts.succeeded_at.isoformat(timespec="seconds") if facts.succeeded_at else None,
            "seconds_since": round(self.seconds_since, 3),
            "trigger": self.trigger.reason if self.trigger else None,
            "deltas": facts.deltas,
            "chain_bytes": facts.chain_bytes,
            "amplification": None if facts.amplification is None else round(facts.amplification, 4),
            "restore_seconds": round(facts.restore_s, 6),
        }


def chain_facts(catalog: Catalog, stream: str) -> list[ChainFacts]:
    """Return the facts of every operator at the newest checkpoint, in the order of its definition; none before the
    first.

    Raises:
        UnknownStream: the stream has not run here.
    """
    newest = next(iter(catalog.checkpoints.list(stream, 1)), None)
    if newest is None:
        return []
    bases = _bases(catalog, newest)
    succeeded = catalog.materializations.get_last_completed(stream)
    found = []
    for operator in newest.forms:
        own = bases.get(operator, [])
        chains = _add_unnoticed(catalog, newest, operator, own)
        # A chain without deltas is not to be materialized, however old its base is.
        first = first_of([of for of in chains if of[1].deltas] or chains, newest.id)
        states, base = [state for _, state in chains], own[-1] if own else None
        state = chain.add_chains(states)
        began = _began_at(catalog, stream, first, own)
        failures, last = catalog.materializations.count_failed(stream, operator, began)
        found.append(
            ChainFacts(
                operator=operator,
                checkpoint=newest.id,
                deltas=state.deltas,
                deltas_bytes=round(state.deltas_bytes + state.index_bytes),
                chain_bytes=round(chain.stored_bytes(state)),
                amplification=chain.amplification(states),
                delta_amplification=_delta_amplification(states),
                restore_s=sum(map(chain.restore_s, states)),
                base_restore_s=sum(of.base_factor * chain.next_base(of)[1] for of in states),
                base=base.manifest.name if base and base.manifest else None,
                since=began,
                newest_at=newest.committed_at,
                succeeded_at=succeeded.get(operator),
                failures=failures,
                failed_at=last.ended_at if last else None,
                error=last.error if last else None,
            )
        )
    return found


def find_beginnings(catalog: Catalog, record: CheckpointRecord) -> dict[str, int]:
    """Return operator -> the checkpoint that its chain at a checkpoint begins with, after materializations."""
    bases = _bases(catalog, record)
    return {
        operator: max(
            first_of(recorded_chains(record, operator).values(), record.id),
            bases[operator][-1].checkpoint if operator in bases else 0,
        )
        for operator in record.forms
    }


def _bases(catalog: Catalog, record: CheckpointRecord) -> dict[str, list[MaterializationRecord]]:
    """Return operator -> the materializations that its chain at a checkpoint begins with, the newest last."""
    found: dict[str, list[MaterializationRecord]] = {}
    for materialization in catalog.materializations.list_in_chain(record.stream, record.id):
        found.setdefault(materialization.operator, []).append(materialization)
    return found


def _add_unnoticed(
    catalog: Catalog, newest: CheckpointRecord, operator: str, bases: Sequence[MaterializationRecord]
) -> list[tuple[int, PolicyState]]:
    """Return the chains of an operator's tables, including materializations that completed after the stream recorded
    its chains."""
    chains = recorded_chains(newest, operator)
    for base in bases:
        late = [table for table, (first, _) in chains.items() if first < base.checkpoint]
        sizes = _table_bytes(catalog, base) if late else {}
        held = [table for table in late if table in sizes]
        if not held:
            continue
        rows = sum(chains[table][1].rows for table in held)
        since = catalog.checkpoints.list_after(newest.stream, base.checkpoint, newest.id - base.checkpoint, marked=True)
        for table in held:
            state = chains[table][1]
            share = round((base.rows or 0) * state.rows / rows) if rows else 0
            made = CheckpointCost(form=Form.BASE, bytes=sizes[table], seconds=0.0, rows=share)
            deltas = [cost for each in since if (cost := recorded_cost(each, operator, table)).bytes]
            chains[table] = base.checkpoint, chain.rebase(state, made, deltas)
    return list(chains.values())


def _table_bytes(catalog: Catalog, materialization: MaterializationRecord) -> dict[str, int]:
    """Return table -> bytes of its bases that a materialization made."""
    sizes: dict[str, int] = {}
    for stored in catalog.objects.list(materialization.stream, [materialization.checkpoint]):
        if materialization_of(stored.name) == materialization.id and not is_materialization_manifest(stored.name):
            table = materialized_variable(stored.name)
            sizes[table] = sizes.get(table, 0) + stored.bytes
    return sizes


def _delta_amplification(states: Collection[PolicyState]) -> float:
    live = sum(chain.next_base(state)[0] for state in states)
    deltas = sum((state.deltas_bytes + state.index_bytes) / state.deltas for state in states if state.deltas)
    return deltas / live if live else 0.0


def _began_at(catalog: Catalog, stream: str, first: int, bases: Sequence[MaterializationRecord]) -> datetime:
    """Return when the base at `first` was made, by a materialization or by the run; of a checkpoint that is gone, when
    the next one was."""
    for base in bases:
        if base.checkpoint == first and base.ended_at:
            return base.ended_at
    return catalog.checkpoints.list_after(stream, first - 1, 1, marked=True)[0].committed_at


def materialization_health(
    catalog: Catalog, stream: str, options: MaterializationOptions, policy_options: PolicyOptions
) -> Mapping[str, OperatorHealth]:
    """Return the health of every operator's materialization, by the catalog's clock.

    Raises:
        UnknownStream: the stream has not run here.
    """
    now, running = catalog.now(), catalog.runs.is_open(stream)
    return {
        facts.operator: OperatorHealth(
            facts, health(facts, now, options, running), decide_trigger(facts, now, options, policy_options), now
        )
        for facts in chain_facts(catalog, stream)
    }
