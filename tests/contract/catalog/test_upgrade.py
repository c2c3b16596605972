"""Catalogs of an older Siltstone, told apart and upgraded, over every database a catalog can be in."""

import os
import signal
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event, text

from siltstone.catalog import upgrading
from siltstone.catalog.backup import tables_made_by
from siltstone.catalog.database.engine import WRITE, parse_url
from siltstone.catalog.database.tables import REVISION, REVISION_TABLE
from siltstone.catalog.database.upgrade import revision
from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.catalog.upgrading import upgrade_catalog
from siltstone.errors import Fenced, Unreachable, UsageError
from siltstone.retention.leases import this_process
from tests.catalog_cases import NOON, commit_of, engine_of
from tests.killed_child import killed_at
from tests.next_revision import NEXT, plant_next_revision

OFFSETS = "v1\n{}\n1"
FILES = '{"0": {"4": "v1\\n{\\"path\\":\\"file:///in/a.parquet\\",\\"timestamp\\":1,\\"batchId\\":4}"}}'
ADVICE = "stop what runs on it, then `siltstone upgrade`"


def revision_of(catalog_url: str) -> str | None:
    engine = engine_of(catalog_url)
    with engine.connect() as connection:
        found = revision(connection)
    engine.dispose()
    return found


def execute(catalog_url: str, *statements: str) -> None:
    engine = engine_of(catalog_url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def backups(directory: Path) -> list[Path]:
    return sorted(directory.glob("catalog-*.backup"))


def write_flights(catalog_url: str) -> list[object]:
    """Make stream flights with two checkpoints and three runs, and forks whose names come before their parents'."""
    with open_catalog(catalog_url) as catalog:
        catalog.streams.register("flights", 128, {"a": 1})
        for id, sources in (1, "{}"), (2, FILES):
            epoch = catalog.runs.begin("flights", "nowhere:1")
            catalog.commits.add("flights", epoch, commit_of(id, steps=[Step(id, id - 1, OFFSETS, sources)]))
        catalog.savepoints.add("flights", epoch, "good", 1)
        catalog.forks.create("flights", "branch", 2)
        catalog.forks.create("branch", "a-branch-of-it", 2)
        catalog.runs.end("flights", catalog.runs.begin("flights", "nowhere:1"), "done")
        return content(catalog)


def content(catalog: Catalog) -> list[object]:
    streams = catalog.streams.list()
    return [streams] + [
        part
        for stream in streams
        for part in (
            catalog.runs.list(stream.name),
            catalog.checkpoints.list(stream.name),
            catalog.objects.list(stream.name),
            catalog.input_log.list(stream.name, 2),
            catalog.savepoints.list(stream.name),
            catalog.definitions.list(stream.name),
        )
    ]


@pytest.fixture
def older(catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a catalog of an older Siltstone holds."""
    before = write_flights(catalog_url)
    plant_next_revision(monkeypatch, tmp_path)
    return before


def test_an_older_catalog_is_refused_and_upgraded_without_loss(
    catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_flights(catalog_url)
    with monkeypatch.context() as patch:
        plant_next_revision(patch, tmp_path)
        for create in (True, False):
            said = rf"older Siltstone \(catalog revision {REVISION}, this one needs {NEXT}\): {ADVICE}"
            with pytest.raises(UsageError, match=said):
                open_catalog(catalog_url, create=create)
        done = upgrade_catalog(catalog_url, tmp_path)
        assert (done.before, done.after, done.fenced) == (REVISION, NEXT, [])
        with open_catalog(catalog_url, create=False) as catalog:
            assert content(catalog) == before
            with catalog.transactions.engine.connect() as connection:
                assert set(connection.scalars(text("SELECT added FROM checkpoint"))) == {"nothing"}
            catalog.commits.add("flights", catalog.runs.begin("flights", "me"), commit_of(3, first={"aircraft": 2}))
            assert catalog.chains.list_checkpoints("flights", 3) == [2, 3]
    with pytest.raises(UsageError, match=rf"newer Siltstone \(revision {NEXT}\): upgrade siltstone"):
        open_catalog(catalog_url)
    assert done.backup is not None
    with open_catalog(f"sqlite:///{done.backup.file}", create=False) as catalog:
        assert content(catalog) == before, "the backup is the catalog as it was"


@pytest.mark.parametrize("table", ["step", "savepoint", "object"])
def test_an_upgrade_that_would_lose_rows_changes_nothing(
    catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    before = write_flights(catalog_url)
    with monkeypatch.context() as patch:
        plant_next_revision(patch, tmp_path, f"DELETE FROM {table}")
        with pytest.raises(Unreachable, match=rf"{table} has 0 rows of [1-9]\), so it was not changed"):
            upgrade_catalog(catalog_url, tmp_path)
    with open_catalog(catalog_url, create=False) as catalog:
        assert content(catalog) == before


@pytest.mark.usefixtures("older")
def test_done_again_an_upgrade_does_nothing(catalog_url: str, tmp_path: Path) -> None:
    first = upgrade_catalog(catalog_url, tmp_path)
    assert [str(path) for path in backups(tmp_path)] == [first.backup and first.backup.file]
    again = upgrade_catalog(catalog_url, tmp_path)
    assert (again.before, again.after, again.backup) == (NEXT, NEXT, None)
    assert len(backups(tmp_path)) == 1


def test_there_must_be_a_catalog_and_none_that_is_newer(catalog_url: str, tmp_path: Path) -> None:
    with pytest.raises(NoCatalog):
        upgrade_catalog(catalog_url, tmp_path)
    open_catalog(catalog_url).close()
    execute(catalog_url, f"UPDATE {REVISION_TABLE} SET version_num = '9999'")
    with pytest.raises(UsageError, match=r"newer Siltstone \(revision 9999\): upgrade siltstone"):
        upgrade_catalog(catalog_url, tmp_path)
    assert revision_of(catalog_url) == "9999" and backups(tmp_path) == []


# Who is at work


@pytest.mark.usefixtures("older")
def test_a_run_that_may_live_is_waited_for_and_a_dead_one_fenced(catalog_url: str, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    host = this_process().rpartition(":")[0]
    running = "UPDATE run SET ended_at = NULL, who = '{}' WHERE epoch = 3"
    execute(catalog_url, running.format(this_process()))
    with pytest.raises(UsageError, match=rf"in use: a run of flights by {this_process()}. Stop that first"):
        upgrade_catalog(catalog_url, tmp_path)
    execute(catalog_url, running.format("elsewhere:1"))
    with pytest.raises(UsageError, match=r"a run of flights by elsewhere:1.*siltstone upgrade --fence"):
        upgrade_catalog(catalog_url, tmp_path)
    assert revision_of(catalog_url) == REVISION and backups(tmp_path) == []
    execute(catalog_url, running.format(f"{host}:{child}"))
    assert upgrade_catalog(catalog_url, tmp_path).fenced == ["flights"]
    with open_catalog(catalog_url) as catalog:
        with pytest.raises(Fenced):
            catalog.commits.add("flights", 3, commit_of(3))  # it lives after all
        assert [run.outcome for run in catalog.runs.list("flights")][2:] == [
            "superseded by epoch 4",
            "upgraded the catalog",
        ]
        catalog.commits.add("flights", catalog.runs.begin("flights", "next"), commit_of(3))


@pytest.mark.usefixtures("older")
def test_a_lease_that_lives_is_waited_for(catalog_url: str, tmp_path: Path) -> None:
    columns = "id, stream, first, last, who, taken_at, expires_at"
    execute(
        catalog_url,
        f"INSERT INTO lease ({columns}) VALUES ('a', 'flights', 1, 1, 'over', '{NOON:%F %T.%f}', '{NOON:%F %T.%f}')",
        f"INSERT INTO lease ({columns}) VALUES ('b', 'flights', 1, 1, 'elsewhere:7 verifies', "
        f"'{NOON:%F %T.%f}', '2913-01-01 12:34:56.000000')",
    )
    with pytest.raises(UsageError, match=r"elsewhere:7 verifies on stream flights \(its lease ends at 12:34:56"):
        upgrade_catalog(catalog_url, tmp_path)
    assert upgrade_catalog(catalog_url, tmp_path, fence=True).after == NEXT


@pytest.mark.usefixtures("older")
def test_two_processes_upgrade_once(catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second looks before the first has the lock, and goes on after it has ended."""
    look = upgrading.lock_upgrades

    def late(connection: object) -> None:
        monkeypatch.setattr(upgrading, "lock_upgrades", look)
        upgrade_catalog(catalog_url, tmp_path)

    if catalog_url.startswith("postgresql"):  # on SQLite the transaction itself is the lock
        monkeypatch.setattr(upgrading, "lock_upgrades", late)
    else:
        upgrade_catalog(catalog_url, tmp_path)
    assert upgrade_catalog(catalog_url, tmp_path).backup is None
    assert len(backups(tmp_path)) == 1


# Killed on the way


@pytest.mark.slow
def test_killed_anywhere_it_is_the_old_catalog_or_the_new_one_and_goes_on(
    catalog_url: str, tmp_path: Path, older: list[object]
) -> None:
    for known in (REVISION, NEXT):
        tables_made_by(known)  # so that every statement at which it dies is one on the catalog or its backup
    kills, at, step = 0, 1, 5
    while (ended := killed_at(lambda: upgrade_catalog(catalog_url, tmp_path), at)) == -signal.SIGKILL:
        kills += 1
        assert revision_of(catalog_url) == REVISION
        with pytest.raises(UsageError, match="older Siltstone"):
            open_catalog(catalog_url)
        at += step
    assert kills > 5 and ended < at
    with open_catalog(catalog_url) as catalog:
        assert content(catalog) == older


@pytest.mark.slow
@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("moment", ["commit", "checkin"])
def test_killed_right_before_and_right_after_its_commit(catalog_url: str, tmp_path: Path, moment: str) -> None:
    child = os.fork()
    if child == 0:

        def write_commits(connection: Connection) -> None:
            its_own = connection.engine.url.database == parse_url(catalog_url).database
            if its_own and connection.get_execution_options().get(WRITE):
                if moment == "commit":
                    die()
                event.listen(connection.engine, moment, die)  # the connection that has committed is given back

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        event.listen(Engine, "commit", write_commits)
        try:
            upgrade_catalog(catalog_url, tmp_path)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert revision_of(catalog_url) == (REVISION if moment == "commit" else NEXT)
    assert (upgrade_catalog(catalog_url, tmp_path).backup is None) == (moment == "checkin")
