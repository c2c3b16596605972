"""What a person asks of recorded checkpoints: the list, and one of them in full. Plain JSON values."""

from collections.abc import Mapping
from typing import Any

from siltstone.catalog.records import CheckpointRecord
from siltstone.catalog.repository import Catalog
from siltstone.lifecycle.compaction import OperatorHealth
from siltstone.lifecycle.costs import recorded_chain
from siltstone.lifecycle.restore import read_manifest
from siltstone.policy.chain import amplification
from siltstone.store.base import Store


def list_checkpoints(catalog: Catalog, stream: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The completed checkpoints of a stream, oldest first; with `limit`, only the newest so many.

    Raises:
        UnknownStream: no such stream has run here.
    """
    return [_summary(record) for record in catalog.checkpoints(stream, limit)]


def describe_origin(catalog: Catalog, stream: str) -> dict[str, Any]:
    """Of which stream, and of which checkpoint of it, a stream is a fork; None each for one that is none.

    Raises:
        UnknownStream: no such stream has run here.
    """
    record = catalog.stream(stream)
    return {"forked_from": record.forked_from, "forked_at": record.forked_at}


def list_materialization(health: Mapping[str, OperatorHealth]) -> dict[str, dict[str, Any]]:
    """Operator -> how materialization does for it."""
    return {operator: found.to_dict() for operator, found in health.items()}


def show_checkpoint(catalog: Catalog, store: Store, stream: str, at: str) -> dict[str, Any]:
    """One checkpoint with its handles, objects, chain and input log.

    Raises:
        UnknownCheckpoint: nothing answers to `at`.
        CorruptObject: its manifest is damaged.
    """
    record = catalog.checkpoint(stream, catalog.resolve(stream, at))
    manifest = read_manifest(store, record.manifest)
    steps = catalog.steps(stream, record.id, after=record.id - 1)
    return {
        "stream": stream,
        **describe_origin(catalog, stream),
        "checkpoint": record.id,
        "epoch": record.epoch,
        **_summary(record),
        "chain": catalog.chain(stream, record.id),
        "manifest": record.manifest.name,
        "statistics": record.statistics,
        "steps": [{"step": s.step, "batch": s.batch_id, "offsets": s.offsets} for s in steps],
        "handles": [
            {
                "operator": h.operator,
                "variable": h.variable,
                "form": str(h.form),
                "key_groups": f"{h.key_groups.start}-{h.key_groups.end - 1}",
                "rows": h.rows,
                "bytes": h.length,
                "offset": h.offset,
                "previous": h.previous,
                "object": h.object,
                "checksum": h.checksum,
            }
            for h in manifest.handles
        ],
    }


def _summary(record: CheckpointRecord) -> dict[str, Any]:
    space = {name: amplification(recorded_chain(record, name)[1]) for name in record.forms}
    return {
        "id": record.id,
        "forms": {name: str(form) for name, form in record.forms.items()},
        "bytes": record.bytes,
        "D": record.d,
        "rows": record.rows,
        "amplification": {name: None if ratio is None else round(ratio, 4) for name, ratio in space.items()},
        "digest": record.digest,
        "proven": record.proven,
        "proof": record.proof,
        "event_time_max": record.event_time_max.isoformat() if record.event_time_max else None,
        "committed_at": record.committed_at.isoformat(timespec="seconds"),
    }
