"""Name a stream's assets, groups, jobs and pools.

<stream>/events                     the input of its source
<stream>/<operator>_base_checkpoint  <stream>/<operator>_delta_chain     the operator's part of checkpoints
<stream>/<operator>_sink            the output of the operator's sink
<stream>/checkpoints                all operators at one point, which is proven, materialized and restored
<stream>/materialization  <stream>/full_snapshot  <stream>/restored_state

The last part has the operator's name, because the page's graph shows only that part of a key.
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
"""assets in the warehouse's store; sinks and restored state are files"""


def asset_key(stream: str, *asset: str) -> dg.AssetKey:
    """Make the key `<stream>/<asset>` or `<stream>/<operator>_<asset>`."""
    return dg.AssetKey([stream, "_".join(asset)])


def asset_of(key: dg.AssetKey) -> tuple[str | None, str]:
    """Split a key into operator and asset; the operator is None for an asset of the whole stream."""
    name = key.path[-1]
    asset = next((asset for asset in OF_OPERATORS if name.endswith(f"_{asset}")), None)
    return (name.removesuffix(f"_{asset}"), asset) if asset else (None, name)


def dagster_name(stream: str, *what: str) -> str:
    """Make the name of a group, job, pool or schedule of a stream; Dagster allows no dashes in it."""
    return "__".join((stream, *what)).replace("-", "_")


def store_kinds(warehouse: str) -> set[str]:
    """Return the kind of store in a warehouse's URL, such as `s3`; empty for files."""
    return {urlsplit(warehouse).scheme} & {"s3", "redis", "cassandra", "rocksdb"}


def pool(stream: str, operation: str) -> str:
    """Name the concurrency pool of one operation on one stream; it allows one run at a time."""
    return dagster_name(stream, operation)
