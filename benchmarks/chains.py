"""Measure the cost of a chain: to materialize it, to restore the longest one, to restore it at another parallelism.

    materialize    a base and a delta of a tenth of its rows through `siltstone materialize` on Spark `local[2]`,
                   compared with pyarrow reading the base's files and writing them back in two processes: same files,
                   compression, row groups and encodings. Starting Spark and all processes is not counted
    restore        a chain as long as the default bounds allow (`PolicyOptions`), compared with a full snapshot of as
                   many rows. Into working state (the hash tables of two subtasks that a resumed run needs), with the
                   snapshot read by pyarrow without checksums and proof; and into Parquet files, with the snapshot
                   restored by the same code with checksums and proof, and by pyarrow without
    rescale        working state for 8 subtasks of what 2 wrote, compared with that for 2

Restores run without Spark in two processes that exist already. Memory is that of all processes together, anonymous
pages only: mapped files, which the kernel can drop, are left out.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.goals import Goal, Report, table_of
from benchmarks.memory import watch_memory
from benchmarks.states import MAX_PARALLELISM, OPERATOR, SUBTASKS, TABLE, Chain, always_deltas, new_chain, stream
from benchmarks.summary import MB
from benchmarks.workload import short
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions
from siltstone.format.base import KEY_GROUP, ROW_GROUP_ROWS
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest, read_manifests
from siltstone.model import KeyGroupRange, StoredObject
from siltstone.restore.export import UnitTask, restore_unit, unit_tasks
from siltstone.restore.restore import load_state
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.spark.session import spark_session
from siltstone.state.backend import SubtaskState
from siltstone.state.backends.named import backend
from siltstone.state.protocol import set_state
from siltstone.store.open import Warehouse

MATERIALIZE_AT_MOST, OPEN_AT_MOST, EXPORT_AT_MOST, RESCALE_AT_MOST = 3.0, 1.2, 1.5, 1.3
MEMORY_AT_MOST_GB = 2.0
CHANGED = 0.1
RESCALED = 8
WORKING_STATE, PARQUET = "working state", "Parquet files"
ALIKE, BY_PYARROW = "restored alike", "read by pyarrow"
_READ_ROWS = 1 << 16
_GB = 1_000_000_000


@dataclass(frozen=True)
class Sizes:
    """Rows of the states, and the number of measurements."""

    rows: int = 10_000_000
    worst_rows: int = 3_000_000
    rounds: int = 3


QUICK = Sizes(200_000, 200_000, 2)


@contextmanager
def two_processes() -> Iterator[ProcessPoolExecutor]:
    """Start two processes that have imported what they need."""
    with ProcessPoolExecutor(SUBTASKS, mp_context=get_context("spawn")) as pool:
        list(pool.map(time.sleep, [0.2] * SUBTASKS))
        yield pool


def measure_seconds(call: Callable[[], Iterable[Any]]) -> float:
    """Return the seconds until all items are computed."""
    began = time.perf_counter()
    list(call())
    return time.perf_counter() - began


# --- materialization --------------------------------------------------------------------------------------------------


def rewrite(paths: tuple[Path, Path]) -> None:
    """Read one Parquet file and write it as another, with pyarrow alone."""
    source, target = paths
    group = pq.ParquetFile(source).metadata.row_group(0)
    encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
    pq.write_table(
        pq.read_table(source),
        target,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name, used in encodings.items() if "RLE_DICTIONARY" in used],  # pyright: ignore[reportArgumentType]
        column_encoding={
            name: "DELTA_BINARY_PACKED" for name, used in encodings.items() if "DELTA_BINARY_PACKED" in used
        },
    )


def manifests_of(place: OpenWarehouse) -> dict[int, Manifest]:
    """Read the manifests of the newest checkpoint's chain."""
    newest = place.catalog.checkpoints.get_latest(stream().name).id
    return read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(stream().name, newest))


def bases(place: OpenWarehouse) -> list[Path]:
    """List the files of the bases that the newest checkpoint's chain begins with."""
    manifests = manifests_of(place)
    names = {h.object for h in manifests[min(manifests)].handles if h.object.endswith(".parquet")}
    return [place.warehouse.local.objects / name for name in sorted(names)]


def materialize_on_spark(warehouse: str) -> None:
    """Run the measured process: for each line that it reads, it materializes and prints the result.

    Spark and its workers stay, as they do with a running stream; pyarrow's processes stay as well.
    """
    from siltstone.settings import Settings
    from siltstone.spark.operations import materialize

    settings = Settings(warehouse=warehouse, parallelism=SUBTASKS)
    spark = spark_session(f"local[{SUBTASKS}]", {"spark.driver.memory": "512m"})
    for _ in sys.stdin:
        began = time.perf_counter()
        made = materialize(settings, stream().name)
        print(json.dumps({"seconds": time.perf_counter() - began, "rows": made.rows}), flush=True)
    spark.stop()


@contextmanager
def materializer(chain: Chain, said: Path) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
    """Start the measured process; yield its id and a function that lets it materialize. `said` gets its log."""
    code = "import sys; from benchmarks.chains import materialize_on_spark; materialize_on_spark(*sys.argv[1:])"
    command = [sys.executable, "-c", code, chain.warehouse.warehouse.url]
    pipe = subprocess.PIPE
    with (
        said.open("w") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def call() -> dict[str, Any]:
            process.stdin.write("\n")  # pyright: ignore[reportOptionalMemberAccess]
            answer = process.stdout.readline()  # pyright: ignore[reportOptionalMemberAccess]
            if not answer:
                raise RuntimeError(f"materializing failed:\n{said.read_text()[-4000:]}")
            return json.loads(answer)

        yield process.pid, call
        process.stdin.close()


def measure_materialization(scratch: Path, chain: Chain, sizes: Sizes) -> Report:
    """Measure both in turn, each round with a delta of its own, after a round that does not count."""
    ours, plain = [], []
    rewritten = scratch / "rewritten"
    with (
        two_processes() as pool,
        materializer(chain, scratch / "materializer.log") as (pid, materialize),
        watch_memory(pid) as peak,
    ):
        for number in range(sizes.rounds + 1):
            rewritten.mkdir()
            jobs = [(path, rewritten / path.name) for path in bases(chain.warehouse)]
            took = measure_seconds(partial(pool.map, rewrite, jobs))
            shutil.rmtree(rewritten)
            found = materialize()
            assert found["rows"] == sizes.rows
            if number:
                plain.append(took)
                ours.append(found["seconds"])
            chain.change(int(CHANGED * sizes.rows))
    memory = peak.together
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    name = f"{short(sizes.rows)} rows, {CHANGED:.0%} changed"
    table = table_of(f"materializing {name}, two processes", "", "seconds", "best", "peak MB, all processes")
    table.add_row("Siltstone, Spark", f"{median(ours):.2f}", f"{min(ours):.2f}", f"{memory / MB:.0f}")
    table.add_row("pyarrow, read and write back", f"{median(plain):.2f}", f"{min(plain):.2f}", "")
    goals = [Goal.of_rounds(f"materialize {name}: seconds / pyarrow's", ratios, at_most=MATERIALIZE_AT_MOST)]
    if memory:
        goals.append(Goal(f"materialize {name}: peak GB", memory / _GB, at_most=MEMORY_AT_MOST_GB))
    return Report([table], goals, {"ours_s": ours, "pyarrow_s": plain, "peak_bytes": memory})


# --- restores ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The task to make one subtask's working state in a new directory."""

    warehouse: str
    manifests: tuple[StoredObject, ...]
    step: int
    groups: KeyGroupRange
    directory: Path
    snapshot: tuple[Path, ...] = ()
    """files to read instead of the chain"""


def load(task: Load) -> int:
    """Make the working state; return its number of rows."""
    schemas = stream().operators[0].tables()
    state = backend("heap").open(task.directory, schemas, (), task.groups, MAX_PARALLELISM)
    try:
        if task.snapshot:
            _read_snapshot(state, task)
        else:
            load_state(state, Warehouse.at(task.warehouse).store, task.manifests, OPERATOR, task.step)
        return state.tables[TABLE].rows
    finally:
        state.close()


def _read_snapshot(state: SubtaskState, task: Load) -> None:
    """Load a snapshot as `load_state` loads a chain, without checksums and proof."""
    state.begin(task.step, tracking=False)
    for path in task.snapshot:
        for batch in pq.ParquetFile(path).iter_batches(_READ_ROWS):
            groups = batch.column(KEY_GROUP).to_numpy()
            set_state(state, TABLE, pa.Table.from_batches([batch.drop_columns([KEY_GROUP])]), groups)
    state.tables[TABLE].mark()
    state.commit()
    state.release(task.step)


def loads(place: OpenWarehouse, scratch: Path, parallelism: int) -> list[Load]:
    """Make one task per subtask, of the newest checkpoint."""
    newest = place.catalog.checkpoints.get_latest(stream().name)
    stored = tuple(place.catalog.chains.list_manifests(stream().name, newest.id))
    step = read_manifest(place.warehouse.store, newest.manifest).step
    ranges = KeyGroupRange(0, MAX_PARALLELISM).split(parallelism)
    return [
        Load(place.warehouse.url, stored, step, groups, scratch / f"state-{parallelism}-{number}")
        for number, groups in enumerate(ranges)
    ]


def load_all(pool: ProcessPoolExecutor, tasks: list[Load], rows: int) -> float:
    """Run the tasks and return the seconds; the working state is removed afterwards."""
    began = time.perf_counter()
    made = list(pool.map(load, tasks))
    took = time.perf_counter() - began
    assert sum(made) == rows, "rows are missing"
    for task in tasks:
        shutil.rmtree(task.directory)
    return took


def measure_rescale(scratch: Path, chain: Chain, sizes: Sizes) -> Report:
    """Measure restoring a chain of 2 subtasks for 2 and for 8, in the same two processes."""
    found: dict[int, list[float]] = {SUBTASKS: [], RESCALED: []}
    with two_processes() as pool:
        for number in range(sizes.rounds + 1):
            for parallelism, seconds in found.items():
                took = load_all(pool, loads(chain.warehouse, scratch, parallelism), sizes.rows)
                if number:
                    seconds.append(took)
    ratios = [b / a for a, b in zip(*found.values(), strict=True)]
    title = f"working state of {short(sizes.rows)} rows that 2 subtasks wrote, two processes"
    table = table_of(title, "", "seconds", "best")
    for parallelism, seconds in found.items():
        table.add_row(f"for {parallelism} subtasks", f"{median(seconds):.2f}", f"{min(seconds):.2f}")
    what = f"rescale 2 -> 8, {short(sizes.rows)} rows: seconds / restore's"
    goals = [Goal.of_rounds(what, ratios, at_most=RESCALE_AT_MOST)]
    return Report([table], goals, {str(p): s for p, s in found.items()})


def export(job: tuple[str, UnitTask]) -> int:
    """Restore one unit to Parquet."""
    warehouse, task = job
    return restore_unit(Warehouse.at(warehouse).store, task).rows


def measure_export(pool: ProcessPoolExecutor, place: OpenWarehouse, out: Path) -> float:
    """Restore the newest checkpoint to Parquet; return the seconds."""
    out.mkdir()
    manifests = manifests_of(place)
    units, _ = unit_tasks(manifests, max(manifests), SUBTASKS, out)
    jobs = [(place.warehouse.url, unit) for unit in units]
    return measure_seconds(partial(pool.map, export, jobs))


def rewrite_plainly(paths: tuple[Path, Path]) -> None:
    """Read a snapshot's file and write its rows with zstd and pyarrow's default encodings."""
    source, target = paths
    pq.write_table(pq.read_table(source).drop_columns([KEY_GROUP]), target, compression="zstd")


def measure_restores(scratch: Path, sizes: Sizes) -> Report:
    """Measure restoring the longest chain that the default bounds allow, into working state and into Parquet."""
    bounds = PolicyOptions(d0=PolicyOptions().d_max)
    found: dict[str, list[float]] = {}
    with (
        new_chain(str(scratch / "worst"), sizes.worst_rows, bounds) as chain,
        new_chain(str(scratch / "whole"), sizes.worst_rows, bounds) as whole,
        two_processes() as pool,
    ):
        newest, share = chain.lengthen(bounds)
        warehouse, manifests = chain.warehouse.warehouse, manifests_of(chain.warehouse)
        snapshot = [take_snapshot(t) for t in snapshot_tasks(warehouse, manifests[newest], "heap", "bench")]
        files = [warehouse.local.objects / part.objects[0].name for part in snapshot]
        from_chain = loads(chain.warehouse, scratch, SUBTASKS)
        from_snapshot = [replace(t, snapshot=(file,)) for t, file in zip(from_chain, files, strict=True)]
        for number in range(sizes.rounds + 1):
            out = scratch / f"restored-{number}"
            (out / "plain").mkdir(parents=True)
            plain = [(path, out / "plain" / path.name) for path in files]
            took = {
                WORKING_STATE: load_all(pool, from_chain, sizes.worst_rows),
                f"{WORKING_STATE}, {BY_PYARROW}": load_all(pool, from_snapshot, sizes.worst_rows),
                PARQUET: measure_export(pool, chain.warehouse, out / "chain"),
                f"{PARQUET}, {ALIKE}": measure_export(pool, whole.warehouse, out / "whole"),
                f"{PARQUET}, {BY_PYARROW}": measure_seconds(partial(pool.map, rewrite_plainly, plain)),
            }
            shutil.rmtree(out)
            for what, seconds in took.items() if number else ():
                found.setdefault(what, []).append(seconds)
    name = f"{bounds.d_max} deltas of {share:.2f} x the base"
    title = f"restoring {short(sizes.worst_rows)} rows from the worst chain: {name}"
    table = table_of(title, "into", "chain s", "a full snapshot", "s", "ratio")
    goals = []
    for form, how, at_most in (
        (WORKING_STATE, BY_PYARROW, OPEN_AT_MOST),
        (PARQUET, BY_PYARROW, EXPORT_AT_MOST),
        (PARQUET, ALIKE, None),
    ):
        ours, theirs = found[form], found[f"{form}, {how}"]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        table.add_row(form, f"{median(ours):.2f}", how, f"{median(theirs):.2f}", f"{median(ratios):.2f}")
        what = f"worst chain into {form}: seconds / a full snapshot's, {how}"
        goals.append(Goal.of_rounds(what, ratios, at_most=at_most))
    return Report([table], goals, {"deltas": bounds.d_max, "deltas_share": share, **found})


def run(scratch: Path, *, quick: bool = False) -> Report:
    """Run all three measurements."""
    sizes = QUICK if quick else Sizes()
    whole = Report()
    with new_chain(str(scratch / "tenth"), sizes.rows, always_deltas()) as chain:
        chain.change(int(CHANGED * sizes.rows))
        parts = {"materialize": measure_materialization(scratch, chain, sizes)}
        parts["rescale"] = measure_rescale(scratch, chain, sizes)
    shutil.rmtree(scratch / "tenth")
    parts["restore"] = measure_restores(scratch, sizes)
    for name, part in parts.items():
        whole.tables += part.tables
        whole.goals += part.goals
        whole.numbers[name] = part.numbers
    return whole
