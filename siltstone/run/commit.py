"""Store a manifest; make the catalog's record of a checkpoint, and what the run reports of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from siltstone.catalog.commit_details import CommitDetails
from siltstone.catalog.commits import CheckpointCommit
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import uploader_of
from siltstone.errors import StateError
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.model import Form, StoredObject
from siltstone.store.open import Warehouse
from siltstone.store.paths import is_base


@dataclass(frozen=True)
class Completed:
    """A checkpoint that has just completed.

    Attributes:
        steps: how many steps it took, those without rows, too.
        rows_in: rows of the source; `operator_rows` are those of each operator.
        seconds: since its last step was processed.
    """

    id: int
    digest: str
    forms: Mapping[str, Form]
    d: Mapping[str, int]
    rows_in: int
    dead_letters: Mapping[str, int]
    state_rows: int
    bytes: int
    seconds: float
    event_time_max: datetime | None
    reasons: Mapping[str, str]
    uploads: UploadStatistics
    steps: int = 1
    operator_rows: Mapping[str, int] = field(default_factory=dict)


def commit_of(manifest: Manifest, stored: StoredObject, details: CommitDetails) -> CheckpointCommit:
    """Make the record of a checkpoint for the catalog: `stored` is its manifest, `details` what this carries."""
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
        steps=details.steps,
        edit=details.edit,
        parallelism=details.parallelism,
        definition=details.definition,
        dropped=details.dropped,
        outputs=details.outputs,
        repeats=details.repeats,
    )


def completed_of(
    commit: CheckpointCommit, uploads: UploadStatistics, seconds: float, reasons: Mapping[str, str]
) -> Completed:
    """Describe a checkpoint whose commit succeeded; the arguments are fields of `Completed`."""
    return Completed(
        id=commit.id,
        digest=commit.digest,
        forms=commit.forms,
        d=commit.d,
        rows_in=commit.statistics["rows_in"],
        dead_letters=commit.statistics["dead_letters"],
        state_rows=commit.rows,
        bytes=commit.bytes,
        seconds=seconds,
        event_time_max=commit.event_time_max,
        reasons=reasons,
        uploads=uploads,
        steps=len(commit.steps),
        operator_rows={name: of["rows_in"] for name, of in commit.statistics["operators"].items()},
    )


def store_manifest(
    warehouse: Warehouse, options: UploadOptions, name: str, manifest: Manifest, uploads: UploadStatistics
) -> tuple[StoredObject, UploadStatistics]:
    """Store a checkpoint's manifest; return it, and the uploads with its own, which it cannot hold itself.

    Raises:
        StateError: its parts name different variables, so that it could be proven and not restored.
        Unreachable: the store failed until the upload was given up; nothing refers to what was stored.
    """
    if mismatch := manifest.find_mismatch():
        raise StateError(
            f"checkpoint {manifest.checkpoint} of {manifest.stream} is not committed: {mismatch}; this is an error in "
            "Siltstone, please report it"
        )
    uploader = uploader_of(warehouse.store_url, options)
    stored = uploader.put(name, encode_manifest(manifest))
    return stored, uploads.merge(uploader.metrics.take())
