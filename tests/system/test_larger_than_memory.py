"""State of several times the memory that its process may have: filled, checkpointed, changed and restored."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.larger_than_memory as program

LIMIT_BYTES = 192 << 20
TIMES = {"heap": 3, "rocksdb": 2.5}
"""backend -> how much larger its state is at least; RocksDB's has no before-images beside its rows"""
# The kernel counts what is mapped, used or not: small stacks, one heap, and what is freed is given back.
ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", program.ROWS)
def test_state_of_several_times_the_memory_works(tmp_path: Path, backend: str) -> None:
    command = [sys.executable, str(program.__file__), str(tmp_path / "w"), str(LIMIT_BYTES), backend]
    limited = ["bash", "-c", 'ulimit -s 1024; exec "$@"', "limited", *command]
    done = subprocess.run(limited, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["state_bytes"] > TIMES[backend] * LIMIT_BYTES
    assert found["same"] and found["rows"] == program.ROWS[backend] and found["forms"] == ["base", "delta", "delta"]
    assert max(found["anonymous_bytes"].values()) < LIMIT_BYTES
