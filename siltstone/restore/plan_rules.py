"""Plan what to read, and in which order, to restore one checkpoint or to verify many: pure plans over handles.

A restore reads, for each key group of each variable, one base and every delta after it. Subtasks may have written
different forms, variables may have their bases at different checkpoints, each checkpoint may have another parallelism,
one that did not change a variable has nothing of it, and one of several steps may have a delta per step. So a plan is
made per key group, from the newest handle back to a base; each delta's `previous` must be the checkpoint of the next
older handle (`_leads_to`).

Every `manifests` argument maps a checkpoint id to all its handles. Plans leave out those of indexes, which hold no
state.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise

import numpy as np

from siltstone.errors import StateError, UnknownCheckpoint
from siltstone.model import Form, Handle, KeyGroupRange, Kind

Manifests = Mapping[int, Sequence[Handle]]
Variable = tuple[str, str]
"""operator and variable"""


@dataclass(frozen=True, slots=True)
class Read:
    """One block to read: where it is, and which of its key groups are wanted (disjoint, ascending).

    Only these may be applied: other key groups of a delta may have a newer base.
    """

    checkpoint: int
    handle: Handle
    key_groups: tuple[KeyGroupRange, ...]


def replaces(handle: Handle) -> bool:
    """Whether a handle holds everything of its key groups, so that nothing earlier is needed for them."""
    return handle.kind is Kind.OPAQUE or handle.form is Form.BASE


def apply_order(read: Read) -> tuple[int, int, str, int]:
    """Return the key of an order in which blocks may be applied: by checkpoint, sequence number, object and offset."""
    return read.checkpoint, read.handle.sqn, read.handle.object, read.handle.offset


@dataclass(frozen=True, slots=True)
class TableReads:
    """One table of one unit.

    Every wanted key group is in exactly one of `bases`. `deltas` are in the order in which they apply (by
    checkpoint, sequence number and key group); for each key group they are exactly those after its base.
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

    `checkpoints` are those it reads from, ascending. `bytes` counts each block once, even if units share it.
    """

    checkpoint: int
    units: tuple[RestoreUnit, ...]
    checkpoints: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One checkpoint of a chain: the handles to apply, after which the state is that of the checkpoint.

    `proves`: whether its digest is compared; otherwise the step only leads to a later one.
    """

    checkpoint: int
    handles: tuple[Handle, ...]
    proves: bool


@dataclass(frozen=True, slots=True)
class VerifyChain:
    """One operator's state in one key-group range from a base on: an independent walk that proves on the way."""

    operator: str
    key_groups: KeyGroupRange
    steps: tuple[VerifyStep, ...]


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
                        bases=tuple(r for r in reads if r.handle.form is Form.BASE),
                        deltas=tuple(r for r in reads if r.handle.form is Form.DELTA),
                    )
            units.append(RestoreUnit(operator, part, tables, opaque))
    blocks = {(r.checkpoint, r.handle) for unit in units for r in unit.reads}
    return RestorePlan(
        checkpoint=checkpoint,
        units=tuple(units),
        checkpoints=tuple(sorted({at for at, _ in blocks})),
        bytes=sum(handle.length for _, handle in blocks),
    )


def verify_plan(
    manifests: Manifests,
    max_parallelism: int,
    proves: Collection[int] | None = None,
    variables: Mapping[int, Collection[Variable]] | None = None,
) -> list[VerifyChain]:
    """Plan the proof of the checkpoints `proves` (default: all), walking each chain once.

    `manifests` holds these and the checkpoints that their chains need. `variables` are those that each checkpoint has,
    by default those that it wrote.

    Every needed handle is in exactly one step of one chain: a chain's key-group range never cuts a block. Chains are
    independent of each other.

    Raises:
        UnknownCheckpoint, StateError: as `plan_restore`, for any of the chains.
    """
    wanted = set(manifests if proves is None else proves)
    for checkpoint in sorted(wanted - set(manifests)):
        raise UnknownCheckpoint(f"checkpoint {checkpoint} has no manifest; list them with `checkpoints`")
    chains = []
    for operator in sorted({h.operator for handles in manifests.values() for h in handles}):
        walk = {c: [h for h in _of_state(manifests[c]) if h.operator == operator] for c in sorted(manifests)}
        if variables is None:
            named = {c: {h.variable for h in handles} for c, handles in walk.items()}
        else:
            named = {c: {variable for of, variable in variables[c] if of == operator} for c in walk}
        whole = KeyGroupRange(0, max_parallelism)
        for run in _runs([(c, handles) for c, handles in walk.items() if named[c]], named, whole):
            parts = _uncut([handles for _, handles in run], max_parallelism)
            for part, inside in zip(parts, _by_part(run, parts), strict=True):
                for steps in _runs(inside, named, part):
                    chain = _chain(operator, part, steps, named, wanted)
                    if chain is not None:
                        chains.append(chain)
    return chains


_Steps = list[tuple[int, list[Handle]]]
"""checkpoints, ascending, with their handles of one operator"""


def _runs(steps: _Steps, variables: Mapping[int, Collection[str]], groups: KeyGroupRange) -> list[_Steps]:
    """Split the steps wherever every variable begins anew in all key groups, so that nothing earlier is needed."""
    runs: list[_Steps] = []
    for checkpoint, handles in steps:
        anew: dict[str, set[KeyGroupRange]] = {}
        for handle in filter(replaces, handles):
            anew.setdefault(handle.variable, set()).add(handle.key_groups)
        if not runs or all(sum(map(len, anew.get(name, ()))) >= len(groups) for name in variables[checkpoint]):
            runs.append([])
        runs[-1].append((checkpoint, handles))
    return runs


def _uncut(steps: list[list[Handle]], max_parallelism: int) -> list[KeyGroupRange]:
    """Return the smallest ranges that cut no block of any of the checkpoints."""
    edges = [0]
    for span in sorted({handle.key_groups for handles in steps for handle in handles}):
        if span.start >= edges[-1]:
            edges += [span.start, span.end]
        else:
            edges[-1] = max(edges[-1], span.end)
    edges = sorted({*edges, max_parallelism})
    return [KeyGroupRange(a, b) for a, b in pairwise(edges)]


def _of_state(handles: Iterable[Handle]) -> list[Handle]:
    return [handle for handle in handles if handle.kind is not Kind.INDEX]


def _by_part(run: list[tuple[int, list[Handle]]], parts: list[KeyGroupRange]) -> list[list[tuple[int, list[Handle]]]]:
    """Return the steps of each part, with only the handles in that part."""
    out: list[list[tuple[int, list[Handle]]]] = [[(c, []) for c, _ in run] for _ in parts]
    starts = [part.start for part in parts]
    for step, (_, handles) in enumerate(run):
        for handle in handles:
            out[bisect_right(starts, handle.key_groups.start) - 1][step][1].append(handle)
    return out


def _chain(
    operator: str,
    part: KeyGroupRange,
    steps: _Steps,
    variables: Mapping[int, Collection[str]],
    wanted: Collection[int],
) -> VerifyChain | None:
    """Check and return the chain up to its last wanted checkpoint; None if none is wanted."""
    last = max((i for i, (c, _) in enumerate(steps) if c in wanted), default=-1)
    walked = steps[: last + 1]
    read = _read_of(part, walked, variables, wanted)
    newest: dict[str, np.ndarray] = {}
    out = []
    for checkpoint, handles in walked:
        ordered = sorted(handles, key=lambda h: (h.variable, h.sqn, h.key_groups))
        for (variable, _), step in groupby(ordered, key=lambda h: (h.variable, h.sqn)):
            name, held = (operator, variable), list(step)
            _pieces(held, part, checkpoint, name)  # raises if two hold the same key group
            written, begun = newest.setdefault(variable, np.zeros((2, len(part)), np.int64))
            for handle in held:
                inside = slice(handle.key_groups.start - part.start, handle.key_groups.end - part.start)
                before = written[inside]
                leads = (before == handle.previous) | (before == checkpoint)
                leads |= (before == begun[inside]) & (before > handle.previous)  # as in `_leads_to`
                if replaces(handle):
                    begun[inside] = checkpoint
                elif not leads[read.get((checkpoint, handle), _NOWHERE)].all():
                    raise _gap(checkpoint, name, handle.previous)
                written[inside] = checkpoint
        needed = tuple(handle for handle in ordered if (checkpoint, handle) in read)
        out.append(VerifyStep(checkpoint, needed, checkpoint in wanted))
    return VerifyChain(operator, part, tuple(out)) if out else None


_NOWHERE = np.zeros(0, np.intp)


def _read_of(
    part: KeyGroupRange, steps: _Steps, variables: Mapping[int, Collection[str]], wanted: Collection[int]
) -> dict["_Link", np.ndarray]:
    """Return the handles that a proof of the wanted checkpoints reads -> in which of their own key groups.

    What is replaced before any of them may be deleted, though a manifest that is needed for something else names it.
    """
    found: dict[_Link, np.ndarray] = {}
    needed: dict[str, np.ndarray] = {}
    for checkpoint, handles in reversed(steps):
        if checkpoint in wanted:
            needed |= {variable: np.ones(len(part), bool) for variable in variables[checkpoint]}
        for handle in sorted(handles, key=lambda h: -h.sqn):
            inside = slice(handle.key_groups.start - part.start, handle.key_groups.end - part.start)
            of = needed.get(handle.variable)
            if of is not None and of[inside].any():
                found[checkpoint, handle] = np.flatnonzero(of[inside])
                if replaces(handle):
                    of[inside] = False
    return found


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
            for handle in sorted(_of_state(self._manifests[checkpoint]), key=lambda h: (-h.sqn, h.key_groups)):
                by_name.setdefault((handle.operator, handle.variable), []).append(handle)
            self._sorted[checkpoint] = by_name
        return self._sorted[checkpoint]

    def walk(self, checkpoint: int, name: Variable, groups: KeyGroupRange) -> tuple[Read, ...]:
        """Return every read that `groups` of one variable need, in the order in which they apply."""
        found: dict[_Link, list[KeyGroupRange]] = {}
        # Key groups whose base is not found yet, and the oldest delta found so far, which leads back to it.
        wanted: list[tuple[KeyGroupRange, _Link | None]] = [(groups, None)] if groups else []
        for at in self._upto(checkpoint):
            for _, step in groupby(self._at(at).get(name, ()), key=lambda h: h.sqn):
                handles, rest = list(step), []
                for piece, newer in wanted:
                    for handle, inside in _pieces(handles, piece, at, name):
                        if handle is None:
                            rest.append((inside, newer))
                            continue
                        if newer and not _leads_to(newer, at, handle):
                            raise _gap(checkpoint, name, newer[1].previous)
                        found.setdefault((at, handle), []).append(inside)
                        if not replaces(handle):
                            rest.append((inside, (at, handle)))
                wanted = rest
            if not wanted:
                break
        for piece, newer in wanted:
            raise _gap(checkpoint, name, newer[1].previous) if newer else _unheld(checkpoint, name, piece)
        reads = [Read(at, handle, _joined(pieces)) for (at, handle), pieces in found.items()]
        return tuple(sorted(reads, key=lambda r: (r.checkpoint, r.handle.sqn, r.key_groups)))


_Link = tuple[int, Handle]
"""a handle and its checkpoint"""


def _leads_to(newer: _Link, at: int, handle: Handle) -> bool:
    """Whether a delta builds on this handle: of the checkpoint it names, or of an earlier step of its own.

    A materialization may also have made a base at a later checkpoint, which had not changed the variable.
    """
    checkpoint, delta = newer
    if at == checkpoint:
        return handle.previous == delta.previous and not replaces(handle)
    return at == delta.previous or (replaces(handle) and at > delta.previous)


def _pieces(
    handles: Sequence[Handle], wanted: KeyGroupRange, checkpoint: int, name: Variable
) -> list[tuple[Handle | None, KeyGroupRange]]:
    """Cut `wanted` at the handles of one step (ordered by key group): what each holds, and with None what none does."""
    out: list[tuple[Handle | None, KeyGroupRange]] = []
    upto = wanted.start
    first = bisect_right(handles, wanted.start, key=lambda h: h.key_groups.end)
    for handle in islice(handles, first, None):
        piece = handle.key_groups.intersect(wanted)
        if not piece:
            break
        if piece.start < upto:
            raise StateError(
                f"{_where(checkpoint, name)}: two handles hold key group {piece.start}; restore another checkpoint"
            )
        if piece.start > upto:
            out.append((None, KeyGroupRange(upto, piece.start)))
        out.append((handle, piece))
        upto = piece.end
    if upto < wanted.end:
        out.append((None, KeyGroupRange(upto, wanted.end)))
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


def _gap(checkpoint: int, name: Variable, previous: int) -> StateError:
    where = _where(checkpoint, name)
    return StateError(
        f"{where}: its chain needs checkpoint {previous}, which does not hold it; restore another checkpoint"
    )


def _unheld(checkpoint: int, name: Variable, groups: KeyGroupRange) -> StateError:
    where = _where(checkpoint, name)
    return StateError(f"{where}: no handle holds key group {groups.start}; restore another checkpoint")
