"""Hostile moments for checkpoints that are pending: no row is lost or doubled, whatever meets whatever."""

from typing import Any

import pytest

from siltstone.catalog.commits import Commits, Committed
from siltstone.catalog.warehouse import OpenWarehouse
from tests.outbox_run import Heard, Outboxed, batch, inputs, outstanding


class Behind(Outboxed):
    """A run that delivers when it is told to, as the threads behind a stream do."""

    def __init__(self, place: OpenWarehouse, heard: Heard, *, max_pending: int = 2, **options: Any) -> None:
        super().__init__(place, heard, max_pending=max_pending, **options)

    def deliver(self, *, checked: bool = False) -> None:
        """What is outstanding, as the runner has it done."""
        self.region.deliver(self.sinks, checked=checked)


def test_an_output_that_is_delivered_while_its_commit_returns_is_not_taken_for_outstanding(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest of the next checkpoint would say so, and a rebuilt catalog deliver it again."""
    run, add = Behind(place, heard), Commits.add

    def add_and_deliver(*args: Any) -> Committed:
        committed = add(*args)
        run.deliver(checked=True)
        return committed

    monkeypatch.setattr(Commits, "add", add_and_deliver)
    run.step(batch(1))
    run.step(batch(2))
    run.complete_pending()
    assert heard.ids == [1, 2] and heard.inputs == inputs([1, 2])
    assert outstanding(place) == run.region.outbox.outstanding == []
