"""The jobs as a cluster runs them: their command lines, their exit codes, and `spark-submit`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest

from jobs import restore_state, run_stream, take_snapshot, verify_checkpoints

REPOSITORY = Path(__file__).parents[2]
STREAMS = '["tests.fault.small_stream"]'

Job = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Job:
    """Runs a job's command line here: exit code, the JSON object it printed, what it told people."""
    monkeypatch.setenv("SILTSTONE_STREAMS", STREAMS)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(main: Callable[[], None], *arguments: str) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["job", *arguments, "--warehouse", str(tmp_path / "warehouse")])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else {}, printed.err

    return run


@pytest.mark.usefixtures("spark")
def test_each_job_prints_one_json_object(job: Job, tmp_path: Path) -> None:
    code, ran, _ = job(run_stream.main, "small", "--batches", "2", "--parallelism", "2")
    assert (code, ran["checkpoints"], ran["rows"]) == (0, [1, 2], 600)
    code, taken, _ = job(take_snapshot.main, "small")
    assert (code, taken["checkpoint"]) == (0, 2)
    code, verified, _ = job(verify_checkpoints.main, "small", "--deep")
    assert (code, verified["proven"], verified["failed"]) == (0, [1, 2], [])
    code, restored, _ = job(restore_state.main, "small", "--at", "1")
    assert (code, restored["checkpoint"], restored["proven"]) == (0, 1, True)
    assert restored["path"] == str(tmp_path / "warehouse" / "restored" / "small" / "000000000001")

    (segment, *_) = (tmp_path / "warehouse" / "objects" / "small").rglob("*.segment")
    segment.unlink()
    code, verified, _ = job(verify_checkpoints.main, "small")
    assert code == 1
    assert segment.name in verified["failed"][0]["object"]


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (run_stream.main, ["nosuch"], "no stream 'nosuch' is defined (defined: small)"),
        (run_stream.main, ["small", "--batches", "0"], "batches is 0"),
        (restore_state.main, ["small"], "no warehouse at"),
        (restore_state.main, ["small", "--at", "1", "--as-of", "2020-01-01"], "not allowed with"),
        (take_snapshot.main, ["small", "--parallelism", "0"], "option parallelism"),
        (verify_checkpoints.main, [], "required: stream"),
    ],
)
def test_bad_usage_ends_with_2_and_makes_nothing(
    job: Job, tmp_path: Path, main: Callable[[], None], arguments: list[str], says: str
) -> None:
    code, printed, told = job(main, *arguments)
    assert (code, printed) == (2, {})
    assert says in told
    assert list(tmp_path.iterdir()) == []


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
