"""Coordinators of one stream against a store, a catalog, tasks and a sink in memory, in any order of events.

The coordinators and the protocol are the real ones; what they talk to is as small as can be, so that very many
schedules can be run. `lifecycle_machine` has the real catalog, formats and life cycle, and far fewer schedules.

    python -m tests.simulation.coordination --schedules 100000 --seed 1
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable

from siltstone.errors import Fenced, Unreachable
from siltstone.run.protocol_rules import Phase
from tests.simulation.coordinated_run import Committed, LostState, Place, Writer, state_after
from tests.simulation.processes import Process

WRITERS = 3
ACTIONS = ("run", "run", "sweep", *["go"] * 10, "finish", "kill", "fail", "fail")
STOPS = (1, 1, 2, 3, 5, 8, 13, 30)


class World:
    """All there is in one schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.place, self.counts = Place(), Counter[str]()
        self.processes: list[Process] = []
        self.writers: dict[Process, Writer] = {}
        self.seen: dict[int, Committed] = {}
        self.loses_state = True

    def perform(self) -> None:
        """Run one schedule; whoever is left is killed or finishes, and then one more run leaves nothing behind."""
        try:
            self._start("run").resume(self.chance.choice(STOPS))
            for _ in range(self.chance.randint(6, 14)):
                self._act(self.chance.choice(ACTIONS))
                self.check()
            kill = self.chance.random() < 0.5
            for process in self.processes:
                process.kill() if kill else process.finish()
                self.check()
            self.loses_state = False
            for kind in ("run", "sweep"):
                self._start(kind).finish()
                self.check()
            self._check_end()
        finally:
            for process in self.processes:
                process.kill()

    def _start(self, kind: str) -> Process:
        chance = random.Random(self.chance.randrange(1 << 30))

        def work(process: Process) -> None:
            if kind == "sweep":
                self._sweep(process)
                return
            self.writers[process] = Writer(self, process, chance)
            self.writers[process].run()

        process = Process(kind, "s", work)
        self.processes.append(process)
        return process

    def _act(self, action: str) -> None:
        self.counts[action] += 1
        alive = [p for p in self.processes if not p.ended]
        stops = self.chance.choice(STOPS)
        if action in ("run", "sweep"):
            if len(alive) < WRITERS:
                self._start(action).resume(stops)
        elif alive:
            process = self.chance.choice(alive)
            if action == "kill":
                process.kill()
            elif action == "finish":
                process.finish()
            else:
                process.fault = self.chance.choice(("before", "after")) if action == "fail" else ""
                process.resume(stops)

    def _sweep(self, process: Process) -> None:
        with process.call("list objects"):
            found = sorted(self.place.objects)
        with process.call("write tombstones"):
            gone = self.place.bury([name for name in found if name in self.place.objects])
        for name in gone:
            with process.call(f"delete object {name}"):
                self.place.objects.pop(name, None)
            self.counts["swept"] += 1

    def check(self) -> None:
        """Check every promise, after every action."""
        place, state, batch, step = self.place, 0, 0, 0
        for id, record in sorted(place.checkpoints.items()):
            assert self.seen.setdefault(id, record) == record, f"checkpoint {id} is another one now"
            assert record.steps[0] == step + 1 and list(record.steps) == list(range(step + 1, record.steps[-1] + 1))
            assert list(record.batches) == list(range(batch + 1, batch + 1 + len(record.batches))), f"input of {id}"
            for batch in record.batches:
                state = state_after(state, batch)
            assert record.state == state, f"checkpoint {id} holds something else than its input makes"
            assert record.objects <= place.objects.keys(), f"checkpoint {id} lacks objects"
            step = record.steps[-1]
        rows = dict(place.delivered)
        assert set(rows) <= set(place.checkpoints) and set(place.delivered) == set(rows.items()), (
            "a sink got other rows"
        )
        for writer in self.writers.values():
            self._check_writer(writer)
        for process in self.processes:
            if process.ended and process.error is not None and not process.dead:
                error, process.error = process.error, None
                if not isinstance(error, Fenced | Unreachable | LostState):
                    raise AssertionError(f"a {process.kind} failed: {error!r}") from error
                self.counts[type(error).__name__] += 1

    def _check_writer(self, writer: Writer) -> None:
        place, coordinator = self.place, writer.coordinator
        for (epoch, id), steps in writer.prepared.items():
            record = place.checkpoints.get(id)
            assert record is None or record.epoch != epoch or record.steps == steps, f"{id} completed with other steps"
        if coordinator is None:
            return
        region = coordinator.region
        assert region.completed <= place.newest, "a checkpoint is complete for nobody else"
        if region.epoch == place.epoch and region.completed < place.newest:
            pending = region.pending[0]
            assert place.newest == pending.id and pending.durable, "the catalog has what nobody committed"
            assert pending.in_doubt or region.phase is Phase.OPEN, "what may be complete counts as failed"

    def _check_end(self) -> None:
        referred = {name for record in self.place.checkpoints.values() for name in record.objects}
        assert self.place.objects.keys() == referred, "orphans are left"
        assert self.place.outstanding == {} and {id for id, _ in self.place.delivered} == set(self.place.checkpoints)
        self.counts["checkpoints"] += self.place.newest


def perform(seed: int) -> Counter[str]:
    """Run the schedule of a seed; return what happened in it, counted.

    Raises:
        AssertionError: a promise was broken.
    """
    world = World(seed)
    world.perform()
    return world.counts


def run_schedules(first: int, schedules: int, tell: Callable[[int], None] = lambda _: None) -> Counter[str]:
    """Run the schedules of consecutive seeds; the error of one that breaks a promise names its seed."""
    total = Counter[str]()
    for seed in range(first, first + schedules):
        try:
            total += perform(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        tell(seed)
    return total


def main() -> None:
    """Run very many schedules; stop at the first that breaks a promise."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()

    def tell(seed: int) -> None:
        if seed % 5000 == 0:
            print(f"seed {seed}, {time.perf_counter() - start:.0f} s", flush=True)

    total = run_schedules(arguments.seed, arguments.schedules, tell)
    print(
        f"{arguments.schedules} schedules from seed {arguments.seed}, no violation, {time.perf_counter() - start:.0f} s"
    )
    for what, count in sorted(total.items()):
        print(f"  {what}: {count}")


if __name__ == "__main__":
    main()
