"""Attempts at tasks on hosts that share the store and nothing else, some of which are done and never heard of.

A lost attempt leaves working state of a version that counts, or of the same number and other rows, as code leaves it
that is not deterministic: whichever it is, only the attempt whose acknowledgement arrived may be gone on from.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

import pyarrow as pa

from siltstone.errors import StateError
from siltstone.run.roll_forward import is_logged
from siltstone.run.task import StepTask
from siltstone.store.open import Warehouse
from tests.region_run import run_tasks


class LostAttempts:
    """Which host does which task, and what was done in vain before.

    Args:
        hosts: the warehouse as each knows it.
        lost: the share of attempts whose acknowledgements are lost.

    Attributes:
        attempts: how many were.
    """

    def __init__(self, hosts: Sequence[Warehouse], lost: float, seed: int) -> None:
        self._warehouses = hosts
        self._lost, self._chance = lost, Random(seed)
        self.attempts = 0
        self._at: dict[str, Warehouse] = {}

    def before(self, task: StepTask, rows: Mapping[int, pa.Table]) -> StepTask:
        """Do attempts that are lost; the task as it is to be done then."""
        chance = self._chance
        while chance.random() < self._lost:
            self.attempts += 1
            kept = {s: pa.array([chance.random() < 0.8 for _ in range(len(t))], pa.bool_()) for s, t in rows.items()}
            some = {s: t.filter(kept[s]) for s, t in rows.items()}
            there = replace(task, warehouse=chance.choice(self._warehouses))
            with suppress(StateError):  # of steps that were not logged, another host has nothing to go on from
                run_tasks(there, some if chance.random() < 0.5 else rows, f"lost{self.attempts}")
        # Without placement each step may be on another host, which rolls forward, or has lost everything and restores.
        name = task.operator.name
        if name not in self._at or is_logged(task, task.restore.step):
            self._at[name] = chance.choice(self._warehouses)
            if chance.random() < 0.2:
                state = self._at[name].local.state(task.stream, task.epoch, name, 0).parent
                shutil.rmtree(state, ignore_errors=True)
        return replace(task, warehouse=self._at[name])
