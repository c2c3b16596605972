"""Run streams in processes that are killed, one after the other, until their input is used up, and then check them.

What is run, what it reads and how it is checked is that of a module: `timed_kills`, `join_kills`, `kafka_kills`. Each
run is a process of its own, which makes its session first and then waits for its turn. So kills fall into the engine's
work: while a run takes the stream over, runs, waits, fires, delivers or completes a checkpoint. Parts of it are killed
before. Backend, parallelism, steps per checkpoint and pending checkpoints change from run to run; some rescale the
stream first. Its time of day jumps, forward and back, within what is not refused.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.settings import Settings
from siltstone.spark.failures import is_lost, may_pass, read_causes
from siltstone.spark.operations import RunRequest, replay, rescale, restore, run, verify
from siltstone.spark.session import spark_session
from siltstone.stream import SourceFunction, Stream
from tests.fault.jumping_clock import OFFSET_S, jumping_clock
from tests.fault.processes import MARK, forked_of, send
from tests.spark_streams import read_files, write_files

GIVES_UP, LIFE_S = 3, 120.0
Drop: TypeAlias = Callable[[argparse.Namespace], Sequence[str]]


def note(directory: Path) -> None:
    """Note that a run is about to take the stream over, or has completed a checkpoint: the file grows by a byte."""
    with (directory / "progress").open("ab") as file:
        file.write(b".")


def files_of(directory: Path, name: str, schema: pa.Schema) -> SourceFunction:
    """A source of files, a micro-batch each, from the folder of its name below the directory."""

    def read(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        note(directory)
        return read_files(spark, directory / name, schema)

    return read


def lay_out(directory: Path, tables: Mapping[str, Sequence[pa.Table]]) -> dict[str, list[Path]]:
    """Write the files of sources by name to where no source reads them, and return these: `let_in` gives them.

    A source must not write its own: if a run is killed between a file and its time of change, the order is another.
    """
    made = dict[str, list[Path]]()
    for name, each in tables.items():
        write_files(directory / "coming" / name, each)
        (directory / name).mkdir()
        made[name] = sorted((directory / "coming" / name).iterdir())
    return made


def let_in(file: Path, directory: Path) -> None:
    """Let its source have a file that was laid out."""
    file.rename(directory / file.parent.name / file.name)


def settings_of(given: argparse.Namespace, draw: random.Random) -> Settings:
    """Settings of one run."""
    return Settings(
        warehouse=given.warehouse or str(given.directory / "warehouse"),
        catalog=given.catalog,
        master=given.master,
        spark=json.loads(given.spark),
        backend=draw.choice(["heap", "rocksdb"]),
        parallelism=draw.choice([None, 1, 2, 3]),
        checkpoint_steps=draw.choice([1, 2, 3]),
        max_pending=draw.choice([0, 2]),
    )


def child(given: argparse.Namespace, define: Callable[[argparse.Namespace], Stream], drop: Drop) -> None:
    """One run, once a line says so: of a few micro-batches, or until it is killed."""
    draw = random.Random(f"{given.seed} {given.child}")
    settings, stream = settings_of(given, draw), define(given)
    spark_session(settings.master, settings.spark, steps=True)
    if not sys.stdin.readline():
        return
    # The highest clock grows from run to run, so that the recorded one goes on, too.
    highest_s = min(OFFSET_S, 5.0 * given.child)
    request = RunRequest(batches=draw.choice([1, 2, 4, 8]), follow=draw.random() < 0.6, drop=drop(given))
    with jumping_clock(draw, highest_s=highest_s):
        try:
            if draw.random() < 0.15 and not request.drop and _has_checkpoint(settings, stream.name):
                rescale(settings, stream, draw.choice([1, 2, 3, 4]))
            run(settings, stream, request, lambda _: note(given.directory))
        except Exception as error:
            # A failure of the query is the cause of the error; what failed in Python, Java only quotes.
            lost = may_pass(error) or is_lost(read_causes(error.__cause__ or error))
            if lost or "a Python worker died" in str(error):  # tasks killed too often in a row
                sys.exit(GIVES_UP)
            raise


def answers(
    given: argparse.Namespace,
    check: Callable[[argparse.Namespace], str],
    define: Callable[[argparse.Namespace], Stream],
    drop: Drop = lambda _: (),
) -> bool:
    """Do what this process was started for by `Kills`: a check, or a run; whether it was.

    Args:
        drop: what a run gives up, since the stream of `define` no longer has it.
    """
    if given.check:
        print(check(given))
    elif given.child is not None:
        child(given, define, drop)
    return given.check or given.child is not None


def _has_checkpoint(settings: Settings, name: str) -> bool:
    with OpenWarehouse.open_writable(settings.warehouse, settings.catalog) as place:
        known = [stream.name for stream in place.catalog.streams.list()]
        return name in known and place.catalog.checkpoints.last_id(name) > 0


def compare(what: str, found: Counter[Any], wanted: Counter[Any]) -> None:
    """Check that a sink got what it should have got."""
    lost, more = list((wanted - found).elements()), list((found - wanted).elements())
    assert not lost and not more, f"{what}: {len(lost)} lost, {lost[:3]}, and {len(more)} made, {more[:3]}"


def check_proven(settings: Settings, stream: Stream, directory: Path, keeping: Sequence[str] = ()) -> None:
    """Check that a replay and all checkpoints of a finished stream are proven, and that its state is empty.

    Args:
        keeping: operators that keep state for ever.
    """
    assert replay(settings, stream).proven and verify(settings, stream.name, every=True).proven
    restore(settings, stream.name, to=directory / "restored")
    found = [path for path in (directory / "restored").rglob("*.parquet") if pq.read_metadata(path).num_rows]
    left = [path for path in found if not {*path.parts} & {*keeping}]
    assert not left, f"{left} has rows that nothing would ever remove"


class Kills(ABC):
    """Runs of one stream after the other, killed on this machine.

    Args:
        given: how many kills, the seed of the first stream, and how many pieces of input each has.
    """

    module: str
    """what a process of a run, or of a check, is of (`python -m`)"""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.counts: Counter[str] = Counter()
        """what was killed, or ended"""

    @abstractmethod
    def make_input(self, directory: Path) -> list[Any]:
        """Make the pieces of the input, in order."""

    @abstractmethod
    def give(self, piece: Any, directory: Path) -> None:
        """Let the stream's source have a piece."""

    def run(self) -> None:
        """Do it; a line for each stream."""
        begun = time.monotonic()
        while self.killed < self.given.kills:
            with tempfile.TemporaryDirectory(dir=self.given.directory) as directory:
                found = self.stream(Path(directory))
            minutes = (time.monotonic() - begun) / 60
            print(f"seed {self.given.seed}: {dict(self.counts)} in {minutes:.0f} min; {found}", flush=True)
            self.given.seed += 1

    @property
    def killed(self) -> int:
        """How many processes, or workers of a cluster, were killed."""
        return self.counts.total() - self.counts["runs that ended"]

    def tell(self, text: str) -> None:
        """Say what happens, if that is asked for."""
        if self.given.tell:
            print(text, flush=True)

    def stream(self, directory: Path) -> str:
        """Run one stream until its input is used up, and check it; return what there was."""
        draw = random.Random(f"kills {self.given.seed}")
        (directory / "tmp").mkdir()
        (directory / "progress").touch()
        coming = self.make_input(directory)
        with self.options(directory) as options:
            number, following = 0, self.start(directory, options, 0)
            while coming and self.killed < self.given.kills:
                process, number = following, number + 1
                following = self.start(directory, options, number)
                self.kill(process, directory, coming, draw)
            following.process.kill()
            following.process.wait()
            for piece in coming:
                self.give(piece, directory)
            last = self.start(directory, [*options, "--check"], number + 1)
            assert last.process.wait(900) == 0, f"seed {self.given.seed}: {_end_of(last.said)}"
            return last.said.read_text().strip().rpartition("\n")[2]

    def kill(self, started: "Started", directory: Path, coming: list[Any], draw: random.Random) -> None:
        """Let a run go, and kill parts of it and then it, unless it ends before; input comes meanwhile."""
        process = started.process
        assert process.stdin is not None
        before = (directory / "progress").stat().st_size
        process.stdin.write(b"go\n")
        process.stdin.close()
        # While it starts, or takes over, or once it has completed some checkpoints.
        until, end = draw.choice([0, 1, 2, 2, 3, 4, 6]), time.monotonic() + LIFE_S
        while process.poll() is None and time.monotonic() < end:
            progress = (directory / "progress").stat().st_size
            done = progress - before
            if done >= until:
                end, until = min(end, time.monotonic() + draw.uniform(0, 3)), sys.maxsize
            # About as fast as checkpoints complete, so that runs often wait.
            if coming and done and self.given.pieces - len(coming) <= progress and draw.random() < 0.7:
                self.give(coming.pop(0), directory)
            if done and draw.random() < 0.3:
                self.kill_part(started, draw)
            time.sleep(max(0, min(end - time.monotonic(), draw.choice([0.2, 1, 1, 2.5]))))
        ends = process.poll() is not None
        process.kill()
        assert process.wait() in (0, -9, GIVES_UP), f"seed {self.given.seed}: {_end_of(started.said)}"
        self.counts["runs that ended" if ends else "runs"] += 1
        done = (directory / "progress").stat().st_size - before
        self.tell(f"the run {'ended by itself' if ends else 'is killed'}, {done} checkpoints after it began")

    def kill_part(self, started: "Started", draw: random.Random) -> None:
        """Kill a process of the run's tasks."""
        if workers := forked_of(started.mark):
            send([draw.choice(workers)], signal.SIGKILL)
            self.counts["task processes"] += 1
            self.tell("a Python process of the run's tasks is killed")

    def start(self, directory: Path, options: Sequence[str], number: int) -> "Started":
        """Start a run that makes a session, and waits for its turn: so kills fall into the engine's work."""
        command = [sys.executable, "-m", self.module, "--child", str(number), *options]
        command += ["--seed", str(self.given.seed), "--pieces", str(self.given.pieces), "--directory", str(directory)]
        mark, path = uuid.uuid4().hex, directory / f"said-{number % 3}.txt"
        environment = {**os.environ, "TMPDIR": str(directory / "tmp"), **self.variables(), MARK: mark}
        with path.open("wb") as said:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said)
        return Started(process, mark, path)

    @contextmanager
    def options(self, directory: Path) -> Iterator[list[str]]:
        """The options of one stream's runs."""
        yield ["--warehouse", str(directory / "warehouse")]

    def variables(self) -> dict[str, str]:
        """Further variables of runs."""
        return {}


@dataclass(frozen=True)
class Started:
    """A run: its process, the mark that all processes of it carry, and what they say."""

    process: subprocess.Popen
    mark: str
    said: Path


def _end_of(said: Path) -> str:
    """What a run has said, without Java's stacks."""
    lines = said.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("\tat "))[-20_000:]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What this module is asked for."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--pieces", type=int, default=30)
    options.add_argument("--directory", type=Path)
    options.add_argument("--tell", action="store_true", help="say what is killed, when it is")
    own = options.add_argument_group("of the processes that it starts")
    own.add_argument("--child", type=int)
    own.add_argument("--check", action="store_true")
    own.add_argument("--warehouse")
    own.add_argument("--catalog")
    own.add_argument("--master", default="local[2]")
    own.add_argument("--spark", default="{}")
    return options
