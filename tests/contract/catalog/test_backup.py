"""Catalogs backed up while they are written, and brought back into every kind of database."""

import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from siltstone.catalog.backup import back_up, bring_back
from siltstone.catalog.database.tables import REVISION
from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.catalog.upgrading import upgrade_catalog
from siltstone.errors import Unreachable, UsageError
from tests.catalog_cases import commit_of
from tests.next_revision import plant_next_revision


@pytest.fixture
def filled(catalog_url: str) -> Iterator[Catalog]:
    """Stream flights with two checkpoints, and forks whose names come before what they were made from."""
    with open_catalog(catalog_url) as catalog:
        catalog.streams.register("flights", 128, {"a": 1}, {"keep_last": 7})
        epoch = catalog.runs.begin("flights", "host:1")
        for id in (1, 2):
            catalog.commits.add("flights", epoch, commit_of(id, steps=[Step(id, id - 1, f"v1\n{{}}\n{id}")]))
        catalog.savepoints.add("flights", epoch, "good", 1)
        catalog.forks.create("flights", "branch", 2)
        catalog.forks.create("branch", "a-branch-of-it", 2)
        yield catalog


def content(catalog: Catalog) -> list[object]:
    """All that methods say of it."""
    names = [record.name for record in catalog.streams.list()]
    return [
        catalog.streams.list(),
        [catalog.runs.list(name) for name in names],
        [catalog.checkpoints.list(name) for name in names],
        [catalog.objects.list(name) for name in names],
        [catalog.input_log.list(name, 2) for name in names],
        [catalog.savepoints.list(name) for name in names],
        [catalog.forks.get_lineage(name) for name in names],
    ]


def test_a_backup_is_a_catalog_and_comes_back_into_any_kind_of_database(
    filled: Catalog, catalog_url: str, tmp_path: Path
) -> None:
    before = content(filled)
    done = back_up(catalog_url, None, tmp_path)
    [file] = tmp_path.glob(f"catalog-*-r{REVISION}.backup")
    assert done.file == str(file) and done.revision == REVISION and stat.S_IMODE(file.stat().st_mode) == 0o600
    with open_catalog(f"sqlite:///{file}", create=False) as catalog:
        assert content(catalog) == before
    again = f"sqlite:///{tmp_path}/again.db"
    assert bring_back(file, again).rows == done.rows
    with open_catalog(again, create=False) as catalog:
        assert content(catalog) == before
        catalog.commits.add("flights", catalog.runs.begin("flights", "me"), commit_of(3, first={"aircraft": 1}))
    with closing(sqlite3.connect(tmp_path / "again.db")) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",), "as a catalog that was made there"
    assert not list(tmp_path.glob("*.part*"))


def test_from_one_kind_of_database_into_the_other(catalog_url: str, tmp_path: Path) -> None:
    """The catalog of this test is the target, made from a backup of a SQLite one."""
    first = f"sqlite:///{tmp_path}/first.db"
    with open_catalog(first) as catalog:
        catalog.streams.register("flights", 128, {"a": 1})
        catalog.commits.add("flights", catalog.runs.begin("flights", "me"), commit_of(1))
        catalog.forks.create("flights", "branch", 1)
        before = content(catalog)
    back_up(first, tmp_path / "b", tmp_path)
    bring_back(tmp_path / "b", catalog_url)
    with open_catalog(catalog_url, create=False) as catalog:
        assert content(catalog) == before
        catalog.commits.add("flights", catalog.runs.begin("flights", "me"), commit_of(2, first={"aircraft": 1}))
    with pytest.raises(UsageError, match="already"):
        bring_back(tmp_path / "b", catalog_url)
    with open_catalog(catalog_url) as catalog:
        assert catalog.checkpoints.last_id("flights") == 2, "what is there is left as it is"


@pytest.mark.slow
def test_while_a_run_writes_it_holds_one_moment(filled: Catalog, catalog_url: str, tmp_path: Path) -> None:
    """A checkpoint and its objects and steps are one transaction: a backup has all of them or none."""
    ended = threading.Event()

    def write() -> None:
        id = 3
        while not ended.is_set():
            filled.commits.add("flights", 1, commit_of(id, first={"aircraft": 1}, steps=[Step(id, id - 1, "x")]))
            id += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        newest = []
        for n in range(5):
            back_up(catalog_url, tmp_path / f"{n}", tmp_path)
            with open_catalog(f"sqlite:///{tmp_path}/{n}", create=False) as catalog:
                newest.append(catalog.checkpoints.last_id("flights"))
                assert len(catalog.objects.list("flights")) == newest[-1]
                assert len(catalog.input_log.list("flights", newest[-1])) == newest[-1]
    finally:
        ended.set()
        writer.join()
    assert newest == sorted(newest) and newest[-1] <= filled.checkpoints.last_id("flights")


def test_between_two_tables_that_are_read_a_commit_is_not_seen(
    filled: Catalog, catalog_url: str, tmp_path: Path
) -> None:
    """Deterministically, where a backup reads table by table."""
    if not catalog_url.startswith("postgresql"):
        pytest.skip("SQLite copies pages, in one step")
    committed = []

    def commit(_: object, __: object, statement: str, *___: object) -> None:
        if "FROM checkpoint" in statement and not committed:
            committed.append(3)
            filled.commits.add("flights", 1, commit_of(3, first={"aircraft": 1}, steps=[Step(3, 2, "x")]))

    event.listen(Engine, "after_cursor_execute", commit)
    try:
        back_up(catalog_url, tmp_path / "b", tmp_path)
    finally:
        event.remove(Engine, "after_cursor_execute", commit)
    assert committed and filled.checkpoints.last_id("flights") == 3
    with open_catalog(f"sqlite:///{tmp_path}/b", create=False) as catalog:
        assert (
            catalog.checkpoints.last_id("flights")
            == len(catalog.objects.list("flights"))
            == len(catalog.input_log.list("flights", 9))
            == 2
        )


def test_mistakes_end_in_one_line_and_change_nothing(catalog_url: str, tmp_path: Path) -> None:
    with pytest.raises(NoCatalog):
        back_up(catalog_url, tmp_path / "b", tmp_path)
    assert not (tmp_path / "b").exists()
    with pytest.raises(UsageError, match="there is no backup"):
        bring_back(tmp_path / "b", catalog_url)
    open_catalog(catalog_url).close()
    (tmp_path / "there").write_text("mine")
    with pytest.raises(UsageError, match="exists already: name another file"):
        back_up(catalog_url, tmp_path / "there", tmp_path)
    assert (tmp_path / "there").read_text() == "mine"
    (tmp_path / "b.part").touch()
    with pytest.raises(UsageError, match=r"b\.part exists and was not left by a backup: move it away"):
        back_up(catalog_url, tmp_path / "b", tmp_path)
    assert (tmp_path / "b.part").exists() and not (tmp_path / "b.part.lock").exists()
    with pytest.raises(Unreachable, match="file is not a database"):
        (tmp_path / "text").write_text("no database at all" * 500)
        bring_back(tmp_path / "text", f"sqlite:///{tmp_path}/new.db")
    assert not (tmp_path / "new.db").exists()


def test_what_an_older_database_left_is_not_taken_for_the_log_of_the_one_that_comes_back(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/catalog.db"
    with open_catalog(url) as catalog:
        catalog.streams.register("flights", 128, {})
    back_up(url, tmp_path / "b", tmp_path)
    (tmp_path / "catalog.db").unlink()
    (tmp_path / "catalog.db-wal").write_bytes(b"frames of another database")
    with pytest.raises(UsageError, match=r"move .*catalog\.db-wal away first"):
        bring_back(tmp_path / "b", url)
    (tmp_path / "catalog.db-wal").unlink()
    bring_back(tmp_path / "b", url)


def test_an_older_catalog_is_backed_up_and_brought_back_as_it_is(
    filled: Catalog, catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.runs.end("flights", 1, "done")
    before = content(filled)
    plant_next_revision(monkeypatch, tmp_path)
    assert back_up(catalog_url, tmp_path / "b", tmp_path).revision == REVISION
    again = f"sqlite:///{tmp_path}/again.db"
    bring_back(tmp_path / "b", again)
    with pytest.raises(UsageError, match="`siltstone upgrade`"):
        open_catalog(again)
    upgrade_catalog(again, tmp_path)
    with open_catalog(again) as catalog:
        assert content(catalog) == before
