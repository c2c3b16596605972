"""Prove several checkpoints of a stream together: each chain is walked once, in tasks that the caller maps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.restore.verify import Failure, ProofPlan, check_indexes, plan_proof, prove

Map: TypeAlias = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""maps a function over independent pieces"""


@dataclass(frozen=True)
class Proof:
    """The result of a proof: why checkpoints are not proven, and the cost of rebuilding each of the others.

    `restore_s` are the seconds of the slowest unit, which a restore takes with one core per unit; `restore_bytes` the
    bytes read.
    """

    failures: dict[int, Failure]
    restore_s: dict[int, float]
    restore_bytes: dict[int, int]


def plan_checkpoints(warehouse: OpenWarehouse, stream: str, wanted: Sequence[int]) -> ProofPlan:
    """Plan the proof of some checkpoints; call it under a lease.

    Raises:
        UnknownCheckpoint: one of them does not exist, or no longer.
    """
    chains = {c: warehouse.catalog.chains.list_manifests(stream, c) for c in wanted}
    return plan_proof(warehouse.warehouse.store, chains, stream)


def prove_checkpoints(warehouse: OpenWarehouse, stream: str, wanted: Sequence[int], run: Map) -> Proof:
    """Prove checkpoints; call it under a lease.

    Raises:
        UnknownCheckpoint: one of them does not exist, or no longer.
        Unreachable: the store or the catalog failed, which says nothing about any checkpoint.
    """
    store, plan = warehouse.warehouse.store, plan_checkpoints(warehouse, stream, wanted)
    proofs = run(lambda task: prove(store, task), plan.tasks)
    checked = run(lambda checks: check_indexes(store, checks), plan.indexes)
    failures = [*plan.failures, *(f for proof in proofs for f in proof.failures), *(f for fs in checked for f in fs)]
    asked = set(wanted)
    return Proof(
        failures={f.checkpoint: f for f in reversed(failures) if f.checkpoint in asked},
        restore_s={c: max((p.restore_s.get(c, 0.0) for p in proofs), default=0.0) for c in wanted},
        restore_bytes={c: sum(p.restore_bytes.get(c, 0) for p in proofs) for c in wanted},
    )
