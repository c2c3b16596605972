"""Plan what to read, and in which order, to restore one checkpoint: a pure plan over handles.

A restore reads, for each key group of each variable, one base and every delta after it. Subtasks may have written
different forms, variables may have their bases at different checkpoints, each checkpoint may have another parallelism,
one that did not change a variable has nothing of it, and one of several steps may have a delta per step. The files of
one step stand for a base: all those of the same key groups are read. So a plan is
made per key group, from the newest handle back to a base; each delta's `previous` must be the checkpoint of the next
older handle (`_leads_to`).

Every `manifests` argument maps a checkpoint id to all its handles. Plans leave out those of indexes, which hold no
state.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from siltstone.errors import StateError, UnknownCheckpoint
from siltstone.model import Form, Handle, KeyGroupRange, Kind

Manifests = Mapping[int, Sequence[Handle]]
Variable = tuple[str, str]
"""operator and variable"""
Link = tuple[int, Handle]
"""a handle and its checkpoint"""


@dataclass(frozen=True, slots=True)
class Read:
    """One block to read: where it is, and which of its key groups are wanted (disjoint, ascending).

    Only these may be applied: other key groups of a delta may have a newer base.
    """

    checkpoint: int
    handle: Handle
    key_groups: tuple[KeyGroupRange, ...]


def replaces(handle: Handle) -> bool:
    """Whether a handle holds everything of its key groups, so that nothing earlier is needed for them.

    Files do so together with the other files of their step.
    """
    return handle.form is not Form.DELTA


def apply_order(read: Read) -> tuple[int, int, str, int]:
    """Return the key of an order in which blocks may be applied: by checkpoint, sequence number, object and offset."""
    return read.checkpoint, read.handle.sqn, read.handle.object, read.handle.offset


@dataclass(frozen=True, slots=True)
class TableReads:
    """One table of one unit.

    Every wanted key group is in exactly one of `bases`, or in all files of one step, which are there, too. `deltas` are
    in the order in which they apply (by checkpoint, sequence number and key group); for each key group they are exactly
    those after its base.
    """

    bases: tuple[Read, ...]
    deltas: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class RestoreUnit:
    """One operator's state in one key-group range: a task independent of other units."""

    operator: str
    key_groups: KeyGroupRange
    tables: Mapping[str, TableReads]
    opaque: Mapping[str, tuple[Read, ...]]

    @property
    def reads(self) -> list[Read]:
        """Every block of the unit in an order in which it may be applied (`apply_order`)."""
        tables = [r for t in self.tables.values() for r in (*t.bases, *t.deltas)]
        opaque = [r for reads in self.opaque.values() for r in reads]
        return sorted(tables + opaque, key=apply_order)

    @property
    def bytes(self) -> int:
        """Bytes of the blocks it reads, each in full."""
        return sum(r.handle.length for r in self.reads)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How to restore one checkpoint: independent units, by operator and then key groups.

    `checkpoints` are those it reads from, ascending. `bytes` counts each block once, even if units share it;
    `files_bytes` are those of them in files, which each unit that needs one reads as a whole.
    """

    checkpoint: int
    units: tuple[RestoreUnit, ...]
    checkpoints: tuple[int, ...]
    bytes: int
    files_bytes: int = 0


def plan_restore(
    manifests: Manifests,
    checkpoint: int,
    max_parallelism: int,
    parallelism: int,
    key_groups: KeyGroupRange | None = None,
    variables: Mapping[Variable, Kind] | None = None,
) -> RestorePlan:
    """Plan the restore of `checkpoint` by `parallelism` units for each operator.

    `key_groups` (default: all) are split evenly over the units; a unit may be empty. `variables` are those to restore,
    by default those that the checkpoint wrote. Only the manifests of needed checkpoints are looked up, so the mapping
    may load them lazily.

    Raises:
        UnknownCheckpoint: `checkpoint` has no manifest.
        StateError: a handle that a delta builds on is missing, key groups are in no handle or twice in one step, or a
            chain does not lead back to a base; names checkpoint, operator and variable.
    """
    whole = KeyGroupRange(0, max_parallelism)
    history = _History(manifests)
    kinds = history.variables(checkpoint) if variables is None else dict(sorted(variables.items()))
    units = []
    for operator in sorted({operator for operator, _ in kinds}):
        for part in (key_groups or whole).split(parallelism):
            tables: dict[str, TableReads] = {}
            opaque: dict[str, tuple[Read, ...]] = {}
            for (of, variable), kind in kinds.items():
                if of != operator:
                    continue
                reads = history.walk(checkpoint, (of, variable), part)
                if kind is Kind.OPAQUE:
                    opaque[variable] = reads
                else:
                    tables[variable] = TableReads(
                        bases=tuple(r for r in reads if replaces(r.handle)),
                        deltas=tuple(r for r in reads if not replaces(r.handle)),
                    )
            units.append(RestoreUnit(operator, part, tables, opaque))
    blocks = {(r.checkpoint, r.handle) for unit in units for r in unit.reads}
    # Each table has a handle of a file that holds several.
    files_bytes = sum({h.object: h.length for _, h in blocks if h.form is Form.FILES}.values())
    return RestorePlan(
        checkpoint=checkpoint,
        units=tuple(units),
        checkpoints=tuple(sorted({at for at, _ in blocks})),
        bytes=sum(h.length for _, h in blocks if h.form is not Form.FILES) + files_bytes,
        files_bytes=files_bytes,
    )


def state_handles(handles: Iterable[Handle]) -> list[Handle]:
    """Return the handles that hold state; those of indexes do not."""
    return [handle for handle in handles if handle.kind is not Kind.INDEX]


class _History:
    """Handles by checkpoint and variable, looked up lazily."""

    def __init__(self, manifests: Manifests) -> None:
        self._manifests = manifests
        self._newest_first = sorted(manifests, reverse=True)
        self._sorted: dict[int, dict[Variable, list[Handle]]] = {}

    def variables(self, checkpoint: int) -> dict[Variable, Kind]:
        """Return (operator, variable) -> kind of what has a handle at one checkpoint, in order of name."""
        if checkpoint not in self._manifests:
            raise UnknownCheckpoint(f"checkpoint {checkpoint} has no manifest; list them with `checkpoints`")
        return {name: found[0].kind for name, found in sorted(self._at(checkpoint).items())}

    def _upto(self, checkpoint: int) -> Iterator[int]:
        """Yield the checkpoints up to one, newest first."""
        first = bisect_left(self._newest_first, -checkpoint, key=lambda c: -c)
        return islice(iter(self._newest_first), first, None)

    def _at(self, checkpoint: int) -> dict[Variable, list[Handle]]:
        """Return the handles of each variable, the newest step's first, then by key group."""
        if checkpoint not in self._sorted:
            by_name: dict[Variable, list[Handle]] = {}
            for handle in sorted(state_handles(self._manifests[checkpoint]), key=lambda h: (-h.sqn, h.key_groups)):
                by_name.setdefault((handle.operator, handle.variable), []).append(handle)
            self._sorted[checkpoint] = by_name
        return self._sorted[checkpoint]

    def walk(self, checkpoint: int, name: Variable, groups: KeyGroupRange) -> tuple[Read, ...]:
        """Return every read that `groups` of one variable need, in the order in which they apply."""
        found: dict[Link, list[KeyGroupRange]] = {}
        # Key groups whose base is not found yet, and the oldest delta found so far, which leads back to it.
        wanted: list[tuple[KeyGroupRange, Link | None]] = [(groups, None)] if groups else []
        for at in self._upto(checkpoint):
            for _, step in groupby(self._at(at).get(name, ()), key=lambda h: h.sqn):
                handles, rest = list(step), []
                for piece, newer in wanted:
                    for held, inside in cut_at_handles(handles, piece, at, name):
                        if not held:
                            rest.append((inside, newer))
                            continue
                        if newer and not _leads_to(newer, at, held[0]):
                            raise missing_link(checkpoint, name, newer[1].previous)
                        for handle in held:
                            found.setdefault((at, handle), []).append(inside)
                        if not replaces(held[0]):
                            rest.append((inside, (at, held[0])))
                wanted = rest
            if not wanted:
                break
        for piece, newer in wanted:
            raise missing_link(checkpoint, name, newer[1].previous) if newer else unheld(checkpoint, name, piece.start)
        reads = [Read(at, handle, _joined(pieces)) for (at, handle), pieces in found.items()]
        return tuple(sorted(reads, key=lambda r: (r.checkpoint, r.handle.sqn, r.key_groups)))


def _leads_to(newer: Link, at: int, handle: Handle) -> bool:
    """Whether a delta builds on this handle: of the checkpoint it names, or of an earlier step of its own.

    A materialization may also have made a base at a later checkpoint, which had not changed the variable.
    """
    checkpoint, delta = newer
    if at == checkpoint:
        return handle.previous == delta.previous and not replaces(handle)
    return at == delta.previous or (replaces(handle) and at > delta.previous)


def cut_at_handles(
    handles: Sequence[Handle], wanted: KeyGroupRange, checkpoint: int, name: Variable
) -> list[tuple[list[Handle], KeyGroupRange]]:
    """Cut `wanted` at the handles of one step (ordered by key group): each piece, and the handle or files that hold it.

    Raises:
        StateError: several handles hold the same key group, and are not files of the same key groups.
    """
    out: list[tuple[list[Handle], KeyGroupRange]] = []
    upto = wanted.start
    first = bisect_right(handles, wanted.start, key=lambda h: h.key_groups.end)
    for groups, same in groupby(islice(handles, first, None), key=lambda h: h.key_groups):
        held, piece = list(same), groups.intersect(wanted)
        if not piece:
            break
        if piece.start < upto or (len(held) > 1 and any(h.form is not Form.FILES for h in held)):
            raise StateError(
                f"{_where(checkpoint, name)}: two handles hold key group {piece.start}",
                advice="restore another checkpoint",
            )
        if piece.start > upto:
            out.append(([], KeyGroupRange(upto, piece.start)))
        out.append((held, piece))
        upto = piece.end
    if upto < wanted.end:
        out.append(([], KeyGroupRange(upto, wanted.end)))
    return out


def _joined(pieces: list[KeyGroupRange]) -> tuple[KeyGroupRange, ...]:
    """Sort disjoint ranges and join neighbours."""
    out: list[KeyGroupRange] = []
    for piece in sorted(pieces):
        if out and out[-1].end == piece.start:
            out[-1] = KeyGroupRange(out[-1].start, piece.end)
        else:
            out.append(piece)
    return tuple(out)


def _where(checkpoint: int, name: Variable) -> str:
    return f"checkpoint {checkpoint}, operator {name[0]}, variable {name[1]}"


def missing_link(checkpoint: int, name: Variable, previous: int) -> StateError:
    """Make the error for a delta that builds on what a checkpoint does not hold."""
    where = _where(checkpoint, name)
    return StateError(
        f"{where}: its chain needs checkpoint {previous}, which does not hold it", advice="restore another checkpoint"
    )


def unheld(checkpoint: int, name: Variable, group: int) -> StateError:
    """Make the error for a key group that no checkpoint up to this one holds."""
    where = _where(checkpoint, name)
    return StateError(f"{where}: no handle holds key group {group}", advice="restore another checkpoint")
