"""Older catalogs with data, told apart and upgraded, over every database a catalog can be in."""

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event, text

from siltstone.catalog import upgrading
from siltstone.catalog.engine import WRITE, parse_url
from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.catalog.shapes import differences, tables_found, tables_made_by
from siltstone.catalog.tables import REVISION, REVISION_TABLE
from siltstone.catalog.upgrade import revision, revisions
from siltstone.catalog.upgrading import upgrade_catalog
from siltstone.errors import Fenced, UsageError
from siltstone.retention.leases import this_process
from tests.catalog_cases import NOON, commit_of
from tests.killed_child import killed_at
from tests.older_catalogs import FILES, OFFSETS, SHAPES, engine_of, make_revision, make_shape

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


@pytest.mark.parametrize("made", revisions())
def test_every_revision_makes_the_same_tables_in_every_database(catalog_url: str, made: str) -> None:
    make_revision(catalog_url, made)
    engine = engine_of(catalog_url)
    expected = tables_made_by(made)
    with engine.connect() as connection:
        assert differences(tables_found(connection, expected.tables), expected) == []
    engine.dispose()


@pytest.mark.parametrize(
    "commit", [c if c in ("b6c1e66", "8595e15") else pytest.param(c, marks=pytest.mark.slow) for c in SHAPES]
)
def test_each_content_that_revision_0001_had_is_upgraded_without_loss(
    catalog_url: str, commit: str, tmp_path: Path
) -> None:
    make_shape(catalog_url, commit)
    for create in (True, False):
        with pytest.raises(UsageError, match=rf"older Siltstone \(catalog revision 0001, .* {REVISION}\): {ADVICE}"):
            open_catalog(catalog_url, create=create)
    done = upgrade_catalog(catalog_url, tmp_path)
    assert (done.before, done.after, done.fenced) == ("0001", REVISION, [])
    assert "step has offsets as str" in done.rebuilt, "it was not of another revision only"
    with open_catalog(catalog_url, create=False) as catalog:
        assert catalog.streams.get("flights").definition == {"a": 1}
        assert [(run.epoch, run.first_checkpoint) for run in catalog.runs.list("flights")] == [(1, 1), (2, 2), (3, 3)]
        assert [c.statistics for c in catalog.checkpoints.list("flights")] == [{"state_rows": 7}] * 2
        assert [(s.offsets, s.sources) for s in catalog.input_log.list("flights", 2)] == [
            (OFFSETS, "{}"),
            (OFFSETS, FILES),
        ]
        assert len(catalog.objects.list("flights")) == 2
        assert catalog.definitions.get("flights", 2) == {"a": 1}
        if "savepoint" not in SHAPES[commit]:
            assert catalog.checkpoints.resolve("flights", "good") == 1
        epoch = catalog.runs.begin("flights", "me")
        catalog.commits.add("flights", epoch, commit_of(3, first={"aircraft": 2}))
        assert catalog.chains.list_checkpoints("flights", 3) == [2, 3]
        catalog.forks.create("flights", "branch", 2)
    assert done.backup is not None
    with closing(sqlite3.connect(done.backup.file)) as backup:
        [(sources,)] = backup.execute("SELECT sources FROM step WHERE step = 2").fetchall()
    assert sources == FILES, "it holds what the catalog did, as it did"


def test_what_cannot_be_carried_over_is_refused_and_left_as_it_is(catalog_url: str, tmp_path: Path) -> None:
    """As of 04b3efd, the first of all, whose dependencies were of checkpoints and not of operators."""
    make_shape(catalog_url, "b6c1e66")
    execute(catalog_url, "ALTER TABLE dependency RENAME COLUMN first TO depends_on")
    with pytest.raises(UsageError, match=r"without loss: dependency lacks first, dependency has depends_on, .*again"):
        upgrade_catalog(catalog_url, tmp_path)
    assert revision_of(catalog_url) == "0001" and backups(tmp_path) == []
    execute(catalog_url, "ALTER TABLE dependency RENAME COLUMN depends_on TO first")
    assert upgrade_catalog(catalog_url, tmp_path).after == REVISION, "nothing else of it was touched"


def test_a_catalog_that_lacks_columns_of_its_own_revision_is_told_apart_and_repaired(
    catalog_url: str, tmp_path: Path
) -> None:
    with open_catalog(catalog_url) as catalog:
        catalog.streams.register("flights", 128, {})
        catalog.commits.add("flights", catalog.runs.begin("flights", "nowhere:1"), commit_of(1))
        catalog.runs.end("flights", 1, "done")
        catalog.forks.create("flights", "branch", 1)
        catalog.forks.create("branch", "a-branch-of-it", 1)  # by name it comes before what it was made from
    execute(catalog_url, "ALTER TABLE stream DROP COLUMN sink_offset", "ALTER TABLE output DROP COLUMN sink_id")
    with pytest.raises(UsageError, match=rf"revision {REVISION} but lacks some of its columns.*{ADVICE}"):
        open_catalog(catalog_url)
    done = upgrade_catalog(catalog_url, tmp_path)
    assert sorted(done.rebuilt) == ["output lacks sink_id", "stream lacks sink_offset"]
    with open_catalog(catalog_url, create=False) as catalog:
        assert [s.name for s in catalog.streams.list()] == ["a-branch-of-it", "branch", "flights"]
        assert catalog.checkpoints.last_id("a-branch-of-it") == 1
    execute(catalog_url, "ALTER TABLE checkpoint DROP COLUMN digest")
    with pytest.raises(UsageError, match="without loss: checkpoint lacks digest"):
        upgrade_catalog(catalog_url, tmp_path)


def test_done_again_an_upgrade_does_nothing(catalog_url: str, tmp_path: Path) -> None:
    make_shape(catalog_url, "8595e15")
    first = upgrade_catalog(catalog_url, tmp_path)
    assert [str(path) for path in backups(tmp_path)] == [first.backup and first.backup.file]
    again = upgrade_catalog(catalog_url, tmp_path)
    assert (again.before, again.after, again.backup) == (REVISION, REVISION, None)
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


@pytest.mark.slow
def test_a_run_that_may_live_is_waited_for_and_a_dead_one_fenced(catalog_url: str, tmp_path: Path) -> None:
    make_shape(catalog_url, "8595e15")
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
    assert revision_of(catalog_url) == "0001" and backups(tmp_path) == []
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


def test_a_lease_that_lives_is_waited_for(catalog_url: str, tmp_path: Path) -> None:
    make_shape(catalog_url, "8595e15")
    columns = "id, stream, first, last, who, taken_at, expires_at"
    execute(
        catalog_url,
        f"INSERT INTO lease ({columns}) VALUES ('a', 'flights', 1, 1, 'over', '{NOON:%F %T.%f}', '{NOON:%F %T.%f}')",
        f"INSERT INTO lease ({columns}) VALUES ('b', 'flights', 1, 1, 'elsewhere:7 verifies', "
        f"'{NOON:%F %T.%f}', '2913-01-01 12:34:56.000000')",
    )
    with pytest.raises(UsageError, match=r"elsewhere:7 verifies on stream flights \(its lease ends at 12:34:56"):
        upgrade_catalog(catalog_url, tmp_path)
    assert upgrade_catalog(catalog_url, tmp_path, fence=True).after == REVISION


def test_two_processes_upgrade_once(catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second looks before the first has the lock, and goes on after it has ended."""
    make_shape(catalog_url, "8595e15")
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
def test_killed_anywhere_it_is_the_old_catalog_or_the_new_one_and_goes_on(catalog_url: str, tmp_path: Path) -> None:
    make_shape(catalog_url, "3c5218b")
    for known in ("0001", REVISION):
        tables_made_by(known)  # so that every statement at which it dies is one on the catalog or its backup
    kills, at, step = 0, 1, 41
    while (ended := killed_at(lambda: upgrade_catalog(catalog_url, tmp_path), at)) == -signal.SIGKILL:
        kills += 1
        assert revision_of(catalog_url) == "0001"
        with pytest.raises(UsageError, match="older Siltstone"):
            open_catalog(catalog_url)
        at += step
    assert kills > 5 and ended < at
    with open_catalog(catalog_url) as catalog:
        assert len(catalog.checkpoints.list("flights")) == 2
        assert [s.sources for s in catalog.input_log.list("flights", 2)] == ["{}", FILES]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["commit", "checkin"])
def test_killed_right_before_and_right_after_its_commit(catalog_url: str, tmp_path: Path, moment: str) -> None:
    make_shape(catalog_url, "8595e15")
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
    assert revision_of(catalog_url) == ("0001" if moment == "commit" else REVISION)
    assert (upgrade_catalog(catalog_url, tmp_path).backup is None) == (moment == "checkin")
