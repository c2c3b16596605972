"""Flink for the benchmarks, in an environment of its own, which `make nexmark` makes.

`python -m benchmarks.flink` installs Flink there, and by Maven what it needs to read Parquet and to keep a changelog.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.maven import fetch_jars

VERSION, HADOOP = "2.3.0", "3.4.1"
ENVIRONMENT = Path(os.environ.get("FLINK_ENVIRONMENT") or Path(sys.prefix).parent / ".venv-flink")
PYTHON = ENVIRONMENT / "bin" / "python"
_JARS = {
    "parquet": (f"org.apache.flink:flink-sql-parquet:{VERSION}", ["flink-sql-parquet"]),
    "changelog": (f"org.apache.flink:flink-dstl-dfs:{VERSION}", ["flink-dstl-dfs"]),
    "hadoop": (f"org.apache.hadoop:hadoop-client-runtime:{HADOOP}", []),
}


def install() -> None:
    """Install what is not there."""
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"apache-flink=={VERSION}"], check=True)
    for name, (coordinates, only) in _JARS.items():
        fetch_jars(coordinates, ENVIRONMENT / "jars" / name, "Flink's benchmarks", only)


def jars() -> list[str]:
    """Return the paths of the jars; none if Flink is not there."""
    return sorted(map(str, (ENVIRONMENT / "jars").glob("*/*.jar"))) if PYTHON.exists() else []


if __name__ == "__main__":
    install()
