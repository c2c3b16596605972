"""Plan what to read, and in which order, to prove many checkpoints together: a pure plan over handles.

Each chain is walked once, from a base on, and proves every wanted checkpoint on the way (`plan_rules` explains chains).
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from siltstone.errors import UnknownCheckpoint
from siltstone.model import Handle, KeyGroupRange
from siltstone.restore.plan_rules import (
    Link,
    Manifests,
    Variable,
    cut_at_handles,
    missing_link,
    replaces,
    state_handles,
    unheld,
)


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
    operators = {h.operator for handles in manifests.values() for h in handles}
    operators |= {operator for names in (variables or {}).values() for operator, _ in names}
    for operator in sorted(operators):
        walk = {c: [h for h in state_handles(manifests[c]) if h.operator == operator] for c in sorted(manifests)}
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
    read, needed = _read_of(part, walked, variables, wanted)
    newest: dict[str, np.ndarray] = {}
    out = []
    for checkpoint, handles in walked:
        ordered = sorted(handles, key=lambda h: (h.variable, h.sqn, h.key_groups))
        for (variable, _), step in groupby(ordered, key=lambda h: (h.variable, h.sqn)):
            name, held = (operator, variable), list(step)
            cut_at_handles(held, part, checkpoint, name)  # raises if two hold the same key group
            written, begun = newest.setdefault(variable, np.zeros((2, len(part)), np.int64))
            for handle in held:
                inside = _inside(handle, part)
                before = written[inside]
                leads = (before == handle.previous) | (before == checkpoint)
                leads |= (before == begun[inside]) & (before > handle.previous)  # as in `_leads_to`
                if replaces(handle):
                    begun[inside] = checkpoint
                elif not leads[read.get((checkpoint, handle), _NOWHERE)].all():
                    raise missing_link(checkpoint, name, handle.previous)
                written[inside] = checkpoint
        applied = tuple(handle for handle in ordered if (checkpoint, handle) in read)
        out.append(VerifyStep(checkpoint, applied, checkpoint in wanted))
    for variable, groups in needed.items():
        if groups.any():
            raise unheld(walked[-1][0], (operator, variable), part.start + int(groups.argmax()))
    return VerifyChain(operator, part, tuple(out)) if out else None


_NOWHERE = np.zeros(0, np.intp)
_NOTHING = np.zeros(0, bool)


def _inside(handle: Handle, part: KeyGroupRange) -> slice:
    """Return where a handle's key groups are in an array of those of a part that has them all."""
    return slice(handle.key_groups.start - part.start, handle.key_groups.end - part.start)


def _read_of(
    part: KeyGroupRange, steps: _Steps, variables: Mapping[int, Collection[str]], wanted: Collection[int]
) -> tuple[dict[Link, np.ndarray], dict[str, np.ndarray]]:
    """Return the handles that a proof of the wanted checkpoints reads -> in which of their own key groups; and variable
    -> in which key groups of the part none of the handles is a base.

    What is replaced before any of them may be deleted, though a manifest that is needed for something else names it.
    """
    found: dict[Link, np.ndarray] = {}
    needed: dict[str, np.ndarray] = {}
    for checkpoint, handles in reversed(steps):
        if checkpoint in wanted:
            needed |= {variable: np.ones(len(part), bool) for variable in variables[checkpoint]}
        for _, step in groupby(sorted(handles, key=lambda h: -h.sqn), key=lambda h: h.sqn):
            places = [(h, needed.get(h.variable, _NOTHING)[_inside(h, part)]) for h in step]
            read = [(h, of) for h, of in places if of.any()]
            found |= {(checkpoint, handle): np.flatnonzero(of) for handle, of in read}
            for _, of in filter(lambda each: replaces(each[0]), read):
                of[:] = False
    return found, needed
