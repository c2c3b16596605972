"""What most suites of the catalog begin with; those that begin otherwise have a `catalog` of their own."""

from collections.abc import Iterator

import pytest

from siltstone.catalog.open import open_catalog
from siltstone.catalog.repository import Catalog
from tests.catalog_cases import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog(catalog_url: str, clock: Clock) -> Iterator[Catalog]:
    with open_catalog(catalog_url, now=clock) as opened:
        yield opened


@pytest.fixture
def flights(catalog: Catalog) -> Catalog:
    """A catalog with stream flights in writer epoch 1."""
    catalog.streams.register("flights", 128, {"operators": []})
    assert catalog.runs.begin("flights", "host:1") == 1
    return catalog
