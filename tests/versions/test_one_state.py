"""One warehouse under several versions of Spark: the same state, digests and outputs, whichever ran which part.

`SPARK_PYTHONS` names the interpreters, one for each version (`make test-versions`).
"""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from tests.command_line import ROOT
from tests.versions.wide_stream import FILES, RECEIVED, STREAM

PYTHONS = os.environ.get("SPARK_PYTHONS", "").split()
_ZONE = "America/New_York"
"""of the sessions: what has no zone must not depend on it"""
_WAIT_S = 300

pytestmark = pytest.mark.skipif(len(PYTHONS) < 2, reason="needs two Sparks: make test-versions")


def _command(python: str, *arguments: str) -> list[str]:
    return [python, "-c", "from siltstone.cli import main; main()", *arguments]


def _variables() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    return inherited | {
        "PYTHONPATH": str(ROOT),
        "SILTSTONE_STREAMS": json.dumps(["tests.versions.wide_stream"]),
        "SILTSTONE_SPARK": json.dumps({"spark.sql.session.timeZone": _ZONE}),
        "SILTSTONE_PARALLELISM": "2",
    }


def siltstone(python: str, directory: Path, *arguments: str) -> dict[str, Any]:
    """Run a command that has to succeed; return its JSON."""
    done = subprocess.run(
        _command(python, *arguments, "--json"),
        cwd=directory,
        env=_variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (python, done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def kill_in_a_run(python: str, directory: Path) -> None:
    """Run on, and kill all processes of the run once it has completed one more checkpoint."""
    before = len(digests(directory))
    running = subprocess.Popen(
        _command(python, "run", "wide"),
        cwd=directory,
        env=_variables(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + _WAIT_S
    while running.poll() is None and len(digests(directory)) == before:
        assert time.monotonic() < deadline, "no checkpoint was completed"
        time.sleep(0.05)
    if running.poll() is None:
        os.killpg(running.pid, signal.SIGKILL)
    _, said = running.communicate()
    assert running.returncode in (0, -signal.SIGKILL), said[-4000:]


def digests(directory: Path) -> list[str]:
    """The digest of each checkpoint, in order; none before there is a catalog with the stream."""
    with suppress(UsageError), OpenWarehouse.open_existing(str(directory / "warehouse")) as place:
        return [record.digest for record in place.catalog.checkpoints.list("wide")]
    return []


def outputs(directory: Path) -> dict[str, list[str]]:
    """The rows that each sink has got, in an order of their own."""
    warehouse = directory / "warehouse"
    found: dict[str, Any] = {
        "numbers": [row for path in sorted((directory / RECEIVED).iterdir()) for row in pq.read_table(path).to_pylist()]
    }
    for name, sink in STREAM.sinks.items():
        if sink is None:
            table = DeltaTable(str(warehouse / "objects" / "_sinks" / "wide" / name)).to_pyarrow_table()
            hidden = [column for column in table.column_names if column.startswith("_")]
            found[name] = table.drop_columns(hidden).to_pylist()
        elif name != "numbers":
            found[name] = (
                ds.dataset(warehouse / "sink" / "wide" / name, exclude_invalid_files=True).to_table().to_pylist()
            )
    return {name: sorted(map(repr, rows)) for name, rows in found.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The stream, run whole under each version."""
    directories = {}
    for python in PYTHONS:
        directories[python] = directory = tmp_path_factory.mktemp("whole")
        siltstone(python, directory, "run", "wide")
    return directories


def test_each_version_comes_to_the_same_state_and_output(whole: dict[str, Path]) -> None:
    first, *others = whole.values()
    assert len(digests(first)) == FILES
    for other in others:
        assert digests(other) == digests(first)
        assert outputs(other) == outputs(first)


@pytest.mark.parametrize("order", [PYTHONS, PYTHONS[::-1]], ids=["newest first", "newest last"])
def test_each_version_goes_on_where_another_was_killed(
    order: list[str], tmp_path: Path, whole: dict[str, Path]
) -> None:
    for python in order:
        kill_in_a_run(python, tmp_path)
        verified = siltstone(python, tmp_path, "verify", "wide", "--all")
        assert (verified["proven"], verified["failed"]) == ([*range(1, len(digests(tmp_path)) + 1)], [])
    siltstone(order[0], tmp_path, "run", "wide")
    assert digests(tmp_path) == digests(whole[order[0]])
    assert outputs(tmp_path) == outputs(whole[order[0]])
    assert siltstone(order[-1], tmp_path, "replay", "wide")["proven"]
