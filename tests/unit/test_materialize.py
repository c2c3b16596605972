"""Materialization without Spark: chains begin later, state stays what it was, whoever dies."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.catalog.place import Place
from siltstone.errors import Fenced, UsageError
from siltstone.lifecycle.deletion import delete_checkpoints
from siltstone.lifecycle.materialize import Materialized, materialize
from siltstone.model import Form
from siltstone.policy.adaptive import PolicyOptions, named
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun

NAME = SMALL.name
LONG = named("adjust-d", PolicyOptions(d0=50, size_ratio_max=None))
"""one base, then deltas"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place.writable(str(tmp_path / "w")) as opened:
        yield opened


def consolidate(place: Place, operator: str, checkpoint: int, id: str = "m1", parallelism: int = 3) -> Materialized:
    run = lambda function, tasks: [function(task) for task in tasks]  # noqa: E731
    return materialize(
        place, NAME, operator, checkpoint, id=id, who="a test", parallelism=parallelism, run=run
    )


def digests(place: Place) -> dict[int, str]:
    return {c.id: c.digest for c in place.catalog.checkpoints(NAME)}


def check(place: Place) -> None:
    """Everything proves, and restores at any parallelism."""
    assert not failures(place, NAME)
    for checkpoint, digest in digests(place).items():
        assert restored_digest(place, NAME, checkpoint, random.choice([1, 2, 5])) == digest


def test_chains_begin_with_it_and_the_run_goes_on(place: Place) -> None:
    run = RegionRun(place, SMALL, LONG, parallelism=2)
    rows = iter(purchases())
    for _ in range(5):
        run.step(next(rows))
    before = digests(place)
    for operator in SMALL.operators:
        made = consolidate(place, operator.name, 4, f"m-{operator.name}")
        assert made.bytes > 0 and made.checkpoint == 4
    assert place.catalog.chain(NAME, 5) == [4, 5] and place.catalog.chain(NAME, 4) == [4]
    assert place.catalog.chain(NAME, 3) == [1, 2, 3]
    check(place)
    for _ in range(2):
        completed = run.step(next(rows))
        assert completed is not None and set(completed.forms.values()) == {Form.DELTA}
    assert place.catalog.chain(NAME, 7) == [4, 5, 6, 7]
    assert run.region._restore_point(SMALL.operators[0].name).manifests[-1].name.endswith(".materialized.arrow")
    assert {state.deltas for state in run.region._policies.values()} == {3}
    check(place)
    assert before.items() <= digests(place).items()
    again = RegionRun(place, SMALL, LONG, parallelism=3)
    assert {state.deltas for state in again.region._policies.values()} == {3}
    again.step(next(rows))
    check(place)
    result = delete_checkpoints(place, NAME, [1, 2, 3])
    assert result.deleted == (1, 2, 3) and not result.marked
    again.step(next(rows))
    check(place)
    listed = {name for name, _ in place.warehouse.store.list("")}
    assert listed == {o.name for o in place.catalog.objects(NAME)}
