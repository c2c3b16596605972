"""Name the assets of a stream.

<stream>/events                     the input of its source
<stream>/<operator>_base_checkpoint  <stream>/<operator>_delta_chain     the operator's part of checkpoints
<stream>/<operator>_sink            the output of the operator's sink
<stream>/checkpoints                all operators at one point, which is proven, materialized and restored
<stream>/materialization  <stream>/full_snapshot  <stream>/restored_state

The last part has the operator's name, because the page's graph shows only that part of a key.
"""

EVENTS = "events"
BASE_CHECKPOINT = "base_checkpoint"
DELTA_CHAIN = "delta_chain"
SINK = "sink"
CHECKPOINTS = "checkpoints"
MATERIALIZATION = "materialization"
FULL_SNAPSHOT = "full_snapshot"
RESTORED_STATE = "restored_state"
OF_OPERATORS = (BASE_CHECKPOINT, DELTA_CHAIN, SINK)
STORED = (BASE_CHECKPOINT, DELTA_CHAIN, CHECKPOINTS, MATERIALIZATION, FULL_SNAPSHOT)
"""assets in the warehouse's store; sinks and restored state are files"""
BY_DAGSTER = "Dagster run "
"""prefix of the owner that the catalog records for a run of Dagster"""


def asset_name(stream: str, *asset: str) -> str:
    """Make the name `<stream>/<asset>` or `<stream>/<operator>_<asset>`."""
    return f"{stream}/{'_'.join(asset)}"


def is_dagster_run(who: str) -> bool:
    """Whether the owner of a writer epoch is a run of Dagster, which reports its checkpoints itself."""
    return who.startswith(BY_DAGSTER)
