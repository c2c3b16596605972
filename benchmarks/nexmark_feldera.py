"""Run one of NEXMark's queries on DBSP, Feldera's engine: a program in Rust (`benchmarks/feldera`) that `make feldera`
builds. It keeps all state in memory, and has no checkpoints.
"""

import json
import subprocess
import tomllib
from pathlib import Path

from benchmarks.systems import CORES
from benchmarks.workload import FILES_A_STEP

PROGRAM = Path(__file__).parent / "feldera"
VERSION = tomllib.loads((PROGRAM / "Cargo.toml").read_text())["dependencies"]["dbsp"].lstrip("=")
BINARY = PROGRAM / "target" / "release" / "nexmark-feldera"
QUERIES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 18, 19, 20, 22)
"""queries that the program has"""


def is_built() -> bool:
    """Whether the program is there."""
    return BINARY.exists()


def run(inputs: Path, answers: Path | None = None) -> tuple[float, float]:
    """Run the query of some input; return when its measured steps began and ended, in seconds since the epoch.

    Args:
        inputs: the directory that `benchmarks.nexmark.Query` writes.
        answers: file for the answer after the last step: JSON lines, a row's columns in the order of
            `tests/nexmark_answers.py`, times in microseconds since the epoch.
    """
    command = [BINARY, inputs, "--files-a-step", str(FILES_A_STEP), "--workers", str(CORES)]
    command += ["--answers", answers] if answers else []
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    began_s, ended_s = json.loads(said.splitlines()[-1])
    return began_s, ended_s
