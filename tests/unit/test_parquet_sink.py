"""The Parquet sink: a checkpoint's rows are in sight once, whoever delivers them and how often."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siltstone.sinks.parquet import ParquetSink
from tests.fault.victims import Frame


def rows(*numbers: int) -> Any:
    return Frame(pa.table({"n": numbers}))


def delivered(path: Path) -> dict[int, list[int]]:
    sink = ParquetSink(path)
    return {id: pq.read_table(sink.published_path(id)).column("n").to_pylist() for id in sorted(sink.list_published())}


def left(path: Path) -> list[str]:
    return [each.name for each in (path / "_staged").iterdir()]


def test_a_parquet_sink_takes_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("one", Path("two"), tmp_path / "three", str(tmp_path / "four five")):
        ParquetSink(path).deliver(rows(1, 2), 3)
        assert delivered(Path(path)) == {3: [1, 2]} and left(Path(path)) == []


def test_delivered_twice_is_delivered_once(tmp_path: Path) -> None:
    for _ in range(2):
        ParquetSink(tmp_path).deliver(rows(1), 1)
    assert delivered(tmp_path) == {1: [1]} and left(tmp_path) == []


def test_killed_while_it_writes_it_shows_nothing_and_the_next_attempt_shows_all(tmp_path: Path) -> None:
    class Killed(Frame):
        def parquet(self, url: str) -> None:
            super().parquet(url)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ParquetSink(tmp_path).deliver(Killed(pa.table({"n": [1]})), 1)  # pyright: ignore[reportArgumentType]
    assert delivered(tmp_path) == {} and len(left(tmp_path)) == 1
    ParquetSink(tmp_path).deliver(rows(1), 1)
    assert delivered(tmp_path) == {1: [1]} and left(tmp_path) == []


def test_a_slow_starter_neither_deletes_nor_replaces_what_the_newer_writer_staged(tmp_path: Path) -> None:
    """It was frozen while it wrote; the newer writer has delivered that checkpoint and is at the next one."""
    newest = tmp_path / "_staged" / f"{2:012d}-newer"

    class Frozen(Frame):
        def parquet(self, url: str) -> None:
            ParquetSink(tmp_path).deliver(rows(1), 1)
            newest.mkdir()
            super().parquet(url)

    ParquetSink(tmp_path).deliver(Frozen(pa.table({"n": [1]})), 1)  # pyright: ignore[reportArgumentType]
    assert delivered(tmp_path) == {1: [1]} and left(tmp_path) == [newest.name]


def test_a_write_that_fails_is_told_of_unless_the_rows_are_in_sight(tmp_path: Path) -> None:
    class Failing(Frame):
        def parquet(self, url: str) -> None:
            raise OSError("no space left")

    broken: Any = Failing(pa.table({"n": [1]}))
    with pytest.raises(OSError, match="no space"):
        ParquetSink(tmp_path).deliver(broken, 1)
    ParquetSink(tmp_path).deliver(rows(1), 1)
    ParquetSink(tmp_path).deliver(broken, 1)
    assert delivered(tmp_path) == {1: [1]}
