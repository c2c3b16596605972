"""What a `siltstone` process writes to standard error: JSON line by line. That it writes nothing as text while all is
well is seen in test_cli."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import CONFIGURATION

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.jvm


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One process."""
    started = [sys.executable, "-m", "siltstone.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(started, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_every_line_of_a_run_is_a_json_object_and_knows_its_step(tmp_path: Path) -> None:
    (tmp_path / "siltstone.toml").write_text(CONFIGURATION)
    run = ("run", "little", "--batches", 2, "--json")
    done = command("--log-format", "json", "--log-level", "debug", *run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoints"] == [1, 2]
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"timestamp", "level", "event", "logger"} <= event.keys() for event in events)

    def told(event: str) -> list[tuple[Any, ...]]:
        fields = ("stream", "epoch", "checkpoint", "step")
        return [tuple(e.get(name) for name in fields) for e in events if e["event"] == event]

    steps = [("little", 1, 1, 1), ("little", 1, 2, 2)]
    assert told("step processed") == told("checkpoint completed") == steps
    assert told("writer epoch begun") == [("little", 1, None, None)]
    in_workers = told("subtask done")
    assert set(in_workers) == set(steps) and len(in_workers) == 2 * 2 * 3, "steps, subtasks, operators"
