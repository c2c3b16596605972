"""Runs that stop, fail or lose their working state inside Spark: what goes on from them is as if nothing had been."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, run
from tests.fault.small_stream import purchases
from tests.region_run import RegionRun
from tests.spark_runs import at, check_proven, digests
from tests.spark_streams import FILES, LITTLE, write_files

pytestmark = pytest.mark.usefixtures("spark")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Undisturbed:
    digests: dict[int, str]
    sink: pa.Table


def sink_rows(settings: Settings) -> pa.Table:
    return pq.read_table(Path(settings.warehouse) / "sink" / "little" / "accounts").sort_by("sequence")


@pytest.fixture(scope="module")
def undisturbed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """LITTLE from end to end in one run."""
    settings = at(tmp_path_factory.mktemp("undisturbed") / "w")
    result = run(settings, LITTLE, RunRequest())
    assert result.checkpoints == list(range(1, FILES + 1))
    check_proven(settings, "little")
    found = digests(settings, "little")
    assert result.digest == found[FILES] and len(set(found.values())) == FILES
    return Undisturbed(found, sink_rows(settings))


def test_spark_makes_no_difference(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Three operators, two of them chained: the same checkpoints as in one process without Spark."""
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        from siltstone.chains.policies import policy_by_name

        alone = RegionRun(place, replace(LITTLE, source=None), policy_by_name("marginal-cost"), parallelism=3)
        found = {step: alone.step(rows).digest for step, rows in enumerate(purchases()[:FILES], 1)}
    assert found == undisturbed.digests
    rows = undisturbed.sink
    assert rows.column("sequence").to_pylist() == list(range(FILES * 300))


def nothing(work: Path) -> None:
    """Only stop and go on."""


def lost(work: Path) -> None:
    """All working state is gone."""
    shutil.rmtree(work)


def torn(work: Path) -> None:
    """Every file of one subtask's working state is cut or altered in a way of its own."""
    files = sorted(p for p in work.glob("little/*/state/*/0000*/**/*") if p.is_file() and p.stat().st_size)
    assert files
    random = np.random.default_rng(5)
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        if number % 2:
            data = data[: len(data) // 2]
        else:
            data[random.integers(0, min(len(data), 256))] ^= 0xFF
        path.write_bytes(data)


def test_runs_go_on_where_the_one_before_stopped(undisturbed: Undisturbed, tmp_path: Path) -> None:
    settings, work = at(tmp_path / "w"), tmp_path / "w" / "work"
    # Other working state, at last another number of subtasks, which moves every key group to another subtask.
    parts: list[tuple[Callable[[Path], None], int, int]] = [
        (nothing, 2, 2),
        (torn, 2, 1),
        (lost, 2, 2),
        (nothing, 3, 1),
    ]
    begun = 0
    for disturb, parallelism, batches in parts:
        disturb(work)
        result = run(at(tmp_path / "w", parallelism=parallelism), LITTLE, RunRequest(batches=batches))
        wanted = list(range(begun + 1, begun + batches + 1))
        assert (result.checkpoints, result.rows, result.digest) == (
            wanted,
            300 * batches,
            undisturbed.digests[wanted[-1]],
        )
        begun += batches
    assert begun == FILES
    assert digests(settings, "little") == undisturbed.digests
    assert sink_rows(settings).equals(undisturbed.sink)
    check_proven(settings, "little")
    again = run(settings, LITTLE, RunRequest())
    assert (again.checkpoints, again.rows, again.digest) == ([], 0, undisturbed.digests[FILES])


@pytest.mark.parametrize("every", [{"checkpoint_steps": 3}, {"checkpoint_s": 3600.0}])
def test_a_checkpoint_of_several_steps_and_one_for_the_rest(
    every: dict[str, object], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    settings, request = at(tmp_path / "w", **every), RunRequest(options={"files": "5"})
    result = run(settings, LITTLE, request)
    wanted = [1, 2] if "checkpoint_steps" in every else [1]
    assert (result.checkpoints, result.rows, result.digest) == (wanted, 1500, undisturbed.digests[5])
    if "checkpoint_steps" in every:
        assert undisturbed.digests[3] in digests(settings, "little").values()
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        steps = place.catalog.input_log.list("little", 9)
        assert [s.batch_id for s in steps] == [0, 1, 2, 3, 4, None]
        directory = place.warehouse.local.source("little")
    assert sink_rows(settings).num_rows == 1500
    write_files(directory, purchases()[:FILES])
    result = run(settings, LITTLE, request)
    assert (result.rows, result.digest) == (300, undisturbed.digests[FILES])
    assert sink_rows(settings).select(["sequence", "spent"]).equals(undisturbed.sink.select(["sequence", "spent"]))
    check_proven(settings, "little")
