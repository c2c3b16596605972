"""How processes are hurt in a round, each way a function.

kill     one process is killed -9, at a random moment or at a random line of the engine's code
two      two at once, of the same kind or of others; one or both are killed, or none
zombie   one is frozen at a random line, the stream taken over, leases expired, others at work; then it wakes up
fault    its store lags, refuses, cuts connections, says wrong bytes; or its disk fails, or fills
damage   an object is altered or gone, and the stream recovered, by a process that may be killed as well
wrong    a process is given an empty or another store with this catalog, or this store with another catalog
lose     the catalog is lost, and rebuilt from the store
failover its newest transactions are lost, with a process that was killed or not, and the streams run
"""

import re
import time
import uuid
from collections.abc import Callable, Sequence
from signal import SIGCONT, SIGKILL, SIGSTOP

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import SiltstoneError
from siltstone.store.open import Warehouse
from tests.fault import promises
from tests.fault.commands import COMMANDS, NAME, choose
from tests.fault.faults import Faults, damage, faults_of
from tests.fault.forked import Victim
from tests.fault.hosts import hosts
from tests.fault.lines import Within
from tests.fault.lost_catalog import fail_over, lose
from tests.fault.outages import outage
from tests.fault.rounds import PUBLISHING, Round, Rounds
from tests.fault.warehouses import WAREHOUSES
from tests.proofs import failures

CONTENDED = "locked|busy|holds it|another process"
"""what is said where a frozen process holds what others need"""
GOES_ON_S = 30.0
"""how long a process that holds what others need is let go on by small steps; a busy machine gives each little time"""
DELIVERY = Within("run/outbox.py", "Outbox.deliver", 500)
OLD_WORK, SINK = (
    Within("run/working_state.py", "remove_older_epochs"),
    Within("sinks/parquet.py", "ParquetSink.deliver"),
)
_TAKE_OVER = [
    Within("run/take_over.py", "take_over"),
    Within("run/take_over.py", "_follow"),
    Within("catalog/epochs.py", "begin_epoch"),
    Within("catalog/epochs.py", "_mark"),
    Within("run/region.py", "ConsistentRegion.open"),
    Within("run/working_state.py", "_take_over"),
]
TAKE_OVER = {
    "rescale": _TAKE_OVER,
    "run": [
        *_TAKE_OVER,
        Within("run/working_state.py", "remove_older_epochs"),
        DELIVERY,
        Within("sinks/parquet.py", "ParquetSink.deliver"),
        Within("sinks/delta.py", "SinkTable.deliver"),
        Within("sinks/delta.py", "SinkTable._add"),
    ],
}
"""kind -> the functions that take a stream over"""


def play(rounds: Rounds, shape: str, kind: str) -> Round:
    """One round, and every promise after it."""
    round = Round(shape, rounds.store, (kind,))
    try:
        SHAPES[shape](rounds, round, kind)
        round.violations += rounds.check()
        if not round.violations and rounds.chance.random() < 0.25:
            rounds.settle(round)
    except (SiltstoneError, OSError) as error:
        round.violations.append(f"the harness itself met {type(error).__name__}: {error}")
    return round


def kill(rounds: Rounds, round: Round, kind: str) -> None:
    """One is killed, alone."""
    known = rounds.some()
    by_line = rounds.chance.random() < 0.6
    victim = rounds.start(kind, known, at_line=rounds.some_line(kind) if by_line else None)
    seconds = None
    if not by_line:
        seconds = rounds.chance.random() * rounds.reach.setdefault(kind, (4000.0, 0.3))[1]
        time.sleep(seconds)
        victim.signal(SIGKILL)
    end = rounds.judge(round, victim, alone=True)
    rounds.learn(kind, end.code == -9, seconds)
    round.kills[kind] += end.code == -9
    if end.code == -9 and rounds.chance.random() < 0.3:
        rounds.undisturbed(round, kind, known.stream)  # what it left hinders nobody


def two(rounds: Rounds, round: Round, kind: str) -> None:
    """Two at once, some of them killed."""
    known = rounds.some()
    other = kind if rounds.chance.random() < 0.6 else choose(rounds.chance, list(COMMANDS), known)
    round.kinds = (kind, other)
    victims = []
    for each in round.kinds:
        at_line = rounds.some_line(each) if rounds.chance.random() < 0.6 else None
        victims.append(rounds.start(each, known, at_line=at_line))
        time.sleep(rounds.chance.choice([0, 0, 0.02, 0.1]))
    ended_well = []
    for victim in victims:
        end = rounds.judge(round, victim, alone=False)
        round.kills[victim.kind] += end.code == -9
        ended_well.append(end.code == 0 or victim.kind not in PUBLISHING)
    if not all(ended_well):  # whichever was the last
        rounds.published(known.stream, False)


def zombie(rounds: Rounds, round: Round, kind: str) -> None:
    """One is frozen, others are at work, it wakes up."""
    stream, chance = rounds.some().stream, rounds.chance
    others = chance.sample(["run", "expire", kind, "truncate", "sweep", "materialize"], chance.choice([1, 2, 3, 4]))
    _freeze(rounds, round, kind, stream, others)


def takeover(rounds: Rounds, round: Round, kind: str) -> None:
    """One is frozen within its take-over of the stream, of which something is outstanding; others take it over; it
    wakes up."""
    chance = rounds.chance
    kind = "rescale" if kind == "rescale" else "run"
    known = rounds.some()
    before = rounds.start("run", known, at_line=rounds.some_line("run", DELIVERY), within=DELIVERY)
    end = rounds.judge(round, before, alone=True)
    rounds.learn("run", end.code == -9, None, DELIVERY)
    round.kills["run"] += end.code == -9
    others = ["run", *chance.sample(["run", "expire", "truncate", "sweep", "rescale"], chance.choice([0, 1, 2]))]
    place = chance.choice(TAKE_OVER[kind])
    round.kinds = ("run", kind)
    round.outcomes.append(f"(in {place})")
    _freeze(rounds, round, kind, known.stream, others, place)


def _freeze(
    rounds: Rounds, round: Round, kind: str, stream: str, others: Sequence[str], within: Within | None = None
) -> None:
    """Freeze a command at a line, let others work, wake it up."""
    line = rounds.some_line(kind, within)
    victim = rounds.start(kind, rounds.known(stream), at_line=line, signal=SIGSTOP, within=within)
    site = rounds.site
    if not victim.until(lambda: victim.stopped) or not _goes_on_until(victim, lambda: site.is_free):
        rounds.judge(round, victim, alone=True)
        rounds.learn(kind, False, None, within)
        return
    rounds.learn(kind, True, None, within)
    round.zombies[kind] += 1
    for act in others:
        if act == "expire":
            rounds.expire_leases()
        elif not _beside(rounds, round, act, stream):
            victim.signal(SIGCONT)
            victim.wait()
            rounds.undisturbed(round, act, stream)
    _goes_on_until(victim, lambda: site.is_free and site.is_readable)
    round.violations += rounds.check()
    before, unpublished = _recorded(rounds, stream), stream in rounds.unpublished
    victim.signal(SIGCONT)
    end = rounds.judge(round, victim, alone=False)
    if end.code == 4:
        rounds.published(stream, not unpublished)
        if _recorded(rounds, stream) != before:
            round.violations.append(f"the fenced {kind} changed what is recorded of {stream}")


def _recorded(rounds: Rounds, stream: str) -> tuple[object, ...] | None:
    with rounds.place() as place:
        known = place is not None and stream in [s.name for s in place.catalog.streams.list()]
        return promises.recorded(place, stream) if place is not None and known else None


def _beside(rounds: Rounds, round: Round, kind: str, stream: str) -> bool:
    """A command beside a frozen one; False if that one keeps it from a lock of the store or catalog."""
    victim = rounds.start(kind, rounds.known(stream))
    end = victim.wait()
    if end.code in (1, 3) and re.search(CONTENDED, end.error):
        return False
    rounds.judge(round, victim, alone=False)
    return True


def _goes_on_until(victim: Victim, is_harmless: Callable[[], bool]) -> bool:
    """Frozen amid a transaction it would keep everybody from the catalog or store: then it goes a little further.

    Returns:
        Whether it is frozen and harmless; else it runs on, or has ended.
    """
    deadline = time.monotonic() + GOES_ON_S
    while not is_harmless():
        victim.signal(SIGCONT)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
        victim.signal(SIGSTOP)
        if not victim.until(lambda: victim.stopped):
            return False
    return True


def fault(rounds: Rounds, round: Round, kind: str) -> None:
    """Commands whose store or disk is not what it should be."""
    known = rounds.some()
    faults: Faults = faults_of(rounds.store, rounds.disk, rounds.chance)
    kinds = (kind,) if rounds.chance.random() < 0.6 else (kind, choose(rounds.chance, list(COMMANDS), known))
    round.kinds = kinds
    with faults.happening(rounds.chance.choice(rounds.site.hosts)) as (url, orders):
        victims = []
        for each in kinds:
            at_line = rounds.some_line(each) if rounds.chance.random() < 0.25 else None
            victims.append(rounds.start(each, known, url, at_line=at_line, **orders))
        for victim in victims:
            end = rounds.judge(round, victim, alone=len(kinds) == 1, faulty=True)
            round.kills[victim.kind] += end.code == -9
            round.faults[victim.kind] += 1
    round.outcomes.append(f"({faults.name})")
    round.violations += rounds.check()
    rounds.undisturbed(round, kind, known.stream)


def damaged(rounds: Rounds, round: Round, kind: str) -> None:
    """An object that the newest checkpoint needs is altered or gone; processes meet it; then all is recovered."""
    with rounds.place() as place:
        if place is None or not rounds.known().checkpoints:
            return
        harmed = damage(place, NAME, rounds.chance)
    round.faults[kind] += 1
    round.outcomes.append(f"({harmed})")
    rounds.judge(round, rounds.start(kind, rounds.known()), alone=True, faulty=True)
    while rounds.chance.random() < 0.4:
        end = rounds.judge(
            round, rounds.start("recover", rounds.known(), at_line=rounds.some_line("recover")), alone=True
        )
        round.kills["recover"] += end.code == -9
        rounds.learn("recover", end.code == -9, None)
    for stream in rounds.streams():
        rounds.strict(round, "recover", stream, ("--accept-loss",))
        _delete_what_stays_damaged(rounds, round, stream)
    round.violations += rounds.check(afresh=True)


def wrong(rounds: Rounds, round: Round, kind: str) -> None:
    """Store and catalog do not belong together: whatever is asked for is refused, and nothing changes anywhere."""
    with rounds.place() as place:
        if place is None or not rounds.known().checkpoints:
            return
        before = promises.recorded(place, NAME), sorted(place.warehouse.store.list(""))
    elsewhere = rounds.disk.path / f"wrong-{uuid.uuid4().hex}"
    (elsewhere / "objects").mkdir(parents=True)
    url, catalog = WAREHOUSES[rounds.store](elsewhere), rounds.site.catalog_url
    what = rounds.chance.choice(["an empty store", "another store", "another catalog", "no catalog"])
    if what in ("another store", "another catalog"):
        with OpenWarehouse.open_writable(url) as other:
            other.catalog.streams.register(NAME, 4, {"operators": {}, "options": {}})
    if what in ("another catalog", "no catalog"):
        url, catalog = rounds.site.hosts[0], Warehouse.at(url).catalog_url
    stored = sorted(Warehouse.at(url).store.list(""))
    # An upgrade reads the catalog only, which may be of any warehouse.
    for each in (kind if COMMANDS[kind].of_stream else "optimize", "run", "sweep", "recover", "truncate"):
        more = ("--accept-loss",) if each == "recover" else COMMANDS[each].arguments(rounds.chance, rounds.known())
        end = rounds.victim(each, NAME, more, ("--warehouse", url, "--catalog", catalog)).wait()
        if end.code != 2 or not re.search("warehouse|no catalog", end.error):
            round.violations.append(f"{each} with {what} ended with {end.code}: {end.said[-1500:]}")
    round.faults[kind] += 1
    round.outcomes.append(f"({what})")
    with rounds.place() as place:
        assert place is not None
        if before != (promises.recorded(place, NAME), sorted(place.warehouse.store.list(""))):
            round.violations.append(f"{what} changed what there was")
    if stored != sorted(Warehouse.at(url).store.list("")):
        round.violations.append(f"the store of {what} was written to")


def _delete_what_stays_damaged(rounds: Rounds, round: Round, stream: str) -> None:
    """The newest checkpoint may need the object no more, since a materialization took its place, and older ones
    still do: recovery leaves those to people, who find them by a proof of all."""
    with rounds.place() as place:
        assert place is not None
        ids = [checkpoint.id for checkpoint in place.catalog.checkpoints.list(stream)][:-1]
        damaged = {failure.checkpoint for failure in failures(place, stream, ids)} if ids else set()
        kept = [s.name for s in place.catalog.savepoints.list(stream) if s.checkpoint in damaged]
    for name in kept:
        rounds.strict(round, "savepoint", stream, (name, "--drop"))
    if damaged:
        round.outcomes.append(f"(deleted {sorted(damaged)}, which stay damaged)")
        rounds.strict(round, "delete", stream, tuple(map(str, sorted(damaged))))


SHAPES: dict[str, Callable[[Rounds, Round, str], None]] = {
    "kill": kill,
    "two": two,
    "zombie": zombie,
    "takeover": takeover,
    "fault": fault,
    "outage": outage,
    "hosts": hosts,
    "damage": damaged,
    "wrong": wrong,
    "lose": lose,
    "failover": fail_over,
}
OFTEN = {"kill": 4, "two": 3, "hosts": 3, "zombie": 2, "takeover": 2, "outage": 2}
WEIGHTS = {shape: OFTEN.get(shape, 1) for shape in SHAPES}
"""of rounds, as often as they come"""


def can_play(rounds: Rounds, shape: str) -> bool:
    """Whether the warehouse is of a kind that can be hurt so."""
    if shape == "failover":
        return rounds.site.catalog == "sqlite"
    return shape != "hosts" or len(rounds.site.hosts) > 1
