"""How a stream's assets are called and grouped.

<stream>/events                     what its source has
<stream>/<operator>/base_checkpoint  <stream>/<operator>/delta_chain     the operator's part of checkpoints
<stream>/<operator>/sink            what its sink shows
<stream>/checkpoints                all operators at one point: what is proven, materialized, restored
<stream>/materialization  <stream>/full_snapshot  <stream>/restored_state
"""

import dagster as dg

EVENTS = "events"
BASE_CHECKPOINT = "base_checkpoint"
DELTA_CHAIN = "delta_chain"
SINK = "sink"
CHECKPOINTS = "checkpoints"
MATERIALIZATION = "materialization"
FULL_SNAPSHOT = "full_snapshot"
RESTORED_STATE = "restored_state"


def asset_key(stream: str, *asset: str) -> dg.AssetKey:
    """`<stream>/<asset>`, or `<stream>/<operator>/<asset>`."""
    return dg.AssetKey([stream, *asset])


def dagster_name(stream: str, *what: str) -> str:
    """A stream's name where Dagster allows no dash, and what is done to it: for groups, jobs, pools, schedules."""
    return "__".join((stream, *what)).replace("-", "_")


def pool(stream: str, operation: str) -> str:
    """The concurrency pool of one operation on one stream: one at a time."""
    return dagster_name(stream, operation)
