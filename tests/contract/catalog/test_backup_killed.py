"""Backups and restores of a catalog that are killed on the way, over every database that a catalog can be in."""

import os
import signal
from pathlib import Path

import pytest
from sqlalchemy import MetaData

from siltstone.catalog.backup import Backup, back_up, bring_back
from siltstone.catalog.database.engine import parse_url
from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.errors import UsageError
from tests.catalog_cases import commit_of, engine_of
from tests.killed_child import frozen_at, killed_at

FIRST, STEP = 22, 31
"""each of the first moments, when files are made and named, and then one of so many, are killed at"""


def fill(catalog_url: str) -> list[object]:
    with open_catalog(catalog_url) as catalog:
        catalog.streams.register("flights", 128, {"a": 1})
        epoch = catalog.runs.begin("flights", "host:1")
        for id in (1, 2):
            catalog.commits.add("flights", epoch, commit_of(id))
        catalog.savepoints.add("flights", epoch, "good", 1)
        catalog.forks.create("flights", "branch", 2)
    return content(catalog_url)


def content(catalog_url: str) -> list[object]:
    with open_catalog(catalog_url, create=False) as catalog:
        names = [record.name for record in catalog.streams.list()]
        of_each = (
            catalog.runs.list,
            catalog.checkpoints.list,
            catalog.objects.list,
            catalog.savepoints.list,
            catalog.forks.get_lineage,
        )
        return [catalog.streams.list(), *(method(name) for name in names for method in of_each)]


def is_there(catalog_url: str) -> bool:
    try:
        open_catalog(catalog_url, create=False).close()
    except NoCatalog:
        return False
    return True


def lose(catalog_url: str) -> None:
    """As people do who bring a catalog back once more."""
    url = parse_url(catalog_url)
    if url.drivername == "sqlite":
        for ending in ("", "-wal", "-shm"):
            Path(str(url.database) + ending).unlink(missing_ok=True)
        return
    engine = engine_of(catalog_url)
    with engine.begin() as connection:
        found = MetaData()
        found.reflect(connection)
        found.drop_all(connection)
    engine.dispose()


def after(moment: int) -> int:
    return moment + (1 if moment < FIRST else STEP)


@pytest.mark.slow
def test_a_restore_killed_anywhere_has_restored_nothing_or_everything(catalog_url: str, tmp_path: Path) -> None:
    before = fill(f"sqlite:///{tmp_path}/first.db")
    file = tmp_path / "backup"
    rows = back_up(f"sqlite:///{tmp_path}/first.db", file, tmp_path).rows
    data, moment, nothing, everything = file.read_bytes(), 1, 0, 0
    while (ended := killed_at(lambda: bring_back(file, catalog_url), moment)) == -signal.SIGKILL:
        if is_there(catalog_url):
            everything += 1
            assert content(catalog_url) == before
            with pytest.raises(UsageError, match="already"):
                bring_back(file, catalog_url)
            assert content(catalog_url) == before
            lose(catalog_url)
        else:
            nothing += 1
        assert file.read_bytes() == data
        moment = after(moment)
    assert nothing > 5 and everything and ended < moment
    assert content(catalog_url) == before and file.read_bytes() == data
    assert not list(tmp_path.glob("*.part*"))
    lose(catalog_url)
    assert bring_back(file, catalog_url).rows == rows


@pytest.mark.slow
def test_a_backup_killed_anywhere_is_taken_again_under_its_name(catalog_url: str, tmp_path: Path) -> None:
    before = fill(catalog_url)
    file, moment, left, whole = tmp_path / "backup", 1, 0, 0
    while killed_at(lambda: back_up(catalog_url, file, tmp_path), moment) == -signal.SIGKILL:
        left += (tmp_path / "backup.part").exists()
        if file.exists():
            whole += 1
            assert content(f"sqlite:///{file}") == before
            with pytest.raises(UsageError, match="backup exists already: name another file"):
                back_up(catalog_url, file, tmp_path)
            assert not list(tmp_path.glob("*.part*"))
            file.unlink()
        moment = after(moment)
    assert left > 3 and whole
    assert content(f"sqlite:///{file}") == before
    assert not list(tmp_path.glob("*.part*"))


def test_what_a_backup_left_that_was_killed_as_it_copied_is_not_made_part_of_the_next(
    catalog_url: str, tmp_path: Path
) -> None:
    """Half of a database, and the log of one that SQLite would bring into what it finds under that name."""
    before = fill(catalog_url)
    file = tmp_path / "backup"
    with frozen_at(lambda: back_up(catalog_url, file, tmp_path), "os.link"):
        data = (tmp_path / "backup.part").read_bytes()
        (tmp_path / "backup.part").write_bytes(data[: len(data) // 2])
        (tmp_path / "backup.part-journal").write_bytes(data)
    back_up(catalog_url, file, tmp_path)
    assert content(f"sqlite:///{file}") == before
    assert not list(tmp_path.glob("*.part*"))


def test_a_killed_backup_that_had_its_name_shares_no_file_with_the_next(catalog_url: str, tmp_path: Path) -> None:
    """It is killed when its draft has two names: the next one must not write into the file that was kept."""
    before = fill(catalog_url)
    file, kept = tmp_path / "backup", tmp_path / "kept"
    with frozen_at(lambda: back_up(catalog_url, file, tmp_path), "os.link"):
        pass
    os.link(tmp_path / "backup.part", kept)
    with open_catalog(catalog_url) as catalog:
        catalog.streams.register("more", 128, {})
    back_up(catalog_url, file, tmp_path)
    assert content(f"sqlite:///{kept}") == before != content(f"sqlite:///{file}")


def test_a_backup_that_is_at_work_is_left_alone(catalog_url: str, tmp_path: Path) -> None:
    before = fill(catalog_url)
    file = tmp_path / "backup"
    with frozen_at(lambda: back_up(catalog_url, file, tmp_path), "os.link"):
        with pytest.raises(UsageError, match=r"another process writes .*backup: wait until it has ended"):
            back_up(catalog_url, file, tmp_path)
        assert content(f"sqlite:///{file}.part") == before
    back_up(catalog_url, file, tmp_path)


def test_backups_without_a_name_clean_up_behind_killed_ones_only(catalog_url: str, tmp_path: Path) -> None:
    fill(catalog_url)

    def take() -> Backup:
        return back_up(catalog_url, None, tmp_path)

    def parts() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("*.part*"))

    with frozen_at(take, "os.link"):
        at_work = parts()
        assert len(at_work) == 2
        take()
        assert parts() == at_work
    assert parts() == at_work
    take()
    assert parts() == [] and len(list(tmp_path.glob("*.backup"))) == 2
