"""Prove that a change of parallelism did not change state."""

from collections.abc import Mapping

import numpy as np

from siltstone.errors import ProofFailed

Digests = Mapping[str, Mapping[str, np.ndarray]]
"""operator -> table or opaque variable -> uint64[max_parallelism]"""


def check_same_digests(recorded: Digests, found: Digests) -> None:
    """Compare digests before and after, per operator, variable and key group; tables that are new must be empty.

    Raises:
        ProofFailed: they differ; the message names the first operator, variable and key group.
    """
    names = {(operator, name) for digests in (recorded, found) for operator in digests for name in digests[operator]}
    for operator, name in sorted(names):
        # If the definition has new tables, they are still empty, and their digest is 0.
        here, before = (digests.get(operator, {}).get(name, np.uint64(0)) for digests in (found, recorded))
        differing = np.flatnonzero(here != before)
        if len(differing):
            raise ProofFailed(
                f"{operator}.{name}: the digests of {len(differing)} key groups, the first of them {differing[0]}, "
                "differ from the recorded ones: nothing was changed; verify the newest checkpoint (siltstone verify)"
            )
