"""Whatever the backend, form and mode of checkpoints, a stream comes to the same: killed in the middle, and resumed.

A real `siltstone run`, which may have none, one or two checkpoints on their way, gets SIGKILL with its JVM and its
workers. Another run goes on, in every other combination with the other backend. Each checkpoint must have the digest
that it has in an undisturbed run on the heap that waits for every checkpoint, and the sink must have the same rows.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from benchmarks import cluster_run
from benchmarks.workload import FILES_A_STEP, Workload
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, FILES_BACKEND, FILES_POLICY, policy_by_name
from siltstone.client import open_client
from siltstone.errors import UsageError
from siltstone.spark.operations import RunRequest, run
from siltstone.state.backends.named import BACKENDS
from siltstone.stream import Stream
from streams import FLIGHTS
from streams.flights import ALERT
from streams.flights_data import prepare
from tests.fault.processes import Run, arguments_of
from tests.fault.reference import flights
from tests.proofs import failures
from tests.region_run import RegionRun
from tests.spark_runs import at

TOTALS = cluster_run.STREAM
STEPS = 7
PENDING = (0, 1, 2)
POLICIES = [*product(BACKENDS, [DEFAULT_POLICY]), (FILES_BACKEND, FILES_POLICY)]
KILL_AFTER = 2
"""checkpoints"""
STEP_S = 0.5
"""within which of a new checkpoint a kill comes"""
WORKLOAD = Workload(state_rows=20_000, step_rows=2_000, warm_up=0, measured=STEPS - 1)


@dataclass(frozen=True)
class Input:
    """A stream, the digest after each step of an undisturbed run, and how a warehouse gets its input.

    `options` is called with a directory that all tests share and the warehouse; it returns the options of the source.
    """

    stream: Stream
    digests: Sequence[str]
    options: Callable[[Path, Path], dict[str, str]]
    written: pa.Table | None = None


@cache
def _flights() -> Input:
    """The demo's stream, over the first weeks."""

    def place(shared: Path, warehouse: Path) -> dict[str, str]:
        prepare(shared / "week", "week")
        own = warehouse / "source" / FLIGHTS.name / "week"
        own.mkdir(parents=True)
        for path in islice(sorted((shared / "week").iterdir()), STEPS):
            shutil.copy2(path, own)  # with its time, by which Spark orders files
        return {}

    written = pa.concat_tables(flights().written[:STEPS]).select(ALERT.names).cast(ALERT).sort_by("sequence")
    return Input(FLIGHTS, flights().digests[:STEPS], place, written)


@cache
def _totals() -> Input:
    """The benchmarks' stream: four aggregates of each key."""
    digests = []
    with TemporaryDirectory() as directory, OpenWarehouse.open_writable(f"{directory}/warehouse") as warehouse:
        WORKLOAD.write(Path(directory) / "input")
        files = [pq.read_table(path) for path in sorted((Path(directory) / "input").iterdir())]
        undisturbed = RegionRun(warehouse, TOTALS, policy_by_name(DEFAULT_POLICY))
        for step in range(STEPS):
            completed = undisturbed.step(pa.concat_tables(files[step * FILES_A_STEP : (step + 1) * FILES_A_STEP]))
            assert completed is not None
            digests.append(completed.digest)

    def place(shared: Path, _: Path) -> dict[str, str]:
        inputs = shared / "input"
        if not inputs.exists():
            WORKLOAD.write(inputs)
        return {"inputs": str(inputs)}

    return Input(TOTALS, digests, place)


INPUTS = {"flights": _flights, "totals": _totals}


def _newest(warehouse: Path, stream: str) -> int:
    try:
        with OpenWarehouse.open_existing(str(warehouse)) as place:
            return place.catalog.checkpoints.last_id(stream)
    except UsageError:  # it has not come so far
        return 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


def combinations() -> Iterator[Any]:
    """Each policy with each number of pending checkpoints, of both streams in turn; in `make test-thorough` of each."""
    for nth, ((backend, policy), max_pending) in enumerate(product(POLICIES, PENDING)):
        for number, name in enumerate(INPUTS):
            marks = [] if nth % len(INPUTS) == number else [pytest.mark.thorough]
            yield pytest.param(name, backend, policy, max_pending, marks=marks)


@pytest.mark.parametrize(("name", "backend", "policy", "max_pending"), list(combinations()))
def test_killed_in_the_middle_and_resumed(
    spark: SparkSession, shared: Path, tmp_path: Path, name: str, backend: str, policy: str, max_pending: int
) -> None:
    given, warehouse = INPUTS[name](), tmp_path / "warehouse"
    stream, options = given.stream.name, given.options(shared, warehouse)
    settings = {"backend": backend, "policy": policy, "max_pending": max_pending, "parallelism": 2}
    arguments = arguments_of({**settings, "warehouse": warehouse})
    sets = [text for key, value in options.items() for text in ("--set", f"{key}={value}")]
    killed = Run([["run", stream, *arguments, *sets]], tmp_path, "local[2]", [cluster_run.__name__])
    try:
        assert killed.until(lambda: _newest(warehouse, stream) >= KILL_AFTER), killed.wait(10).said
        time.sleep(Random(f"{name} {backend} {policy} {max_pending}").random() * STEP_S)
    finally:
        killed.kill_all()
    assert KILL_AFTER <= _newest(warehouse, stream) < STEPS, "it was killed in the middle"

    # Every other combination goes on with the other backend.
    other = backend if (max_pending + BACKENDS.index(backend)) % 2 else next(b for b in BACKENDS if b != backend)
    policy = policy if other == backend else DEFAULT_POLICY
    resumed = run(
        at(warehouse, backend=other, policy=policy, max_pending=max_pending), given.stream, RunRequest(options=options)
    )
    assert resumed.digest == given.digests[-1] and resumed.resets == 0
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        assert [record.digest for record in place.catalog.checkpoints.list(stream)] == given.digests
        assert not failures(place, stream)
    if given.written is not None:
        alerts = open_client(warehouse).stream(stream).sink_table("aircraft").to_pyarrow_table()
        assert alerts.select(ALERT.names).cast(ALERT).sort_by("sequence").equals(given.written)
