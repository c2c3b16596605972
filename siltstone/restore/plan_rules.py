"""Plan what to read, and in which order, to restore one checkpoint or to prove many: pure plans over handles.

A restore reads, for each key group of each variable, one base and every delta after it, or all files of one step and
every delta after them (`live_rules`). Its plan cuts these chains at the key groups of its units.

A proof reads every handle that is live at one of its checkpoints, each once. The work is divided where no handle is
needed on both sides: in time, where all chains of an operator begin anew, and between key groups.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from siltstone.errors import UnknownCheckpoint
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.restore.live_rules import LiveHandle, LiveHandles, Variable, replaces


@dataclass(frozen=True, slots=True)
class Read:
    """One block to read: where it is, and which of its key groups are wanted (disjoint, ascending).

    Only these may be applied: other key groups of a delta may have a newer base.
    """

    checkpoint: int
    handle: Handle
    key_groups: tuple[KeyGroupRange, ...]


def apply_order(read: Read) -> tuple[int, int, str, int]:
    """Return the key of an order in which blocks may be applied: by checkpoint, sequence number, object and offset."""
    return read.checkpoint, read.handle.sqn, read.handle.object, read.handle.offset


@dataclass(frozen=True, slots=True)
class TableReads:
    """One table of one unit.

    Every wanted key group is in exactly one read of `bases`, or in all files of one step, which are in `bases`, too.
    `deltas` are in the order in which they apply (by checkpoint, sequence number and key group); for each key group
    they are exactly those after its base.
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
    `files_bytes` counts only files, which each unit that needs one reads whole.
    """

    checkpoint: int
    units: tuple[RestoreUnit, ...]
    checkpoints: tuple[int, ...]
    bytes: int
    files_bytes: int = 0


def plan_restore(
    manifests: Mapping[int, Sequence[Handle]],
    checkpoint: int,
    max_parallelism: int,
    parallelism: int,
    variables: Mapping[Variable, Kind],
    key_groups: KeyGroupRange | None = None,
) -> RestorePlan:
    """Plan the restore of `checkpoint` by `parallelism` units for each operator.

    Args:
        manifests: checkpoint -> all its handles; indexes are ignored, since they hold no state. Checkpoints that
            `checkpoint` does not need may be missing.
        variables: those to restore, also if the checkpoint wrote nothing of them, because they had not changed.
        key_groups: those to restore (default: all). They are split evenly over the units; a unit may be empty.

    Raises:
        UnknownCheckpoint: `checkpoint` has no manifest.
        StateError: see `LiveHandles.chains`.
    """
    if checkpoint not in manifests:
        raise UnknownCheckpoint(f"checkpoint {checkpoint} has no manifest; list them with `checkpoints`")
    whole = KeyGroupRange(0, max_parallelism)
    wanted = key_groups or whole
    live = LiveHandles()
    for at in sorted(manifests):
        if at <= checkpoint:
            held = (h for h in manifests[at] if (h.operator, h.variable) in variables)
            live.advance(at, [h for h in held if h.key_groups.intersect(wanted)], whole)
    units = []
    for operator, of_operator in groupby(sorted(variables.items()), key=lambda each: each[0][0]):
        own = [(variable, kind) for (_, variable), kind in of_operator]
        for part in wanted.split(parallelism):
            tables: dict[str, TableReads] = {}
            opaque: dict[str, tuple[Read, ...]] = {}
            for variable, kind in own:
                reads = _list_reads(live, (operator, variable), part)
                if kind is Kind.OPAQUE:
                    opaque[variable] = reads
                else:
                    tables[variable] = TableReads(
                        bases=tuple(r for r in reads if replaces(r.handle)),
                        deltas=tuple(r for r in reads if not replaces(r.handle)),
                    )
            units.append(RestoreUnit(operator, part, tables, opaque))
    blocks = {(r.checkpoint, r.handle) for unit in units for r in unit.reads}
    return RestorePlan(
        checkpoint=checkpoint,
        units=tuple(units),
        checkpoints=tuple(sorted({at for at, _ in blocks})),
        bytes=bytes_of(h for _, h in blocks),
        files_bytes=bytes_of(h for _, h in blocks if h.form is Form.FILES),
    )


def _list_reads(live: LiveHandles, variable: Variable, key_groups: KeyGroupRange) -> tuple[Read, ...]:
    """Return every read that some key groups of one variable need, in the order in which they apply."""
    found: dict[LiveHandle, list[KeyGroupRange]] = {}
    for part, chain in live.chains(variable, key_groups):
        for link in chain.links:
            found.setdefault(link, []).append(part)
    reads = [Read(link.checkpoint, link.handle, _join(parts)) for link, parts in found.items()]
    return tuple(sorted(reads, key=lambda r: (r.checkpoint, r.handle.sqn, r.key_groups)))


def bytes_of(handles: Iterable[Handle]) -> int:
    """Return the bytes of the blocks of different handles, and of each file once: every table has a handle of it."""
    files: dict[str, int] = {}
    blocks = 0
    for handle in handles:
        if handle.form is Form.FILES:
            files[handle.object] = handle.length
        else:
            blocks += handle.length
    return blocks + sum(files.values())


def _join(pieces: list[KeyGroupRange]) -> tuple[KeyGroupRange, ...]:
    """Sort disjoint ranges and join neighbours."""
    out: list[KeyGroupRange] = []
    for piece in sorted(pieces):
        if out and out[-1].end == piece.start:
            out[-1] = KeyGroupRange(out[-1].start, piece.end)
        else:
            out.append(piece)
    return tuple(out)


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One checkpoint of a chain: the handles to apply, which bring the state to the checkpoint's.

    Attributes:
        proves: whether its digest is compared; otherwise the step only leads to a later one.
        ends: handles of this step or of earlier ones that no later proven checkpoint needs.
    """

    checkpoint: int
    handles: tuple[Handle, ...]
    proves: bool
    ends: tuple[Handle, ...]


@dataclass(frozen=True, slots=True)
class VerifyChain:
    """One operator's state in one key-group range from a base on: an independent walk that proves on the way."""

    operator: str
    key_groups: KeyGroupRange
    steps: tuple[VerifyStep, ...]


@dataclass(frozen=True, slots=True)
class _Needed:
    """A handle that a proof reads, and the last proven checkpoint that needs it."""

    live: LiveHandle
    until: int


def plan_proof(
    walk: Iterable[tuple[int, LiveHandles]], max_parallelism: int, proves: Collection[int]
) -> list[VerifyChain]:
    """Plan the proof of the checkpoints `proves`, walking each chain once.

    Every needed handle is in exactly one step of one chain: a chain's key-group range never cuts a block. Chains are
    independent of each other.

    Args:
        walk: yields the checkpoints to prove and those they need, ascending, each with its live handles.

    Raises:
        UnknownCheckpoint: one of them is not in the walk.
        StateError: see `LiveHandles.chains`.
    """
    whole, proven, needed = KeyGroupRange(0, max_parallelism), list[int](), list[_Needed]()
    live = LiveHandles()
    for checkpoint, live in walk:
        if proven:
            needed += [_Needed(each, proven[-1]) for each in live.released if each.checkpoint <= proven[-1]]
        if checkpoint in proves:
            for variable in live.variables:
                list(live.chains(variable, whole))  # raises if it cannot be restored
            proven.append(checkpoint)
    if missing := set(proves).difference(proven):
        raise UnknownCheckpoint(f"checkpoint {min(missing)} has no manifest; list them with `checkpoints`")
    needed += [_Needed(each, proven[-1]) for each in live.handles if proven and each.checkpoint <= proven[-1]]
    by_operator: dict[str, list[_Needed]] = {}
    for each in needed:
        by_operator.setdefault(each.live.handle.operator, []).append(each)
    return [
        _make_chain(operator, steps, proven)
        for operator, of in sorted(by_operator.items())
        for run in _divide(of, _time_span)
        for part in _divide(run, _group_span)
        for steps in _divide(part, _time_span)
    ]


def _time_span(needed: _Needed) -> tuple[int, int]:
    return needed.live.checkpoint, needed.until + 1


def _group_span(needed: _Needed) -> tuple[int, int]:
    groups = needed.live.handle.key_groups
    return groups.start, groups.end


def _divide(needed: Iterable[_Needed], span: Callable[[_Needed], tuple[int, int]]) -> Iterator[list[_Needed]]:
    """Divide handles into groups whose spans do not overlap, ascending."""
    group, end = list[_Needed](), 0
    for each in sorted(needed, key=span):
        start, stop = span(each)
        if group and start >= end:
            yield group
            group = []
        group.append(each)
        end = max(end, stop)
    if group:
        yield group


def _make_chain(operator: str, needed: Sequence[_Needed], proven: Sequence[int]) -> VerifyChain:
    """Return the walk over some handles; `proven` are all proven checkpoints, ascending."""
    begins: dict[int, list[Handle]] = {}
    ends: dict[int, list[Handle]] = {}
    for each in needed:
        begins.setdefault(each.live.checkpoint, []).append(each.live.handle)
        ends.setdefault(each.until, []).append(each.live.handle)
    proves = {*proven[bisect_left(proven, min(begins)) : bisect_right(proven, max(ends))]}
    groups = [each.live.handle.key_groups for each in needed]
    return VerifyChain(
        operator,
        KeyGroupRange(min(part.start for part in groups), max(part.end for part in groups)),
        tuple(
            VerifyStep(
                checkpoint,
                tuple(sorted(begins.get(checkpoint, ()), key=lambda h: (h.variable, h.sqn, h.key_groups, h.object))),
                checkpoint in proves,
                tuple(ends.get(checkpoint, ())),
            )
            for checkpoint in sorted({*begins, *proves})
        ),
    )
