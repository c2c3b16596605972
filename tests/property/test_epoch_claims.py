"""Writer epochs of two copies of a catalog on one store: whatever is frozen when, an epoch is granted only above all
that were marked before it."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import pyarrow as pa
import pytest

from siltstone.catalog import epochs
from siltstone.catalog.database.transactions import Transactions
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Fenced, Unreachable, WrongWarehouse
from siltstone.model import StoredObject
from siltstone.run.definition import definition_of
from siltstone.run.take_over import take_over
from siltstone.store.paths import epoch_mark, epoch_marks
from tests.examples import few_examples
from tests.simulation.processes import Clock, Database, MemoryStore, Process, SimulatedStore, SimulatedTransactions
from tests.simulation.writer import GROUPS, NAME, STREAM

PROCESSES = 6
SCHEDULES = few_examples(100)


class Copies:
    """Two databases that hold the same catalog, and processes that take its stream over by one or the other."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.memory = MemoryStore(self.clock.now)
        self.databases = [Database("world"), Database("draft")]
        first = Catalog(Transactions(self.databases[0].engine, self.clock.now, outage_s=0.0))
        first.streams.register(NAME, GROUPS, definition_of(STREAM, {}))
        self.databases[1].load(self.databases[0].raw.serialize())
        self.marked: list[int] = []
        """every epoch that was marked, in order"""
        self.granted: list[tuple[int, int]] = []
        """(an epoch that a process was given, how many had been marked when its mark was)"""
        self.refused: list[BaseException] = []

    def start(self, which: int) -> Process:
        """A process that takes the stream over by one of the catalogs, at its first stop."""

        def work(process: Process) -> None:
            transactions = SimulatedTransactions(self.databases[which].engine, self.clock.now, process)
            store = Marking(self, process)
            warehouse = SimpleNamespace(store=store, store_url="", label="memory", prepare=lambda: None)
            epoch = take_over(OpenWarehouse(cast(Any, warehouse), Catalog(transactions)), NAME, "a test")
            self.granted.append((epoch, store.marked_at))

        return Process("claim", NAME, work)


class Marking(SimulatedStore):
    """The store as one process sees it; notes when its mark is written."""

    def __init__(self, copies: Copies, process: Process) -> None:
        super().__init__(copies.memory, process)
        self._copies, self.marked_at = copies, 0

    def put(self, name: str, data: bytes | memoryview | pa.Buffer) -> StoredObject:
        stored = super().put(name, data)
        if name.startswith(epoch_marks(NAME)):
            self.marked_at = len(self._copies.marked)
            self._copies.marked.append(int(name.removeprefix(epoch_marks(NAME))))
        return stored


def _perform(seed: int) -> Copies:
    chance, copies, processes = random.Random(seed), Copies(), list[Process]()
    for _ in range(60):
        alive = [each for each in processes if not each.ended]
        if len(processes) < PROCESSES and (not alive or chance.random() < 0.3):
            processes.append(copies.start(chance.randrange(2)))
            alive.append(processes[-1])
        if alive:
            chance.choice(alive).resume(chance.choice([1, 2, 3, 8, 30]))
    for each in processes:
        each.finish()
        if each.error is not None:
            assert isinstance(each.error, Fenced | Unreachable | WrongWarehouse), each.error
            copies.refused.append(each.error)
    return copies


def _check(copies: Copies) -> None:
    for epoch, at in copies.granted:
        before = copies.marked[:at]
        assert not before or max(before) < epoch, f"epoch {epoch} was granted after {max(before)} was marked"
    assert len({epoch for epoch, _ in copies.granted}) == len(copies.granted)
    there = [name for name in copies.memory.objects if name.startswith(epoch_marks(NAME))]
    assert epoch_mark(NAME, max(copies.marked)) in there, "the highest mark was deleted"


@pytest.mark.slow
def test_no_schedule_grants_an_epoch_below_one_that_is_marked() -> None:
    granted = refused = 0
    for seed in range(SCHEDULES):
        copies = _perform(seed)
        _check(copies)
        granted, refused = granted + len(copies.granted), refused + len(copies.refused)
    assert granted > SCHEDULES // 2 and refused > SCHEDULES // 2, (granted, refused)


def test_without_the_looks_after_the_mark_a_schedule_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies A and B: B is frozen before its mark; A marks it, and the next one, and deletes it; B wakes up. It
    looks at the marks once more, and then at whose its extract is."""
    nothing: Callable[..., dict[int, str]] = lambda *_: {}  # noqa: E731
    monkeypatch.setattr(epochs, "_marked_epochs", nothing)
    write = epochs.write_extract

    def of_any_epoch(warehouse: OpenWarehouse, stream: str) -> Any:
        write(warehouse, stream)
        return SimpleNamespace(epoch=ANY)

    monkeypatch.setattr(epochs, "write_extract", of_any_epoch)
    with pytest.raises(AssertionError, match="was granted after"):
        for seed in range(1000):
            _check(_perform(seed))
