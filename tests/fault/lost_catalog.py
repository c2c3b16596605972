"""A round in which the catalog is lost, whatever the rounds before have left, and rebuilt from the store."""

from contextlib import suppress
from unittest import mock

from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import rebuild_catalog
from siltstone.errors import ObjectExists
from siltstone.run.take_over import take_over
from siltstone.store.open import Warehouse
from tests.fault.commands import NAME
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
