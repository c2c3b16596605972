"""What the result of an operation says about a stream's assets: an outcome for each asset that has something new.

All of it is read from the catalog, so nothing is told that the catalog does not show.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.fork import find_definition
from siltstone.model import Form
from siltstone.pipes.metadata import (
    ROWS,
    Metadata,
    checkpoints_metadata,
    operator_metadata,
    sink_metadata,
    table,
    typed,
)
from siltstone.pipes.parts import (
    BASE_CHECKPOINT,
    CHECKPOINTS,
    DELTA_CHAIN,
    FULL_SNAPSHOT,
    MATERIALIZATION,
    RESTORED_STATE,
    SINK,
    asset_name,
)
from siltstone.result import Result
from siltstone.settings import Settings
from siltstone.sinks.resolve import resolve_sinks
from siltstone.stream import Stream

if TYPE_CHECKING:
    from siltstone.spark.operations import MaterializeResult, RestoreResult, RunResult, VerifyResult

MATERIALIZED = {"operator": "string", "checkpoint": "int", "rows": "int", "bytes": "int", "seconds": "float"}
DIGEST = "digest"
"""the check that checkpoints restore to the state that the stream had"""


@dataclass(frozen=True)
class Outcome:
    """Something new of an asset.

    Attributes:
        asset: its name (`parts.asset_name`).
        metadata: see `pipes.metadata`.
        version: the digest of its data; None if it has none.
    """

    asset: str
    metadata: Metadata = field(default_factory=dict)
    version: str | None = None


@dataclass(frozen=True)
class CheckOutcome:
    """Whether an asset has a property."""

    asset: str
    check: str
    passed: bool
    metadata: Metadata
    severity: Literal["ERROR", "WARN"] = "ERROR"


def outcomes_in(
    settings: Settings, result: Result, *, with_assets: bool, with_checks: bool
) -> Iterator[tuple[Outcome | CheckOutcome, bool]]:
    """Tell what a result says, dependencies first; nothing of an operation that makes and checks no asset.

    Args:
        with_assets: whether to yield outcomes of assets.
        with_checks: whether to yield outcomes of checks.

    Yields:
        Each outcome, and whether it is of the asset that the operation is there for.

    Raises:
        SiltstoneError: the catalog or a manifest cannot be read, or does not show what the result has.
    """
    from siltstone.spark.operations import MaterializeResult, RestoreResult, RunResult, SnapshotResult, VerifyResult

    if not isinstance(result, RunResult | MaterializeResult | RestoreResult | SnapshotResult | VerifyResult):
        return
    if not (with_checks if isinstance(result, VerifyResult) else with_assets):
        return
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        match result:
            case RunResult():
                *parts, checkpoints = outcomes_of_run(place, find_definition(settings, result.stream), result)
                yield from ((part, False) for part in parts)
                yield checkpoints, True
            case MaterializeResult():
                yield outcome_of_materialization(place, result), True
            case SnapshotResult():
                yield newest_snapshot(place, result.stream), True
            case RestoreResult():
                yield _of_restore(result), True
            case VerifyResult():
                yield _of_proofs(place, result), True


def newest_snapshot(place: OpenWarehouse, stream: str) -> Outcome:
    """Describe the newest full snapshot of a stream; its version is the digest of its checkpoint."""
    snapshot = place.catalog.reference_copies.list(stream)[-1]
    digest = place.catalog.checkpoints.get(stream, snapshot.checkpoint).digest
    metadata = {"checkpoint": snapshot.checkpoint, "digest": digest, ROWS: snapshot.rows, "bytes": snapshot.bytes}
    return Outcome(asset_name(stream, FULL_SNAPSHOT), metadata, digest)


def outcomes_of_run(place: OpenWarehouse, stream: Stream, result: "RunResult") -> Iterator[Outcome]:
    """Tell each operator's newest base and newest delta, each sink, and last the checkpoints.

    A base is told only if one was taken. Of a long run, retention may have deleted the older checkpoints.

    Raises:
        UnknownCheckpoint: the catalog does not show the newest checkpoint of the run.
    """
    catalog, made = place.catalog.checkpoints, set(result.checkpoints)
    records = [record for record in catalog.list(stream.name, len(made)) if record.id in made] if made else []
    if made:
        records.append(catalog.get(stream.name, max(made)))
    newest: dict[tuple[str, Form], int] = {}
    for record in sorted(records, key=lambda record: record.id):
        newest |= {(operator, form): record.id for operator, form in record.forms.items()}
    for operator in stream.sort_operators() if made else ():
        # Files are a checkpoint that holds everything, as a base is.
        for forms, part in (((Form.BASE, Form.FILES), BASE_CHECKPOINT), ((Form.DELTA,), DELTA_CHAIN)):
            if id := max(newest.get((operator.name, form), 0) for form in forms):
                metadata, version = operator_metadata(place, stream.name, operator.name, id)
                yield Outcome(asset_name(stream.name, operator.name, part), metadata, version)
    for operator, sink in resolve_sinks(stream, place).items() if made else ():
        yield Outcome(asset_name(stream.name, operator, SINK), sink_metadata(result.checkpoints, sink))
    counts = {
        "checkpoints_made": len(result.checkpoints),
        "rows": result.rows,
        "bytes": result.bytes,
        "dead_letters": sum(result.dead_letters.values()),
        "late_rows": sum(result.late.values()),
        "resets": result.resets,
        "seconds": result.seconds,
    }
    newest_metadata = checkpoints_metadata(place, stream.name)
    yield Outcome(asset_name(stream.name, CHECKPOINTS), counts | newest_metadata, result.digest)


def outcome_of_materialization(place: OpenWarehouse, result: "MaterializeResult") -> Outcome:
    """Describe what was materialized; its version is the digest of its checkpoint."""
    digest = place.catalog.checkpoints.get(result.stream, result.checkpoint).digest
    rows: list[Mapping[str, Any]] = [{name: getattr(each, name) for name in MATERIALIZED} for each in result.operators]
    metadata = {
        "checkpoint": result.checkpoint,
        "digest": digest,
        ROWS: result.rows,
        "bytes": result.bytes,
        "seconds": result.seconds,
        "operators": table(MATERIALIZED, rows),
        "had_a_base_already": ", ".join(result.kept) or "none",
    }
    return Outcome(asset_name(result.stream, MATERIALIZATION), metadata, digest)


def _of_restore(result: "RestoreResult") -> Outcome:
    metadata = {"checkpoint": result.checkpoint, "digest": result.digest, ROWS: result.rows, "bytes": result.bytes}
    path = {} if result.path is None else {"path": typed("path", result.path)}
    return Outcome(
        asset_name(result.stream, RESTORED_STATE), metadata | path | {"seconds": result.seconds}, result.digest
    )


def _of_proofs(place: OpenWarehouse, result: "VerifyResult") -> CheckOutcome:
    """Tell whether all checkpoints up to the newest that was verified are proven, now or before."""
    objects = {failure.checkpoint: failure.object for failure in result.failed}
    newest = max([*result.proven, *objects], default=0)
    records = [record for record in place.catalog.checkpoints.list(result.stream) if record.id <= newest]
    rows: list[Mapping[str, Any]] = [
        {"checkpoint": each.id, "object": objects.get(each.id), "reason": each.proof or "not proven yet"}
        for each in records
        if not each.proven
    ]
    metadata: Metadata = {"facts": len(records), "failing": len(rows)}
    failing = {"rows": table({"checkpoint": "int", "object": "string", "reason": "string"}, rows)} if rows else {}
    return CheckOutcome(asset_name(result.stream, CHECKPOINTS), DIGEST, not rows, metadata | failing)
