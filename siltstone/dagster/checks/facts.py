"""Gather facts about a stream as pandas tables, with one row per thing that may be wrong.

Each function takes a `Subject` and raises `SiltstoneError` if the facts cannot be read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pandas as pd

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.chain_rules import add_chains, amplification
from siltstone.chains.chain_rules import restore_s as predicted_restore_s
from siltstone.chains.costs import recorded_states
from siltstone.chains.due import materialization_health
from siltstone.client import Client, StreamClient
from siltstone.format.manifests import read_many, with_materializations
from siltstone.model import Form, Kind
from siltstone.settings import Settings
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.parquet import ParquetSink
from siltstone.sinks.resolve import DatabaseOrTopic, resolve_sinks
from siltstone.store.paths import stream_prefix
from siltstone.stream import Stream

Facts = pd.DataFrame
SAMPLE = 10
"""checkpoints that were proven before and are proven again each time, those proven longest ago first"""


@dataclass(frozen=True)
class Subject:
    """A stream, and the settings that name its warehouse."""

    settings: Settings
    stream: Stream

    @property
    def name(self) -> str:
        """The stream's name."""
        return self.stream.name

    @property
    def client(self) -> StreamClient:
        """The client of the stream."""
        return Client(self.settings).stream(self.name)

    def warehouse(self) -> OpenWarehouse:
        """Open its warehouse and catalog; the caller closes them."""
        return OpenWarehouse.open_existing(self.settings.warehouse, self.settings.catalog)


def proofs(subject: Subject) -> Facts:
    """Prove the checkpoints that are new, and a few of the others. One row per retained checkpoint: whether its newest
    proof succeeded; if not, the object and reason."""
    with subject.warehouse() as warehouse:
        newest = warehouse.catalog.checkpoints.last_id(subject.name)
    failed = {failure.checkpoint: failure for failure in subject.client.verify(sample=SAMPLE).failed}
    with subject.warehouse() as warehouse:  # a run may have completed more meanwhile, or retention deleted some
        recorded = [each for each in warehouse.catalog.checkpoints.list(subject.name) if each.id <= newest]
    return _facts(
        {
            "checkpoint": record.id,
            "proven": bool(record.proven),
            "object": failed[record.id].object if record.id in failed else None,
            "reason": record.proof,
        }
        for record in recorded
    )


def links(subject: Subject) -> Facts:
    """One row per table of a retained checkpoint: the checkpoint it builds on, and whether that one has the table."""
    rows: list[dict[str, Any]] = []
    with subject.warehouse() as warehouse:
        catalog = warehouse.catalog
        records = catalog.checkpoints.list(subject.name)
        chains = {c.id: catalog.chains.list_manifests(subject.name, c.id) for c in records}
        named = {stored.name: stored for chain in chains.values() for stored in chain}
        read = read_many(warehouse.warehouse.store, [*named.values()])
        manifests = dict(zip(named, read, strict=True))
    for record in records:
        # If a materialization begins the chain here, the delta that the checkpoint wrote is no longer read.
        merged = with_materializations([manifests[stored.name] for stored in chains[record.id]])
        holding: dict[tuple[str, str], list[int]] = {}
        builds_on: dict[tuple[str, str], int] = {}
        for at, manifest in merged.items():
            for key in {(h.operator, h.variable) for h in manifest.handles if h.kind is Kind.INCREMENTAL}:
                holding.setdefault(key, []).append(at)
        for handle in merged[record.id].handles:
            if handle.kind is Kind.INCREMENTAL and handle.form is Form.DELTA:
                key = handle.operator, handle.variable
                builds_on[key] = min(handle.previous, builds_on.get(key, handle.previous))
        # A materialization may have made a base later than what a delta builds on.
        found = {
            key: max((at for at in holding[key] if before <= at < record.id), default=None)
            for key, before in builds_on.items()
        }
        own = manifests[record.manifest.name].handles
        rows += [
            {
                "checkpoint": record.id,
                "operator": operator,
                "table": table,
                "builds_on": found.get((operator, table)) or builds_on.get((operator, table), 0),
                "whole": found.get((operator, table), 0) is not None,
            }
            for operator, table in sorted({(h.operator, h.variable) for h in own if h.kind is Kind.INCREMENTAL})
        ]
    return _facts(rows)


def references(subject: Subject) -> Facts:
    """One row per object that the catalog refers to: its size as recorded and as in the store; null if missing.

    Objects that are being deleted are left out.
    """
    with subject.warehouse() as warehouse:
        catalog, store = warehouse.catalog, warehouse.warehouse.store
        # Read the catalog first: then new objects are not missed, and deleted ones are recorded as tombstones before.
        referred = catalog.objects.list(subject.name)
        # A fork shares objects of the stream it was forked from, whose names begin with that stream's name.
        prefixes = {stream_prefix(stored.name.partition("/")[0]) for stored in referred}
        sizes = dict(chain.from_iterable(store.list(prefix) for prefix in sorted(prefixes)))
        going = {record.name for record in catalog.tombstones.list(subject.name)}
        marked = {checkpoint.id for checkpoint in catalog.checkpoints.list_retained(subject.name) if checkpoint.deleted}
    return _facts(
        {
            "checkpoint": stored.checkpoint,
            "kind": stored.kind.value,
            "object": stored.name,
            "recorded_bytes": stored.bytes,
            "stored_bytes": sizes.get(stored.name),
        }
        for stored in referred
        if not (stored.checkpoint in marked and stored.name in going)
    )


def restore_costs(subject: Subject) -> Facts:
    """One row per operator of a retained checkpoint: its chain and the policy's bounds (restore cost, promise 7).

    `predicted_s` is the policy's estimate for a restore of that operator; `restore_s` is the newest measured restore of
    the checkpoint, null if none was measured. A chain that is only a base has no bound in seconds, because it cannot
    be shorter. The bounds are the current ones; chains kept to those of their time.
    """
    options = subject.settings.policy_options
    rows = []
    with subject.warehouse() as warehouse:
        for record in warehouse.catalog.checkpoints.list(subject.name):
            for operator in record.forms:
                taken = add_chains(recorded_states(record, operator))
                most = None if options.size_ratio_max is None else options.size_ratio_max * taken.base_bytes
                rows.append(
                    {
                        "checkpoint": record.id,
                        "operator": operator,
                        "deltas": taken.deltas,
                        "most_deltas": options.d_max,
                        "delta_bytes": taken.deltas_bytes,
                        "most_delta_bytes": most,
                        "predicted_s": predicted_restore_s(taken),
                        "restore_s": record.restore_s,
                        "most_restore_s": options.restore_budget_s if taken.deltas else None,
                    }
                )
    return _facts(rows)


def amplifications(subject: Subject) -> Facts:
    """One row per operator of a retained checkpoint: bytes of its chain per byte of live state, and the bound."""
    rows = []
    with subject.warehouse() as warehouse:
        for record in warehouse.catalog.checkpoints.list(subject.name):
            for operator in record.forms:
                rows.append(
                    {
                        "checkpoint": record.id,
                        "operator": operator,
                        "amplification": amplification(recorded_states(record, operator)),
                        "most": subject.settings.policy_options.space_amplification_max,
                    }
                )
    return _facts(rows)


def orphans(subject: Subject) -> Facts:
    """One row per reason why objects exist that nothing refers to; a sweep would delete those that are `deletable`."""
    found = subject.client.sweep(dry_run=True)
    return _facts(
        {
            "reason": finding.reason,
            "objects": finding.objects,
            "bytes": finding.bytes,
            "deletable": finding.deletes,
            "examples": ", ".join(finding.names),
        }
        for finding in found.reasons
    )


def materializations(subject: Subject) -> Facts:
    """One row per operator: whether materialization keeps up with its chain."""
    options = subject.settings.materialization
    with subject.warehouse() as warehouse:
        found = materialization_health(warehouse.catalog, subject.name, options, subject.settings.policy_options)
    return _facts({"operator": name, **each.to_dict()} for name, each in found.items())


def comparisons(subject: Subject) -> Facts:
    """One row per table and key group: the newest checkpoint with a full snapshot, restored and live."""
    found = subject.client.compare_snapshot()
    parts = []
    for table in found.tables:
        columns = ", ".join(f"{name} in {count}" for name, count in table.columns.items())
        part = pd.DataFrame(
            {
                "checkpoint": found.checkpoint,
                "operator": table.operator,
                "table": table.table,
                "key_group": table.key_groups,
                "restored_rows": table.restored_rows,
                "live_rows": table.live_rows,
                "only_restored": table.only_restored,
                "only_live": table.only_live,
                "unequal": table.unequal,
                "restored_digest": [f"{digest:016x}" for digest in table.restored_digests],
                "live_digest": [f"{digest:016x}" for digest in table.live_digests],
            }
        )
        differs = part["only_restored"] + part["only_live"] + part["unequal"] > 0
        part["columns"] = pd.Series(columns or None, index=part.index, dtype=object).where(part["unequal"] > 0, None)
        part["examples"] = pd.Series(str(list(table.examples)), index=part.index, dtype=object).where(differs, None)
        parts.append(part)
    return pd.concat(parts, ignore_index=True) if parts else _facts([])


def sinks(subject: Subject) -> Facts:
    """One row per output of a table or a Parquet sink: whether its checkpoint completed, and whether it is published.

    Of checkpoints that were deleted, or given up and made again, it is not known whether they have output for a sink. A
    sink may also have the output of checkpoints that were lost for good; their ids are not used again.
    """
    rows: list[dict[str, Any]] = []
    with subject.warehouse() as warehouse:
        record, newest = (
            warehouse.catalog.streams.get(subject.name),
            warehouse.catalog.checkpoints.last_id(subject.name),
        )
        staged = {c.id: c.statistics.get("outputs") for c in warehouse.catalog.checkpoints.list(subject.name)}
        # A fork that was rolled back to before its beginning makes checkpoints of its own from there on.
        rollbacks = warehouse.catalog.rollbacks.list(subject.name)
        begin = min([record.forked_at or 0, *(each.checkpoint for each in rollbacks)])
        resolved = resolve_sinks(subject.stream, warehouse)
        found = {name: _list_published(sink) for name, sink in resolved.items()}
    for name, (ids, since) in ((name, listed) for name, listed in found.items() if listed is not None):
        known = range(begin + 1, newest + 1)
        outputs = {id: of for id in known if (of := staged.get(id)) is not None}
        published = {id - record.sink_offset for id in ids if id > record.sink_offset}
        older = {id for id in known if id + record.sink_offset < since}  # than the log of the table
        published |= {id for id in older if id not in outputs or name in outputs[id]}
        completed = {id for id in known if (name in outputs[id] if id in outputs else id in published)}
        rows += [
            {"sink": name, "checkpoint": id, "completed": id in completed, "published": id in published}
            for id in sorted(completed | published)
        ]
    return _facts(rows)


def _list_published(sink: object) -> tuple[set[int], int] | None:
    """Return the ids that a sink has, and the oldest id from which on it says so; None for a user's own."""
    if isinstance(sink, ParquetSink):
        return sink.list_published(), 1
    return sink.list_published() if isinstance(sink, SinkTable | DatabaseOrTopic) else None


def _facts(rows: Iterable[Mapping[str, Any]]) -> Facts:
    return pd.DataFrame(list(rows))
