"""Mistakes at the commands of the life cycle, without Spark: one clear line, the right exit code, nothing changed."""

from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.database import tables
from siltstone.catalog.records.deletions import Deletions
from siltstone.catalog.records.savepoints import Savepoints
from siltstone.catalog.warehouse import OpenWarehouse
from tests.command_line import Ended, siltstone
from tests.orphans import NAME, filesystem, inject, write
from tests.stored import stream_objects


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stream sums with five checkpoints, a run, a savepoint and orphans; and stream idle, which has none."""
    path = tmp_path_factory.mktemp("mistakes")
    with filesystem(path) as place:
        write(place)
        inject(place)
        place.catalog.savepoints.add(NAME, 2, "kept", 2)
        place.catalog.streams.register("idle", 4, {})
    return path / "w"


def contents(warehouse: Path) -> tuple[Any, ...]:
    """Every row and every object."""
    with (
        OpenWarehouse.open_existing(str(warehouse)) as place,
        place.catalog.transactions.engine.connect() as connection,
    ):
        rows = [tuple(connection.execute(table.select()).all()) for table in tables.METADATA.sorted_tables]
        return rows, sorted(stream_objects(place.warehouse.store)), sorted(warehouse.rglob("*.parquet"))


def mistaken(warehouse: Path, line: str) -> Ended:
    return siltstone(*line.split(), "--warehouse", warehouse)


EMPTY = "stream idle: it has none yet, run it first"
NONE = "no stream 'nosuch' in this catalog: it has idle, sums"
MISTAKES: list[tuple[str, str]] = [
    *((f"{command} nosuch", NONE) for command in ("materialize", "sweep", "sweep --dry-run", "restore", "verify")),
    *((f"{command} idle", EMPTY) for command in ("materialize", "sweep", "sweep --incomplete", "restore", "verify")),
    *((f"{command} ../x", "'../x'") for command in ("materialize", "sweep", "savepoints")),
    ("delete ../x 1", "'../x'"),
    ("savepoint ../x new", "'../x'"),
    ("delete nosuch 1", NONE),
    ("delete idle 1", EMPTY),
    ("delete sums 5", "checkpoint 5 of stream sums is its newest"),
    ("delete sums 6", "no checkpoint 6 of stream sums: it has 5, 1 to 5"),
    ("delete sums 1 0", "no checkpoint 0 of stream sums"),
    ("materialize sums --operator ../x", "has no operator '../x': it has by_key"),
    ("materialize sums --at 6", "no checkpoint 6 of stream sums"),
    ("materialize sums --at ../x", "'../x' is not a checkpoint: use latest"),
    ("materialize sums --parallelism 5", "parallelism is 5: use 1 to max_parallelism 4"),
    ("materialize sums --parallelism 0", "parallelism"),
    ("restore sums --parallelism 5", "parallelism is 5: use 1 to max_parallelism 4"),
    ("restore sums --parallelism 5 --to out", "parallelism is 5: use 1 to max_parallelism 4"),
    ("restore sums --at ../x", "'../x' is not a checkpoint: use latest"),
    ("sweep sums --limit 0", "--limit"),
    ("sweep sums --age-guard soon", "'soon' is not a length of time"),
    ("truncate sums --keep-last 0", "keep none of 5 checkpoints"),
    ("savepoint sums kept", "has a savepoint kept already, of checkpoint 2"),
    ("savepoint sums ../x", "'../x' is not a savepoint name"),
    ("savepoint sums new --at ../x", "'../x' is not a checkpoint: use latest"),
]


@pytest.mark.slow
def test_a_mistake_is_one_line_and_changes_nothing(
    warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(warehouse)
    for line, said in MISTAKES:
        mistaken(warehouse, line).failed(2, said)
        assert contents(warehouse) == before, line
        assert not list(tmp_path.iterdir()), line


OVERTAKEN = [
    ("truncate sums --keep-last 1", Deletions, "mark"),
    ("delete sums 1", Deletions, "mark"),
    ("savepoint sums new", Savepoints, "add"),
    ("savepoint sums kept --drop", Savepoints, "drop"),
]


@pytest.mark.parametrize(("line", "part", "call"), OVERTAKEN)
@pytest.mark.slow
def test_a_command_that_a_new_run_overtakes_ends_fenced_and_changes_nothing(
    line: str, part: type, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filesystem(tmp_path) as place:
        write(place)
        place.catalog.savepoints.add(NAME, 2, "kept", 2)
    guarded = getattr(part, call)
    before: list[Any] = []

    def overtaken(self: object, stream: str, *rest: Any, **named: Any) -> Any:
        with OpenWarehouse.open_existing(str(tmp_path / "w")) as place:
            place.catalog.runs.begin(stream, "a new run")
        before.append(contents(tmp_path / "w"))
        return guarded(self, stream, *rest, **named)

    monkeypatch.setattr(part, call, overtaken)
    mistaken(tmp_path / "w", line).failed(4, "writer epoch 2 of stream sums was fenced by epoch 3")
    assert before == [contents(tmp_path / "w")]
