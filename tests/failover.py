"""A database that fails over to a standby without its newest transactions, or is restored from a backup."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.retention.sweep import SweepOptions, sweep
from tests.outbox_run import NAME, Heard, Outboxed, batch, inputs
from tests.proofs import failures

AT_ONCE = SweepOptions(age_guard=timedelta(0))


class Standby:
    """What a standby has of a SQLite catalog; `promote` lets that be the catalog, for those who have it open, too."""

    def __init__(self, place: OpenWarehouse) -> None:
        self._path = place.catalog.url.removeprefix("sqlite:///")
        self._copy = sqlite3.connect(":memory:")
        self.replicate()

    def replicate(self) -> None:
        """Have all that the catalog has now."""
        with closing(sqlite3.connect(self._path)) as live:
            live.backup(self._copy)

    def promote(self) -> None:
        """Let the catalog lose what was not replicated."""
        with closing(sqlite3.connect(self._path)) as live:
            self._copy.backup(live)

    def close(self) -> None:
        """Forget it."""
        self._copy.close()


@contextmanager
def losing_what_follows(place: OpenWarehouse) -> Iterator[None]:
    """Lose all that the catalog records in the block, at its end."""
    with closing(Standby(place)) as standby:
        yield
        standby.promote()


def go_on(place: OpenWarehouse, heard: Heard, newest: int) -> None:
    """The next run goes on after `newest`, and each input row has arrived once."""
    run = Outboxed(place, heard)
    assert (run.region.completed, run.batches) == (newest, newest)
    run.step(batch(newest + 1))
    run.region.close("done")
    assert heard.inputs == inputs(range(1, newest + 2)) and sorted(set(heard.ids)) == [*range(1, newest + 2)]
    assert not failures(place, NAME)
    sweep(place, NAME, AT_ONCE)
    assert not failures(place, NAME)
