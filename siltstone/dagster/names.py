"""Name a stream's groups, jobs and pools, and the tags by which its assets and runs are found.

`siltstone.pipes.parts` names the assets. What a code location has once for all streams begins with `siltstone__`.
"""

import functools
import hashlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import dagster as dg

from siltstone.pipes.parts import OF_OPERATORS, asset_name

LOCATION = "siltstone"
STREAM_TAG, OPERATION_TAG, PART_TAG = "siltstone/stream", "siltstone/operation", "siltstone/part"
"""tags: of runs and assets the stream, of runs what they do, of assets what they are"""
ASSET = "siltstone/asset"
"""metadata of an asset: the name that Siltstone gives it, `STREAM/ASSET`"""
TAG_LENGTH = 63
"""longest value of an asset's tag in Dagster"""


def asset_key(stream: str, *asset: str) -> dg.AssetKey:
    """Make the key that an asset has unless it is given another (`parts.asset_name`)."""
    return dg.AssetKey.from_user_string(asset_name(stream, *asset))


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


def mark(spec: dg.AssetSpec) -> dg.AssetSpec:
    """Add what an asset is found and selected by (`tag:siltstone/part=checkpoints`), whatever key it is given."""
    tags = {STREAM_TAG: _tag_value(spec.key.path[0]), PART_TAG: asset_of(spec.key)[1]}
    return spec.merge_attributes(tags=tags, metadata={ASSET: spec.key.to_user_string()})


class Keys(dict[dg.AssetKey, dg.AssetKey]):
    """The name that Siltstone gives each asset (`asset_key`) -> its key here; the name itself, if it is not known."""

    @classmethod
    def of(cls, assets: Iterable["Marked"]) -> Self:
        """Find the keys of some assets; those of others are left out."""
        ours = ((str(asset.metadata[ASSET]), asset.key) for asset in assets if ASSET in asset.metadata)
        return cls((dg.AssetKey.from_user_string(name), key) for name, key in ours)

    def __missing__(self, name: dg.AssetKey) -> dg.AssetKey:
        return name


class Marked(Protocol):
    """An asset's spec, or its node in a graph."""

    @property
    def key(self) -> dg.AssetKey:
        """Its key."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What `mark` added, and more."""
        ...


def select_part(*parts: str, stream: str | None = None) -> dg.AssetSelection:
    """Select the assets that are one of these parts of any stream, or of one."""
    first, *more = (dg.AssetSelection.tag(PART_TAG, part) for part in parts)
    of_all = functools.reduce(operator.or_, more, first)
    return of_all & dg.AssetSelection.tag(STREAM_TAG, _tag_value(stream)) if stream else of_all


def _tag_value(stream: str) -> str:
    """Return a stream's name as the value of a tag, which is shorter than a name may be."""
    if len(stream) <= TAG_LENGTH:
        return stream
    return f"{stream[: TAG_LENGTH - 9]}-{hashlib.sha256(stream.encode()).hexdigest()[:8]}"


def run_tags(stream: str, operation: str) -> dict[str, str]:
    """Make the tags that identify runs of one operation on one stream."""
    return {STREAM_TAG: stream, OPERATION_TAG: operation}


@dataclass(frozen=True)
class OpOptions:
    """What a deployment gives the steps that make a stream's assets.

    Attributes:
        tags: further tags of the steps, such as `dagster-k8s/config`.
        pool: the pool of all of them; None for one of each operation.
        backfill_policy: of restored state; None to restore a range of partitions in one run.
    """

    tags: Mapping[str, str] = field(default_factory=dict)
    pool: str | None = None
    backfill_policy: dg.BackfillPolicy | None = None

    def tags_of(self, stream: str, operation: str) -> dict[str, str]:
        """Return the tags of the step that does an operation on a stream."""
        return {**self.tags, **run_tags(stream, operation)}

    def pool_of(self, stream: str, operation: str) -> str:
        """Return its pool: one of its own, in which it waits for no other operation, unless all have one."""
        return self.pool or dagster_name(stream, operation)


NO_OPTIONS = OpOptions()


def is_shared(name: str) -> bool:
    """Whether a name is one of those that a code location has once, so that no stream may be called so."""
    return name == LOCATION or name.startswith(location_name(""))


def store_kinds(warehouse: str) -> set[str]:
    """Return the kind of store in a warehouse's URL, such as `s3`; empty for files."""
    return {urlsplit(warehouse).scheme} & {"s3", "redis", "cassandra", "rocksdb"}
