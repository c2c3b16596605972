"""Attempts at tasks on hosts that share the store and nothing else, some of which are done and never heard of.

A lost attempt leaves working state of a version that counts, or of the same number and other rows, as code leaves it
that is not deterministic: whichever it is, only the attempt whose acknowledgement arrived may be gone on from.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

import pyarrow as pa

from siltstone.errors import StateError
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
        self._interval: tuple[int, int] | None = None
        self._at = hosts[0]

    def before(self, task: StepTask, rows: Mapping[int, pa.Table]) -> StepTask:
        """Do attempts that are lost; the task as it is to be done then."""
        chance = self._chance
        while chance.random() < self._lost:
            self.attempts += 1
            some = {s: t.filter(pa.array([chance.random() < 0.8 for _ in range(len(t))])) for s, t in rows.items()}
            there = replace(task, warehouse=chance.choice(self._warehouses))
            # Within a checkpoint, another host than the one that did the steps before has nothing to go on from.
            with suppress(StateError):
                run_tasks(there, some if chance.random() < 0.5 else rows, f"lost{self.attempts}")
        # Placement: all steps of a checkpoint are done by one host; the next checkpoint may be by another.
        interval = (task.epoch, task.restore.step)
        if interval != self._interval:
            self._interval, self._at = interval, chance.choice(self._warehouses)
        return replace(task, warehouse=self._at)
