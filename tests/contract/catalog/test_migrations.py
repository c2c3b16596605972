"""Catalogs with data of older revisions, upgraded, over every database a catalog can be in."""

import shutil
from pathlib import Path

import pytest
from sqlalchemy import create_engine, insert, make_url

from siltstone.catalog import tables as t
from siltstone.catalog import upgrade
from siltstone.catalog.open import open_catalog
from siltstone.catalog.records import Step
from tests.catalog_cases import commit_of

FILES = '{"0": {"4": "v1\\n{\\"path\\":\\"file:///in/a.parquet\\",\\"timestamp\\":1,\\"batchId\\":4}"}}'
RATE = '{"0": {"0": "v1\\n17"}}'


def test_steps_that_were_recorded_before_they_could_be_pruned_stay_as_they_are(
    catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "older"
    newer = [path.name for path in (upgrade.MIGRATIONS / "versions").glob("r*.py") if path.name >= "r0004"]
    shutil.copytree(upgrade.MIGRATIONS, older, ignore=shutil.ignore_patterns("__pycache__", *newer))
    with monkeypatch.context() as patch:
        patch.setattr(upgrade, "MIGRATIONS", older)
        patch.setattr(upgrade, "REVISION", "0003")
        with open_catalog(catalog_url) as catalog:
            catalog.register("flights", 128, {})
            catalog.new_epoch("flights", "host:1")
            catalog.commit("flights", 1, commit_of(1))
    url = make_url(catalog_url)
    engine = create_engine(url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url)
    recorded = {1: RATE, 2: "{}", 3: "{}", 4: FILES, 5: "{}"}
    with engine.begin() as connection:
        for number, sources in recorded.items():
            read = {"batch_id": number - 1, "offsets": f"v1\n{{}}\n{number}", "sources": sources}
            connection.execute(insert(t.step), {"stream": "flights", "checkpoint": 1, "step": number} | read)
    engine.dispose()
    with open_catalog(catalog_url) as catalog:
        assert {s.step: s.sources for s in catalog.steps("flights", 1)} == recorded
        position = catalog.input_position("flights", 1)
        assert [s.step for s in position.entries] == [1, 4] and [s.step for s in position.newest] == [4, 5]
        catalog.commit("flights", 1, commit_of(2, steps=[Step(6, 5, "v1\n{}\n6")]))
        assert [s.step for s in catalog.input_position("flights", 2).newest] == [5, 6]
