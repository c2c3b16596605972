"""What is an extra is imported when it is used, and asked for by name where it is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import long_form

WITHOUT = """
import sys

GONE = {"redis", "cassandra", "rocksdict", "matplotlib", "psycopg", "pyspark"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {*GONE}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
RUN = "from siltstone.cli import main; sys.argv[0] = 'siltstone'; main()"


def without_extras(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{WITHOUT}\n{code}", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "checkpoints sums --warehouse redis://localhost:1/0",
            "a warehouse in Redis needs the package redis: pip install 'siltstone[redis]'",
        ),
        long_form(
            "checkpoints sums --warehouse rediss://localhost:1/0",
            "a warehouse in Redis needs the package redis: pip install 'siltstone[redis]'",
        ),
        (
            "checkpoints sums --warehouse cassandra://localhost:1/k",
            "a warehouse in Cassandra needs the package cassandra: pip install 'siltstone[cassandra]'",
        ),
        (
            "checkpoints sums --warehouse rocksdb://{}/w",
            "a warehouse in RocksDB needs the package rocksdict: pip install 'siltstone[rocksdb]'",
        ),
        (
            "report sums --out {}/chain.png --warehouse {}",
            "a picture needs the package matplotlib: pip install 'siltstone[report]'",
        ),
        (
            "checkpoints sums --warehouse {} --catalog postgresql://localhost:1/catalog",
            "a PostgreSQL catalog needs the package psycopg: pip install 'siltstone[postgres]'",
        ),
        ("run sums --warehouse {}", "Spark needs the package pyspark: pip install 'siltstone[spark]'"),
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(arguments: str, said: str, tmp_path: Path) -> None:
    ended = without_extras(RUN, *arguments.replace("{}", str(tmp_path)).split())
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"siltstone: {said}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_without_any_extra_the_engine_and_its_commands_are_there() -> None:
    modules = "siltstone.cli, siltstone.report, siltstone.client, siltstone.chains.background, siltstone.store.s3.store"
    assert without_extras(f"import {modules}").returncode == 0
    assert without_extras(RUN, "--help").returncode == 0


def test_a_module_that_is_missing_for_another_reason_is_a_mistake_and_said() -> None:
    code = (
        "from siltstone.extras import require_extra\nwith require_extra('redis', 'redis', 'x'): import siltstone.none"
    )
    assert "ModuleNotFoundError: No module named 'siltstone.none'" in without_extras(code).stderr


@pytest.mark.slow
def test_state_in_rocksdb_asks_for_its_extra() -> None:
    code = "from siltstone.state.backends.named import backend\nbackend('heap')\nbackend('rocksdb')"
    said = without_extras(code).stderr
    assert "working state in RocksDB needs the package rocksdict: pip install 'siltstone[rocksdb]'" in said


@pytest.mark.slow
def test_a_spark_that_is_too_old_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text("__version__ = '3.4.1+vendor'")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{RUN}"
    ended = subprocess.run(
        [sys.executable, "-c", code, "run", "sums", "--warehouse", str(tmp_path / "w")],
        capture_output=True,
        text=True,
        check=False,
    )
    said = "siltstone: Siltstone needs Spark 3.5 or newer, and this is 3.4.1+vendor: upgrade it\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)
