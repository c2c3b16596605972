"""Rounds in which the catalog is lost, whatever the rounds before have left: all of it, and it is rebuilt from the
store, or its newest transactions, and the next run brings it up to the store."""

import sqlite3
from collections import deque
from contextlib import closing, suppress
from unittest import mock

from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import rebuild_catalog
from siltstone.errors import ObjectExists
from siltstone.run.take_over import take_over
from siltstone.store.open import Warehouse
from tests.fault.commands import NAME
from tests.fault.promises import LOST
from tests.fault.rounds import Round, Rounds
from tests.rebuild_cases import check_same, plant, what_it_knows


def lose(rounds: Rounds, round: Round, kind: str) -> None:
    """The catalog is lost and rebuilt, half of the time after a rebuild that is killed.

    Before that, a fenced writer has stored manifests, and sometimes the stream was rolled back and has not run since.
    After runs that ended well it knows what the lost one did. If the last process was killed, what that had not
    acknowledged may be there or not; every promise is kept in either case.
    """
    ended_well = rounds.chance.random() < 0.5
    if ended_well:
        for stream in rounds.streams():
            rounds.strict(round, "run", stream)
    with rounds.place() as place:
        if place is None or not rounds.known().checkpoints:
            return
        if rounds.chance.random() < 0.3:
            round.outcomes.append(_roll_back(place))
        _plant_manifests(place)
        lost = what_it_knows(place.catalog, {name for name, _ in place.warehouse.store.list("")})
    rounds.close()
    rounds.site.lose_catalog()
    warehouse = Warehouse.at(rounds.site.hosts[0])
    if rounds.chance.random() < 0.5:
        killed = mock.patch("siltstone.change.rebuild.bring_back", side_effect=KeyboardInterrupt)
        with killed, suppress(KeyboardInterrupt):
            rebuild_catalog(warehouse, rounds.site.catalog_url)
    done = rebuild_catalog(warehouse, rounds.site.catalog_url)
    round.faults["rebuild-catalog"] += 1
    round.outcomes.append(f"({', '.join(f'{s.stream} to {s.newest}, {s.adopted} adopted' for s in done.streams)})")
    round.violations += [f"{each.stream} is left out: {each.why}" for each in done.left_out]
    with rounds.place() as place:
        assert place is not None
        if ended_well:
            try:
                check_same(what_it_knows(place.catalog), lost)
            except AssertionError as error:
                round.violations.append(f"the rebuilt catalog is not the lost one: {error}")
    round.violations += rounds.check(afresh=True)


def fail_over(rounds: Rounds, round: Round, kind: str) -> None:
    """A standby becomes the catalog, which lacks up to five transactions of a process that was killed, or was not.

    Then each stream runs. A fork whose making was lost is refused, so that is not lost here.
    """
    known = rounds.some()
    if not known.checkpoints:
        return
    by_line = rounds.chance.random() < 0.6
    victim = rounds.start(kind, known, at_line=rounds.some_line(kind) if by_line else None)
    copies = deque[bytes](maxlen=1 + LOST)
    while not victim.ended:
        _copy(rounds, copies)
    end = rounds.judge(round, victim, alone=True)
    if by_line:
        rounds.learn(kind, end.code == -9, None)
    round.kills[kind] += end.code == -9
    _copy(rounds, copies)
    lost = min(rounds.chance.randint(1, LOST), len(copies) - 1)
    streams = rounds.streams()
    rounds.close()
    _promote(rounds, copies[-1 - lost])
    if rounds.streams() != streams:
        rounds.close()
        _promote(rounds, copies[-1])
        lost = 0
    round.faults["failover"] += lost > 0
    round.outcomes.append(f"({lost} copies back)")
    for stream in streams:
        rounds.strict(round, "run", stream)
    round.violations += rounds.check(afresh=True)


def _copy(rounds: Rounds, copies: deque[bytes]) -> None:
    """Copy the catalog as it is now, if it has changed."""
    with closing(sqlite3.connect(rounds.site.catalog_path)) as live, closing(sqlite3.connect(":memory:")) as copy:
        live.backup(copy)
        data = copy.serialize()
    if not copies or copies[-1] != data:
        copies.append(data)


def _promote(rounds: Rounds, data: bytes) -> None:
    """Let a copy be the catalog; nobody has it open."""
    rounds.site.lose_catalog()
    rounds.site.catalog_path.write_bytes(data)


def _roll_back(place: OpenWarehouse) -> str:
    """Give up the newest checkpoint, under an epoch that then ends."""
    kept = ([0] + [each.id for each in place.catalog.checkpoints.list(NAME)])[-2]
    if not kept:
        return "(one checkpoint only, not rolled back)"
    epoch = take_over(place, NAME, "the campaign rolls back")
    place.catalog.rollbacks.roll_back(NAME, epoch, kept, "planted", "the campaign")
    place.catalog.runs.end(NAME, epoch, "rolled back")
    write_extract(place, NAME)
    return f"(rolled back to {kept})"


def _plant_manifests(place: OpenWarehouse) -> None:
    """Store manifests as a writer does that was frozen before it was fenced: of the newest checkpoint, which its
    successor has completed meanwhile, and of the next one."""
    epoch, newest = place.catalog.streams.get(NAME).epoch, place.catalog.checkpoints.last_id(NAME)
    for id in (newest, newest + 1) if epoch > 1 else ():
        with suppress(ObjectExists):  # of a writer that was fenced, or given up
            plant(place, epoch - 1, id, newest, NAME)
