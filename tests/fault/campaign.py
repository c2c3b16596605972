"""The campaign: warehouse after warehouse, process after process of every kind, every promise checked in between.

Most processes are forked and need no JVM (`rounds`), so that kills fall into the engine's work and cost no start; a
share are real `siltstone` processes with Spark (`life`).
"""

import argparse
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fault.commands import COMMANDS, choose
from tests.fault.disk import small_disk
from tests.fault.life import KILLS, Hurt, Life
from tests.fault.reference import flights, held
from tests.fault.rounds import Round, Rounds
from tests.fault.shapes import SHAPES, WEIGHTS, can_play, play
from tests.fault.sites import CATALOGS
from tests.fault.warehouses import WAREHOUSES

COLUMNS = ("kills", "zombies", "faults", "rounds", "violations")
SPARK_EVERY = 6
"""one of so many kills is of a process with Spark, and one of so many of these is followed by a take-over"""


@dataclass
class Campaign:
    """Rounds and lives until there were kills enough, or a promise was broken.

    Args:
        kills: how many.
        kinds: of processes, among `COMMANDS`.
        stores: of `WAREHOUSES`, used in turn.
        spark_kills: how many of the kills are of processes with Spark.
        shapes: how processes without are hurt, among `SHAPES`.
        catalogs: of `CATALOGS`, used in turn by processes without.
        tell: called with a line for people and the violations, as they come.
    """

    seed: int
    kills: int
    kinds: Sequence[str] = tuple(COMMANDS)
    stores: Sequence[str] = ("filesystem",)
    spark_kills: int = 0
    shapes: Sequence[str] = tuple(SHAPES)
    catalogs: Sequence[str] = ("sqlite",)
    tell: Callable[[str, list[str]], None] = lambda line, violations: None
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._reach: dict[str, tuple[float, float]] = {}

    def run(self) -> None:
        """Do it: processes without a JVM and processes with Spark side by side, each on warehouses of their own."""
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(self._turns, name, one) for name, one in (("forked", self._forked), ("spark", self._spark))
            ]
        for done in both:
            done.result()

    def _turns(self, name: str, one: Callable[[Path, random.Random, int], None]) -> None:
        """One warehouse after the other."""
        chance, number = random.Random(f"{name} {self.seed}"), 0
        while self._left(spark=name == "spark") and not self.broken:
            directory = Path(tempfile.mkdtemp(prefix=f"siltstone-fault-{name}-"))
            one(directory, chance, number)
            if self.broken:
                self.tell(f"left as it is, to look at: {directory}", [])
            else:
                shutil.rmtree(directory, ignore_errors=True)
            number += 1

    def total(self, column: str, *, spark: bool | None = None) -> int:
        """Over all kinds."""
        with self._lock:
            counts = dict(self.counts)
        chosen_ = [c for kind, c in counts.items() if spark is None or kind.endswith("Spark") == spark]
        return sum(count[column] for count in chosen_)

    def _left(self, *, spark: bool) -> int:
        wanted = self.spark_kills if spark else self.kills - self.spark_kills
        return max(0, wanted - self.total("kills", spark=spark))

    def _count(self, kind: str, column: str, by: int = 1) -> None:
        with self._lock:
            self.counts.setdefault(kind, Counter())[column] += by

    def _told(self, line: str, violations: list[str]) -> None:
        self.broken += violations
        self.tell(line, violations)

    # --- without a JVM ----------------------------------------------------------------------------------------------

    def _forked(self, directory: Path, chance: random.Random, number: int) -> None:
        store = self.stores[number % len(self.stores)]
        # Shifted by one each time round: each store meets each catalog.
        catalog = self.catalogs[(number + number // len(self.stores)) % len(self.catalogs)]
        with (
            small_disk(directory / "disk") as disk,
            closing(Rounds(disk, chance, store, self._reach, catalog)) as rounds,
        ):
            shapes = [shape for shape in self.shapes if can_play(rounds, shape)]
            while self._left(spark=False) and not self.broken:
                known = rounds.known()
                if known.left < 2:
                    break
                start = time.monotonic()
                (shape,) = chance.choices(shapes, [WEIGHTS[shape] for shape in shapes])
                played = play(rounds, shape, choose(chance, self.kinds, known))
                self._record(played, time.monotonic() - start, known.newest)
            if not self.broken:
                self._told(f"    a warehouse on {store} and {catalog} at its end: settled", rounds.finish())
            if self.broken:  # the disk goes with its block
                ignored = shutil.ignore_patterns("ballast")
                shutil.copytree(disk.path, directory / "copy", ignore=ignored, dirs_exist_ok=True)

    def _record(self, played: Round, seconds: float, newest: int) -> None:
        for kind in played.kinds:
            self._count(kind, "rounds")
        for column, counted in (("kills", played.kills), ("zombies", played.zombies), ("faults", played.faults)):
            for kind, count in counted.items():
                self._count(kind, column, count)
        if played.violations:
            self._count(played.kinds[0], "violations", len(played.violations))
        line = (
            f"{self.total('kills'):4} {played.store:10} {played.shape:8} at checkpoint {newest:2}, {seconds:4.1f} s: "
        )
        self._told(line + ", ".join(played.outcomes), played.violations)

    # --- with Spark -------------------------------------------------------------------------------------------------

    def _spark(self, directory: Path, chance: random.Random, number: int) -> None:
        # One of three of flights, which take longer.
        reference = flights() if number % 3 == 2 else held()
        life = Life(reference, directory, chance, self.stores[number % len(self.stores)])
        targets = [*KILLS]
        chance.shuffle(targets)
        for target in targets * 2:
            if not self._left(spark=True) or life.left < 2 or self.broken:
                break
            hurt = life.kill(target)
            if hurt is not None:
                self._recorded(hurt, "kills")
        if life.left > 1 and not self.broken:
            self._recorded(life.zombie(stopped=chance.random() < 0.7), "zombies")
        if not self.broken:
            self._told(f"    a warehouse of {life.stream} on {life.store} at its end: proven", life.finish())

    def _recorded(self, hurt: Hurt, column: str) -> None:
        kind = f"{hurt.work}, Spark"
        for counted in ("rounds", column):
            self._count(kind, counted)
        self._count(kind, "violations", len(hurt.violations))
        line = (
            f"{self.total('kills'):4} {hurt.store:10} {hurt.target:7} of {hurt.work} of {hurt.stream} with Spark after "
        )
        line += f"{hurt.seconds:.1f} s, then at step {hurt.step}: {hurt.outcome}"
        self._told(line, hurt.violations)

    def table(self) -> Table:
        """What was done to each kind of process."""
        table = Table("process", *COLUMNS)
        for kind in sorted(self.counts):
            table.add_row(kind, *(str(self.counts[kind][column]) for column in COLUMNS))
        table.add_row("all", *(str(self.total(column)) for column in COLUMNS))
        return table


def main() -> int:
    """The command line of `harness.py`."""
    parser = argparse.ArgumentParser(description="Kill Siltstone's processes; nothing may be lost or doubled.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--spark-kills", type=int, help=f"How many of them with Spark. [one of {SPARK_EVERY}]")
    parser.add_argument("--seed", type=int, help="Repeat the choices of another campaign. [at random]")
    parser.add_argument("--process-kinds", default="all", help=f"all, or some of {','.join(COMMANDS)}")
    parser.add_argument("--warehouse-kind", choices=[*WAREHOUSES, "all"], default="filesystem")
    parser.add_argument("--catalog-kind", choices=[*CATALOGS, "all"], default="sqlite")
    parser.add_argument("--shapes", default="all", help=f"How forked processes are hurt: all, or {','.join(SHAPES)}")
    given = parser.parse_args()
    kinds = list(COMMANDS) if given.process_kinds == "all" else given.process_kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in COMMANDS]:
        parser.error(f"no process kind {unknown[0]}: there are {', '.join(COMMANDS)}")
    shapes = list(SHAPES) if given.shapes == "all" else given.shapes.split(",")
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        parser.error(f"no shape {unknown[0]}: there are {', '.join(SHAPES)}")
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(3))
    spark_kills = given.kills // SPARK_EVERY if given.spark_kills is None else min(given.spark_kills, given.kills)
    console = Console(width=160)
    console.print(f"{given.kills} kills, {spark_kills} with Spark, of {', '.join(kinds)}; seed {seed}")
    start = time.monotonic()

    def tell(line: str, violations: list[str]) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        for violation in violations:
            console.print(f"    VIOLATION: {violation}", style="red", markup=False, soft_wrap=True)

    catalogs = list(CATALOGS) if given.catalog_kind == "all" else [given.catalog_kind]
    stores = list(WAREHOUSES) if given.warehouse_kind == "all" else [given.warehouse_kind]
    campaign = Campaign(seed, given.kills, kinds, stores, spark_kills, shapes, catalogs, tell)
    campaign.run()
    console.print(campaign.table())
    seconds, broken = time.monotonic() - start, campaign.broken
    verdict = f"{len(broken)} violations: repeat with --seed {seed}" if broken else "no violation"
    console.print(f"{campaign.total('kills')} kills in {seconds:.0f} s, seed {seed}: {verdict}")
    return 1 if broken else 0
