"""Runs in processes of their own, with a JVM of their own: interrupted by a person, or with tasks that fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.spark.operations import RunRequest, run
from tests.command_line import ROOT, Ended, in_process, siltstone
from tests.spark_runs import at, check_proven, digests
from tests.spark_streams import COUNTS, FLAKY

pytestmark = pytest.mark.usefixtures("spark")


def test_a_process_of_its_own_until_interrupted(new_project: Path) -> None:
    """One JSON object on standard output whatever the JVM says; Ctrl-C lets the step in progress end, then all is well.

    A mistake costs no JVM.
    """
    command = [sys.executable, "-m", "siltstone.cli", "run", "counts", "--follow", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SILTSTONE_LOG_LEVEL": "info"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        begun = new_project / "w" / "objects" / "counts" / "00000001" / f"{2:012d}"
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert [line for line in err.splitlines() if "incubator" not in line] == []
    first = Ended(0, out, "").json
    assert first["checkpoints"][:2] == [1, 2] and first["stopped"] == "SIGINT"
    with OpenWarehouse.open_existing("w") as place:
        assert [r.outcome for r in place.catalog.runs.list("counts")] == ["stopped"]
    rest = siltstone("run", "counts", "--json").json
    assert first["checkpoints"] + rest["checkpoints"] == [1, 2, 3, 4]
    assert first["rows"] + rest["rows"] == 12
    assert siltstone("verify", "counts", "--all", "--json").json["proven"] == [1, 2, 3, 4]
    in_process("run", "counts", "--parallelism", "none", cwd=new_project).failed(2, "--parallelism", "run --help")


def test_a_task_that_fails_and_is_tried_again_changes_nothing(tmp_path: Path) -> None:
    """By an exception in one step, by a killed worker in another; local Spark retries only if its master says so."""
    run(at(tmp_path / "steady"), COUNTS, RunRequest())
    wanted = digests(at(tmp_path / "steady"), "counts")
    program = (
        "from siltstone.settings import Settings; from siltstone.spark.operations import *; "
        "from tests.spark_streams import FLAKY; import sys; "
        "print(run(Settings(warehouse=sys.argv[1], parallelism=2, master='local[2,3]'), FLAKY, RunRequest()).digest)"
    )
    environment = {**os.environ, "FLAKY": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path / "flaky")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "raised").exists() and (tmp_path / "died").exists()
    assert digests(at(tmp_path / "flaky"), FLAKY.name) == wanted
    check_proven(at(tmp_path / "flaky"), FLAKY.name)
