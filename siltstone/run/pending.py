"""A pending checkpoint: its steps are logged, and the stream goes on while its bytes are on their way to the store.

The region prepares it between two steps, from the interval that its tasks have filled (Teracloud Streams: a
non-blocking checkpoint of a consistent region). Nothing in it changes after that, so a thread of its own can `upload`
it, the outputs and the small segments; another can `store` it to the end, with the manifest, once the one before it is
complete. The commit makes it complete, between two steps again. All that a run holds of a checkpoint until then is
here, and goes with it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from siltstone.catalog.records.commit_details import CommitDetails, PreviousCheckpoint, encode_details
from siltstone.catalog.records.commits import CheckpointCommit, Committed
from siltstone.catalog.records.outbox import Output
from siltstone.catalog.records.steps import Step
from siltstone.changelog.log import LoggedInterval
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import uploader_of
from siltstone.errors import StateError
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.model import Form, StoredObject
from siltstone.operator import Operator
from siltstone.run import callbacks
from siltstone.run.chains import NextChains
from siltstone.run.coordinator import CheckpointTimes
from siltstone.run.outbox import CheckpointOutputs, Outbox
from siltstone.run.references import RunReferences
from siltstone.run.step_reports import StepReports
from siltstone.store.open import Warehouse
from siltstone.store.paths import StepPath, is_base
from siltstone.stream import Stream


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
    def late(self) -> Mapping[str, int]:
        """Operator -> its late rows, if any."""
        return self.commit.statistics.get("late", {})

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
            f"checkpoint {manifest.checkpoint} of {manifest.stream} is not committed: {mismatch}",
            advice="this is an error in Siltstone, please report it",
        )
    uploader = uploader_of(warehouse.store_url, options)
    stored = uploader.put(name, encode_manifest(manifest))
    return stored, uploads.merge(uploader.metrics.take())


@dataclass
class CheckpointInterval:
    """What a run gathers, step by step, until it prepares a checkpoint of it.

    Attributes:
        checkpoint: the id of that checkpoint.
        begins_after: the last step of the checkpoint before it.
        log: its steps' changes.
        outputs: what its tasks staged.
        steps: its steps, the running one included.
        gathered: its subtasks' acknowledgements.
        tracked: operator -> the variables that its first step tracks.
    """

    checkpoint: int
    begins_after: int
    log: LoggedInterval
    outputs: CheckpointOutputs
    steps: list[Step] = field(default_factory=list)
    gathered: StepReports = field(default_factory=StepReports)
    tracked: dict[str, frozenset[str]] = field(default_factory=dict)

    def track(
        self, operator: Operator, wanted: frozenset[str], *, ends: bool, logs: bool
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Decide what an operator tracks in the next step.

        Args:
            wanted: the variables to track, by the decisions on the checkpoint.
            ends: whether the step ends in it.
            logs: whether steps are logged.

        Returns:
            The variables that it tracks; and those of which the checkpoint can have no delta.
        """
        unlogged, begun = self.log.list_unlogged(operator.name), self.tracked.setdefault(operator.name, wanted)
        if logs:
            # It may be decided anew meanwhile. Without the rest, what the steps before have logged would be of no use.
            return wanted if ends else wanted | begun, unlogged
        # The tables know what changed since the checkpoint before; opaque variables know the open step alone.
        opaque = frozenset(operator.opaque_variables())
        return begun, frozenset((*operator.tables(), *opaque)) - begun | unlogged & opaque


@dataclass
class PendingCheckpoint:
    """A checkpoint that is prepared, and not complete.

    Attributes:
        path: names what is stored for it, with its id and last step.
        details: what it adds to the catalog, as far as it is known before it is stored.
        interval: its steps, which are all taken.
        chains: the chains once it is complete.
        commit: its record for the catalog, once it is stored.
        committed: the catalog's answer.
    """

    path: StepPath
    details: CommitDetails
    interval: CheckpointInterval
    chains: NextChains
    event_time_max: datetime | None
    commit: CheckpointCommit | None = None
    committed: Committed | None = None
    uploads: UploadStatistics = field(default_factory=UploadStatistics)
    _outputs: Sequence[Output] | None = None
    """what is staged, once it is uploaded"""
    _began_s: float = field(default_factory=time.perf_counter)

    @property
    def id(self) -> int:
        """Its id."""
        return self.path.checkpoint

    def call_operators(self, stream: Stream, upload: UploadOptions, *, blocking: bool) -> None:
        """Call `checkpoint` of the operators that are blocking, or of the others (see `callbacks.checkpoint`)."""
        callbacks.checkpoint(stream.operators, self.id, self.interval.gathered.last, upload, blocking=blocking)

    def upload(self, outbox: Outbox) -> None:
        """Store everything that the manifest refers to, while other checkpoints may be uploaded.

        Raises:
            Unreachable: the store failed.
            CorruptObject: a segment was damaged on its way.
        """
        outputs = outbox.stage(self.interval.outputs)
        self.uploads = self.interval.log.persist()
        self._outputs = outputs

    def store(
        self,
        stream: Stream,
        warehouse: Warehouse,
        upload: UploadOptions,
        outbox: Outbox,
        references: RunReferences,
        previous: PreviousCheckpoint | None,
        times: CheckpointTimes,
    ) -> None:
        """Have its operators do what they do, and store the manifest; it is uploaded.

        Args:
            previous: the checkpoint before it, which is complete.
            times: what was noted since the manifest before; this one carries it.

        Raises:
            Exception: an operator's `checkpoint` failed.
            Unreachable: the store failed, or the catalog did where objects of earlier checkpoints were looked up.
        """
        outputs, repeats, gathered = self._outputs, outbox.repeats(self.id), self.interval.gathered
        assert outputs is not None, "it is uploaded"
        self.call_operators(stream, upload, blocking=False)  # one checkpoint after the other
        gathered.last = self.interval.log.merge(gathered.last)
        uploads = self.uploads.merge(gathered.uploads())
        details = replace(
            self.details, outputs=outputs, repeats=repeats, previous=previous, outstanding=outbox.outstanding
        )
        rows = None if repeats else {output.name: output.rows for output in outputs}
        manifest = replace(self._manifest(stream, uploads, times, rows), commit=encode_details(details))
        stored, self.uploads = store_manifest(warehouse, upload, self.path.manifest(), manifest, uploads)
        oldest_needed, replaced = references.advance(manifest, stored.name)
        record = commit_of(manifest, stored, details)
        self.commit = replace(record, oldest_needed=oldest_needed, replaced=replaced)

    def describe(self) -> Completed:
        """Describe the checkpoint once it is complete."""
        assert self.commit is not None, "it was stored before"
        seconds = time.perf_counter() - self._began_s
        return Completed(self.commit, self.uploads, seconds, self.chains.reasons)

    def _manifest(
        self, stream: Stream, uploads: UploadStatistics, times: CheckpointTimes, outputs: Mapping[str, int] | None
    ) -> Manifest:
        gathered, chains = self.interval.gathered, self.chains
        received = gathered.last
        return Manifest(
            stream=stream.name,
            checkpoint=self.id,
            epoch=self.path.epoch,
            step=self.path.step,
            max_parallelism=stream.max_parallelism,
            operators=stream.definition()["operators"],
            handles=[h for a in received.values() for ack in a for h in ack.handles],
            objects=list({o.name: o for a in received.values() for ack in a for o in ack.objects}.values()),
            digests=gathered.digests(stream.max_parallelism),
            forms=chains.forms,
            d=chains.d,
            chains=chains.chains,
            event_time_max=self.event_time_max,
            statistics={
                **gathered.statistics(stream, uploads, chains.statistics, chains.bounds),
                "times": times.take(),
                "outputs": outputs,
            },
            versions=chains.versions,
        )
