"""Replays of the input log inside Spark: what ran unevenly, was stopped or was given up comes again just as it was."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import SiltstoneError
from siltstone.run.region import Completed
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, run
from tests.command_line import CONFIGURATION, plain, siltstone
from tests.fault.small_stream import purchases
from tests.spark_streams import UNEVEN, write_files

FILES = 7


@pytest.fixture(scope="module")
def project(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream whose boundaries follow from what happened: files arrived between runs, and a run failed.

    Left to itself Spark would make micro-batches of 2, 2, 2 and 1 files. They are of

        2  1 |1   2 |2   2 |3, with a step of its own since that run ended before it was due
    """
    path = tmp_path_factory.mktemp("project")
    (path / "siltstone.toml").write_text(CONFIGURATION)

    def settings(steps: int) -> Settings:
        return Settings(warehouse=str(path / "w"), parallelism=2, checkpoint_steps=steps)

    def fail(completed: Completed) -> None:
        raise ZeroDivisionError(f"checkpoint {completed.id}")

    arrive(path, 3)
    run(settings(2), UNEVEN, RunRequest())
    arrive(path, 6)
    with pytest.raises(SiltstoneError, match="checkpoint 2"):
        run(settings(1), UNEVEN, RunRequest(), fail)
    arrive(path, 7)
    assert run(settings(2), UNEVEN, RunRequest()).checkpoints == [3]
    with OpenWarehouse.open_existing(str(path / "w")) as place:
        assert [(s.checkpoint, s.step) for s in place.catalog.input_log.list("uneven", 3)] == [
            (1, 1),
            (1, 2),
            (2, 3),
            (3, 4),
            (3, 5),
        ]
    return path


@pytest.fixture(autouse=True)
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def arrive(path: Path, files: int) -> None:
    write_files(path / "w" / "source" / "uneven", purchases()[:files])


def digests() -> dict[int, str]:
    with OpenWarehouse.open_existing("w") as place:
        return {c.id: c.digest for c in place.catalog.checkpoints.list("uneven")}


def everything() -> tuple[object, ...]:
    """All that a replay must leave alone."""
    files = {p: p.stat().st_mtime_ns for p in Path("w").rglob("*") if not p.name.startswith("catalog.db")}
    with OpenWarehouse.open_existing("w") as place:
        return files, digests(), place.catalog.streams.get("uneven"), place.catalog.runs.list("uneven")


def test_a_replay_from_the_start_comes_to_every_recorded_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = everything()
    found = siltstone("replay", "uneven", "--to", "latest", "--json").json
    assert found.pop("seconds") > 0
    assert found == {
        "stream": "uneven",
        "checkpoint": 3,
        "from": 0,
        "why": "",
        "steps": 5,
        "rows": FILES * 300,
        "digest": digests()[3],
        "proven": True,
        "compared": 3,
    }
    assert everything() == before
    assert not list(tmp_path.iterdir())


def test_a_replay_from_a_checkpoint_at_another_parallelism(project: Path) -> None:
    [line] = plain(siltstone("replay", "uneven", "--from", 1, "--to", 3, "--parallelism", 3))
    assert line.startswith("uneven: checkpoint 3 replayed from checkpoint 1: 3 steps, 1,200 rows, ")
    assert line.endswith(f" s, as recorded at 2 checkpoints, digest {digests()[3]}")


@contextmanager
def recorded_as(digest: str, checkpoint: int) -> Iterator[None]:
    """The catalog, tampered with."""
    true = digests()[checkpoint]
    for value in (digest, true):
        with sqlite3.connect("w/catalog.db") as database:
            database.execute("update checkpoint set digest = ? where id = ?", (value, checkpoint))
        database.close()
        if value == digest:
            yield


def test_an_altered_record_is_noticed() -> None:
    with recorded_as("0" * 32, 1):
        siltstone("replay", "uneven", "--to", 2).failed(1, "checkpoint 1 of uneven", f"the recorded {'0' * 32}")


@contextmanager
def another(table: pa.Table, file: Path) -> Iterator[None]:
    """A source file with other content, as old as it was."""
    kept, old = file.read_bytes(), file.stat().st_mtime
    pq.write_table(table, file)
    os.utime(file, (old, old))
    try:
        yield
    finally:
        file.write_bytes(kept)
        os.utime(file, (old, old))


def test_an_altered_source_row_is_noticed(project: Path) -> None:
    rows = purchases()[3]
    # Large, whatever the source adds to it: so it is in the list of its place.
    amounts = [rows.column("amount")[0].as_py() + 100, *rows.column("amount").to_pylist()[1:]]
    altered = rows.set_column(rows.schema.get_field_index("amount"), "amount", pa.array(amounts, pa.int64()))
    with another(altered, project / "w/source/uneven/00003.parquet"):
        siltstone("replay", "uneven", "--from", 1).failed(
            1, "uneven cannot be replayed: step 3 is run again", "00003.parquet has ", " bytes, and had "
        )


def test_source_data_that_are_gone_are_named(project: Path) -> None:
    file = project / "w/source/uneven/00005.parquet"
    moved = file.rename(project / "kept")
    try:
        before = everything()
        siltstone("replay", "uneven", "--from", 2).failed(
            1, "uneven cannot be replayed: source data of step 4 are missing", "00005.parquet"
        )
        assert everything() == before
    finally:
        moved.rename(file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["uneven", "--to", 9], "no checkpoint 9"),
        (["uneven", "--to", "nonsense"], "'nonsense' is not a checkpoint"),
        (["uneven", "--from", "garbage"], "'garbage' is not a checkpoint: use latest, an id"),
        (["uneven", "--from", -1], "'-1' is not a checkpoint"),
        (["uneven", "--from", 3, "--to", 2], "checkpoint 3 of uneven is not before 2"),
        (["uneven", "--from", "latest"], "checkpoint 3 of uneven is not before 3"),
        (["uneven", "--parallelism", 1000], "parallelism is 1000: use 1 to"),
        (["uneven", "--to"], "--to"),
        (["counts"], "counts"),
        (["neverheard"], "no stream 'neverheard' is defined"),
    ],
)
def test_bad_input(arguments: list[object], said: str) -> None:
    before = everything()
    siltstone("replay", *arguments).failed(2, said)
    assert everything() == before


def test_a_run_makes_checkpoints_that_were_given_up_again(project: Path) -> None:
    """With the boundaries they had, not those that it would have made, before it goes on."""
    recorded, sink = digests(), sink_rows()
    with OpenWarehouse.open_existing("w") as place:
        epoch = place.catalog.runs.begin("uneven", "a test")
        place.catalog.rollbacks.roll_back("uneven", epoch, 0, "a test", "a test")
        assert digests() == {}
    first = siltstone("run", "uneven", "--batches", 1, "--json").json
    assert first["checkpoints"] == [1]  # a checkpoint of two steps is no shorter
    arrive(project, 8)
    second = siltstone("run", "uneven", "--json").json
    assert second["checkpoints"] == [2, 3, 4]
    found = digests()
    assert {id: found[id] for id in recorded} == recorded
    assert sink_rows()[: len(sink)] == sink and len(sink_rows()) == 8 * 300
    assert siltstone("replay", "uneven", "--json").json["compared"] == 4


def sink_rows() -> list[dict[str, object]]:
    return pq.read_table("w/sink/uneven/accounts").sort_by("sequence").to_pylist()
