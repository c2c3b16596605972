"""How a stream's assets are called and grouped.

<stream>/events                     what its source has
<stream>/<operator>_base_checkpoint  <stream>/<operator>_delta_chain     the operator's part of checkpoints
<stream>/<operator>_sink            what its sink shows
<stream>/checkpoints                all operators at one point: what is proven, materialized, restored
<stream>/materialization  <stream>/full_snapshot  <stream>/restored_state

The last part names the operator, for it is all that the page's graph shows of a key.
"""

from urllib.parse import urlsplit

import dagster as dg

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
"""those that are in the warehouse's store; sinks and restored state are files"""


def asset_key(stream: str, *asset: str) -> dg.AssetKey:
    """`<stream>/<asset>`, or `<stream>/<operator>_<asset>`."""
    return dg.AssetKey([stream, "_".join(asset)])


def asset_of(key: dg.AssetKey) -> tuple[str | None, str]:
    """(operator, asset) that a key names; None where it is of the whole stream."""
    name = key.path[-1]
    asset = next((asset for asset in OF_OPERATORS if name.endswith(f"_{asset}")), None)
    return (name.removesuffix(f"_{asset}"), asset) if asset else (None, name)


def dagster_name(stream: str, *what: str) -> str:
    """A stream's name where Dagster allows no dash, and what is done to it: for groups, jobs, pools, schedules."""
    return "__".join((stream, *what)).replace("-", "_")


def store_kinds(warehouse: str) -> set[str]:
    """What kind of store a warehouse's URL names, such as `s3`; none for files."""
    return {urlsplit(warehouse).scheme} & {"s3", "redis", "rocksdb"}


def pool(stream: str, operation: str) -> str:
    """The concurrency pool of one operation on one stream: one at a time."""
    return dagster_name(stream, operation)
