"""A lost catalog is rebuilt into any database that a catalog can be in."""

from pathlib import Path

import pytest

from siltstone.catalog.open import open_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import rebuild_catalog
from siltstone.errors import UsageError
from tests.outbox_run import Heard
from tests.rebuild_cases import check_same, rebuilt, what_it_knows, write_history


@pytest.mark.slow
def test_a_catalog_is_rebuilt_in_any_database_and_only_once(tmp_path: Path, catalog_url: str) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        write_history(place, Heard()).region.close("done")
        known = what_it_knows(place.catalog)
        check_same(rebuilt(place, catalog_url)[1], known)
        with pytest.raises(UsageError, match="there is a catalog"):
            rebuild_catalog(place.warehouse, catalog_url)
    with open_catalog(catalog_url, create=False) as catalog:
        check_same(what_it_knows(catalog), known)


@pytest.mark.slow
def test_a_catalog_is_lost_from_any_database(tmp_path: Path, catalog_url: str) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url) as place:
        write_history(place, Heard()).region.close("done")
        known = what_it_knows(place.catalog)
        check_same(rebuilt(place, f"sqlite:///{tmp_path}/again.db")[1], known)
