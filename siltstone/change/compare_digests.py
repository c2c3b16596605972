"""Compare digests of state: what a change of parallelism keeps, and what a replay makes again.

What operators prepared lies at the first key groups of the subtasks that prepared it, so it is compared per operator:
the same parts, wherever they are. A change of parallelism keeps all of them.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from siltstone.errors import ProofFailed
from siltstone.state.digest import opaque_digest
from siltstone.state_handler import PREPARED

Digests = Mapping[str, Mapping[str, np.ndarray]]
"""operator -> table or opaque variable -> uint64[max_parallelism]"""


def list_differing(recorded: Digests, found: Digests) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each variable that differs, with its operator, and the key groups whose digests differ.

    A variable that one side lacks is empty there, and has digest 0.
    """
    names = {(operator, name) for digests in (recorded, found) for operator in digests for name in digests[operator]}
    for operator, name in sorted(names):
        one, other = (np.atleast_1d(digests.get(operator, {}).get(name, np.uint64(0))) for digests in (recorded, found))
        if name != PREPARED or not np.array_equal(_parts(one), _parts(other)):
            groups = np.flatnonzero(one != other)
            if len(groups):
                yield f"{operator}.{name}", groups


def _parts(digests: np.ndarray) -> np.ndarray:
    """Return the digests of what was prepared, without key groups that have nothing or no longer anything."""
    return np.sort(digests[(digests != 0) & (digests != np.uint64(opaque_digest(b"")))])


def check_same_digests(recorded: Digests, found: Digests) -> None:
    """Compare digests before and after a change of parallelism; tables that are new must be empty.

    Raises:
        ProofFailed: they differ; the message names the first operator, variable and key group.
    """
    for name, groups in list_differing(recorded, found):
        raise ProofFailed(
            f"{name}: the digests of {len(groups)} key groups, the first of them {groups[0]}, "
            "differ from the recorded ones: nothing was changed",
            advice="verify the newest checkpoint (siltstone verify)",
        )
