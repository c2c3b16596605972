"""Materializations that complete while another process reads what checkpoints need."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.records.chains import Chains
from siltstone.catalog.records.checkpoints import Checkpoints
from siltstone.catalog.records.leases import Leases
from siltstone.catalog.records.objects import Objects
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.format.manifests import read_manifests
from siltstone.retention.deletion import delete_checkpoints
from tests.deletion_cases import rows, stream
from tests.places import place_at
from tests.proofs import check_whole, in_order
from tests.region_run import RegionRun
from tests.sums import NAME, POLICY

DELTAS = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    """Checkpoints 1 to 4: operator `old` has its bases at 1 and next at 5, `new` at 3."""
    with place_at(tmp_path / "w") as opened:
        run = RegionRun(opened, stream("old"), POLICY)
        for n in (1, 2):
            run.step(rows(n))
        run = RegionRun(opened, stream("old", "new"), POLICY)
        for n in (3, 4):
            run.step(rows(1 if n == 3 else n))
        yield opened


def after_first(patch: pytest.MonkeyPatch, calls: list[tuple[type, str]], then: Callable[[], None]) -> None:
    """Do something once, right after the first of these methods has returned."""
    waiting = [then]

    def patched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found = method(*args, **options)
            if waiting:
                waiting.pop()()
            return found

        return call

    for of, name in calls:
        patch.setattr(of, name, patched(getattr(of, name)))


def consolidate(place: OpenWarehouse, operator: str, checkpoint: int, id: str = "m1") -> None:
    materialize(place, NAME, operator, checkpoint, id=id, parallelism=1, run=in_order)


def test_a_materialization_completes_while_a_run_learns_what_checkpoints_need(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RegionRun(place, stream("old", "new"), POLICY)
    with monkeypatch.context() as patch:
        region, complete = run.region, run.region.complete

        def completing(*args: Any, **options: Any) -> Any:
            reads = [(Chains, "list_manifests"), (Chains, "list_objects")]
            after_first(patch, reads, lambda: consolidate(place, "new", 4))
            return complete(*args, **options)

        patch.setattr(region, "complete", completing)
        completed = run.step(rows(5))
    assert completed and completed.id == 5 and completed.forms["old"] == "base"
    assert [m.outcome for m in place.catalog.materializations.list(NAME)] == ["done"]
    check_whole(place, [1, 2, 3, 4, 5])
    run.step(rows(6))
    delete_checkpoints(place, NAME, [1, 2, 3, 4, 5])
    check_whole(place, [6])


def test_a_deletion_spares_what_a_reader_reads_though_it_was_materialized_meanwhile(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def begin_to_read() -> None:
        place.catalog.leases.take(NAME, [4], id="r", who="a reader", lasts=timedelta(hours=1))
        read.extend(place.catalog.chains.list_manifests(NAME, 4))
        for operator in "old", "new":
            consolidate(place, operator, 4, operator)

    with monkeypatch.context() as patch:
        looks = [(Leases, "list_live"), (Checkpoints, "list_retained"), (Objects, "list")]
        after_first(patch, looks, begin_to_read)
        delete_checkpoints(place, NAME, [1, 2, 3])
    manifests = read_manifests(place.warehouse.store, read)
    for manifest in manifests.values():
        for stored in manifest.objects:
            place.warehouse.store.read(stored)
    place.catalog.leases.release("r")
    delete_checkpoints(place, NAME, [])
    check_whole(place, [4])


def test_what_two_materializations_at_once_left_open_is_closed_by_the_next(tmp_path: Path) -> None:
    def meanwhile(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        consolidate(place, "old", 3, "m2")
        return in_order(function, tasks)

    with place_at(tmp_path / "w") as place:
        run = RegionRun(place, stream("old", "new"), DELTAS)
        for n in (1, 2, 3):
            run.step(rows(n))
        materialize(place, NAME, "new", 3, id="m1", parallelism=1, run=meanwhile)
        assert place.catalog.chains.list_checkpoints(NAME, 3) == [1, 2, 3]
        run = RegionRun(place, stream("old", "new"), DELTAS)  # it looks no further back than its checkpoints need
        completed = run.step(rows(4))
        assert completed and set(completed.forms.values()) == {"delta"}
        for operator in "old", "new":
            consolidate(place, operator, 4, operator)
        assert place.catalog.chains.list_checkpoints(NAME, 4) == [4]
        run.step(rows(5))
        delete_checkpoints(place, NAME, [1, 2, 3])
        check_whole(place, [4, 5])
