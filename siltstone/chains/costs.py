"""From what subtasks acknowledged to what the policy is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from typing import Any

import numpy as np

from siltstone.catalog.checkpoints import CheckpointRecord
from siltstone.catalog.materializations import MaterializationRecord
from siltstone.chains.chain_rules import rebased
from siltstone.chains.policy_rules import CheckpointCost, PolicyState, RestoreBound
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.model import Form, Kind
from siltstone.operator import SOURCE
from siltstone.state.digest import assemble_digests
from siltstone.stream import Stream

_CHAIN = (
    "rows",
    "base_bytes",
    "base_s",
    "base_rows",
    "deltas",
    "deltas_bytes",
    "deltas_s",
    "index_bytes",
    "base_factor",
    "delta_factor",
)
"""what the catalog keeps of a policy's state: the chain"""


@dataclass
class StepReports:
    """What the subtasks said since the last checkpoint, by operator."""

    last: dict[str, list[Acknowledgement]] = field(default_factory=dict)
    """of the newest step"""
    rows_in: dict[str, int] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    restore_s: dict[str, float] = field(default_factory=dict)
    """seconds of the slowest subtask, where all of them had to restore from the changelog"""
    event_times: list[datetime] = field(default_factory=list)
    """the highest of each subtask and step that saw any"""

    def add(self, operator: str, received: Sequence[Acknowledgement]) -> None:
        """One operator's part of one step."""
        self.last[operator] = list(received)
        self.rows_in[operator] = self.rows_in.get(operator, 0) + sum(a.rows_in for a in received)
        self.dead_letters[operator] = self.dead_letters.get(operator, 0) + sum(a.dead_letters for a in received)
        restored = [a.seconds.get("restore", 0.0) for a in received]
        if all(restored):
            self.restore_s[operator] = max(restored)
        self.event_times += [a.event_time_max for a in received if a.event_time_max is not None]

    def digests(self, max_parallelism: int) -> dict[str, dict[str, np.ndarray]]:
        """Operator -> table or opaque variable -> uint64[max_parallelism], put together from the subtasks'."""
        received = ((name, a.key_groups, a.digests) for name, every in self.last.items() for a in every)
        return assemble_digests(received, max_parallelism)

    def event_time(self, before: datetime | None) -> datetime | None:
        """The highest event time seen so far, given that of the checkpoint before."""
        return max([*self.event_times, *([before] if before else [])], default=None)


def written_form(received: Sequence[Acknowledgement]) -> Form:
    """What an operator's part became: a base only if every subtask wrote one."""
    forms = {h.form for a in received for h in a.handles if h.kind is Kind.INCREMENTAL}
    return Form.BASE if forms <= {Form.BASE} else Form.DELTA


def cost_of(received: Sequence[Acknowledgement]) -> CheckpointCost:
    """What one operator's part of a checkpoint cost; the slowest subtask counts, since the others wait for it."""
    handles = [h for a in received for h in a.handles if h.kind is Kind.INCREMENTAL]
    form = written_form(received)
    # A delta holds the bases of those subtasks for which a delta was too large.
    phases = ("base", "persist") if form is Form.BASE else ("delta", "base", "persist")
    gave_way = sum(a.tracked_bytes for a in received)
    return CheckpointCost(
        form=form,
        bytes=sum(h.length for h in handles),
        seconds=max((sum(a.seconds.get(phase, 0.0) for phase in phases) for a in received), default=0.0),
        rows=sum(a.state_rows for a in received),
        tracked_bytes=gave_way + sum(h.length for h in handles if h.form is Form.DELTA) if gave_way else None,
        index_bytes=_bytes_of(received, Kind.INDEX),
    )


def _bytes_of(received: Sequence[Acknowledgement], kind: Kind) -> int:
    return sum(h.length for a in received for h in a.handles if h.kind is kind)


def recorded_cost(record: CheckpointRecord, operator: str) -> CheckpointCost:
    """What one operator's part of a recorded checkpoint cost."""
    said = record.statistics.get("operators", {}).get(operator, {})
    seconds = said.get("seconds", {})
    return CheckpointCost(
        form=record.forms.get(operator, Form.DELTA),
        bytes=int(said.get("incremental_bytes", said.get("bytes", 0))),
        seconds=sum(seconds.get(phase, 0.0) for phase in ("delta", "base", "persist")),
        rows=int(said.get("state_rows", 0)),
        index_bytes=int(said.get("index_bytes", 0)),
    )


def recorded_chain(record: CheckpointRecord, operator: str) -> tuple[int, PolicyState]:
    """(the checkpoint it begins with, sizes and seconds) of one operator's chain, as known when the checkpoint was
    taken; without what the policy remembers beyond it."""
    said = record.statistics.get("operators", {}).get(operator, {}).get("chain", {})
    return int(said.get("first", record.id)), PolicyState.from_json(said)


def materialized_chain(
    state: PolicyState, materialized: MaterializationRecord, since: Sequence[CheckpointRecord]
) -> PolicyState:
    """`state` where the chain begins with a materialization, and goes on with the deltas of the checkpoints since."""
    base = CheckpointCost(form=Form.BASE, bytes=materialized.bytes or 0, seconds=0.0, rows=materialized.rows)
    return rebased(state, base, [recorded_cost(record, materialized.operator) for record in since])


def uploads_of(gathered: StepReports) -> UploadStatistics:
    """What storing a checkpoint took, all subtasks together."""
    parts = [UploadStatistics.from_json(a.uploads) for received in gathered.last.values() for a in received]
    return reduce(UploadStatistics.merge, parts, UploadStatistics())


def statistics_of(
    gathered: StepReports,
    stream: Stream,
    bounds: Mapping[str, RestoreBound],
    uploads: UploadStatistics,
    chains: Mapping[str, tuple[int, PolicyState]],
) -> dict[str, Any]:
    """What the catalog keeps of a checkpoint, for reports and to tell when a materialization is due.

    Per operator also bytes, bounds, seconds by phase, and the chain (`recorded_chain`).
    """
    sources = [op.name for op in stream.operators if op.reads == SOURCE]
    operators = {
        name: {
            "rows_in": gathered.rows_in[name],
            "state_rows": sum(a.state_rows for a in received),
            "bytes": sum(a.stored_bytes for a in received),
            "incremental_bytes": _bytes_of(received, Kind.INCREMENTAL),
            "index_bytes": _bytes_of(received, Kind.INDEX),
            "chain": {"first": chains[name][0], **{key: getattr(chains[name][1], key) for key in _CHAIN}},
            "restore_bound_bytes": round(bounds[name].bytes),
            "restore_bound_s": round(bounds[name].seconds, 6),
            "seconds": {
                phase: round(max(a.seconds.get(phase, 0.0) for a in received), 6)
                for phase in sorted({p for a in received for p in a.seconds})
            },
        }
        for name, received in gathered.last.items()
    }
    return {
        # Operators that read the source all see the same rows.
        "rows_in": max((gathered.rows_in[name] for name in sources), default=0),
        "dead_letters": {name: count for name, count in gathered.dead_letters.items() if count},
        "state_rows": sum(o["state_rows"] for o in operators.values()),
        "parallelism": max((len(received) for received in gathered.last.values()), default=0),
        "operators": operators,
        "uploads": uploads.to_json(),
    }
