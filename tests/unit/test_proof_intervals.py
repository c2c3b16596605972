"""Proofs where the catalog is wrong about which checkpoints need an object: exactly those fail that lack it.

Others that are proven with them have it listed, so together all is there.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from siltstone.catalog.database import tables as t
from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.recover import recover
from siltstone.errors import LossRefused
from tests import tiny_stream
from tests.examples import long_form
from tests.proofs import failures, in_order, restored_digest
from tests.recovery_cases import NAME, check_goes_on, delete, digests, objects, write_checkpoints


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWarehouse]:
    """Four checkpoints: a base, a delta, a delta that is materialized, a delta."""
    with tiny_stream.written(str(tmp_path_factory.mktemp("tiny") / "w")) as stored:
        yield stored.place


def set_until(place: OpenWarehouse, name: str, until: int) -> int:
    """Make the catalog say that no checkpoint after `until` needs an object; return what it said before."""
    o = t.object_.c
    [before] = [stored.until for stored in place.catalog.objects.list(name.partition("/")[0]) if stored.name == name]
    with place.catalog.transactions.begin_write("a wrong interval") as connection:
        connection.execute(update(t.object_).where(o.name == name).values(until=until))
    return before


@pytest.mark.parametrize(
    ("ending", "until", "failed", "reason"),
    [
        ("1/manifest.arrow", 1, 2, "its chain needs checkpoint 1, which does not hold it"),
        ("1/*.segment", 1, 2, "needs object .*1.*segment, but the catalog does not list it"),
        ("1/*row*.base.parquet", 1, 2, "needs object .*base.parquet, but the catalog does not list it"),
        ("2/manifest.arrow", 1, 2, "needs its manifest, but the catalog does not list it"),
        ("3/tiny.m.materialized.arrow", 3, 4, "its chain needs checkpoint 3, which does not hold it"),
        ("3/*row*.materialized.parquet", 3, 4, "needs object .*materialized.parquet, but the catalog does not list it"),
    ],
)
def test_the_checkpoint_fails_that_an_object_is_not_listed_for(
    tiny: OpenWarehouse, ending: str, until: int, failed: int, reason: str
) -> None:
    every = range(1, tiny_stream.LAST + 1)
    [name] = [o.name for o in tiny.catalog.objects.list(tiny_stream.NAME) if Path(o.name).match(f"*{ending}")]
    before = set_until(tiny, name, until)
    try:
        [failure] = failures(tiny, tiny_stream.NAME)
        assert failure.checkpoint == failed and failures(tiny, tiny_stream.NAME, [failed]) == [failure]
        assert re.search(f"{reason}.*; restore another checkpoint", failure.reason)
        for checkpoint in set(every) - {failed}:
            assert not failures(tiny, tiny_stream.NAME, [checkpoint])
            restored_digest(tiny, tiny_stream.NAME, checkpoint)
    finally:
        set_until(tiny, name, before)
    assert not failures(tiny, tiny_stream.NAME)


# Recovery


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine checkpoints, with bases at 1, 5 and 9."""
    return write_checkpoints(tmp_path_factory.mktemp("intervals") / "w")


def manifest(place: OpenWarehouse, checkpoint: int) -> str:
    [name] = objects(place, checkpoint, ObjectKind.MANIFEST)
    return name


@pytest.mark.slow
def test_a_gap_fails_those_behind_it_and_gives_nothing_up_where_the_newest_restores(place: OpenWarehouse) -> None:
    before = digests(place)
    set_until(place, manifest(place, 6), 6)
    assert (
        [f.checkpoint for f in failures(place, NAME)] == [7, 8] == [f.checkpoint for f in failures(place, NAME, [7, 8])]
    )
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up, done.fenced) == (9, (), False)
    assert digests(place) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", [long_form(ObjectKind.MANIFEST), ObjectKind.SEGMENT])
def test_a_recovery_goes_back_to_where_the_catalog_is_right(place: OpenWarehouse, kind: ObjectKind) -> None:
    before = digests(place)
    delete(place, manifest(place, 9))
    set_until(place, objects(place, 6, kind)[0], 7)
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.given_up, done.rebuilt) == (7, (8, 9), ())
    assert not failures(place, NAME), "what is needed by checkpoint 7 is open again"
    check_goes_on(place, done, before)
    assert not failures(place, NAME)


@pytest.mark.slow
def test_a_recovery_gives_up_no_more_than_it_may(place: OpenWarehouse) -> None:
    delete(place, manifest(place, 9))
    set_until(place, manifest(place, 5), 5)
    before = digests(place), place.catalog.objects.list(NAME)
    with pytest.raises(LossRefused, match="more than 3 checkpoints"):
        recover(place, NAME, run=in_order)
    assert (digests(place), place.catalog.objects.list(NAME)) == before
