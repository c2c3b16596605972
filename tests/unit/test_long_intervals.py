"""Long intervals: what is lost inside one comes back within the budget, and chains are consolidated inside one.

Seconds are made of bytes here, so that the budget is one of bytes whatever the machine does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.due import chain_facts
from siltstone.chains.materialization_rules import MaterializationOptions
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import Policy, PolicyOptions, policy_by_name
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import CorruptObject, Unreachable
from siltstone.model import Form
from siltstone.operator import Operator
from siltstone.retention.sweep import sweep
from siltstone.run.task import StepTask
from siltstone.settings import RecoveryOptions
from siltstone.spark.resets import Resets
from siltstone.spark.stopping import StopRequest
from siltstone.store.paths import LocalLayout
from tests.proofs import check_restores, failures, in_order
from tests.region_run import RegionRun
from tests.sums import NAME, Counted, Sums, stream_of

KEYS, CHANGED, STEPS = 4000, 100, 50
PACE = 1e-6
"""seconds of writing a byte, and of reading one"""
BUDGET_S = 0.036
"""half more than what a base takes"""


def rows(n: int) -> pa.Table:
    """All keys first, then a few."""
    chosen = np.arange(KEYS) if n == 1 else (np.arange(CHANGED) + 7 * n) % KEYS
    return pa.table({"k": chosen, "n": np.random.default_rng(n).integers(0, 2**30, len(chosen))})


def policy(budget_s: float | None) -> Policy:
    return policy_by_name(
        "marginal-cost",
        PolicyOptions(restore_budget_s=budget_s, size_ratio_max=None, space_amplification_max=None, restore_weight=0),
    )


class Run(RegionRun):
    """A run whose interval only ends by itself."""

    def __init__(
        self,
        place: OpenWarehouse,
        operator: Operator,
        budget_s: float | None,
        chosen: Policy | None = None,
        **given: Any,
    ) -> None:
        super().__init__(place, stream_of(operator), chosen or policy(budget_s), checkpoint_steps=10**9, **given)
        self.place, self.host = place, "one"
        self.written = 0
        """bytes of the newest step's changes"""
        self.read = False
        """whether the newest step had to restore"""

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        local = LocalLayout(task.warehouse.local.root / "hosts" / self.host)
        done, received = super().attempt(replace(task, warehouse=replace(task.warehouse, local=local)), rows)
        self.read = any("restore" in a.seconds for a in received)
        timed = []
        for a in received:
            size = sum(stored.bytes for stored in a.objects) + sum(map(len, a.inline))
            timed.append(replace(a, seconds={"persist": size * PACE}))
            self.written = size
        return done, timed

    def prime(self) -> None:
        """A base, and a delta by which its pace is known."""
        self.step(rows(1), ends=True)
        self.step(rows(2), ends=True)


def inside_an_interval(place: OpenWarehouse) -> Run:
    """A run after four checkpoints and a step that is in none."""
    run = Run(place, Sums(), None)
    for n in range(1, 5):
        run.step(rows(n), ends=True)
    run.step(rows(5))
    return run


def background(place: OpenWarehouse, run: Run, budget_s: float | None) -> Background:
    options = BackgroundOptions(MaterializationOptions(interval_s=0), PolicyOptions(restore_budget_s=budget_s))
    hooks = {"postponed": run.region.chains.find_postponed, "made": run.region.manifests.add}
    return Background(place, NAME, run.region.epoch, options, in_order, **hooks)


def materialize_now(place: OpenWarehouse, run: Run, id: str, *, known: bool = True) -> None:
    """At the newest checkpoint: by the run's own background, or by another process, of which it does not know."""
    told = {"completed": run.region.manifests.add} if known else {}
    materialize(place, NAME, NAME, run.region.completed, id=id, parallelism=1, run=in_order, **told)


def checkpoints_with_bases(place: OpenWarehouse) -> list[int]:
    return [c.id for c in place.catalog.checkpoints.list(NAME) if Form.BASE in c.forms.values()]


@pytest.mark.parametrize(
    ("operator", "max_pending", "backend"),
    [(Sums(), 0, "heap"), (Counted(), 0, "rocksdb"), (Counted(), 2, "heap"), (Sums(), 2, "rocksdb")],
)
def test_what_is_lost_comes_back_within_the_budget_and_no_step_writes_a_base(
    place: OpenWarehouse, operator: Operator, max_pending: int, backend: str
) -> None:
    run = Run(place, operator, BUDGET_S, max_pending=max_pending, backend=backend)
    run.prime()
    run.complete_pending()
    worker = background(place, run, BUDGET_S)
    logged, most, ended = 0, 0.0, []
    for n in range(3, STEPS):
        before = run.region.checkpoint
        run.step(rows(n))
        run.complete_pending()
        logged += run.written
        if run.region.checkpoint > before:
            ended.append(n)
            logged = 0
            assert worker.look()
        [facts] = chain_facts(place.catalog, NAME)
        most = max(most, 1.2 * PACE * (facts.chain_bytes + logged))
    assert 0.8 * BUDGET_S < most <= BUDGET_S
    made = [m.checkpoint for m in place.catalog.materializations.list(NAME)]
    assert len(ended) >= 2 and all(checkpoint > 2 for checkpoint in made) and len(made) >= len(ended) - 1
    assert checkpoints_with_bases(place) == [1]
    run.host = "two"
    run.step(rows(STEPS), ends=True)
    run.complete_pending()
    assert run.read
    check_restores(place, NAME, (3,))


def test_without_a_budget_or_with_one_that_no_base_keeps_it_lasts_as_long_as_asked(place: OpenWarehouse) -> None:
    for budget_s in (None, 0.01):
        run = Run(place, Sums(), budget_s)
        run.prime()
        completed = run.region.completed
        for n in range(3, STEPS // 2):
            run.step(rows(n))
        assert run.region.completed == completed and run.region.has_steps


def test_what_is_logged_from_the_beginning_of_an_interval_is_logged_to_its_end(place: OpenWarehouse) -> None:
    """Though a materialization inside it makes deltas pay no longer."""

    def some(first: int, last: int, seed: int) -> pa.Table:
        values = np.random.default_rng(seed).integers(0, 2**30, last - first)
        return pa.table({"k": np.arange(first, last), "n": values})

    options = PolicyOptions(d0=1, restore_budget_s=0.055, size_ratio_max=None, space_amplification_max=None)
    run = Run(place, Sums(), None, policy_by_name("adjust-d", options))
    run.step(some(0, 4000, 1), ends=True)
    run.step(some(4000, 7000, 2), ends=True)
    run.step(some(0, 5, 3), ends=False)
    materialize_now(place, run, "m")
    for seed in (4, 5):
        run.step(some(0, 5, seed), ends=False)
    assert not any(decision.tracking for decision in run.region.chains.decisions[NAME].values())
    run.host = "two"
    run.step(some(0, 5, 6), ends=False)
    assert run.read
    run.step(some(0, 5, 7), ends=True)
    assert not failures(place, NAME)


def test_a_step_inside_an_interval_does_not_need_the_catalog(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes over later what was materialized meanwhile."""
    run = inside_an_interval(place)
    materialize_now(place, run, "m")
    before = run.region.chains.manifests

    def away(*_: object) -> None:
        raise Unreachable("the catalog is away: the test says so")

    with monkeypatch.context() as patch:
        patch.setattr(type(place.catalog.chains), "list_manifests", away)
        run.step(rows(6))
    assert run.region.chains.manifests == before
    run.step(rows(7))
    assert run.region.chains.manifests != before
    run.host = "two"
    run.step(rows(8), ends=True)
    assert run.read and not failures(place, NAME)


def test_bases_that_another_process_replaces_and_deletes_inside_an_interval_are_found_missing(
    place: OpenWarehouse,
) -> None:
    """The run can tell that from damage, and the next one begins with the new bases."""
    run = inside_an_interval(place)
    materialize_now(place, run, "m1")
    run.step(rows(6))
    assert run.region.chains.is_current()
    materialize_now(place, run, "m2", known=False)
    sweep(place, NAME)
    run.host = "two"
    with pytest.raises(CorruptObject, match="missing"):
        run.step(rows(7))
    assert not run.region.chains.is_current()
    again = Run(place, Sums(), None)
    again.host = "two"
    again.step(rows(5), ends=True)
    assert again.read and not failures(place, NAME)


def test_a_failure_for_that_reason_resets_the_run() -> None:
    resets = Resets(NAME, RecoveryOptions(), StopRequest())
    damage = CorruptObject("a base is missing")
    assert resets.may_reset(Unreachable("it was replaced"), damage) and not resets.may_reset(damage, damage)
