"""A recovery that is killed, or whose store answers wrongly or not at all: nothing is given up that was not damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change import recover as recovery
from siltstone.change import recovery_point
from siltstone.change.recover import recover
from siltstone.errors import Unreachable
from tests.proofs import in_order
from tests.recovery_cases import (
    NAME,
    check_goes_on,
    delete,
    digests,
    objects,
    write_checkpoints,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine checkpoints."""
    return write_checkpoints(tmp_path_factory.mktemp("recovery") / "w")


def test_wrong_bytes_once_give_nothing_up(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = recovery_point.prove_checkpoints, []

    def prove(place: OpenWarehouse, stream: str, some: list[int], run: Callable) -> object:
        calls.append(some)
        if len(calls) > 1:
            return real(place, stream, some, run)
        [manifest] = objects(place, 9, ObjectKind.MANIFEST)
        path = place.warehouse.local.objects / manifest
        path.rename(path.with_suffix(".away"))
        try:
            return real(place, stream, some, run)
        finally:
            path.with_suffix(".away").rename(path)

    monkeypatch.setattr(recovery_point, "prove_checkpoints", prove)
    assert recover(place, NAME, run=in_order).given_up == () and calls == [[9], [9]]


@pytest.mark.slow
@pytest.mark.parametrize("error", [Unreachable("the store is away"), KeyboardInterrupt()], ids=["away", "killed"])
def test_a_store_that_is_away_says_nothing_about_checkpoints(
    place: OpenWarehouse, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests(place)
    delete(place, objects(place, 9, ObjectKind.MANIFEST)[0])

    def away(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(recovery_point, "prove_checkpoints", away)
        recover(place, NAME, run=in_order)
    assert digests(place) == before and place.catalog.rollbacks.list(NAME) == []
    assert [r.outcome for r in place.catalog.runs.list(NAME)][1:] == ["done"] and place.catalog.leases.list_live(
        NAME
    ) == []
    check_goes_on(place, recover(place, NAME, run=in_order), before)


@pytest.mark.slow
def test_killed_after_rolling_back_the_rest_is_left_to_others(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests(place)
    delete(place, objects(place, 9, ObjectKind.MANIFEST)[0])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recovery, "sweep", killed)
        recover(place, NAME, run=in_order)
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up) == (8, ()) and before.items() >= digests(place).items()
