"""Describe recorded checkpoints for people, as plain JSON values: the list, and one of them in full."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.records.edits import EditRecord
from siltstone.catalog.records.source_entries import decode_offsets
from siltstone.catalog.records.steps import Step
from siltstone.catalog.repository import Catalog
from siltstone.chains.chain_rules import amplification
from siltstone.chains.costs import recorded_states
from siltstone.chains.due import OperatorHealth
from siltstone.errors import StateError, UsageError
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest
from siltstone.store.base import Store


def list_checkpoints(catalog: Catalog, stream: str, limit: int | None = None) -> list[dict[str, Any]]:
    """List a stream's completed checkpoints, oldest first; with `limit`, only that many of the newest.

    Raises:
        UnknownStream: the stream has not run here.
    """
    edits, dropped = _edits(catalog, stream), _list_dropped(catalog, stream)
    return [_summary(record, edits, dropped) for record in catalog.checkpoints.list(stream, limit)]


def list_deletions(catalog: Catalog, stream: str, limit: int | None = None) -> list[dict[str, Any]]:
    """List a stream's deletion passes, oldest first: what each deleted, when and by whom. `limit` keeps the newest.

    Raises:
        UnknownStream: the stream has not run here.
    """
    catalog.streams.get(stream)
    passes = catalog.passes.list(stream, limit)
    return [asdict(each) | {"began_at": each.began_at.isoformat()} for each in passes]


def describe_origin(catalog: Catalog, stream: str) -> dict[str, Any]:
    """Return the stream and the checkpoint that a stream was forked from; both None if it is not a fork.

    Raises:
        UnknownStream: the stream has not run here.
    """
    record = catalog.streams.get(stream)
    return {"forked_from": record.forked_from, "forked_at": record.forked_at}


def list_materialization(health: Mapping[str, OperatorHealth]) -> dict[str, dict[str, Any]]:
    """Return operator -> the health of its materialization."""
    return {operator: found.to_dict() for operator, found in health.items()}


def show_checkpoint(catalog: Catalog, store: Store, stream: str, at: str) -> dict[str, Any]:
    """Describe one checkpoint with its handles, objects, chain and input log.

    Raises:
        UnknownCheckpoint: no checkpoint matches `at`.
        CorruptObject: its manifest is damaged.
    """
    record = catalog.checkpoints.get(stream, catalog.checkpoints.resolve(stream, at))
    manifest = read_manifest(store, record.manifest)
    steps = catalog.input_log.list(stream, record.id, after=record.id - 1)
    return {
        "stream": stream,
        **describe_origin(catalog, stream),
        "checkpoint": record.id,
        "epoch": record.epoch,
        **_summary(record, _edits(catalog, stream), _list_dropped(catalog, stream)),
        "chain": catalog.chains.list_checkpoints(stream, record.id),
        "manifest": record.manifest.name,
        "statistics": record.statistics,
        "input": _list_input(steps),
        "steps": [{"step": s.step, "kind": s.kind, "batch": s.batch_id, "offsets": s.offsets} for s in steps],
        "unchanged": _list_unchanged(manifest),
        "handles": [
            {
                "operator": h.operator,
                "variable": h.variable,
                "form": str(h.form),
                "step": h.sqn or None,
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


def _list_input(steps: Sequence[Step]) -> dict[str, str]:
    """Return how far each source has been read, as Spark wrote it; nothing if no step with a batch tells."""
    for step in reversed(steps):
        with suppress(UsageError, StateError):  # nothing of Spark's, or damaged, as a proof will say
            if found := decode_offsets(step.offsets):
                return found
    return {}


def _edits(catalog: Catalog, stream: str) -> dict[tuple[int, int], EditRecord]:
    """Return the edits by checkpoint and the epoch that wrote it."""
    return {(edit.checkpoint, edit.epoch): edit for edit in catalog.edits.list(stream)}


def _list_dropped(catalog: Catalog, stream: str) -> dict[int, list[str]]:
    """Return checkpoint -> the variables whose state was dropped with it."""
    return {one.checkpoint: list(one.dropped) for one in catalog.definitions.list(stream)}


def _list_unchanged(manifest: Manifest) -> dict[str, int]:
    """Return operator.variable -> the checkpoint that wrote it last, for variables unchanged in this checkpoint."""
    newest = {
        f"{operator}.{name}": max((at for _, at in runs), default=0)
        for operator, of in manifest.versions.items()
        for name, runs in of.items()
    }
    return {name: at for name, at in newest.items() if at != manifest.checkpoint}


def _describe_edit(edit: EditRecord) -> dict[str, Any]:
    fields = ("operator", "variable", "upserts", "deletes", "source", "source_checksum", "who")
    return {name: getattr(edit, name) for name in fields} | {"edited_at": edit.edited_at.isoformat(timespec="seconds")}


def _tables(record: CheckpointRecord, operator: str) -> dict[str, dict[str, Any]]:
    """Return table -> its D, and its form in the checkpoint (None if it did not change)."""
    tables = record.statistics.get("operators", {}).get(operator, {}).get("tables", {})
    return {table: {"form": of.get("form"), "D": of["D"]} for table, of in tables.items()}


def _summary(
    record: CheckpointRecord, edits: Mapping[tuple[int, int], EditRecord], dropped: Mapping[int, list[str]]
) -> dict[str, Any]:
    edit = edits.get((record.id, record.epoch))
    space = {name: amplification(recorded_states(record, name)) for name in record.forms}
    return {
        "id": record.id,
        "forms": {name: str(form) for name, form in record.forms.items()},
        "tables": {name: _tables(record, name) for name in record.forms},
        "bytes": record.bytes,
        "D": record.d,
        "rows": record.rows,
        "amplification": {name: None if ratio is None else round(ratio, 4) for name, ratio in space.items()},
        "digest": record.digest,
        "proven": record.proven,
        "proof": record.proof,
        "event_time_max": record.event_time_max.isoformat() if record.event_time_max else None,
        "committed_at": record.committed_at.isoformat(timespec="seconds"),
        "edit": _describe_edit(edit) if edit else None,
        "dropped": dropped.get(record.id, []),
    }
