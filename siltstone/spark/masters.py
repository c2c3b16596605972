"""What a Spark master URL says about where tasks run."""

import re

_LOCAL = re.compile(r"local(\[.*\])?")


def is_local(master: str | None) -> bool:
    """Whether all tasks of a master run in this process: `local` or `local[N]`, but not `local-cluster[...]`."""
    return master is not None and _LOCAL.fullmatch(master) is not None
