"""Catalogs that are not there, cannot be reached, or may not be written."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, make_url, text

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.steps import Step
from siltstone.errors import Unreachable, UsageError
from siltstone.model import Form, StoredObject
from tests.catalog_cases import commit_one

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def new_catalogs() -> None:
    """Made by Alembic, as everywhere but in tests."""


def test_without_create_nothing_is_made(catalog_url: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"no catalog at .*: run a stream first, or check --warehouse"):
        open_catalog(catalog_url, create=False)
    assert sorted(tmp_path.rglob("*")) == before
    with open_catalog(catalog_url) as catalog:
        commit_one(catalog)
    before = sorted(tmp_path.rglob("*"))
    with open_catalog(catalog_url, create=False) as catalog:
        assert catalog.checkpoints.last_id("flights") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_held_lock_ends_in_bounded_time(catalog_url: str) -> None:
    with open_catalog(catalog_url) as catalog:
        commit_one(catalog)
    holder = create_engine(make_url(catalog_url), isolation_level="AUTOCOMMIT")
    with open_catalog(catalog_url, timeout_s=0.3, outage_s=0) as catalog, holder.connect() as held:
        held.execute(text("BEGIN"))
        held.execute(text("UPDATE stream SET epoch = epoch"))
        with pytest.raises(Unreachable, match="lock"):
            catalog.runs.begin("flights", "waiting")
        assert catalog.checkpoints.last_id("flights") == 1  # readers do not wait
        held.execute(text("ROLLBACK"))
        assert catalog.runs.begin("flights", "free") == 2
    holder.dispose()


@pytest.mark.server
def test_a_server_that_is_away_is_unreachable_and_its_password_unseen() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        for query in ("", "?sslpassword=s3cret&password=s3cret"):
            url = f"postgresql://me:s3cret@127.0.0.1:{port}/catalog{query}"
            with pytest.raises(Unreachable, match=f"127.0.0.1:{port}/catalog.*check that the server") as caught:
                open_catalog(url)
            assert "s3cret" not in str(caught.value) and "\n" not in str(caught.value)
            assert caught.value.exit_code == 3


@pytest.mark.server
def test_a_server_that_never_answers_is_unreachable_in_bounded_time() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(Unreachable, match="timeout"):
            open_catalog(f"postgresql://me@127.0.0.1:{listener.getsockname()[1]}/catalog", timeout_s=1)


def test_a_host_that_does_not_exist_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="cannot use the catalog"):
        open_catalog("postgresql://me@no-such-host.invalid/catalog", timeout_s=2)


def test_a_connection_that_broke_is_made_anew(postgres: URL) -> None:
    with open_catalog(postgres.render_as_string(hide_password=False)) as catalog:
        catalog.streams.list()
        with create_engine(postgres).connect() as admin:
            admin.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"))
        assert catalog.streams.list() == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "warehouse",
        "mysql://h/db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///a.db?mode=memory",
        "sqlite:///file:a.db",
        "postgresql+asyncpg://h/db",
        "postgresql://u:s3cret@h:port/db",
    ],
)
def test_a_url_of_another_kind_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(UsageError, match="sqlite:///PATH or postgresql://") as caught:
        open_catalog(url)
    assert "s3cret" not in str(caught.value)


def test_a_path_that_cannot_be_a_catalog_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for path in (tmp_path, tmp_path / "missing" / "catalog.db", tmp_path / "file" / "catalog.db"):
        with pytest.raises(UsageError, match="cannot keep a catalog at"):
            open_catalog(f"sqlite:///{path}")
    assert [p.name for p in tmp_path.rglob("*")] == ["file"]


@pytest.mark.parametrize("content", [b"this is text, not a database" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
@pytest.mark.parametrize("create", [True, False])
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, content: bytes, create: bool) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(content)
    with pytest.raises(Unreachable, match=r"catalog\.db.*check that it is a Siltstone catalog"):
        open_catalog(f"sqlite:///{path}", create=create)
    assert path.read_bytes() == content


def test_a_path_with_odd_characters_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a b%20c#d&é.db"
    with open_catalog(f"sqlite:///{path}") as catalog:
        catalog.streams.register("flights", 128, {})
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with open_catalog(f"sqlite:///{path}", create=False) as catalog:
        assert len(catalog.streams.list()) == 1


def test_sqlite_commits_are_durable_and_keys_are_kept(tmp_path: Path) -> None:
    with (
        open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog,
        catalog.transactions.writer.connect() as connection,
    ):
        pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas]
    assert found == ["wal", 2, 1, 10_000]


READER = """
import os, sqlite3, sys
import sqlalchemy.dialects.sqlite
from siltstone.catalog.open import open_catalog
from siltstone.errors import Unreachable
if os.geteuid() == 0:  # file permissions bind everyone but root
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
with open_catalog(sys.argv[1], create=False) as catalog:
    assert catalog.checkpoints.last_id("flights") == 1
    try:
        catalog.runs.begin("flights", "reader")
    except Unreachable as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("left_by_a_crash", [False, True])
def test_a_read_only_warehouse_can_be_read_and_says_why_it_cannot_be_written(
    tmp_path: Path, left_by_a_crash: bool
) -> None:
    warehouse = tmp_path / "warehouse"
    warehouse.mkdir()
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        commit_one(catalog)
        if left_by_a_crash:
            for file in tmp_path.glob("catalog.db*"):
                shutil.copy(file, warehouse)
    if not left_by_a_crash:
        shutil.copy(tmp_path / "catalog.db", warehouse)
    names = sorted(file.name for file in warehouse.iterdir())
    assert len(names) == (3 if left_by_a_crash else 1)
    for parent in tmp_path.parents:
        if os.geteuid() == 0 and parent.stat().st_mode & 0o055 != 0o055:
            parent.chmod(0o755)  # pytest's own are private to root
    for file in warehouse.iterdir():
        file.chmod(0o444)
    tmp_path.chmod(0o755)
    warehouse.chmod(0o555)
    command = [sys.executable, "-c", READER, f"sqlite:///{warehouse}/catalog.db"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    warehouse.chmod(0o755)
    assert said.returncode == 0, said.stderr
    assert "readonly database" in said.stdout and "is writable" in said.stdout
    assert sorted(file.name for file in warehouse.iterdir()) == names


def test_a_full_disk_is_unreachable_and_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/catalog.db"
    with open_catalog(url) as catalog:
        commit_one(catalog)
        with catalog.transactions.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        manifest = StoredObject("flights/1/2/manifest.arrow", 1, "xxh3-128:" + "0" * 32)
        steps = [Step(n, n, os.urandom(5_000).hex()) for n in range(2, 50)]
        big = CheckpointCommit(2, manifest, "0" * 32, 1, 1, {"a": Form.BASE}, details=CommitDetails(steps))
        with pytest.raises(Unreachable, match=r"full.*has space left"):
            catalog.commits.add("flights", 1, big)
        assert catalog.checkpoints.last_id("flights") == 1
        assert len(catalog.objects.list("flights")) == len(catalog.input_log.list("flights", 9)) == 1


def test_a_damaged_page_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    with open_catalog(f"sqlite:///{path}") as catalog:
        commit_one(catalog)
    with sqlite3.connect(path) as raw:
        page = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = 'checkpoint'").fetchone()[0]
        size = raw.execute("PRAGMA page_size").fetchone()[0]
    raw.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    with (
        open_catalog(f"sqlite:///{path}", create=False) as catalog,
        pytest.raises(Unreachable, match="malformed"),
    ):
        catalog.checkpoints.get_latest("flights")
