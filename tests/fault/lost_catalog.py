"""A round in which the catalog is lost, whatever the rounds before have left, and rebuilt from the store."""

from contextlib import suppress
from unittest import mock

from siltstone.change.rebuild import rebuild_catalog
from siltstone.store.open import Warehouse
from tests.fault.rounds import Round, Rounds
from tests.rebuild_cases import check_same, what_it_knows


def lose(rounds: Rounds, round: Round, kind: str) -> None:
    """The catalog is lost and rebuilt, half of the time after a rebuild that is killed.

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
        lost = what_it_knows(place.catalog)
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
