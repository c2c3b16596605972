"""Measure how much the commands of a stream's life cycle reduce its throughput.

    python -m benchmarks side-by-side [--minutes 10] [--alone 10] [--pause 30] [--nice 10] [--rows N] [--json PATH]

`siltstone run feed --follow` reads rows as fast as it can, in a process of its own: some minutes alone, then some
minutes while `materialize`, `truncate`, `sweep` and `verify --all` are repeated, each in processes of its own.
Throughput is computed from the catalog's input log, over the steps that were committed within those minutes. Each loop
pauses between its rounds, and its commands run one task at a time at a low priority (nice 10, `--nice`): at normal
priority they would take cores from a stream that uses all of them, and at the lowest priority they would not end. The
stream's own background materialization is turned off, because only one can run. At the end the stream is stopped and
swept, and another sweep must find nothing.

The exit code is 1 if throughput drops by more than 15 %, a command fails, or an orphan is left.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.feed import FEED
from benchmarks.goals import Goal, goals_table, table_of
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import SiltstoneError

DROP_AT_MOST = 0.15
COMMANDS: dict[str, list[str]] = {
    "materialize": ["materialize", FEED.name, "--parallelism", "1"],
    "truncate": ["truncate", FEED.name, "--keep-last", "5"],
    "sweep": ["sweep", FEED.name],
    "verify": ["verify", FEED.name, "--all"],
}
_NICE = 10
_POLL_S = 0.5
_WAIT_S = 600.0
"""most seconds to wait for a step, or for the end of the stream"""


@dataclass
class Loop:
    """The rounds of one command."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def command(warehouse: str, arguments: list[str]) -> list[str]:
    """Make a command line of `siltstone`."""
    return [sys.executable, "-m", "siltstone.cli", *arguments, "--warehouse", warehouse]


def environment(cores: int) -> dict[str, str]:
    """Make the environment: the number of cores, and the stream of this benchmark."""
    return {**os.environ, "SILTSTONE_MASTER": f"local[{cores}]", "SILTSTONE_STREAMS": '["benchmarks.feed"]'}


@contextmanager
def run_stream(warehouse: str, rows: int) -> Iterator[subprocess.Popen[str]]:
    """Run the stream, and interrupt it at the end of the block.

    Raises:
        RuntimeError: it failed; the message ends with its output.
    """
    arguments = ["run", FEED.name, "--follow", "--materialize-every", "off", "--set", f"rows={rows}"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command(warehouse, arguments), env=environment(2), stdout=said, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield process
            process.send_signal(signal.SIGINT)
            process.wait(_WAIT_S)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            process.kill()
            process.wait()
            said.seek(0)
            raise RuntimeError(f"{error}; its output:\n{said.read()[-4000:]}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"the stream ended with {process.returncode}:\n{said.read()[-4000:]}")


def steps_done(warehouse: str) -> int:
    """Return the newest committed step; 0 before the first."""
    try:
        with OpenWarehouse.open_existing(warehouse) as place:
            last = place.catalog.checkpoints.last_id(FEED.name)
            steps = place.catalog.input_log.list(FEED.name, last, last - 1) if last else []
    except SiltstoneError:  # there is no warehouse yet
        return 0
    return steps[-1].step if steps else 0


def wait_for_steps(warehouse: str, process: subprocess.Popen[str], steps: int) -> None:
    """Wait until a number of steps are committed.

    Raises:
        RuntimeError: they were not committed in time.
    """
    give_up = time.monotonic() + _WAIT_S
    while steps_done(warehouse) < steps:
        if process.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"the stream did not commit {steps} steps within {_WAIT_S:.0f} s")
        time.sleep(_POLL_S)


def next_step(warehouse: str) -> tuple[int, float]:
    """Wait for the next committed step; return it and the time when it was seen."""
    known, give_up = steps_done(warehouse), time.monotonic() + _WAIT_S
    while time.monotonic() < give_up:
        now = steps_done(warehouse)
        if now > known:
            return now, time.monotonic()
        time.sleep(_POLL_S / 10)
    raise RuntimeError(f"the stream committed no step for {_WAIT_S:.0f} s")


def throughput(warehouse: str, rows: int, seconds: float) -> float:
    """Measure the rows per second that the stream commits in about `seconds`: whole steps, over the time they took."""
    first, began = next_step(warehouse)
    time.sleep(seconds)
    last, ended = next_step(warehouse)
    return (last - first) * rows / (ended - began)


@contextmanager
def run_loops(warehouse: str, pause_s: float, nice: int) -> Iterator[dict[str, Loop]]:
    """Repeat every command in a loop of its own until the block ends; then wait for the current rounds."""
    done = threading.Event()
    loops = {name: Loop() for name in COMMANDS}

    def loop(name: str, delay_s: float) -> None:
        done.wait(delay_s)
        while not done.is_set():
            began = time.monotonic()
            ended = subprocess.run(
                ["nice", "-n", str(nice), *command(warehouse, COMMANDS[name])],
                env=environment(1),
                capture_output=True,
                text=True,
                check=False,
            )
            loops[name].seconds.append(time.monotonic() - began)
            if ended.returncode:
                loops[name].failures.append(f"exit {ended.returncode}: {(ended.stderr or ended.stdout)[-500:].strip()}")
            done.wait(pause_s)

    threads = [
        threading.Thread(target=loop, args=(name, i * pause_s / len(COMMANDS))) for i, name in enumerate(COMMANDS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield loops
    finally:
        done.set()
        for thread in threads:
            thread.join()


def left_to_sweep(warehouse: str) -> int:
    """Sweep twice; return the orphans that the second sweep finds. The stream must have stopped."""
    for further in ([], ["--dry-run"]):
        arguments = command(warehouse, ["sweep", FEED.name, "--json", *further])
        said = subprocess.run(arguments, env=environment(1), capture_output=True, text=True, check=True).stdout
    return json.loads(said)["found"]


def measure(
    warehouse: str, alone_minutes: float, minutes: float, pause_s: float, rows: int, nice: int
) -> dict[str, Any]:
    """Measure the stream alone, then together with the commands; then stop and sweep it."""
    console = Console(stderr=True)
    with run_stream(warehouse, rows) as process:
        console.print("the stream starts ...")
        wait_for_steps(warehouse, process, 5)
        console.print(f"{alone_minutes:g} minutes alone ...")
        alone = throughput(warehouse, rows, 60 * alone_minutes)
        console.print(f"{minutes:g} minutes with {', '.join(COMMANDS)} ...")
        with run_loops(warehouse, pause_s, nice) as loops:
            beside = throughput(warehouse, rows, 60 * minutes)
    return {
        "alone_rows_per_s": alone,
        "beside_rows_per_s": beside,
        "drop": 1 - beside / alone,
        "loops": {name: vars(loop) for name, loop in loops.items()},
        "orphans": left_to_sweep(warehouse),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks side-by-side", description="A stream and its life cycle."
    )
    parser.add_argument("--minutes", type=float, default=10, help="minutes with the commands (default: 10)")
    parser.add_argument("--alone", type=float, default=10, help="minutes alone (default: 10)")
    parser.add_argument("--pause", type=float, default=30, help="seconds between a loop's rounds (default: 30)")
    parser.add_argument("--nice", type=int, default=_NICE, help=f"priority of the commands, 0 to 19 (default: {_NICE})")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per micro-batch (default: 1,000,000)")
    parser.add_argument("--directory", type=Path, help="temporary files: a disk, not memory (default: the system's)")
    parser.add_argument("--json", type=Path, default=Path("side-by-side.json"), help="file for the numbers")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="siltstone-beside-", dir=options.directory) as scratch:
        found = measure(
            str(Path(scratch) / "w"), options.alone, options.minutes, options.pause, options.rows, options.nice
        )
    options.json.write_text(json.dumps(found, indent=1))
    console = Console(width=None if sys.stdout.isatty() else 150)
    how = f"nice {options.nice}, one task at a time, {options.pause:g} s between rounds, {os.cpu_count()} cores"
    table = table_of(f"commands during the stream ({how})", "command", "rounds", "failed", "median s")
    for name, loop in found["loops"].items():
        seconds = loop["seconds"]
        middle = f"{median(seconds):.1f}" if seconds else "-"
        table.add_row(name, str(len(seconds)), str(len(loop["failures"])), middle)
    console.print(table)
    console.print(
        f"rows per second: {found['alone_rows_per_s']:,.0f} alone, {found['beside_rows_per_s']:,.0f} with the commands"
    )
    goals = [
        Goal("drop of throughput with the commands", found["drop"], at_most=DROP_AT_MOST),
        Goal("commands that failed", sum(len(loop["failures"]) for loop in found["loops"].values()), at_most=0),
        Goal("commands that never ran", sum(not loop["seconds"] for loop in found["loops"].values()), at_most=0),
        Goal("orphans left at the end", found["orphans"], at_most=0),
    ]
    console.print(goals_table(goals, "side by side: goals"))
    for name, loop in found["loops"].items():
        for failure in loop["failures"][:3]:
            console.print(f"{name}: {failure}", markup=False, highlight=False, soft_wrap=True)
    return 1 if any(goal.is_kept is False for goal in goals) else 0
