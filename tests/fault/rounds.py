"""Rounds on one warehouse of the small stream: processes of every kind are hurt, alone and beside each other; no JVM.

How they are hurt is said in `shapes`. After each round the promises are checked. Now and then, and at the end, the
warehouse is settled: the next run begins where the last was, leases expire, a truncation and a sweep run, and nothing
may be left over.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from siltstone.catalog.open import NoCatalog, open_catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.import_savepoint import prove_export
from siltstone.errors import SiltstoneError
from siltstone.store.open import Warehouse
from tests.fault import promises
from tests.fault.commands import COMMANDS, NAME, Arguments, Known, wrong
from tests.fault.deliveries import Memory
from tests.fault.disk import Disk
from tests.fault.forked import Victim
from tests.fault.lines import Within
from tests.fault.processes import End
from tests.fault.reference import held
from tests.fault.sites import Site
from tests.fault.victims import Orders
from tests.proofs import failures

PUBLISHING = ("run",)
"""what makes output, and first delivers what an earlier run has not; without Spark, a rescale delivers nothing"""
LEASE = timedelta(hours=1)
"""after which every lease has expired"""
AGE_GUARD = "1s"
"""of a sweep that is to leave nothing; nobody is at work then"""


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
        store, catalog: the kinds of both.
        reach: kind -> (lines, seconds) that it is at work for, about; learnt on the way, shared by warehouses.

    Attributes:
        site: where it is.
        unpublished: streams whose newest run did not end well, or has not ended.
    """

    def __init__(
        self, disk: Disk, chance: Random, store: str, reach: dict[str, tuple[float, float]], catalog: str = "sqlite"
    ) -> None:
        self.disk, self.chance, self.store, self.reach = disk, chance, store, reach
        self.reference = held()
        self.site = Site.new(store, catalog, disk.path)
        self._said = disk.path.with_name(f"{disk.path.name}-said")
        self._said.mkdir()
        self._count = 0
        self.unpublished: set[str] = set()
        self._memory = Memory()
        self._opened: OpenWarehouse | None = None
        self._later = timedelta(0)

    # --- what there is ----------------------------------------------------------------------------------------------

    @contextmanager
    def place(self, later: timedelta = timedelta(0)) -> Iterator[OpenWarehouse | None]:
        """The warehouse, its catalog's clock ahead; None while there is none. Opened once."""
        if self._opened is None:
            with suppress(NoCatalog):
                now = lambda: datetime.now(UTC) + self._later  # noqa: E731
                catalog = open_catalog(self.site.catalog_url, create=False, now=now)
                self._opened = OpenWarehouse(Warehouse.at(self.site.hosts[0]), catalog)
        self._later = later
        try:
            yield self._opened
        finally:
            self._later = timedelta(0)

    @property
    def elsewhere(self) -> Sequence[str]:
        """The options that name another warehouse, which has nothing but what is imported."""
        return ("--warehouse", str(self.disk.path / "elsewhere"))

    def streams(self) -> list[str]:
        """The small stream and its forks, as far as they are recorded; the small one first."""
        with self.place() as place:
            names = [] if place is None else [stream.name for stream in place.catalog.streams.list()]
        return sorted(names, key=lambda name: (name != NAME, name))

    def known(self, stream: str = NAME) -> Known:
        """What there is to choose arguments by."""
        with self.place() as place:
            if place is None or stream not in [s.name for s in place.catalog.streams.list()]:
                return Known(stream, [], self.reference.steps, exports=self.disk.path / "exports")
            catalog = place.catalog
            newest = catalog.checkpoints.last_id(stream)
            done = catalog.input_log.get_position(stream, newest).next_batch
            ids = [checkpoint.id for checkpoint in catalog.checkpoints.list(stream)]
            savepoints = [savepoint.name for savepoint in catalog.savepoints.list(stream)]
            return Known(stream, ids, self.reference.steps - done, savepoints, self.disk.path / "exports")

    def some(self) -> Known:
        """Most often of the small stream, sometimes of a fork."""
        forks = self.streams()[1:]
        return self.known(self.chance.choice(forks) if forks and self.chance.random() < 0.25 else NAME)

    def expire_leases(self) -> None:
        """Let all leases expire, as if time had passed."""
        streams = self.streams()
        with self.place(LEASE) as place:
            if place is not None:
                for stream in streams:
                    place.catalog.leases.list_live(stream)

    # --- victims ----------------------------------------------------------------------------------------------

    def start(
        self, kind: str, known: Known, url: str | None = None, catalog: str | None = None, **orders: Any
    ) -> Victim:
        """A command on a stream, with arguments at random, on any host unless `url` names one."""
        if kind in PUBLISHING:
            self.unpublished.add(known.stream)  # frozen or killed, it may be so
        arguments = COMMANDS[kind].arguments(self.chance, known)
        host = url or self.chance.choice(self.site.hosts)
        where = self.elsewhere if COMMANDS[kind].elsewhere else self.site.where(host, catalog)
        return self.victim(kind, known.stream, arguments, where, **orders)

    def victim(self, kind: str, stream: str, arguments: Arguments, where: Sequence[str], **orders: Any) -> Victim:
        """A command on a stream of the warehouse that is named by these options."""
        self._count += 1
        named = [stream] if COMMANDS[kind].of_stream else []
        command = [kind, *named, *map(str, arguments), *where]
        said = self._said / f"{self._count:04d}-{kind}"
        return Victim(Orders(command, said, sinks=self.site.sinks, stream=stream, **orders))

    def some_line(self, kind: str, within: Within | None = None) -> int:
        """At which of the engine's lines that a command comes to, of all or within a function, something happens."""
        lines = self.reach.setdefault(_key(kind, within), (float(within.lines) if within else 4000.0, 0.3))[0]
        return 1 + int(self.chance.random() * lines)

    def learn(self, kind: str, met: bool, seconds: float | None, within: Within | None = None) -> None:
        """Kills that came too late come a little earlier from now on, the others a little later."""
        kind = _key(kind, within)
        lines, reach_s = self.reach[kind]
        # Within a function few rounds are played, of which few may go by until its last lines are come to.
        factor = (1.3 if within else 1.1) if met else 0.75
        self.reach[kind] = (lines, reach_s * factor) if seconds is not None else (lines * factor, reach_s)

    def judge(self, round: Round, victim: Victim, *, alone: bool, faulty: bool = False, anywhere: bool = False) -> End:
        """How it ended, and whether it may have."""
        try:
            end = victim.wait()
        except TimeoutError as error:
            round.violations.append(str(error))
            return End(-9, None, str(error))
        if victim.kind in PUBLISHING:
            self.published(victim.stream, end.code == 0)
        begun = bool(self.known(victim.stream).checkpoints)
        if fault := wrong(victim.kind, end, alone=alone, faulty=faulty, begun=begun, anywhere=anywhere):
            round.violations.append(fault)
        round.outcomes.append(f"{victim.kind} {end.code}")
        return end

    def undisturbed(self, round: Round, kind: str, stream: str) -> End:
        """A command that nothing hurts."""
        return self.judge(round, self.start(kind, self.known(stream)), alone=True)

    # --- checks ----------------------------------------------------------------------------------------------

    def check(self, *, afresh: bool = False) -> list[str]:
        """Every promise, as things are; what was proven before only is once more if `afresh`."""
        if afresh:
            self._memory.proven = set()
        with self.place() as place:
            if place is None:
                return []
            found = promises.broken(
                self.reference, place, unpublished=self.unpublished, memory=self._memory, sinks=self.site.sinks
            )
        return [*found, *self._check_imported()]

    def _check_imported(self) -> list[str]:
        """What was imported elsewhere is of the undisturbed run, and restores there alone; or nothing is to be seen."""
        found, url = [], self.elsewhere[1]
        if not Warehouse.at(url).local.catalog.exists():  # an import that was killed may not have come to it
            return found
        with suppress(NoCatalog), OpenWarehouse.open_existing(url) as place:
            for stream in place.catalog.streams.list():
                for record in place.catalog.checkpoints.list(stream.name):
                    if record.digest not in (*self.reference.digests, *self.reference.waited):
                        found.append(f"{stream.name}, imported: its digest is of no step of the undisturbed run")
                    failed = failures(place, stream.name, [record.id])
                    found += [f"{stream.name}, imported, is not proven: {each.reason}" for each in failed]
        return found

    # --- the end ----------------------------------------------------------------------------------------------

    def settle(self, round: Round) -> None:
        """The next run goes on, leases expire, retention and a sweep run: nothing is left over, nobody is hindered."""
        self.strict(round, "run", NAME)
        self.expire_leases()
        for stream in self.streams():
            if stream != NAME:
                self.strict(round, "run", stream)
            self.strict(round, self.chance.choice(["materialize", "verify"]), stream)
            self.strict(round, "truncate", stream)
            self.strict(round, "optimize", stream)
            self._export(round, stream)
        self._outwait_rollbacks()
        # All of them first: what one deletes may be what another was the last to refer to.
        for stream in self.streams():
            self.strict(round, "sweep", stream, ("--age-guard", AGE_GUARD))
        with self.place() as place:
            assert place is not None
            for stream in self.streams():
                round.violations += promises.left_over(place, stream)
        round.violations += self.check(afresh=True)

    def _export(self, round: Round, stream: str) -> None:
        """Whatever was killed, a savepoint of the newest checkpoint can be exported, and imported elsewhere."""
        self.strict(round, "savepoint", stream, ("settled", "--full"))
        url = self.disk.path / "exports" / f"{stream}-settled"
        self.strict(round, "export-savepoint", stream, ("settled", "--to", url))
        try:
            digest = prove_export(str(url)).exported.digest
        except SiltstoneError as error:
            round.violations.append(f"the savepoint of {stream} that was exported is not proven: {error}")
        else:
            known = self.known(stream)
            if not self.reference.has(digest, self.reference.steps - known.left):
                round.violations.append(f"the savepoint of {stream} that was exported has another digest")
        self._count += 1
        self.strict(round, "import-savepoint", stream, (url, "--as", f"{stream}-{self._count}"))
        self.strict(round, "savepoint", stream, ("settled", "--drop"))
        shutil.rmtree(url, ignore_errors=True)

    def _outwait_rollbacks(self) -> None:
        """What was given up is kept for the age guard."""
        with self.place() as place:
            assert place is not None
            at = [rollback.rolled_back_at for name in self.streams() for rollback in place.catalog.rollbacks.list(name)]
            if at:
                time.sleep(max(0.0, 1.1 - (place.catalog.now() - max(at)).total_seconds()))

    def strict(self, round: Round, kind: str, stream: str, arguments: Arguments | None = None) -> None:
        """A command that has to succeed."""
        if arguments is None:
            arguments = COMMANDS[kind].arguments(self.chance, self.known(stream))
        host = self.chance.choice(self.site.hosts)
        where = self.elsewhere if COMMANDS[kind].elsewhere else self.site.where(host)
        victim = self.victim(kind, stream, arguments, where)
        end = victim.wait()
        if end.code != 0:
            told = f"{' '.join(victim.orders.arguments)} cannot do its work any more ({end.code}): {end.said[-1500:]}"
            round.violations.append(told)
        elif kind in PUBLISHING:
            self.published(stream, True)

    def published(self, stream: str, ended_well: bool) -> None:
        """Whether who was last to complete checkpoints of a stream came to publish their rows."""
        (self.unpublished.discard if ended_well else self.unpublished.add)(stream)

    def close(self) -> None:
        """Let go of the catalog."""
        if self._opened is not None:
            self._opened.catalog.close()
        self._opened = None

    def finish(self) -> list[str]:
        """An undisturbed run to the end, settled."""
        round = Round("end", self.store, ())
        self.strict(round, "run", NAME, ("--batches", str(max(1, self.known().left)), "--parallelism", "2"))
        self.settle(round)
        return round.violations


def _key(kind: str, within: Within | None) -> str:
    return f"{kind} in {within}" if within else kind
