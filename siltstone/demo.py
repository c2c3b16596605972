"""The demo: the flights of 2013 stream through Spark, are killed in the middle, resumed, and proven.

Nothing is simulated: the stream runs in its own process, as `siltstone run` does, and that process, its JVM and its
Python workers get SIGKILL at a random moment.
"""

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds
from rich.console import Console

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import open_client
from siltstone.errors import StateError, UsageError
from siltstone.report import checkpoint_table, draw_report, report_data
from siltstone.settings import Settings
from siltstone.store.open import Warehouse
from siltstone.stream import find_stream

STREAM = "flights"
PACKAGED = "siltstone.demo_streams"
"""the stream's module in an installed wheel; a checkout has it in ./streams, which its siltstone.toml names"""
MARK = ".siltstone-demo"
"""a file that marks a warehouse made by the demo, which the demo may delete"""
POLL_S = 0.1
KILL_AFTER = (15, 30)
"""the kill comes after a checkpoint between these two"""


def run_demo(settings: Settings, console: Console, seed: int | None = None) -> None:
    """Run the demo in the settings' warehouse and print what happens.

    Args:
        seed: determines when the kill comes.

    Raises:
        UsageError: the warehouse was not made by the demo, or the flights are not installed.
        SiltstoneError: state was lost or doubled, which the demo shows not to happen.
    """
    if importlib.util.find_spec(PACKAGED):
        settings = settings.model_copy(update={"streams": [PACKAGED]})
    find_stream(STREAM, settings.streams)
    warehouse = Warehouse.at(settings.warehouse)
    root = warehouse.local.root
    _make_room(root)
    warehouse.prepare()
    (root / MARK).touch()
    chance = random.Random(seed)
    kill_at = chance.randint(*KILL_AFTER)

    console.rule("1. The stream runs", align="left")
    console.print("The flights of 2013, one file per week; each operator chooses base or delta at each checkpoint.")
    with _stream_process(settings, root / "demo-1.log") as process:
        last = _print_checkpoints(settings, console, process, 0, until=kill_at)
        time.sleep(chance.uniform(0.05, 1.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    console.rule("2. kill -9", align="left")
    console.print("The driver and Spark's JVM were killed in the middle of a step. Now the stream is started again.")
    with _stream_process(settings, root / "demo-2.log") as process:
        _print_checkpoints(settings, console, process, last)
        if process.wait() != 0:
            raise StateError("the run that resumed the stream failed", advice=f"see {root / 'demo-2.log'}")
    _prove(settings, console, root)


def _prove(settings: Settings, console: Console, root: Path) -> None:
    """Verify all checkpoints, restore the last one, count rows in and out; print a table and draw a picture."""
    from siltstone.spark import operations

    console.rule("3. Every checkpoint is proven", align="left")
    taken = operations.snapshot(settings, STREAM)
    console.print(f"{taken.rows:,} live rows copied as a snapshot, to compare with the last restore row by row.")
    proof = operations.verify(settings, STREAM, every=True, deep=True)
    restored = operations.restore(settings, STREAM, to=root / "restored")
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as opened:
        data = report_data(opened.catalog, STREAM)
    console.print(checkpoint_table(data))
    _count(console, root)
    picture = draw_report(data, root / f"{STREAM}-chain.png")
    console.print(
        f"{len(proof.proven)} of {len(data.checkpoints)} checkpoints proven; the last one restored in "
        f"{restored.seconds:.1f} s.\nPicture: {picture}",
        soft_wrap=True,
    )
    if proof.failed:
        raise StateError(f"checkpoint {proof.failed[0].checkpoint} is not proven: {proof.failed[0].reason}")


def _count(console: Console, root: Path) -> None:
    """Check that nothing was lost or doubled: compare the source, the restored state's counts and the sink.

    Raises:
        StateError: they disagree.
    """
    source = ds.dataset(root / "source" / STREAM, format="parquet").count_rows()
    totals = ds.dataset(root / "restored" / "aircraft" / "totals").to_table(columns=["flights"])
    counted = pc.sum(totals.column("flights")).as_py()
    alerts = open_client(root).stream(STREAM).sink_table("aircraft").to_pyarrow_table()
    distinct = alerts.group_by(alerts.column_names).aggregate([]).num_rows
    console.print(
        f"{source:,} flights in the source, {counted:,} counted in the restored state; "
        f"{alerts.num_rows:,} alerts in the sink, {distinct:,} of them distinct."
    )
    if source != counted or alerts.num_rows != distinct:
        raise StateError("flights were lost or doubled", advice="this must never happen, please report it")


def _make_room(root: Path) -> None:
    """Remove what an earlier demo left, and nothing else.

    Raises:
        UsageError: the directory holds something that the demo did not make, such as another stream.
    """
    if not root.exists() or not any(root.iterdir()):
        return
    if not (root / MARK).exists():
        raise UsageError(f"{root} was not made by the demo: name another directory with --warehouse")
    streams = {path.name for part in ("objects", "work") for path in (root / part).glob("[a-z]*")}
    if others := sorted(streams - {STREAM}):
        raise UsageError(f"{root} now holds {', '.join(others)} too: name another directory with --warehouse")
    shutil.rmtree(root)


@contextmanager
def _stream_process(settings: Settings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `siltstone run` in its own process group, and kill it at the end if it still runs."""
    command = [sys.executable, "-P", "-m", "siltstone.cli", "run", STREAM]
    given = {
        "SILTSTONE_WAREHOUSE": settings.warehouse,
        "SILTSTONE_CATALOG": settings.catalog,
        "SILTSTONE_STREAMS": json.dumps(settings.streams),
    }  # not as arguments, which every user of the machine can read
    environment = os.environ | {name: value for name, value in given.items() if value}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _print_checkpoints(
    settings: Settings, console: Console, process: subprocess.Popen[bytes], last: int, until: int | None = None
) -> int:
    """Print each new checkpoint, until one has id `until` or the process has ended; return the last id printed.

    Raises:
        StateError: the process ended before checkpoint `until`.
    """
    while True:
        ended = process.poll() is not None
        for record in _checkpoints(settings, last):
            last = record.id
            forms = "  ".join(f"{name} {form.value:5} D={record.d[name]:<3}" for name, form in record.forms.items())
            until_then = f"{record.event_time_max:%d %b}" if record.event_time_max else ""
            console.print(f"  {record.id:3}  {until_then}  {forms} {record.bytes:>9,} bytes", highlight=False)
        if until is not None and last >= until:
            return last
        if ended:
            if until is not None:
                raise StateError(
                    f"the stream ended before checkpoint {until}", advice="see the log beside the warehouse's work"
                )
            return last
        time.sleep(POLL_S)


def _checkpoints(settings: Settings, after: int) -> list[CheckpointRecord]:
    """Return the checkpoints newer than `after`; none before the stream has begun."""
    try:
        with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as opened:
            new = opened.catalog.checkpoints.last_id(STREAM) - after
            return opened.catalog.checkpoints.list(STREAM, limit=new) if new > 0 else []
    except UsageError:
        return []
