"""A catalog is rebuilt from a store that a sweep has cleaned up in part, or in which others have put objects."""

from collections.abc import Collection
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.catalog.epochs import check_catalog
from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import StateError, Unreachable
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.store.base import Store
from siltstone.store.paths import is_built_here
from tests.outbox_run import NAME, Heard, Outboxed, batch, inputs, write
from tests.proofs import failures
from tests.rebuild_cases import catalog_url, rebuilt


def _killed(*_: object) -> None:
    raise StateError("killed")


@pytest.mark.parametrize("limit", [1, 2, None])
def test_no_output_that_a_sweep_deleted_in_part_is_taken_for_delivered(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """A rebuild takes over a manifest that a killed run had not committed: so a sweep deletes it before the rest."""
    run = Outboxed(place, heard)
    run.step(batch(1))
    with monkeypatch.context() as patch, pytest.raises(StateError):
        patch.setattr(type(place.catalog.commits), "add", _killed)
        run.step(batch(2))
    place.catalog.runs.end(NAME, 1, "failed")  # else what has a manifest stays for the next run
    delete = type(place.warehouse.store).delete

    def delete_first(own: Store, names: Collection[str]) -> None:
        objects = [name for name in names if is_built_here(name)]
        delete(own, objects[:1] or names)
        if objects:
            raise Unreachable("killed")

    options = SweepOptions(age_guard=timedelta(0), limit=limit)
    with monkeypatch.context() as patch, nullcontext() if limit else pytest.raises(Unreachable):
        if limit is None:
            patch.setattr(type(place.warehouse.store), "delete", delete_first)
        sweep(place, NAME, options)
    rebuilt(place, catalog_url(tmp_path))
    with OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        assert not failures(again, NAME)
        later = Outboxed(again, heard)
        for n in range(later.batches + 1, 4):
            later.step(batch(n))
        later.region.close("done")
    assert heard.inputs == inputs([1, 2, 3])


def test_what_others_have_put_beside_extracts_is_passed_over_and_stays(
    place: OpenWarehouse, heard: Heard, tmp_path: Path
) -> None:
    write(place, heard, 3).region.close("done")
    others = [
        "_catalog/Old/note",
        "_catalog/Old/00000001-000000009999",
        f"_catalog/{'x' * 65}/00000001-000000009999",
        f"_catalog/{NAME}/kept/00000001-000000009999",
        f"_catalog/{NAME}/notes.txt",
    ]
    for name in others:
        place.warehouse.store.put(name, b"x")
    check_catalog(place, NAME)
    write_extract(place, NAME)
    done, _ = rebuilt(place, catalog_url(tmp_path))
    assert [each.stream for each in done.streams] == [NAME]
    assert {*others} <= {name for name, _ in place.warehouse.store.list("_catalog/")}
