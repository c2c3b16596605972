"""The catalog is lost at any moment, all of it or its newest transactions, and comes back from the store; then the
simulation goes on with what came back."""

from contextlib import suppress
from typing import TYPE_CHECKING

from siltstone.catalog.database.transactions import Transactions
from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import Clock, rebuild_streams
from siltstone.errors import UnknownCheckpoint
from siltstone.retention.deletion import delete_checkpoints
from siltstone.run.take_over import take_over
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
    finish, known = bool(a % 2), None
    if not _end_all(world, finish):
        return
    if finish:
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


def fail_over(world: "World", a: int, b: int) -> None:
    """The database loses up to five transactions that it had acknowledged, and the streams are taken over.

    All processes end before that, or are killed where they are; sometimes a last one works alone, so that all that is
    lost was acknowledged. Then each stream knows what it knew. A process that takes over is killed after `b` stops, or
    not. A fork that was lost with its name is refused, so it is not lost here.
    """
    finish, known = bool(a % 2), None
    if not _end_all(world, finish):
        return
    if finish:
        world.database.before.clear()
        kind = WORK[a // 2 % len(WORK)]
        world.start(kind, NAME, getattr(world, f"_{kind}")(a)).finish()
        world.check()
        before = list(world.database.before)
        _settle(world)
        known = what_it_knows(world.catalog, world.memory.objects.keys())
        world.database.before.extend(before)
    lost = min(1 + a % 5, len(world.database.before))
    streams, now = world.oracle.streams(), world.database.raw.serialize()
    if not lost:
        return
    world.database.load(world.database.before[-lost])
    world.database.before.clear()
    if world.oracle.streams() != streams:
        world.database.load(now)
        return
    for stream in streams:
        if a % 3 == 0:
            killed = world.start("take over", stream, _take_over)
            killed.resume(b)
            killed.kill()
        last = world.start("take over", stream, _take_over)
        last.finish()
        if last.error is not None:
            raise AssertionError(f"{stream} cannot be taken over") from last.error
    world.oracle.continue_with_rebuilt()
    world.counts["failed over"] += 1
    if known is not None:
        _settle(world)
        check_same(what_it_knows(world.catalog, world.memory.objects.keys()), known)
        world.counts["failed over to the same"] += 1
    world.check()


def _end_all(world: "World", finish: bool) -> bool:
    """End all processes, or kill them where they are; return whether there is something to lose, and to come back.

    If they ended, the store has an extract of each stream since.
    """
    for process in world.processes:
        process.finish() if finish else process.kill()
        world.check()
    if not world.oracle.visible(NAME) or world.oracle.damaged & world.memory.objects.keys():
        return False
    if finish:
        for stream in world.oracle.streams():
            write_extract(world.place(world.catalog), stream)
    return True


def _settle(world: "World") -> None:
    """Do again what may be lost and is then done later: releases of leases, ends of runs, and deletions."""
    world.database.raw.execute("DELETE FROM lease")
    for stream in world.oracle.streams():
        world.catalog.runs.end(stream, world.oracle.epoch(stream), "done")
        with suppress(UnknownCheckpoint):
            delete_checkpoints(world.place(world.catalog), stream, ())


WORK = ("run", "truncate", "run", "savepoint", "delete", "run", "rewind", "materialize")
"""what a last process does, of which all is acknowledged"""


def _take_over(_: Process, place: OpenWarehouse, stream: str) -> None:
    epoch = take_over(place, stream, "after a failover")
    place.catalog.runs.end(stream, epoch, "done")
    write_extract(place, stream)


def _start(world: "World") -> tuple[Process, Database]:
    """A process at the first stop of a rebuild, and the draft that it writes."""
    draft, clock = Database("draft"), Clock(world.clock.now)
    catalog = Catalog(Transactions(draft.engine, clock, outage_s=0.0))
    rebuild = Process("rebuild-catalog", "", lambda it: rebuild_streams(world.place(catalog, it), IDENTITY, clock))
    return rebuild, draft
