"""Proof that a change of parallelism changed nothing else."""

from collections.abc import Mapping

import numpy as np

from siltstone.errors import ProofFailed

Digests = Mapping[str, Mapping[str, np.ndarray]]
"""operator -> table or opaque variable -> uint64[max_parallelism]"""


def check_same_digests(recorded: Digests, found: Digests) -> None:
    """Compare the state before and after, per operator, variable and key group; what is new since must be empty.

    Raises:
        ProofFailed: they differ; names the first operator, variable and key group.
    """
    names = {(operator, name) for digests in (recorded, found) for operator in digests for name in digests[operator]}
    for operator, name in sorted(names):
        # Of a definition that grew, the new tables are empty so far, which is digest 0.
        here, before = (digests.get(operator, {}).get(name, np.uint64(0)) for digests in (found, recorded))
        differing = np.flatnonzero(here != before)
        if len(differing):
            raise ProofFailed(
                f"{operator}.{name} has another digest than was recorded in {len(differing)} key groups from "
                f"{differing[0]} on: nothing was changed; verify the newest checkpoint (siltstone verify)"
            )
