"""The campaign: warehouse after warehouse, kill after kill, with every check of `reference` in between."""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from siltstone.catalog.open import open_catalog
from siltstone.catalog.place import Place
from siltstone.catalog.repository import Catalog
from siltstone.errors import UsageError
from siltstone.store.open import Warehouse
from streams import FLIGHTS
from tests.fault.processes import Run, arguments_of, send
from tests.fault.reference import Reference, flights, proof_violations, small, violations
from tests.fault.warehouses import WAREHOUSES

LIMIT_S = 300.0
"""no run of the campaign takes so long, on however slow a machine"""
ORPHANS_S = 60.0
"""after which nothing of a run whose driver is gone may be alive"""
STEP_S = 1.5
"""about what a step takes; a kill comes within one of a moment that the run is seen to reach"""
KILLS = ("tree", "driver", "jvm", "worker")


@dataclass(frozen=True)
class Hurt:
    """One line of the table."""

    stream: str
    store: str
    kind: str
    options: str
    step: int
    seconds: float
    outcome: str
    violations: list[str] = field(default_factory=list)


class Life:
    """One warehouse: it is hurt until its input is used up, then proven whole.

    Args:
        directory: an empty directory for it.
        chance: where all random choices come from.
        store: where its objects lie, one of `WAREHOUSES`.

    Attributes:
        warehouse: its directory on this machine.
        url: what `--warehouse` names.
    """

    def __init__(self, reference: Reference, directory: Path, chance: random.Random, store: str = "filesystem") -> None:
        self.reference, self.directory, self.chance, self.store = reference, directory, chance, store
        self.stream = reference.stream.name
        self.warehouse = directory / "warehouse"
        self.url = WAREHOUSES[store](self.warehouse)
        self._orphaned: list[Run] = []

    @property
    def step(self) -> int:
        """The last step that a completed checkpoint holds."""
        with self._catalog() as catalog:
            newest = catalog.last_id(self.stream) if catalog is not None else 0
            return catalog.steps(self.stream, newest)[-1].step if catalog is not None and newest else 0

    @contextmanager
    def _catalog(self) -> Iterator[Catalog | None]:
        """The catalog; None while it does not know the stream."""
        try:
            catalog = open_catalog(Warehouse.at(self.url).catalog_url, create=False)
        except UsageError:
            yield None
            return
        with closing(catalog):
            yield catalog if self.stream in [s.name for s in catalog.streams()] else None

    @property
    def left(self) -> int:
        """How many steps are left to do."""
        return max(0, self.reference.steps - self.step)

    def start(self, options: dict[str, int | str | None], master: str = "local[2]") -> Run:
        """A run; where the stream's input goes on after the reference's, it is told to stop there."""
        batches = options.get("batches")
        if batches is None and not self.reference.whole:
            options = {**options, "batches": self.left}
        return Run(self.stream, self.url, self.directory, arguments_of(options), master)

    def options(self) -> dict[str, int | str | None]:
        """How the next run works; one after the other they differ in all that may differ."""
        chance = self.chance
        return {
            "parallelism": chance.choice([1, 2, 3]),
            "checkpoint_steps": chance.choice([1, 1, 3]),
            "batches": chance.choice([None, None, min(self.left, chance.randint(4, 8))]),
            "policy": chance.choice([None, "adjust-d"]),
        }

    def kill(self, kind: str) -> Hurt | None:
        """Start a run, kill what `kind` says at a random moment; None if the run was through before."""
        chance, options = self.chance, self.options()
        if kind == "worker":  # it may well survive, and is then not to use the input up
            options["batches"] = min(self.left, chance.randint(5, 6))
        # With retries a task survives the loss of its worker.
        run = self.start(options, chance.choice(["local[2]", "local[2,4]"]))
        try:
            self._wait_for_a_moment(run)
            targets = self._targets(run, kind)
            if run.ended or not targets:
                run.wait(LIMIT_S)
                return None
            send(targets, signal.SIGKILL)
            at_s = time.monotonic() - run.started_s
            outcome, found = self._after(run, kind)
        finally:
            if run not in self._orphaned:
                run.kill_all()
        return Hurt(self.stream, self.store, kind, _shown(options), self.step, at_s, outcome, [*found, *self.look()])

    def _wait_for_a_moment(self, run: Run) -> None:
        """Until some checkpoints completed, or only until the start; then a little longer."""
        work = self.warehouse / "work" / self.stream
        newest, before = max((path.name for path in work.glob("*")), default=""), self.completed
        more = self.chance.choice([-1, 0, 0, 1, 1, 2, 3])

        def begun() -> bool:
            return any(path.parts[-3] > newest for path in work.glob("*/spark/offsets"))

        def enough() -> bool:
            return begun() and self.completed >= before + more

        pause = self.chance.random() * STEP_S
        if more < 0:
            pause *= 4
        elif not run.until(begun if more == 0 else enough):
            return
        until = time.monotonic() + pause
        run.until(lambda: time.monotonic() >= until)

    @property
    def completed(self) -> int:
        """The newest checkpoint, 0 before the first."""
        with self._catalog() as catalog:
            return catalog.last_id(self.stream) if catalog is not None else 0

    def _targets(self, run: Run, kind: str) -> list[int]:
        match kind:
            case "tree":
                return list(run.processes())
            case "driver":
                return [run.process.pid]
            case "jvm":
                return run.machine()
            case _:
                if not run.until(lambda: bool(run.workers())):
                    return []
                workers = run.workers()
                # Any one may be idle; among all of them is the one at work.
                return workers if self.chance.random() < 0.5 else self.chance.sample(workers, min(1, len(workers)))

    def _after(self, run: Run, kind: str) -> tuple[str, list[str]]:
        """What became of the run, and what of that may not be."""
        if kind == "tree":
            run.kill_all()
            return "killed", []
        if kind == "driver":
            # Half of the time the next run begins while the driver's orphans still die.
            if self.chance.random() < 0.5:
                self._orphaned.append(run)
                return "killed, resumed at once", []
            return "killed", _outlived(run)
        try:
            end = run.wait(LIMIT_S)
        except TimeoutError as error:
            return "hangs", [str(error)]
        if end.code == 0 and kind == "worker":
            return "survived", []
        says = "Spark" if kind == "jvm" else "Python worker died"
        clear = end.code == (3 if kind == "jvm" else 1) and says in end.error
        return f"stopped: {end.error}", [] if clear else [f"exit code {end.code}, and said: {end.said[-500:]}"]

    def look(self, *, ended: bool = False) -> list[str]:
        """Cheap checks between runs."""
        return violations(self.reference, self.url, ended=ended) if self.step else []

    def finish(self) -> list[str]:
        """An undisturbed run to the end, and every check there is."""
        if self.left:
            end = self.start({"parallelism": self.chance.choice([1, 2, 3])}).wait(LIMIT_S)
            if end.code != 0 or end.result is None:
                return [f"the last run ended with {end.code}: {end.said[-500:]}"]
            if end.result["digest"] != self.reference.digests[self.step - 1]:
                return ["the last run does not end with the digest of the undisturbed one"]
        found = [] if self.left == 0 else [f"{self.left} steps were not run"]
        found += [violation for run in self._orphaned for violation in _outlived(run)]
        return [*found, *self.look(ended=True), *proof_violations(self.reference, self.url)]

    def zombie(self, *, stopped: bool) -> Hurt:
        """A second run takes the stream over from a first that is stopped (or goes on), which then is to find out."""
        first = self.start({"parallelism": self.chance.choice([1, 2]), "checkpoint_steps": 1})
        second: Run | None = None
        kind = "zombie" if stopped else "rival"
        try:
            self._wait_for_a_moment(first)
            frozen = list(first.processes()) if stopped else []
            send(frozen, signal.SIGSTOP)
            at_s = time.monotonic() - first.started_s
            if first.ended:
                return Hurt(self.stream, self.store, kind, "", self.step, at_s, "the first run was through before")
            second = self.start({"batches": min(self.left, 3), "parallelism": self.chance.choice([1, 2, 3])})
            outcome, found = self._taken_over(first, second, stopped)
            return Hurt(self.stream, self.store, kind, "", self.step, at_s, outcome, found)
        finally:
            for run in (first, second):
                if run is not None:
                    run.kill_all()

    def _taken_over(self, first: Run, second: Run, stopped: bool) -> tuple[str, list[str]]:
        found = []
        end = second.wait(LIMIT_S)
        if end.code != 0:
            found.append(f"the second run ended with {end.code}: {end.said[-500:]}")
        before = self._fingerprint()
        send(list(first.processes()), signal.SIGCONT)
        late = first.wait(LIMIT_S)
        # One that was never stopped may be through before the second begins.
        if late.code not in ((4,) if stopped else (0, 4)):
            found.append(f"the fenced run ended with {late.code}: {late.said[-500:]}")
        if stopped and self._fingerprint() != before:
            found.append("the fenced run changed what the second had written")
        outcome = "fenced" if late.code == 4 else f"ended with {late.code}"
        return outcome, [*found, *self.look(ended=True)]

    def _fingerprint(self) -> tuple[object, ...]:
        """What is recorded, what is published, and every object that a checkpoint names."""
        with Place.existing(self.url) as place:
            catalog, store = place.catalog, place.warehouse.store
            records = catalog.checkpoints(self.stream)
            objects = [(o.name, store.read(o.stored).size) for o in catalog.objects(self.stream)]  # their bytes checked
        sink = self.warehouse / "sink" / self.stream / self.reference.sink
        rows = sorted(str(path) for path in sink.glob("checkpoint=*/*"))
        return [(r.id, r.epoch, r.digest) for r in records], objects, rows


def _outlived(run: Run) -> list[str]:
    """A run whose driver was killed: what of it does not go by itself."""
    if run.gone(ORPHANS_S):
        return []
    left = [" ".join(command[:3]) for command in run.processes().values()]
    run.kill_all()
    return [f"{left} outlived the driver by {ORPHANS_S:.0f} s"]


def _shown(options: dict[str, int | str | None]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items() if value is not None)


@dataclass
class Campaign:
    """Lives, one after the other, until there were kills enough.

    Args:
        kills: how many, at least a quarter of them on flights.
        stores: of `WAREHOUSES`, used in turn.
        zombies: how many take-overs.
        tell: called with each line of the table, as it comes.
    """

    seed: int
    kills: int
    zombies: int
    stores: Sequence[str] = ("filesystem",)
    tell: Callable[[Hurt], None] = lambda _: None
    hurts: list[Hurt] = field(default_factory=list)
    ends: list[tuple[str, list[str]]] = field(default_factory=list)
    """per warehouse: its stream, and what was found at its end"""

    def run(self) -> None:
        """Do it."""
        chance = random.Random(self.seed)
        # Every kind comes equally often.
        kinds = [KILLS[i % len(KILLS)] for i in range(self.kills)]
        takeovers = ["rival" if i % 3 == 2 else "zombie" for i in range(self.zombies)]
        chance.shuffle(kinds)
        todo = [*_mixed(chance, kinds, takeovers)]
        while todo:
            # A third of the kills on flights.
            on_flights = sum(hurt.stream == FLIGHTS.name for hurt in self.hurts)
            reference = flights() if on_flights * 3 < len(self.hurts) else small()
            directory = Path(tempfile.mkdtemp(prefix="siltstone-fault-"))
            life = Life(reference, directory, chance, self.stores[len(self.ends) % len(self.stores)])
            try:
                while todo and life.left > 1:
                    kind = todo[-1]
                    hurt = life.kill(kind) if kind in KILLS else life.zombie(stopped=kind == "zombie")
                    if hurt is None:
                        continue
                    todo.pop()
                    self.hurts.append(hurt)
                    self.tell(hurt)
                    if hurt.violations:
                        break
                self.ends.append((f"{life.stream} on {life.store}", [] if self.broken else life.finish()))
            finally:
                if not self.broken:
                    shutil.rmtree(directory, ignore_errors=True)
            if self.broken:
                self.ends[-1][1].append(f"left as it is, to look at: {directory}")
                return

    @property
    def broken(self) -> list[str]:
        """Every violation."""
        return [v for hurt in self.hurts for v in hurt.violations] + [v for _, found in self.ends for v in found]


def _mixed(chance: random.Random, kinds: list[str], takeovers: list[str]) -> Iterator[str]:
    """All of them, the take-overs at random places in between."""
    places = sorted(chance.sample(range(len(kinds) + len(takeovers)), len(takeovers)))
    for place in range(len(kinds) + len(takeovers)):
        yield takeovers.pop() if place in places else kinds.pop()


def main() -> int:
    """The command line of `harness.py`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--zombies", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--warehouse-kind", choices=[*WAREHOUSES, "all"], default="filesystem")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(3))
    console = Console(width=160)
    console.print(f"{given.kills} kills and {given.zombies} take-overs on {given.warehouse_kind}, seed {seed}")
    start = time.monotonic()

    def tell(hurt: Hurt) -> None:
        console.print(
            f"{len(campaign.hurts):3} {hurt.stream:8} {hurt.store:10} {hurt.kind:7} after {hurt.seconds:5.1f} s, "
            f"then at step {hurt.step:2}  {hurt.outcome}  [{hurt.options}]",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        for violation in hurt.violations:
            console.print(f"    VIOLATION: {violation}", style="red", markup=False, soft_wrap=True)

    stores = list(WAREHOUSES) if given.warehouse_kind == "all" else [given.warehouse_kind]
    campaign = Campaign(seed, given.kills, given.zombies, stores, tell)
    campaign.run()
    console.print(_summary(campaign))
    for stream, found in campaign.ends:
        console.print(
            f"a warehouse of {stream} at its end: {'; '.join(found) or 'proven'}", markup=False, soft_wrap=True
        )
    seconds = time.monotonic() - start
    broken = campaign.broken
    verdict = f"{len(broken)} violations: repeat with --seed {seed}" if broken else "no violation"
    console.print(f"{len(campaign.hurts)} times hurt in {seconds:.0f} s, seed {seed}: {verdict}")
    return 1 if broken else 0


def _summary(campaign: Campaign) -> Table:
    table = Table("what", "stream", "store", "times", "survived", "stopped", "killed", "fenced", "mean s", "violations")
    groups: dict[tuple[str, str, str], list[Hurt]] = {}
    for hurt in campaign.hurts:
        groups.setdefault((hurt.kind, hurt.stream, hurt.store), []).append(hurt)
    for (kind, stream, store), hurts in sorted(groups.items()):
        count = Counter(hurt.outcome.split(":")[0].split(",")[0] for hurt in hurts)
        table.add_row(
            kind,
            stream,
            store,
            str(len(hurts)),
            *(str(count[outcome]) for outcome in ("survived", "stopped", "killed", "fenced")),
            f"{sum(hurt.seconds for hurt in hurts) / len(hurts):.1f}",
            str(sum(len(hurt.violations) for hurt in hurts)),
        )
    return table
