"""Plan what to read, and in which order, to restore one checkpoint or to verify many: pure plans over handles.

A restore reads, for each key group of each table, one base and every delta after it. Subtasks may have
written different forms, variables may have their bases at different checkpoints, and each checkpoint may have
another parallelism; so a plan is made per key group, walking each handle's `previous` back to its base. Every
`manifests` argument maps a checkpoint id to all its handles; plans leave out those of indexes, which hold no
state.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from siltstone.errors import StateError, UnknownCheckpoint
from siltstone.model import Form, Handle, KeyGroupRange, Kind

Manifests = Mapping[int, Sequence[Handle]]


@dataclass(frozen=True, slots=True)
class Read:
    """One block to read: where it is, and which of its key groups are wanted (disjoint, ascending).

    Only these may be applied: other key groups of a delta may have a newer base.
    """

    checkpoint: int
    handle: Handle
    key_groups: tuple[KeyGroupRange, ...]


@dataclass(frozen=True, slots=True)
class TableReads:
    """One table of one unit.

    Every wanted key group is in exactly one of `bases`. `deltas` are in the order in which they apply (by
    checkpoint, then key group); for each key group they are exactly those after its base.
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
        """Every block of the unit in an order in which it may be applied: by checkpoint, object and offset."""
        tables = [r for t in self.tables.values() for r in (*t.bases, *t.deltas)]
        opaque = [r for reads in self.opaque.values() for r in reads]
        return sorted(tables + opaque, key=lambda r: (r.checkpoint, r.handle.object, r.handle.offset))

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
) -> RestorePlan:
    """Plan the restore of `checkpoint` by `parallelism` units for each operator.

    `key_groups` (default: all) are split evenly over the units; a unit may be empty. Only the manifests of needed
    checkpoints are looked up, so the mapping may load them lazily.

    Raises:
        UnknownCheckpoint: `checkpoint` has no manifest.
        StateError: a checkpoint that a delta builds on is missing, key groups are in no handle or in two, or
            a chain does not lead back to a base; names checkpoint, operator and variable.
    """
    whole = KeyGroupRange(0, max_parallelism)
    history = _History(manifests)
    kinds = history.variables(checkpoint)
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


def verify_plan(manifests: Manifests, max_parallelism: int, proves: Collection[int] | None = None) -> list[VerifyChain]:
    """Plan the proof of the checkpoints `proves` (default: all), walking each chain once.

    `manifests` holds these and the checkpoints that their chains need.

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
        variables = {c: sorted({h.variable for h in handles}) for c, handles in walk.items()}
        for run in _runs([(c, handles) for c, handles in walk.items() if handles]):
            parts = _uncut([handles for _, handles in run], max_parallelism)
            for part, inside in zip(parts, _by_part(run, parts), strict=True):
                for steps in _runs(inside):
                    chain = _chain(operator, part, steps, variables, wanted)
                    if chain is not None:
                        chains.append(chain)
    return chains


def _runs(steps: list[tuple[int, list[Handle]]]) -> list[list[tuple[int, list[Handle]]]]:
    """Split the steps wherever every table is a base again, so that nothing earlier is needed."""
    runs: list[list[tuple[int, list[Handle]]]] = []
    for checkpoint, handles in steps:
        if not runs or all(h.form is Form.BASE for h in handles if h.kind is Kind.INCREMENTAL):
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
    steps: list[tuple[int, list[Handle]]],
    variables: Mapping[int, list[str]],
    wanted: Collection[int],
) -> VerifyChain | None:
    """Check and return the chain up to its last wanted checkpoint; None if none is wanted."""
    last = max((i for i, (c, _) in enumerate(steps) if c in wanted), default=-1)
    at: dict[str, int] = {}
    out = []
    for checkpoint, handles in steps[: last + 1]:
        ordered = sorted(handles, key=lambda h: (h.variable, h.key_groups))
        for variable in variables[checkpoint]:
            mine = [h for h in ordered if h.variable == variable]
            _pieces(mine, part, checkpoint, (operator, variable))
            for previous in {h.previous for h in mine if h.form is Form.DELTA}:
                if at.get(variable) != previous:
                    raise _gap(checkpoint, (operator, variable), previous)
            at[variable] = checkpoint
        out.append(VerifyStep(checkpoint, tuple(ordered), checkpoint in wanted))
    return VerifyChain(operator, part, tuple(out)) if out else None


class _History:
    """Handles by checkpoint and variable, looked up lazily."""

    def __init__(self, manifests: Manifests) -> None:
        self._manifests = manifests
        self._sorted: dict[int, dict[tuple[str, str], list[Handle]]] = {}

    def variables(self, checkpoint: int) -> dict[tuple[str, str], Kind]:
        """Return (operator, variable) -> kind at one checkpoint, in order of name."""
        handles = self._at(checkpoint)
        if handles is None:
            raise UnknownCheckpoint(f"checkpoint {checkpoint} has no manifest; list them with `checkpoints`")
        return {name: found[0].kind for name, found in sorted(handles.items())}

    def _at(self, checkpoint: int) -> dict[tuple[str, str], list[Handle]] | None:
        if checkpoint not in self._sorted:
            try:
                handles = self._manifests[checkpoint]
            except KeyError:
                return None
            by_name: dict[tuple[str, str], list[Handle]] = {}
            for handle in sorted(_of_state(handles), key=lambda h: h.key_groups):
                by_name.setdefault((handle.operator, handle.variable), []).append(handle)
            self._sorted[checkpoint] = by_name
        return self._sorted[checkpoint]

    def walk(self, checkpoint: int, name: tuple[str, str], groups: KeyGroupRange) -> tuple[Read, ...]:
        """Return every read that `groups` of one variable need, oldest checkpoint first."""
        found: dict[tuple[int, Handle], list[KeyGroupRange]] = {}
        todo = [(checkpoint, groups)] if groups else []
        while todo:
            at, wanted = todo.pop()
            handles = (self._at(at) or {}).get(name)
            if not handles:
                raise _gap(checkpoint, name, at)
            for handle, piece in _pieces(handles, wanted, at, name):
                found.setdefault((at, handle), []).append(piece)
                if handle.form is Form.DELTA:
                    if handle.previous >= at:
                        raise _gap(at, name, handle.previous)
                    todo.append((handle.previous, piece))
        reads = [Read(at, handle, _joined(pieces)) for (at, handle), pieces in found.items()]
        return tuple(sorted(reads, key=lambda r: (r.checkpoint, r.key_groups)))


def _pieces(
    handles: Sequence[Handle], wanted: KeyGroupRange, checkpoint: int, name: tuple[str, str]
) -> list[tuple[Handle, KeyGroupRange]]:
    """Return the part of `wanted` that each handle (ordered by key group) holds; every key group exactly once."""
    out = []
    upto = wanted.start
    where = f"checkpoint {checkpoint}, operator {name[0]}, variable {name[1]}"
    first = bisect_right(handles, wanted.start, key=lambda h: h.key_groups.end)
    for handle in islice(handles, first, None):
        piece = handle.key_groups.intersect(wanted)
        if not piece:
            break
        if piece.start < upto:
            raise StateError(f"{where}: two handles hold key group {piece.start}; restore another checkpoint")
        if piece.start > upto:
            break
        out.append((handle, piece))
        upto = piece.end
    if upto < wanted.end:
        raise StateError(f"{where}: no handle holds key group {upto}; restore another checkpoint")
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


def _gap(checkpoint: int, name: tuple[str, str], previous: int) -> StateError:
    where = f"checkpoint {checkpoint}, operator {name[0]}, variable {name[1]}"
    return StateError(
        f"{where}: its chain needs checkpoint {previous}, which does not hold it; restore another checkpoint"
    )
