"""Rounds on one warehouse of the small stream: processes of every kind are hurt, alone and beside each other; no JVM.

    kill     one process is killed -9, at a random moment or at a random line of the engine's code
    two      two at once, of the same kind or of others; one or both are killed, or none
    zombie   one is frozen at a random line, the stream taken over, leases expired, others at work; then it wakes up
    fault    its store lags, refuses, cuts connections, says wrong bytes; or its disk fails, or fills
    damage   an object is altered or gone, and the stream recovered, by a process that may be killed as well
    wrong    a process is given an empty or another store with this catalog, or this store with another catalog

After each the promises are checked. Now and then, and at the end, the warehouse is settled: the next run begins where
the last was, leases expire, a truncation and a sweep run, and nothing may be left over.
"""

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

from siltstone.catalog.open import open_catalog
from siltstone.catalog.place import Place
from siltstone.errors import SiltstoneError
from siltstone.store.open import Warehouse
from tests.fault import promises
from tests.fault.commands import COMMANDS, NAME, Known, chosen, wrong
from tests.fault.disk import Disk
from tests.fault.faults import Faults, damage, faults_of
from tests.fault.forked import Victim
from tests.fault.processes import End
from tests.fault.reference import small
from tests.fault.victims import Orders
from tests.fault.warehouses import WAREHOUSES
from tests.proofs import failures

PUBLISHING = ("run", "rescale")
"""what completes checkpoints, and first publishes what an earlier run has not"""
SHAPES = ("kill",) * 4 + ("two",) * 3 + ("zombie",) * 2 + ("fault", "damage", "wrong")
"""of rounds, as often as they come"""
LEASE = timedelta(hours=1)
"""after which every lease has expired"""
AGE_GUARD = "1s"
"""of a sweep that is to leave nothing; nobody is at work then"""
CONTENDED = "locked|busy|holds it|another process"
"""what is said where a frozen process holds what others need"""


@dataclass
class Round:
    """What happened in one: process kind -> how many were killed, became zombies, met faults."""

    shape: str
    store: str
    kinds: tuple[str, ...]
    kills: Counter[str] = field(default_factory=Counter)
    zombies: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Rounds:
    """One warehouse, until its input is used up.

    Args:
        disk: an empty one for it.
        reach: kind -> (lines, seconds) that it is at work for, about; learnt on the way, shared by warehouses.
    """

    def __init__(self, disk: Disk, chance: Random, store: str, reach: dict[str, tuple[float, float]]) -> None:
        self.disk, self.chance, self.store, self.reach = disk, chance, store, reach
        self.reference = small()
        self.warehouse = disk.path / "warehouse"
        self.url = WAREHOUSES[store](self.warehouse)
        self._said = disk.path.with_name(f"{disk.path.name}-said")
        self._said.mkdir()
        self._count = 0
        self._unpublished: set[str] = set()
        self._proven: set[object] = set()
        self._opened: Place | None = None
        self._later = timedelta(0)

    # --- what there is ----------------------------------------------------------------------------------------------

    @contextmanager
    def _place(self, later: timedelta = timedelta(0)) -> Iterator[Place | None]:
        """The warehouse, its catalog's clock ahead; None while there is none. Opened once."""
        warehouse = Warehouse.at(self.url)
        if self._opened is None and warehouse.local.catalog.exists():
            catalog = open_catalog(warehouse.catalog_url, now=lambda: datetime.now(UTC) + self._later)
            self._opened = Place(warehouse, catalog)
        self._later = later
        try:
            yield self._opened
        finally:
            self._later = timedelta(0)

    def streams(self) -> list[str]:
        """The small stream and its forks, as far as they are recorded; the small one first."""
        with self._place() as place:
            names = [] if place is None else [stream.name for stream in place.catalog.streams()]
        return sorted(names, key=lambda name: (name != NAME, name))

    def known(self, stream: str = NAME) -> Known:
        """What there is to choose arguments by."""
        with self._place() as place:
            if place is None or stream not in [s.name for s in place.catalog.streams()]:
                return Known(stream, [], self.reference.steps)
            catalog = place.catalog
            newest = catalog.last_id(stream)
            done = catalog.steps(stream, newest)[-1].batch_id + 1 if newest else 0
            ids = [checkpoint.id for checkpoint in catalog.checkpoints(stream)]
            return Known(stream, ids, self.reference.steps - done, [s.name for s in catalog.savepoints(stream)])

    def _some(self) -> Known:
        """Most often of the small stream, sometimes of a fork."""
        forks = self.streams()[1:]
        return self.known(self.chance.choice(forks) if forks and self.chance.random() < 0.25 else NAME)

    def _expire(self) -> None:
        """Let all leases expire, as if time had passed."""
        streams = self.streams()
        with self._place(LEASE) as place:
            if place is not None:
                for stream in streams:
                    place.catalog.live_leases(stream)

    # --- victims ----------------------------------------------------------------------------------------------

    def _start(self, kind: str, known: Known, url: str | None = None, **orders: Any) -> Victim:
        self._count += 1
        arguments = [
            kind,
            NAME,
            *map(str, COMMANDS[kind].arguments(self.chance, known)),
            "--warehouse",
            url or self.url,
        ]
        if kind in PUBLISHING:
            self._unpublished.add(known.stream)  # frozen or killed, it may be so
        return Victim(Orders(arguments, self._said / f"{self._count:04d}-{kind}", **orders))

    def _at_line(self, kind: str) -> int:
        return 1 + int(self.chance.random() * self.reach.setdefault(kind, (4000.0, 0.3))[0])

    def _learn(self, kind: str, met: bool, seconds: float | None) -> None:
        """Kills that came too late come a little earlier from now on, the others a little later."""
        lines, reach_s = self.reach[kind]
        factor = 1.1 if met else 0.75
        self.reach[kind] = (lines, reach_s * factor) if seconds is not None else (lines * factor, reach_s)

    def _judge(self, round: Round, victim: Victim, *, alone: bool, faulty: bool = False) -> End:
        """How it ended, and whether it may have."""
        try:
            end = victim.wait()
        except TimeoutError as error:
            round.violations.append(str(error))
            return End(-9, None, str(error))
        if victim.kind in PUBLISHING:
            self._published(victim.stream, end.code == 0)
        begun = bool(self.known(victim.stream).checkpoints)
        if fault := wrong(victim.kind, end, alone=alone, faulty=faulty, begun=begun):
            round.violations.append(fault)
        round.outcomes.append(f"{victim.kind} {end.code}")
        return end

    def _undisturbed(self, round: Round, kind: str, stream: str) -> End:
        """A command that nothing hurts."""
        return self._judge(round, self._start(kind, self.known(stream)), alone=True)

    # --- rounds ----------------------------------------------------------------------------------------------

    def play(self, shape: str, kind: str) -> Round:
        """One round, and every promise after it."""
        round = Round(shape, self.store, (kind,))
        try:
            getattr(self, f"_{shape}")(round, kind)
            round.violations += self.check()
            if not round.violations and self.chance.random() < 0.25:
                self.settle(round)
        except (SiltstoneError, OSError) as error:
            round.violations.append(f"the harness itself met {type(error).__name__}: {error}")
        return round

    def check(self, *, afresh: bool = False) -> list[str]:
        """Every promise, as things are; what was proven before only is once more if `afresh`."""
        if afresh:
            self._proven = set()
        with self._place() as place:
            if place is None:
                return []
            return promises.broken(self.reference, place, unpublished=self._unpublished, before=self._proven)

    def _kill(self, round: Round, kind: str) -> None:
        known = self._some()
        by_line = self.chance.random() < 0.6
        victim = self._start(kind, known, at_line=self._at_line(kind) if by_line else None)
        seconds = None
        if not by_line:
            seconds = self.chance.random() * self.reach.setdefault(kind, (4000.0, 0.3))[1]
            time.sleep(seconds)
            victim.signal(SIGKILL)
        end = self._judge(round, victim, alone=True)
        self._learn(kind, end.code == -9, seconds)
        round.kills[kind] += end.code == -9
        if end.code == -9 and self.chance.random() < 0.3:
            self._undisturbed(round, kind, known.stream)  # what it left hinders nobody

    def _two(self, round: Round, kind: str) -> None:
        known = self._some()
        other = kind if self.chance.random() < 0.6 else chosen(self.chance, list(COMMANDS), known)
        round.kinds = (kind, other)
        victims = []
        for each in round.kinds:
            at_line = self._at_line(each) if self.chance.random() < 0.6 else None
            victims.append(self._start(each, known, at_line=at_line))
            time.sleep(self.chance.choice([0, 0, 0.02, 0.1]))
        ended_well = []
        for victim in victims:
            end = self._judge(round, victim, alone=False)
            round.kills[victim.kind] += end.code == -9
            ended_well.append(end.code == 0 or victim.kind not in PUBLISHING)
        if not all(ended_well):  # whichever was the last
            self._published(known.stream, False)

    def _zombie(self, round: Round, kind: str) -> None:
        stream = self._some().stream
        victim = self._start(kind, self.known(stream), at_line=self._at_line(kind), signal=SIGSTOP)
        if not victim.until(lambda: victim.stopped) or not self._lets_others(victim):
            self._judge(round, victim, alone=True)
            self._learn(kind, False, None)
            return
        self._learn(kind, True, None)
        round.zombies[kind] += 1
        chance = self.chance
        acts = chance.sample(["run", "expire", kind, "truncate", "sweep", "materialize"], chance.choice([1, 2, 3, 4]))
        for act in acts:
            if act == "expire":
                self._expire()
            elif not self._beside(round, act, stream):
                victim.signal(SIGCONT)
                victim.wait()
                self._undisturbed(round, act, stream)
        round.violations += self.check()
        before, unpublished = self._recorded(stream), stream in self._unpublished
        victim.signal(SIGCONT)
        end = self._judge(round, victim, alone=False)
        if end.code == 4:
            self._published(stream, not unpublished)
            if self._recorded(stream) != before:
                round.violations.append(f"the fenced {kind} changed what is recorded of {stream}")

    def _recorded(self, stream: str) -> tuple[object, ...] | None:
        with self._place() as place:
            known = place is not None and stream in [s.name for s in place.catalog.streams()]
            return promises.recorded(place, stream) if place is not None and known else None

    def _beside(self, round: Round, kind: str, stream: str) -> bool:
        """A command beside a frozen one; False if that one keeps it from a lock of the store or catalog."""
        victim = self._start(kind, self.known(stream))
        end = victim.wait()
        if end.code in (1, 3) and re.search(CONTENDED, end.error):
            return False
        self._judge(round, victim, alone=False)
        return True

    def _lets_others(self, victim: Victim) -> bool:
        """Frozen amid a transaction it would keep everybody from a catalog in a file: then it goes a little further."""
        path = Warehouse.at(self.url).local.catalog
        for _ in range(200):
            try:
                if not path.exists():
                    return True
                with closing(sqlite3.connect(path, timeout=0.01, isolation_level=None)) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute("ROLLBACK")
                return True
            except sqlite3.OperationalError:
                victim.signal(SIGCONT)
                time.sleep(0.002)
                victim.signal(SIGSTOP)
                if not victim.until(lambda: victim.stopped):
                    return False
        return False

    def _fault(self, round: Round, kind: str) -> None:
        known = self._some()
        faults: Faults = faults_of(self.store, self.disk, self.chance)
        kinds = (kind,) if self.chance.random() < 0.6 else (kind, chosen(self.chance, list(COMMANDS), known))
        round.kinds = kinds
        with faults.happening(self.url) as (url, orders):
            victims = []
            for each in kinds:
                at_line = self._at_line(each) if self.chance.random() < 0.25 else None
                victims.append(self._start(each, known, url, at_line=at_line, **orders))
            for victim in victims:
                end = self._judge(round, victim, alone=len(kinds) == 1, faulty=True)
                round.kills[victim.kind] += end.code == -9
                round.faults[victim.kind] += 1
        round.outcomes.append(f"({faults.name})")
        round.violations += self.check()
        self._undisturbed(round, kind, known.stream)

    def _damage(self, round: Round, kind: str) -> None:
        """An object that the newest checkpoint needs is altered or gone; processes meet it; then all is recovered."""
        with self._place() as place:
            if place is None or not self.known().checkpoints:
                return
            harmed = damage(place, NAME, self.chance)
        round.faults[kind] += 1
        round.outcomes.append(f"({harmed})")
        self._judge(round, self._start(kind, self.known()), alone=True, faulty=True)
        while self.chance.random() < 0.4:
            end = self._judge(round, self._start("recover", self.known(), at_line=self._at_line("recover")), alone=True)
            round.kills["recover"] += end.code == -9
            self._learn("recover", end.code == -9, None)
        for stream in self.streams():
            self.strict(round, "recover", stream, ("--accept-loss",))
            self._delete_what_stays_damaged(round, stream)
        round.violations += self.check(afresh=True)

    def _wrong(self, round: Round, kind: str) -> None:
        """Store and catalog do not belong together: whatever is asked for is refused, and nothing changes anywhere."""
        with self._place() as place:
            if place is None or not self.known().checkpoints:
                return
            before = promises.recorded(place, NAME), sorted(place.warehouse.store.list(""))
        self._count += 1
        elsewhere = self.disk.path / f"wrong-{self._count}"
        (elsewhere / "objects").mkdir(parents=True)
        url, catalog = WAREHOUSES[self.store](elsewhere), Warehouse.at(self.url).catalog_url
        what = self.chance.choice(["an empty store", "another store", "another catalog", "no catalog"])
        if what in ("another store", "another catalog"):
            with Place.writable(url) as other:
                other.catalog.register(NAME, 4, {"operators": {}, "options": {}})
        if what in ("another catalog", "no catalog"):
            url, catalog = self.url, Warehouse.at(url).catalog_url
        stored = sorted(Warehouse.at(url).store.list(""))
        for each in (kind, "run", "sweep", "recover", "truncate"):
            more = ("--accept-loss",) if each == "recover" else COMMANDS[each].arguments(self.chance, self.known())
            arguments = [each, NAME, *map(str, more), "--warehouse", url, "--catalog", catalog]
            end = Victim(Orders(arguments, self._said / f"{self._count:04d}-wrong-{each}")).wait()
            if end.code != 2 or not re.search("warehouse|no catalog", end.error):
                round.violations.append(f"{each} with {what} ended with {end.code}: {end.said[-1500:]}")
        round.faults[kind] += 1
        round.outcomes.append(f"({what})")
        with self._place() as place:
            assert place is not None
            if before != (promises.recorded(place, NAME), sorted(place.warehouse.store.list(""))):
                round.violations.append(f"{what} changed what there was")
        if stored != sorted(Warehouse.at(url).store.list("")):
            round.violations.append(f"the store of {what} was written to")

    def _delete_what_stays_damaged(self, round: Round, stream: str) -> None:
        """The newest checkpoint may need the object no more, since a materialization took its place, and older ones
        still do: recovery leaves those to people, who find them by a proof of all."""
        with self._place() as place:
            assert place is not None
            ids = [checkpoint.id for checkpoint in place.catalog.checkpoints(stream)][:-1]
            damaged = {failure.checkpoint for failure in failures(place, stream, ids)} if ids else set()
            kept = [s.name for s in place.catalog.savepoints(stream) if s.checkpoint in damaged]
        for name in kept:
            self.strict(round, "savepoint", stream, (name, "--drop"))
        if damaged:
            round.outcomes.append(f"(deleted {sorted(damaged)}, which stay damaged)")
            self.strict(round, "delete", stream, tuple(map(str, sorted(damaged))))

    # --- the end ----------------------------------------------------------------------------------------------

    def settle(self, round: Round) -> None:
        """The next run goes on, leases expire, retention and a sweep run: nothing is left over, nobody is hindered."""
        self.strict(round, "run", NAME)
        self._expire()
        for stream in self.streams():
            if stream != NAME:
                self.strict(round, "run", stream)
            self.strict(round, self.chance.choice(["materialize", "verify"]), stream)
            self.strict(round, "truncate", stream)
        self._outwait_rewindings()
        # All of them first: what one deletes may be what another was the last to refer to.
        for stream in self.streams():
            self.strict(round, "sweep", stream, ("--age-guard", AGE_GUARD))
        with self._place() as place:
            assert place is not None
            for stream in self.streams():
                round.violations += promises.left_over(place, stream)
        round.violations += self.check(afresh=True)

    def _outwait_rewindings(self) -> None:
        """What was given up is kept for the age guard."""
        with self._place() as place:
            assert place is not None
            at = [rewinding.rewound_at for name in self.streams() for rewinding in place.catalog.rewindings(name)]
            if at:
                time.sleep(max(0.0, 1.1 - (place.catalog.now() - max(at)).total_seconds()))

    def strict(self, round: Round, kind: str, stream: str, arguments: tuple[str, ...] | None = None) -> None:
        """A command that has to succeed."""
        self._count += 1
        if arguments is None:
            arguments = tuple(map(str, COMMANDS[kind].arguments(self.chance, self.known(stream))))
        orders = Orders([kind, stream, *arguments, "--warehouse", self.url], self._said / f"{self._count:04d}-{kind}")
        end = Victim(orders).wait()
        if end.code != 0:
            told = f"{' '.join(orders.arguments)} cannot do its work any more ({end.code}): {end.said[-1500:]}"
            round.violations.append(told)
        elif kind in PUBLISHING:
            self._published(stream, True)

    def _published(self, stream: str, ended_well: bool) -> None:
        """Whether who was last to complete checkpoints of a stream came to publish their rows."""
        (self._unpublished.discard if ended_well else self._unpublished.add)(stream)

    def close(self) -> None:
        """Let go of the catalog."""
        if self._opened is not None:
            self._opened.catalog.close()

    def finish(self) -> list[str]:
        """An undisturbed run to the end, settled."""
        round = Round("end", self.store, ())
        self.strict(round, "run", NAME, ("--batches", str(max(1, self.known().left)), "--parallelism", "2"))
        self.settle(round)
        return round.violations
