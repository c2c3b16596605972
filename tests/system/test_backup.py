"""docs/backup.md from the command line: run, back up, run on, lose the catalog, bring it back, and run on."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import URL, create_engine, text

from tests.command_line import CONFIGURATION, siltstone
from tests.pages import blocks
from tests.postgres_server import postgres_server


def documented() -> list[list[str]]:
    """The commands of the page, in order."""
    text = "\n".join(block.text for block in blocks("docs/backup.md"))
    return [line.split()[1:] for line in re.findall(r"^(siltstone .*)$", text, re.MULTILINE)]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def catalogs(request: pytest.FixtureRequest) -> Iterator[tuple[str | None, str | None]]:
    """The catalog's URL (None: inside the warehouse), and that of where it comes back to."""
    if request.param == "sqlite":
        yield None, None
        return
    with postgres_server() as url:
        yield schema(url, "first"), schema(url, "second")


def schema(server: URL, name: str) -> str:
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    return server.update_query_dict({"options": f"-csearch_path={name}"}).render_as_string(hide_password=False)


def test_a_lost_catalog_comes_back_from_a_backup_and_the_stream_goes_on(
    spark: SparkSession, catalogs: tuple[str | None, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "siltstone.toml").write_text(CONFIGURATION)
    first, second = catalogs
    if first is not None:
        monkeypatch.setenv("SILTSTONE_CATALOG", first)
    backup, restore, *recovery = [
        [part.replace("/backups", str(tmp_path)).replace("flights", "little") for part in command]
        for command in documented()
    ]
    assert siltstone("run", "little", "--batches", 2).code == 0
    assert siltstone(*backup, "--json").json["rows"] > 0
    assert siltstone("run", "little", "--batches", 2).code == 0
    before = siltstone("checkpoints", "little", "--json").json["checkpoints"]
    if second is None:
        siltstone(*restore).failed(2, "a catalog exists already", "catalog.db", "away first")
        for path in (tmp_path / "w").glob("catalog.db*"):
            path.unlink()
    else:
        siltstone(*restore).failed(2, "already, and was not changed: name an empty database or schema")
        monkeypatch.setenv("SILTSTONE_CATALOG", second)
    assert siltstone(*restore).code == 0
    siltstone("sweep", "little").failed(2, "older than the store", "Run the stream")
    run, verify = recovery
    ran = siltstone(*run, "--json").json
    assert ran["stream"] == "little"
    verified = siltstone(*verify, "--json").json
    assert verified["failed"] == [] and len(verified["proven"]) >= 6
    after = {c["id"]: c["digest"] for c in siltstone("checkpoints", "little", "--json").json["checkpoints"]}
    assert [after[c["id"]] for c in before] == [c["digest"] for c in before], "what the backup did not know came back"
