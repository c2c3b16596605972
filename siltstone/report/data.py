"""The data of a report: pure values gathered from the catalog's checkpoint records."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.repository import Catalog
from siltstone.chains.chain_rules import amplification
from siltstone.chains.costs import first_of, recorded_chains, recorded_states
from siltstone.chains.due import OperatorHealth, materialization_health
from siltstone.chains.materialization_rules import MaterializationOptions
from siltstone.chains.policy_rules import PolicyOptions
from siltstone.errors import UnknownCheckpoint
from siltstone.model import Form
from siltstone.report.chain_sizes import ChainSize, ChainSizes
from siltstone.report.timeline import Timeline, timeline_of

TIMED = 100
"""checkpoints whose times a report has: the newest"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPart:
    """One operator's part of one checkpoint.

    Attributes:
        form: base or delta.
        bytes: bytes written.
        d: D, the number of deltas that the policy then wanted in a chain.
        rows: live rows of its state.
        seconds: phase -> seconds of the slowest subtask.
        chain_base_bytes: bytes that a restore reads of bases: those that the chains of its variables begin with.
        chain_delta_bytes: bytes that a restore reads of the deltas after these bases.
        chain_deltas: the number of deltas of the longest chain.
        bound_bytes: the most that a restore was predicted to read before the next base; None if not recorded.
        bound_s: the same in seconds.
        amplification: bytes of its chain at that time per byte of live state; None if there was none.
    """

    form: Form
    bytes: int
    d: int
    rows: int
    seconds: Mapping[str, float]
    chain_base_bytes: int
    chain_delta_bytes: int
    chain_deltas: int
    bound_bytes: float | None
    bound_s: float | None
    amplification: float | None = None

    @property
    def chain_bytes(self) -> int:
        """Bytes that a restore reads: the base and the deltas since."""
        return self.chain_base_bytes + self.chain_delta_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        return {
            "form": self.form.value,
            "bytes": self.bytes,
            "D": self.d,
            "rows": self.rows,
            "seconds": dict(self.seconds),
            "chain_bytes": self.chain_bytes,
            "chain_deltas": self.chain_deltas,
            "restore_bound_bytes": self.bound_bytes,
            "restore_bound_seconds": self.bound_s,
            "amplification": self.amplification,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPoint:
    """One checkpoint of the report.

    Attributes:
        other_bytes: bytes written outside all operators: its manifest.
        materialized_bytes: bytes of materializations at this checkpoint, with which its chains begin.
        chain_other_bytes: bytes of the manifests that a restore reads, from the oldest base it needs on.
    """

    record: CheckpointRecord
    operators: Mapping[str, OperatorPart]
    other_bytes: int
    materialized_bytes: int
    chain_other_bytes: int

    @property
    def chain_bytes(self) -> int:
        """Bytes that a restore of this checkpoint reads."""
        return sum(part.chain_bytes for part in self.operators.values()) + self.chain_other_bytes

    @property
    def chain_base_bytes(self) -> int:
        """Bytes of bases that a restore of this checkpoint reads."""
        return sum(part.chain_base_bytes for part in self.operators.values())

    @property
    def bound_bytes(self) -> float | None:
        """The bounds of all operators together, in bytes; None unless each has one."""
        return _total(part.bound_bytes for part in self.operators.values())

    @property
    def bound_s(self) -> float | None:
        """The bounds of all operators together, one restored after the other; None unless each has one."""
        return _total(part.bound_s for part in self.operators.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as JSON values."""
        return {
            "id": self.record.id,
            "epoch": self.record.epoch,
            "committed_at": self.record.committed_at.isoformat(timespec="seconds"),
            "event_time_max": self.record.event_time_max.isoformat() if self.record.event_time_max else None,
            "bytes": self.record.bytes,
            "rows": self.record.rows,
            "proven": self.record.proven,
            "materialized_bytes": self.materialized_bytes,
            "chain_bytes": self.chain_bytes,
            "restore_bound_bytes": self.bound_bytes,
            "restore_bound_seconds": self.bound_s,
            "restore_seconds": self.record.restore_s,
            "restore_bytes": self.record.restore_bytes,
            "operators": {name: part.to_dict() for name, part in self.operators.items()},
        }


@dataclass(frozen=True, slots=True)
class ReportData:
    """A stream's retained checkpoints, oldest first, at least one.

    `materialization` is operator -> health; `timeline` tells when the newest `TIMED` checkpoints were made.
    """

    stream: str
    checkpoints: tuple[CheckpointPoint, ...]
    materialization: Mapping[str, OperatorHealth] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def newest(self) -> CheckpointPoint:
        """The newest checkpoint."""
        return self.checkpoints[-1]

    @property
    def operators(self) -> tuple[str, ...]:
        """Every operator of any checkpoint, in the order in which they first appear."""
        return tuple(dict.fromkeys(name for point in self.checkpoints for name in point.operators))

    @property
    def stored_bytes(self) -> int:
        """Bytes of checkpoints and materializations in the store, without full snapshots, which are made on request."""
        return sum(point.record.bytes + point.materialized_bytes for point in self.checkpoints)

    @property
    def amplification(self) -> float | None:
        """Bytes stored per byte of the newest base; None while the state is empty."""
        base = self.newest.chain_base_bytes
        return self.stored_bytes / base if base else None

    @property
    def restore_amplification(self) -> float | None:
        """Bytes that a restore of the newest checkpoint reads, per byte of its base; None as above."""
        base = self.newest.chain_base_bytes
        return self.newest.chain_bytes / base if base else None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "stream": self.stream,
            "stored_bytes": self.stored_bytes,
            "base_bytes": self.newest.chain_base_bytes,
            "chain_bytes": self.newest.chain_bytes,
            "amplification": self.amplification,
            "restore_amplification": self.restore_amplification,
            "materialization": {name: found.to_dict() for name, found in self.materialization.items()},
            "timeline": self.timeline.to_dict(),
            "checkpoints": [point.to_dict() for point in self.checkpoints],
        }


def report_data(
    catalog: Catalog,
    stream: str,
    options: MaterializationOptions | None = None,
    policy_options: PolicyOptions | None = None,
    *,
    newest: int | None = None,
) -> ReportData:
    """Gather the report of all checkpoints of `stream` that are not deleted, or of the `newest`.

    A deleted or older checkpoint that others build on counts as part of their chains.

    Raises:
        UnknownStream: the stream has not run here.
        UnknownCheckpoint: it has no checkpoint yet.
    """
    records, begins = _read_records(catalog, stream, newest)
    if not records:
        raise UnknownCheckpoint(f"stream {stream} has no checkpoint to report on yet: run it first")
    points: list[CheckpointPoint] = []
    sizes: dict[str, ChainSizes] = {}
    ids, others = [0], [0]  # ids, and the sizes of the manifests up to each
    materialized = {
        (m.checkpoint, m.operator): m.bytes or 0 for m in catalog.materializations.list(stream) if m.manifest
    }
    for record in records:
        bases = {name: materialized[record.id, name] for name in record.forms if (record.id, name) in materialized}
        sizes = {name: sizes.get(name, ChainSizes(name)) for name in record.forms}
        chains = {name: each.follow(record, bases.get(name)) for name, each in sizes.items()}
        parts = {name: _part(record, name, of) for name, of in chains.items()}
        own = max(0, record.bytes - sum(part.bytes for part in parts.values()))
        ids.append(record.id)
        others.append(others[-1] + own)
        if record.deleted_at is None and record.id >= begins:
            first = min((of.first for of in chains.values()), default=record.id)
            other = others[-1] - others[bisect_left(ids, first) - 1]
            points.append(
                CheckpointPoint(
                    record=record,
                    operators=parts,
                    other_bytes=own,
                    materialized_bytes=sum(bases.values()),
                    chain_other_bytes=other,
                )
            )
    health = materialization_health(
        catalog, stream, options or MaterializationOptions(), policy_options or PolicyOptions()
    )
    return ReportData(stream, tuple(points), health, timeline_of([point.record for point in points[-TIMED:]]))


def _read_records(catalog: Catalog, stream: str, newest: int | None) -> tuple[list[CheckpointRecord], int]:
    """Return the records that a report reads, and the first checkpoint that it shows: of the newest few, all that their
    chains need."""
    if newest is None:
        return catalog.checkpoints.list(stream, marked=True), 0
    shown = catalog.checkpoints.list(stream, newest)
    if not shown:
        return [], 0
    begins = shown[0].id
    first = min((first_of(recorded_chains(shown[0], name).values(), begins) for name in shown[0].forms), default=begins)
    return catalog.checkpoints.list_after(stream, first - 1, shown[-1].id - first + 1, marked=True), begins


def _part(record: CheckpointRecord, name: str, chain: ChainSize) -> OperatorPart:
    """Make one operator's part from a record, and what a restore reads of it."""
    said: Mapping[str, Any] = record.statistics.get("operators", {}).get(name, {})
    return OperatorPart(
        form=record.forms[name],
        bytes=int(said.get("bytes", 0)),
        d=record.d.get(name, 0),
        rows=int(said.get("state_rows", 0)),
        seconds=said.get("seconds", {}),
        chain_base_bytes=round(chain.base_bytes),
        chain_delta_bytes=round(chain.delta_bytes),
        chain_deltas=chain.deltas,
        bound_bytes=said.get("restore_bound_bytes"),
        bound_s=said.get("restore_bound_s"),
        amplification=amplification(recorded_states(record, name)),
    )


def _total(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None
