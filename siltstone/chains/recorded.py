"""What a manifest says of the chains of its tables, also one from before each table had a chain of its own."""

from collections.abc import Mapping
from typing import Any

from siltstone.format.manifest import Manifest
from siltstone.restore.restore import schemas_of

_LEARNED = ("d", "log_ratio", "base_factor", "delta_factor", "restores")
"""the fields of an operator's policy state, from before there was one per table, that hold for each of its tables"""


def chains_of(manifest: Manifest, operator: str) -> Mapping[str, Mapping[str, Any]]:
    """Return table -> where its chain begins and the state of its policy, of one operator (`Manifest.chains`).

    An older manifest has one state for all tables of an operator. Its only table goes on with it. Several tables go on
    with what was learned of restores and logging, and begin with bases, since nothing tells their shares of the sizes.
    """
    if operator in manifest.chains or operator not in manifest.operators or operator not in manifest.policy:
        return manifest.chains.get(operator, {})
    state, tables = manifest.policy[operator], sorted(schemas_of(manifest, operator))
    if len(tables) > 1:
        state = {key: state[key] for key in _LEARNED if key in state}
    return {table: {**state, "first": manifest.first.get(operator, manifest.checkpoint)} for table in tables}
