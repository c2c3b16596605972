"""The README's example, run as printed by a user: the wheel in an empty virtual environment, outside the repository."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = re.compile(r"<!-- (run|file: (?P<file>\S+)) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that finds Siltstone in a virtual environment that holds the wheel and what it needs."""
    root = tmp_path_factory.mktemp("user")
    # A Spark session of this process has put its own packages on PYTHONPATH, where pip would find them.
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON")}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(root), str(ROOT)], check=True, env=inherited)
    (wheel,) = root.glob("siltstone-*.whl")
    home = root / "venv"
    venv.create(home)
    install = [*pip, "--python", str(home / "bin" / "python"), "install", "--no-compile"]
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True, env=inherited)
    return inherited | {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def test_the_example_runs_as_printed(environment: dict[str, str], tmp_path: Path) -> None:
    said = []
    for part in PARTS.finditer((ROOT / "README.md").read_text()):
        if part["file"]:
            (tmp_path / part["file"]).write_text(part["text"])
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", part["text"]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    text = "\n".join(said)
    assert "spenders: 3 checkpoints proven, 0 not" in text
    totals = {tuple(line.split()[1:]) for line in text.splitlines() if re.match(r"\d+\s+(ada|bob|cyd)", line)}
    assert {("ada", "2", "1100"), ("bob", "2", "1010"), ("cyd", "1", "1500")} <= totals
    assert {("ada", "1100"), ("bob", "1010"), ("cyd", "1500")} <= totals
