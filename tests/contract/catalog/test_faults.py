"""A catalog whose process dies, whose server is away, or whose tables are another version's."""

import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from siltstone.catalog.database import upgrade
from siltstone.catalog.database.tables import METADATA, REVISION, REVISION_TABLE
from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.errors import UsageError
from siltstone.model import Form, StoredObject
from tests.catalog_cases import commit_one
from tests.killed_child import prepared_and_killed_at

ROOT = Path(__file__).parents[3]
"""where Python finds siltstone, in a process of its own too"""

COMMITTER = "import sys; from tests.contract.catalog.test_faults import commit_on; commit_on(sys.argv[1])"


def take_over(url: str) -> tuple[Catalog, int]:
    """Open the catalog and begin an epoch with a checkpoint; return both."""
    catalog = open_catalog(url)
    catalog.streams.register("flights", 128, {})
    epoch = catalog.runs.begin("flights", "child")
    catalog.commits.add("flights", epoch, next_commit(catalog, epoch))
    return catalog, epoch


def next_commit(catalog: Catalog, epoch: int) -> CheckpointCommit:
    """Make the commit of the next checkpoint."""
    id = catalog.checkpoints.last_id("flights") + 1

    def stored(file: str) -> StoredObject:
        return StoredObject(f"flights/{epoch:08d}/{id:012d}/{file}", id, "xxh3-128:" + "0" * 32)

    segments, steps = [stored(f"{n}.segment") for n in range(5)], [Step(id, id - 1, "x" * 5000)]
    forms, manifest = {"aircraft": Form.DELTA}, stored("manifest.arrow")
    details = CommitDetails(steps)
    return CheckpointCommit(id, manifest, "0" * 32, id, id, forms, segments=segments, oldest_needed=1, details=details)


def commit_on(url: str) -> None:
    """Commit checkpoint after checkpoint, and print the id of each that is acknowledged."""
    catalog, epoch = take_over(url)
    while True:
        print(catalog.checkpoints.last_id("flights"), flush=True)
        catalog.commits.add("flights", epoch, next_commit(catalog, epoch))


@pytest.fixture(scope="module", autouse=True)
def new_catalogs() -> None:
    """Made by Alembic, as everywhere but in tests."""


def committer(url: str) -> subprocess.Popen[str]:
    """A process that commits checkpoints and prints each acknowledged id."""
    return subprocess.Popen([sys.executable, "-c", COMMITTER, url], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def check_whole(catalog: Catalog, last: int) -> None:
    """Checkpoints 1 to `last` are there with all they refer to, and nothing else is."""
    assert [c.id for c in catalog.checkpoints.list("flights")] == list(range(1, last + 1))
    assert [o.checkpoint for o in catalog.objects.list("flights")] == [i for i in range(1, last + 1) for _ in range(6)]
    assert [(s.step, s.checkpoint) for s in catalog.input_log.list("flights", 2**40)] == [
        (i, i) for i in range(1, last + 1)
    ]
    if last:
        assert catalog.chains.list_checkpoints("flights", last) == list(range(1, last + 1))


@pytest.mark.slow
def test_a_process_killed_at_any_statement_of_a_commit_leaves_nothing_of_it(catalog_url: str) -> None:
    open_catalog(catalog_url).close()

    def prepare() -> tuple[Catalog, int, CheckpointCommit]:
        catalog, epoch = take_over(catalog_url)
        return catalog, epoch, next_commit(catalog, epoch)

    had, moment, last = -signal.SIGKILL, 0, 0
    while had == -signal.SIGKILL:
        moment += 1
        had = prepared_and_killed_at(prepare, lambda made: made[0].commits.add("flights", made[1], made[2]), moment)
        last += 1 if had == -signal.SIGKILL else 2
        with open_catalog(catalog_url, create=False) as catalog:
            check_whole(catalog, last)
    # SQLite's BEGIN; PostgreSQL's receipt and time; hold, newest, log, checkpoint, deleted names, objects, step, what
    # is no longer needed, manifests, commit
    assert moment - 1 == had == (11 if catalog_url.startswith("sqlite") else 12)


@pytest.mark.slow
def test_a_process_killed_at_random_leaves_what_it_was_told_and_at_most_one_more(catalog_url: str) -> None:
    moments = random.Random(20130704)
    acknowledged = 0
    for _ in range(3):
        child = committer(catalog_url)
        assert child.stdout is not None
        first = int(child.stdout.readline())
        time.sleep(moments.uniform(0.01, 0.15))
        child.kill()
        acknowledged = int(["", str(first), *child.communicate()[0].split()][-1])
        with open_catalog(catalog_url, create=False) as catalog:
            last = catalog.checkpoints.last_id("flights")
            assert acknowledged <= last <= acknowledged + 1
            check_whole(catalog, last)


# Versions


def test_migrations_make_the_tables_that_the_code_uses(catalog_url: str) -> None:
    with open_catalog(catalog_url) as catalog, catalog.transactions.engine.connect() as connection:
        options = {"version_table": REVISION_TABLE, "compare_type": True}
        assert ScriptDirectory(str(upgrade.MIGRATIONS)).get_current_head() == REVISION
        assert compare_metadata(MigrationContext.configure(connection, opts=options), METADATA) == []


def test_a_newer_catalog_is_refused_and_left_as_it_is(catalog_url: str) -> None:
    with open_catalog(catalog_url) as catalog:
        commit_one(catalog)
        before = catalog.checkpoints.list("flights")
        with catalog.transactions.writer.begin() as connection:
            connection.execute(text(f"UPDATE {REVISION_TABLE} SET version_num = '9999'"))
    for create in (True, False):
        with pytest.raises(UsageError, match=r"newer Siltstone \(revision 9999\): upgrade siltstone"):
            open_catalog(catalog_url, create=create)
    with catalog.transactions.writer.begin() as connection:
        connection.execute(text(f"UPDATE {REVISION_TABLE} SET version_num = '{REVISION}'"))
    with open_catalog(catalog_url, create=False) as catalog:
        assert catalog.checkpoints.list("flights") == before


@pytest.mark.slow
def test_many_processes_may_create_one_catalog(catalog_url: str) -> None:
    code = "import sys; from siltstone.catalog.open import open_catalog; open_catalog(sys.argv[1]).streams.list()"
    children = [subprocess.Popen([sys.executable, "-c", code, catalog_url], cwd=ROOT) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4


@pytest.mark.slow
def test_many_threads_may_create_catalogs(catalog_url: str, tmp_path: Path) -> None:
    urls = [*[catalog_url] * 4, *[f"sqlite:///{tmp_path}/{n}.db" for n in range(8)]]
    start = threading.Barrier(len(urls), timeout=60)

    def create(url: str) -> int:
        start.wait()
        with open_catalog(url) as catalog:
            return len(catalog.streams.list())

    with ThreadPoolExecutor(len(urls)) as pool:
        assert list(pool.map(create, urls)) == [0] * len(urls)
