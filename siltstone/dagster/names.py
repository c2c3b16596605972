"""Name a stream's assets, groups, jobs and pools, and the tags by which its assets and runs are found.

<stream>/events                     the input of its source
<stream>/<operator>_base_checkpoint  <stream>/<operator>_delta_chain     the operator's part of checkpoints
<stream>/<operator>_sink            the output of the operator's sink
<stream>/checkpoints                all operators at one point, which is proven, materialized and restored
<stream>/materialization  <stream>/full_snapshot  <stream>/restored_state

The last part has the operator's name, because the page's graph shows only that part of a key.

What a code location has once for all streams begins with `siltstone__`.
"""

import functools
import operator
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
LOCATION = "siltstone"
STREAM_TAG, OPERATION_TAG, PART_TAG = "siltstone/stream", "siltstone/operation", "siltstone/part"
"""tags: of runs and assets the stream, of runs what they do, of assets what they are"""
TAG_LENGTH = 63
"""longest value of an asset's tag in Dagster"""
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


def location_name(*what: str) -> str:
    """Make the name of a job, schedule, sensor or pool that a code location has once."""
    return dagster_name(LOCATION, *what)


def part_tags(key: dg.AssetKey) -> dict[str, str]:
    """Make the tags of an asset, by which it is found and can be selected (`tag:siltstone/part=checkpoints`)."""
    return {STREAM_TAG: key.path[0][:TAG_LENGTH], PART_TAG: asset_of(key)[1]}


def select_part(*parts: str) -> dg.AssetSelection:
    """Select the assets that are one of these parts of any stream."""
    first, *more = (dg.AssetSelection.tag(PART_TAG, part) for part in parts)
    return functools.reduce(operator.or_, more, first)


def run_tags(stream: str, operation: str) -> dict[str, str]:
    """Make the tags that identify runs of one operation on one stream."""
    return {STREAM_TAG: stream, OPERATION_TAG: operation}


def store_kinds(warehouse: str) -> set[str]:
    """Return the kind of store in a warehouse's URL, such as `s3`; empty for files."""
    return {urlsplit(warehouse).scheme} & {"s3", "redis", "cassandra", "rocksdb"}


def pool(stream: str, operation: str) -> str:
    """Name the concurrency pool of one operation on one stream; it allows one run at a time."""
    return dagster_name(stream, operation)
