"""State of each backend killed -9 in the middle of a step: what is opened next is exactly one version or the other."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from siltstone.state.backend import SubtaskState
from siltstone.state.backends.heap import index
from siltstone.state.backends.named import BACKENDS
from tests.examples import examples, is_thorough
from tests.fault.state_victim import MAX_LOAD, SEGMENT_BITS, open_state, run_step, thin_out
from tests.state_model import changed, contents

ROOT = Path(__file__).parents[2]
LINES_KILLED = 40
"""in `make test-thorough`"""


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the victims have them."""
    monkeypatch.setattr(index, "SEGMENT_BITS", SEGMENT_BITS)
    monkeypatch.setattr(index, "MAX_LOAD", MAX_LOAD)


def victim(kind: str, mode: str, directory: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("state_victim.py")), kind, mode, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def everything(state: SubtaskState) -> tuple:
    """All that can be asked of a state; `contents` also checks digests and counts against a scan."""
    tables = {name: (contents(table), changed(table)) for name, table in state.tables.items()}
    return state.version, tables, {name: dict(values) for name, values in state.opaque.items()}


@pytest.mark.parametrize("kind", BACKENDS)
def test_killed_at_any_line_of_a_step(kind: str, tmp_path: Path):
    """A child dies at chosen lines of the backend's own code; before, in and after the step, and in recovery."""
    made, versions = tmp_path / "made", {}
    state = open_state(kind, made)
    versions[0] = everything(state)
    for step in (1, 2):
        run_step(state, step, 300)
        versions[step] = everything(state)
    state.release(1)
    state.close()
    state = open_state(kind, made)
    run_step(state, 3, 300)
    versions[3] = everything(state)
    thin_out(state, 4)
    versions[4] = everything(state)
    state.rollback()
    state.rollback()
    state.close()

    process = victim(kind, "lines", tmp_path)
    assert process.stdin
    assert process.stdout

    def run(copy: str, at: int) -> str:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{copy} {at}\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    shutil.copytree(made, tmp_path / "whole")
    said, lines = run("whole", 0).split()
    assert said == "lived"
    assert process.stdout.readline().strip() == "ended"
    rng = random.Random(1)
    seen = set()
    apart = int(lines) // examples(LINES_KILLED)
    for first in range(1, int(lines) - apart + 1, apart):  # one of each part, so that no phase is left out by chance
        at = first + rng.randrange(apart)
        copy = tmp_path / "copy"
        shutil.copytree(made, copy)
        assert run("copy", at) == "died"
        if at % 2:  # and once more while it recovers
            assert run("copy", rng.randint(1, 300)) == "died"
        state = open_state(kind, copy)
        assert everything(state) == versions[state.version], f"killed at line {at}"
        seen.add(state.version)
        if state.version == 2:
            run_step(state, 3, 300)
            assert everything(state) == versions[3], f"killed at line {at}"
        state.close()
        shutil.rmtree(copy)
    process.stdin.close()
    process.wait()
    assert seen == {2, 3, 4}


@pytest.mark.parametrize("kind", BACKENDS)
def test_killed_from_outside_again_and_again(kind: str, tmp_path: Path):
    """One directory through many kills: each run goes on from where the one before it died."""
    directory, twin = tmp_path / "state", open_state(kind, tmp_path / "twin")
    digests = {0: json.dumps([t.digests.tolist() for t in twin.tables.values()])}
    rng = random.Random(2)
    for _ in range(6 if is_thorough() else 3):
        process = victim(kind, "loop", directory)
        assert process.stdout
        said = int(process.stdout.readline())
        time.sleep(rng.random() * 0.2)
        process.kill()
        said = max([said, *map(int, process.stdout.read().split())])
        process.wait()
        state = open_state(kind, directory)
        assert said <= state.version <= said + 1
        while twin.version < state.version:
            run_step(twin, twin.version + 1, 20_000)
            twin.release(twin.version)
            digests[twin.version] = json.dumps([t.digests.tolist() for t in twin.tables.values()])
        for kept in state.tables.values():
            contents(kept)
        assert {n: dict(v) for n, v in state.opaque.items()} == {n: dict(v) for n, v in twin.opaque.items()}
        assert json.dumps([t.digests.tolist() for t in state.tables.values()]) == digests[state.version]
        state.rollback()
        assert json.dumps([t.digests.tolist() for t in state.tables.values()]) == digests[state.version]
        state.close()
