"""What the process does from which Python workers are forked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from siltstone.spark.daemon import prefer_unpacked

FORKS = """
import os
from siltstone.spark.daemon import import_for_workers
import_for_workers()
print(len(os.listdir("/proc/self/task")), flush=True)
for _ in range(2):
    if not os.fork():
        import numpy
        print(numpy.random.random(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def installed(tmp_path: Path) -> tuple[str, list[str]]:
    """A directory with a package of Spark, and its zip files."""
    library = tmp_path / "packages" / "pyspark" / "python" / "lib"
    library.mkdir(parents=True)
    (tmp_path / "packages" / "pyspark" / "__init__.py").touch()
    return str(tmp_path / "packages"), [str(library / "pyspark.zip"), str(library / "py4j-0.10-src.zip")]


def test_zip_files_of_the_spark_that_is_installed_are_left_out(installed: tuple[str, list[str]]) -> None:
    packages, zips = installed
    assert prefer_unpacked(["mine", *zips, "more.zip", packages]) == ["mine", "more.zip", packages]


def test_those_of_another_spark_stay(installed: tuple[str, list[str]], tmp_path: Path) -> None:
    packages, zips = installed
    other = tmp_path / "other" / "pyspark"
    other.mkdir(parents=True)
    assert prefer_unpacked([*zips, str(tmp_path)]) == [*zips, str(tmp_path)]
    (other / "__init__.py").touch()
    assert prefer_unpacked([*zips, str(other.parent), packages]) == [*zips, str(other.parent), packages]


def test_those_of_a_spark_that_is_not_there_stay(installed: tuple[str, list[str]]) -> None:
    """A search path may come from another machine."""
    gone = "/nowhere/pyspark/python/lib/pyspark.zip"
    assert prefer_unpacked([gone, installed[0]]) == [gone, installed[0]]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_it_forks_with_one_thread_and_workers_draw_numbers_of_their_own() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as Spark starts it
    said = subprocess.run([sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True, check=True)
    threads, *numbers = said.stdout.split()
    assert threads == "1"
    assert len(set(numbers)) == len(numbers) == 2
