"""Store a manifest; make the catalog's record of a checkpoint, and what the run reports of it."""

from collections.abc import Mapping
from dataclasses import dataclass
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
        commit: what the catalog has of it.
        uploads: what was uploaded for it.
        seconds: since its last step was processed.
        reasons: operator -> why its tables have their forms.
    """

    commit: CheckpointCommit
    uploads: UploadStatistics
    seconds: float
    reasons: Mapping[str, str]

    @property
    def id(self) -> int:
        """Its id."""
        return self.commit.id

    @property
    def digest(self) -> str:
        """The digest of the state: 32 hex digits."""
        return self.commit.digest

    @property
    def forms(self) -> Mapping[str, Form]:
        """Operator -> the form of its part."""
        return self.commit.forms

    @property
    def d(self) -> Mapping[str, int]:
        """Operator -> the D in force."""
        return self.commit.d

    @property
    def bytes(self) -> int:
        """Bytes that it wrote."""
        return self.commit.bytes

    @property
    def event_time_max(self) -> datetime | None:
        """The highest event time so far, in UTC; None if there was none."""
        return self.commit.event_time_max

    @property
    def state_rows(self) -> int:
        """Live rows of the whole state."""
        return self.commit.rows

    @property
    def rows_in(self) -> int:
        """Rows of the source."""
        return self.commit.statistics["rows_in"]

    @property
    def operator_rows(self) -> Mapping[str, int]:
        """Operator -> the rows that it got."""
        return {name: of["rows_in"] for name, of in self.commit.statistics["operators"].items()}

    @property
    def dead_letters(self) -> Mapping[str, int]:
        """Operator -> the rows that it refused, if any."""
        return self.commit.statistics["dead_letters"]

    @property
    def steps(self) -> int:
        """How many steps it took, those without rows, too."""
        return len(self.commit.details.steps)


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
        details=details,
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
