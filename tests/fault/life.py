"""One warehouse of a stream under Spark, whose processes are killed and taken over until its input is used up."""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.open import open_catalog
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.state.schema import DELETED
from siltstone.state.variables import ValueState
from siltstone.store.open import Warehouse
from tests.fault import promises
from tests.fault.processes import Run, arguments_of, send
from tests.fault.reference import Reference
from tests.fault.tables import table_of
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
    """What was done to a process under Spark: `target` of the tree while it was at `work`, the kind of a command."""

    stream: str
    store: str
    target: str
    work: str
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
        """How many batches completed checkpoints hold."""
        with self._catalog() as catalog:
            newest = catalog.checkpoints.last_id(self.stream) if catalog is not None else 0
            return catalog.input_log.get_position(self.stream, newest).next_batch if catalog is not None else 0

    @property
    def completed(self) -> int:
        """The newest checkpoint, 0 before the first."""
        with self._catalog() as catalog:
            return catalog.checkpoints.last_id(self.stream) if catalog is not None else 0

    @contextmanager
    def _catalog(self) -> Iterator[Catalog | None]:
        """The catalog; None while it does not know the stream."""
        try:
            catalog = open_catalog(Warehouse.at(self.url).catalog_url, create=False)
        except UsageError:
            yield None
            return
        with closing(catalog):
            yield catalog if self.stream in [s.name for s in catalog.streams.list()] else None

    @property
    def left(self) -> int:
        """How many steps are left to do."""
        return max(0, self.reference.steps - self.step)

    # --- processes ----------------------------------------------------------------------------------------------

    def command(self, kind: str, **options: int | str | None) -> list[str]:
        """A command on the stream; where its input goes on after the reference's, a run is told to stop there."""
        if kind == "run" and options.get("batches") is None and not self.reference.whole:
            options = {**options, "batches": self.left}
        return [kind, self.stream, "--warehouse", self.url, "--json", *arguments_of(options)]

    def start(self, master: str = "local[2]", **options: int | str | None) -> Run:
        """A run."""
        return Run([self.command("run", **options)], self.directory, master)

    def _work(self) -> list[list[str]]:
        """Processes of every kind, a few steps of the stream first and in between."""
        chance, left = self.chance, self.left
        commands = []
        for after in chance.sample(["materialize", "materialize", "verify", "restore", "replay", "recover"], 3):
            batches = min(left, chance.randint(1, 3))
            left -= batches
            if batches:
                commands.append(self.command("run", batches=batches, **self._options()))
            commands.append(self.command(after))
            if chance.random() < 0.4:
                commands.append(self.command("rescale", parallelism=chance.choice([1, 2, 3, 4])))
            if chance.random() < 0.3:
                commands.append(self.command("edit", **self._nobody()))
            if chance.random() < 0.3:
                commands.append(self.command("truncate", keep_last=3))
        return commands

    def _nobody(self) -> dict[str, str]:
        """An edit that deletes a key that nobody has: a step and a checkpoint, of state that stays what it was."""
        operator, name = next(
            (operator, name)
            for operator in self.reference.stream.operators
            for name, variable in operator.variables().items()
            if isinstance(variable, ValueState)
        )
        key = [(f.name, pa.array(["nobody" if pa.types.is_string(f.type) else -1], f.type)) for f in operator.key]
        path = self.directory / "nobody.parquet"
        pq.write_table(pa.table(dict([*key, (DELETED, pa.array([True]))])), path)
        return {"operator": operator.name, "variable": name, "from": str(path)}

    def _options(self) -> dict[str, int | str | None]:
        """How the next run works; one after the other they differ in all that may differ."""
        chance = self.chance
        policy = chance.choice([None, "adjust-d", "files"])
        return {
            "parallelism": chance.choice([1, 2, 3]),
            "checkpoint_steps": chance.choice([1, 1, 3]),
            "policy": policy,
            "backend": "rocksdb" if policy == "files" else None,
            "max_pending": chance.choice([0, 1, 2]),
        }

    # --- kills ----------------------------------------------------------------------------------------------

    def kill(self, target: str) -> Hurt | None:
        """Start some work, kill what `target` says at a random moment; None if the work was through before."""
        chance = self.chance
        # With retries a task survives the loss of its worker.
        run = Run(self._work(), self.directory, chance.choice(["local[2]", "local[2,4]"]))
        try:
            self._wait_for_a_moment(run)
            targets = self._targets(run, target)
            if run.ended or not targets:
                run.wait(LIMIT_S)
                return None
            send(targets, signal.SIGKILL)
            at_s = time.monotonic() - run.started_s
            work = run.begun[-1]
            outcome, found = self._after(run, target)
        finally:
            if run not in self._orphaned:
                run.kill_all()
        return Hurt(self.stream, self.store, target, work, self.step, at_s, outcome, [*found, *self.look()])

    def _wait_for_a_moment(self, run: Run) -> None:
        """Until some command began, the first with Spark not before the stream is at work; then a little longer."""
        work = self.warehouse / "work" / self.stream
        newest = max((path.name for path in work.glob("*")), default="")
        which = self.chance.choice([*range(1, len(run.commands) + 1), 1, 2])

        def begun() -> bool:
            if run.begun[:1] == ["run"] and which == 1:
                return any(path.parts[-3] > newest for path in work.glob("*/spark/offsets"))
            return len(run.begun) >= which

        if not run.until(begun):
            return
        until = time.monotonic() + self.chance.random() * STEP_S
        run.until(lambda: time.monotonic() >= until)

    def _targets(self, run: Run, target: str) -> list[int]:
        match target:
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

    def _after(self, run: Run, target: str) -> tuple[str, list[str]]:
        """What became of the work, and what of that may not be."""
        if target == "tree":
            run.kill_all()
            return "killed", []
        if target == "driver":
            # Half of the time the next run begins while the driver's orphans still die.
            if self.chance.random() < 0.5:
                self._orphaned.append(run)
                return "killed, resumed at once", []
            return "killed", _outlived(run)
        try:
            end = run.wait(LIMIT_S)
        except TimeoutError as error:
            return "hangs", [str(error)]
        if end.code == 0:
            # A worker is replaced; the JVM was needed no more, so that what is said is done.
            result = end.result or {}
            newest = max([result.get("checkpoint") or 0, *result.get("checkpoints", ())])
            is_done = target == "worker" or (end.result is not None and newest <= self.completed)
            return "survived", [] if is_done else [f"{run.begun[-1]} ended well without its JVM: {end.result}"]
        says = "Spark" if target == "jvm" else "Python worker died"
        clear = end.code == (3 if target == "jvm" else 1) and says in end.error
        # One that was killed before holds its lease until that expires.
        clear = clear or (run.begun[-1] == "materialize" and end.code == 2 and "is being materialized" in end.error)
        return f"stopped: {end.error}", [] if clear else [f"exit code {end.code}, and said: {end.said[-1500:]}"]

    # --- checks ----------------------------------------------------------------------------------------------

    def look(self, *, ended: bool = False, proven: bool = False) -> list[str]:
        """The promises; restoring every checkpoint only if asked for."""
        if not self.step:
            return []
        with OpenWarehouse.open_existing(self.url) as place:
            unpublished = () if ended else (self.stream,)
            return promises.broken(self.reference, place, unpublished=unpublished, proven=proven)

    def finish(self) -> list[str]:
        """An undisturbed run to the end, and every check there is."""
        if self.left:
            end = self.start(parallelism=self.chance.choice([1, 2, 3])).wait(LIMIT_S)
            if end.code != 0 or end.result is None:
                return [f"the last run ended with {end.code}: {end.said[-1500:]}"]
            if not self.reference.has(end.result["digest"], self.step):
                return ["the last run does not end with the digest of the undisturbed one"]
        found = [] if self.left == 0 else [f"{self.left} steps were not run"]
        found += [violation for run in self._orphaned for violation in _outlived(run)]
        return [*found, *self.look(ended=True, proven=True)]

    # --- take-overs -------------------------------------------------------------------------------------------------

    def zombie(self, *, stopped: bool) -> Hurt:
        """A second run takes the stream over from a first that is stopped (or goes on), which then is to find out."""
        first = self.start(parallelism=self.chance.choice([1, 2]), checkpoint_steps=1)
        second: Run | None = None
        target = "zombie" if stopped else "rival"
        try:
            self._wait_for_a_moment(first)
            frozen = list(first.processes()) if stopped else []
            send(frozen, signal.SIGSTOP)
            at_s = time.monotonic() - first.started_s
            if first.ended:
                outcome = "the first run was through before"
                return Hurt(self.stream, self.store, target, "run", self.step, at_s, outcome)
            second = self.start(batches=min(self.left, 3), parallelism=self.chance.choice([1, 2, 3]))
            outcome, found = self._taken_over(first, second, stopped)
            return Hurt(self.stream, self.store, target, "run", self.step, at_s, outcome, found)
        finally:
            for run in (first, second):
                if run is not None:
                    run.kill_all()

    def _taken_over(self, first: Run, second: Run, stopped: bool) -> tuple[str, list[str]]:
        found = []
        end = second.wait(LIMIT_S)
        if end.code != 0:
            found.append(f"the second run ended with {end.code}: {end.said[-1500:]}")
        before = self._fingerprint()
        send(list(first.processes()), signal.SIGCONT)
        late = first.wait(LIMIT_S)
        # One that was never stopped may be through before the second begins.
        if late.code not in ((4,) if stopped else (0, 4)):
            found.append(f"the fenced run ended with {late.code}: {late.said[-1500:]}")
        if stopped and self._fingerprint() != before:
            found.append("the fenced run changed what the second had written")
        outcome = "fenced" if late.code == 4 else f"ended with {late.code}"
        return outcome, [*found, *self.look(ended=True)]

    def _fingerprint(self) -> tuple[object, ...]:
        """What is recorded, what is published, and every object that a checkpoint names."""
        with OpenWarehouse.open_existing(self.url) as place:
            store = place.warehouse.store
            objects = [
                store.read(o.stored).size for o in place.catalog.objects.list(self.stream)
            ]  # their bytes checked
            recorded = promises.recorded(place, self.stream)
            tables = [table_of(self.reference.stream, place, self.stream, sink) for sink in self.reference.outputs]
            delivered = [table.find_delivered() for table in tables if table is not None]
        sinks = self.warehouse / "sink" / self.stream
        return recorded, objects, delivered, sorted(str(path) for path in sinks.glob("*/checkpoint=*/*"))


def _outlived(run: Run) -> list[str]:
    """A run whose driver was killed: what of it does not go by itself."""
    if run.gone(ORPHANS_S):
        return []
    left = [" ".join(command[:3]) for command in run.processes().values()]
    run.kill_all()
    return [f"{left} outlived the driver by {ORPHANS_S:.0f} s"]
