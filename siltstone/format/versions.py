"""Where the newest version of each variable is: what a change of it builds on (field iii of US 9471438's index).

A variable that did not change in an interval writes nothing. So a manifest says, for each variable and key group, which
checkpoint wrote it last; the next change names that checkpoint, and a chain has no gap that goes unnoticed.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from siltstone.model import Handle, Kind

Versions = Mapping[str, Mapping[str, Sequence[tuple[int, int]]]]
"""operator -> table or opaque variable -> runs of key groups: (the first, the checkpoint that wrote them last)"""


def next_versions(
    before: Versions, handles: Iterable[Handle], checkpoint: int, variables: Mapping[str, Iterable[str]], groups: int
) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Return the versions after a checkpoint.

    Args:
        before: those before it.
        handles: what it writes.
        variables: operator -> its variables; of others nothing is kept.
        groups: total number of key groups.
    """
    written: dict[tuple[str, str], np.ndarray] = {}
    for handle in handles:
        if handle.kind is not Kind.INDEX:
            name = handle.operator, handle.variable
            newest = written.get(name)
            if newest is None:
                newest = written[name] = expand_runs(before.get(name[0], {}).get(name[1], ()), groups)
            newest[handle.key_groups.start : handle.key_groups.end] = checkpoint
    return {
        operator: {
            name: _runs(written[operator, name])
            if (operator, name) in written
            else list(before.get(operator, {}).get(name, ()))
            for name in names
        }
        for operator, names in variables.items()
    }


def expand_runs(runs: Sequence[tuple[int, int]], groups: int) -> np.ndarray:
    """Return per key group the checkpoint of its newest version (int64[groups]); 0 if it has none."""
    out = np.zeros(groups, np.int64)
    for first, checkpoint in runs:
        out[first:] = checkpoint
    return out


def _runs(newest: np.ndarray) -> list[tuple[int, int]]:
    firsts = np.flatnonzero(np.diff(newest, prepend=-1))
    return list(zip(firsts.tolist(), newest[firsts].tolist(), strict=True))
