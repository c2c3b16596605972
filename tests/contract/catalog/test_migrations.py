"""Catalogs with data of older revisions, upgraded, over every database a catalog can be in."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, insert, make_url

from siltstone.catalog import tables as t
from siltstone.catalog import upgrade
from siltstone.catalog.open import open_catalog
from siltstone.catalog.passes import Pass
from siltstone.catalog.steps import Step
from siltstone.catalog.tombstones import Tombstone
from siltstone.catalog.upgrading import upgrade_catalog
from siltstone.errors import UnknownStream
from siltstone.model import StoredObject
from siltstone.store.checksums import checksum_of
from tests.catalog_cases import commit_of
from tests.clock import NOON

FILES = '{"0": {"4": "v1\\n{\\"path\\":\\"file:///in/a.parquet\\",\\"timestamp\\":1,\\"batchId\\":4}"}}'
RATE = '{"0": {"0": "v1\\n17"}}'


@pytest.fixture(scope="module", autouse=True)
def new_catalogs() -> None:
    """Made by Alembic, as everywhere but in tests."""


def older_catalog(catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str) -> Engine:
    """A catalog of that revision, in which stream flights has checkpoint 1; written by SQL, as today's code cannot."""
    older = tmp_path / "older"
    newer = [path.name for path in (upgrade.MIGRATIONS / "versions").glob("r*.py") if path.name[1:5] > revision]
    shutil.copytree(upgrade.MIGRATIONS, older, ignore=shutil.ignore_patterns("__pycache__", *newer))
    with monkeypatch.context() as patch:
        patch.setattr(upgrade, "MIGRATIONS", older)
        patch.setattr(upgrade, "REVISION", revision)
        open_catalog(catalog_url).close()
    url = make_url(catalog_url)
    engine = create_engine(url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url)
    manifest = commit_of(1).manifest
    of_manifest = {"manifest": manifest.name, "manifest_bytes": manifest.bytes, "manifest_checksum": manifest.checksum}
    counted = {"digest": "0" * 32, "rows": 7, "bytes": 100, "forms": {"aircraft": "base"}, "d": {}, "statistics": {}}
    made = {"stream": "flights", "epoch": 1}
    with engine.begin() as connection:
        values = {"name": "flights", "max_parallelism": 128, "definition": {}, "epoch": 1, "created_at": NOON}
        connection.execute(insert(t.stream), values)
        connection.execute(insert(t.run), made | {"first_checkpoint": 1, "who": "host:1", "started_at": NOON})
        connection.execute(insert(t.checkpoint), made | {"id": 1, "committed_at": NOON} | of_manifest | counted)
    return engine


def test_a_stream_that_was_there_before_retention_was_recorded_keeps_everything_until_it_is_told(
    catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older_catalog(catalog_url, tmp_path, monkeypatch, "0001").dispose()
    upgrade_catalog(catalog_url, tmp_path, fence=True)
    rules = {"keep_last": 100}
    with open_catalog(catalog_url) as catalog:
        assert catalog.streams.get("flights").retention is None
        assert catalog.streams.register("flights", 128, {}, rules).retention is None, "it is not new"
        assert catalog.streams.register("others", 128, {}, rules).retention == rules
        assert catalog.forks.create("flights", "branch", 1).retention is None
        assert (
            catalog.streams.set_retention("flights", rules).retention
            == catalog.streams.get("flights").retention
            == rules
        )
        assert catalog.forks.create("flights", "later", 1).retention == rules, "a fork keeps what its parent does"
        assert catalog.streams.set_retention("others", None).retention is None
        with pytest.raises(UnknownStream):
            catalog.streams.set_retention("nosuch", rules)


def test_steps_that_were_recorded_before_they_could_be_pruned_stay_as_they_are(
    catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = older_catalog(catalog_url, tmp_path, monkeypatch, "0003")
    recorded = {1: RATE, 2: "{}", 3: "{}", 4: FILES, 5: "{}"}
    with engine.begin() as connection:
        for number, sources in recorded.items():
            read = {"batch_id": number - 1, "offsets": f"v1\n{{}}\n{number}", "sources": sources}
            connection.execute(insert(t.step), {"stream": "flights", "checkpoint": 1, "step": number} | read)
    engine.dispose()
    upgrade_catalog(catalog_url, tmp_path, fence=True)
    with open_catalog(catalog_url) as catalog:
        assert {s.step: s.sources for s in catalog.input_log.list("flights", 1)} == recorded
        position = catalog.input_log.get_position("flights", 1)
        assert [s.step for s in position.entries] == [1, 4] and [s.step for s in position.newest] == [4, 5]
        catalog.commits.add(
            "flights", catalog.runs.begin("flights", "me"), commit_of(2, steps=[Step(6, 5, "v1\n{}\n6")])
        )
        assert [s.step for s in catalog.input_log.get_position("flights", 2).newest] == [5, 6]


def test_checksums_of_before_they_said_their_algorithm_are_kept_beside_longer_ones(
    catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 11, item 5: a row of an older catalog has room for a cryptographic checksum."""
    engine = older_catalog(catalog_url, tmp_path, monkeypatch, "0001")
    with engine.begin() as connection:
        values = {"checkpoint": 1, "epoch": 1, "kind": "base", "bytes": 5, "checksum": "ab" * 16}
        connection.execute(insert(t.object_), values | {"stream": "flights", "name": "flights/o"})
    engine.dispose()
    upgrade_catalog(catalog_url, tmp_path, fence=True)
    with open_catalog(catalog_url) as catalog:
        assert catalog.checkpoints.get("flights", 1).manifest == commit_of(1).manifest
        assert [found.checksum for found in catalog.objects.list("flights")] == ["ab" * 16]
        manifest = StoredObject("flights/00000001/m", 7, checksum_of(b"a manifest"))
        epoch = catalog.runs.begin("flights", "me")
        catalog.commits.add("flights", epoch, replace(commit_of(2), manifest=manifest))
        assert catalog.checkpoints.get("flights", 2).manifest == manifest


def test_deletions_of_before_passes_were_recorded_stay_as_they_are(
    catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = older_catalog(catalog_url, tmp_path, monkeypatch, "0001")
    gone = {"stream": "flights", "name": "a", "bytes": 7, "reason": "old", "who": "host:1", "deleted_at": NOON}
    with engine.begin() as connection:
        connection.execute(insert(t.deletion), gone)
    engine.dispose()
    upgrade_catalog(catalog_url, tmp_path, fence=True)
    with open_catalog(catalog_url, now=lambda: NOON) as catalog:
        assert catalog.passes.list("flights") == []
        by = Pass.begin("a sweep", "host:2")
        catalog.tombstones.record_orphans("flights", "host:2", ["b"], lambda _: [Tombstone("b", 5, "new")], by)
        assert [(p.id, p.objects, p.bytes) for p in catalog.passes.list("flights")] == [(by.id, 1, 5)]
        assert {d.name for d in catalog.tombstones.list("flights")} == {"a", "b"}


def test_streams_of_before_tables_keep_their_parquet_files_and_new_ones_have_tables(
    catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 13, item 6: rows of one sink are never split over two places by an upgrade."""
    engine = older_catalog(catalog_url, tmp_path, monkeypatch, "0013")
    with engine.begin() as connection:
        output = {"stream": "flights", "checkpoint": 1, "name": "aircraft", "sink_id": 1, "epoch": 1, "rows": 2}
        connection.execute(insert(t.output), output | {"arrow_schema": b"x", "lost": False})
        staged = {"stream": "flights", "name": "flights/o", "checkpoint": 1, "output": "aircraft", "position": 0}
        connection.execute(insert(t.output_object), staged | {"bytes": 5, "checksum": "ab" * 16})
    engine.dispose()
    upgrade_catalog(catalog_url, tmp_path, fence=True)
    with open_catalog(catalog_url) as catalog:
        assert catalog.streams.get("flights").default_sink is None
        [found] = catalog.outbox.list("flights", outstanding=True)
        assert found.objects == (StoredObject("flights/o", 5, "ab" * 16),)
        assert catalog.streams.register("later", 128, {}).default_sink == "table"
        assert catalog.forks.create("flights", "what-if", 1).default_sink == "table"
