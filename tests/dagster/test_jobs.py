"""The jobs as a cluster runs them: their command lines, their exit codes, and `spark-submit`."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest

REPOSITORY = Path(__file__).parents[2]
STREAMS = '["tests.fault.small_stream"]'

Job = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Job:
    """Runs a job's command line here: exit code, the JSON object it printed, what it told people."""
    monkeypatch.setenv("SILTSTONE_STREAMS", STREAMS)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(name: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["job", *arguments, "--warehouse", str(tmp_path / "warehouse")])
        code = 0
        try:
            runpy.run_path(str(REPOSITORY / "jobs" / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else {}, printed.err

    return run


@pytest.mark.usefixtures("spark")
def test_each_job_prints_one_json_object(job: Job, tmp_path: Path) -> None:
    code, ran, _ = job("run_stream", "small", "--batches", "2", "--parallelism", "2")
    assert (code, ran["checkpoints"], ran["rows"]) == (0, [1, 2], 600)
    code, taken, _ = job("take_snapshot", "small")
    assert (code, taken["checkpoint"]) == (0, 2)
    code, verified, _ = job("verify_checkpoints", "small", "--deep")
    assert (code, verified["proven"], verified["failed"]) == (0, [1, 2], [])
    code, series, _ = job("restore_series", "small", "monday=1", "tuesday=2", "wednesday=2")
    assert (code, series["failed"], series["kept"]) == (0, [], [])
    assert [(label["label"], label["checkpoint"]) for label in series["restored"]] == [
        ("monday", 1),
        ("tuesday", 2),
        ("wednesday", 2),
    ]
    root = tmp_path / "warehouse" / "restored" / "small" / "series"
    assert series["root"] == str(root) and {path.name for path in root.iterdir()} == {"monday", "tuesday", "wednesday"}
    code, series, _ = job("restore_series", "small", "monday=1")
    assert (code, series["restored"], [label["label"] for label in series["kept"]]) == (0, [], ["monday"])

    code, made, _ = job("materialize", "small", "--operator", "daily", "--at", "2")
    assert (code, made["checkpoint"], [m["operator"] for m in made["operators"]]) == (0, 2, ["daily"])
    code, made, _ = job("materialize", "small", "--due")
    assert (code, made["operators"], made["triggers"]) == (0, [], {})
    lost = tmp_path / "warehouse" / "objects" / "small" / "00000001" / "000000000001" / "lost.segment"
    lost.write_bytes(b"nothing refers to this")
    code, swept, _ = job("sweep", "small", "--dry-run")
    assert (code, swept["found"], swept["deleted"]) == (0, 1, 0)
    code, swept, _ = job("sweep", "small", "--limit", "5")
    assert (code, swept["deleted"], lost.exists()) == (0, 1, False)
    code, truncated, _ = job("truncate", "small", "--dry-run")
    assert (code, truncated["dry_run"]) == (0, True)
    code, recovered, _ = job("recover", "small")
    assert (code, recovered["failures"]) == (0, [])

    (segment, *_) = (tmp_path / "warehouse" / "objects" / "small").rglob("*.segment")
    segment.unlink()
    code, verified, _ = job("verify_checkpoints", "small")
    assert code == 1
    assert segment.name in verified["failed"][0]["object"]
    code, recovered, _ = job("recover", "small", "--dry-run")
    assert code == 0 and segment.name in str(recovered["failures"])
    code, series, _ = job("restore_series", "small", "thursday=2")
    assert (code, [failure["checkpoint"] for failure in series["failed"]]) == (1, [2])


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("run_stream", ["nosuch"], "no stream 'nosuch' is defined (defined: small)"),
        ("run_stream", ["small", "--batches", "0"], "greater than or equal to 1"),
        ("restore_series", ["small", "monday=1"], "no warehouse at"),
        ("restore_series", ["small", "monday"], "write it as LABEL=ID"),
        ("materialize", ["small", "--due"], "no warehouse at"),
        ("truncate", ["small"], "no warehouse at"),
        ("sweep", ["small", "--limit", "few"], "valid integer"),
        ("recover", ["small"], "no warehouse at"),
        ("take_snapshot", ["small", "--parallelism", "0"], "No such option"),
        ("verify_checkpoints", [], "Missing argument 'STREAM'"),
    ],
)
def test_bad_usage_ends_with_2_and_makes_nothing(
    job: Job, tmp_path: Path, name: str, arguments: list[str], says: str
) -> None:
    code, printed, told = job(name, *arguments)
    assert (code, printed) == (2, {})
    assert says in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough  # in tests/system/test_stopping.py it decides, too
def test_spark_submit_decides_where_spark_runs(tmp_path: Path) -> None:
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    warehouse = tmp_path / "warehouse"
    command = [str(submit), "--master", "local[1]", "--conf", "spark.ui.enabled=false", "jobs/run_stream.py"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PYSPARK_PYTHON": sys.executable,
        "SILTSTONE_STREAMS": STREAMS,
        "SILTSTONE_MASTER": "local[nonsense]",
    }
    done = subprocess.run(
        [*command, "small", "--batches", "1", "--warehouse", str(warehouse)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line)["checkpoints"] == [1]
