"""The catalog is lost at any moment, and rebuilt from the store; then the simulation goes on with the rebuilt one."""

from typing import TYPE_CHECKING

from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.repository import Catalog
from siltstone.catalog.transactions import Transactions
from siltstone.change.rebuild import Clock, rebuild_streams
from tests.rebuild_cases import check_same, what_it_knows
from tests.simulation.processes import Database, Process
from tests.simulation.writer import NAME

if TYPE_CHECKING:
    from tests.simulation.world import World

IDENTITY = "5" * 32


def lose(world: "World", a: int, b: int) -> None:
    """All processes end, or are killed where they are; the catalog is lost; a rebuild is killed after `b` stops, or
    not, and run to its end.

    Every checkpoint that could be restored still can. If all processes ended and the store has an extract of each
    stream since, the rebuilt catalog knows what the lost one did. A catalog is not rebuilt from a damaged store.
    """
    for process in world.processes:
        process.finish() if a % 2 else process.kill()
        world.check()
    if not world.oracle.visible(NAME) or world.oracle.damaged & world.memory.objects.keys():
        return
    known = None
    if a % 2:
        for stream in world.oracle.streams():
            write_extract(world.place(world.catalog), stream)
        known = what_it_knows(world.catalog, world.memory.objects.keys())
    if a % 3 == 0:
        killed, _ = _start(world)
        killed.resume(b)
        killed.kill()
        world.check()
    rebuild, draft = _start(world)
    rebuild.finish()
    if rebuild.error is not None:
        raise AssertionError("the lost catalog cannot be rebuilt") from rebuild.error
    world.database.load(draft.raw.serialize())
    world.oracle.continue_with_rebuilt()
    world.counts["rebuilt"] += 1
    if known is not None:
        check_same(what_it_knows(world.catalog), known)
        world.counts["rebuilt the same"] += 1


def _start(world: "World") -> tuple[Process, Database]:
    """A process at the first stop of a rebuild, and the draft that it writes."""
    draft, clock = Database("draft"), Clock(world.clock.now)
    catalog = Catalog(Transactions(draft.engine, clock, outage_s=0.0))
    rebuild = Process("rebuild-catalog", "", lambda it: rebuild_streams(world.place(catalog, it), IDENTITY, clock))
    return rebuild, draft
