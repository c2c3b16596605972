"""Make the catalog's record of a checkpoint that has been written."""

from collections.abc import Sequence

from siltstone.catalog.commits import CheckpointCommit
from siltstone.catalog.steps import Step
from siltstone.format.manifest import Manifest
from siltstone.model import StoredObject
from siltstone.store.paths import is_base


def commit_of(manifest: Manifest, stored: StoredObject, steps: Sequence[Step]) -> CheckpointCommit:
    """Make the record of a checkpoint for the catalog."""
    return CheckpointCommit(
        id=manifest.checkpoint,
        manifest=stored,
        digest=manifest.digest,
        rows=manifest.statistics["state_rows"],
        bytes=stored.bytes + sum(o.bytes for o in manifest.objects),
        forms=manifest.forms,
        d=manifest.d,
        statistics=manifest.statistics,
        event_time_max=manifest.event_time_max,
        segments=[o for o in manifest.objects if not is_base(o.name)],
        bases=[o for o in manifest.objects if is_base(o.name)],
        steps=steps,
    )
