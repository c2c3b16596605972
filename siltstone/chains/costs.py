"""Turn the acknowledgements of subtasks into the costs that a policy observes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from siltstone.catalog.checkpoints import CheckpointRecord
from siltstone.catalog.materializations import MaterializationRecord
from siltstone.chains.chain_rules import rebase
from siltstone.chains.policy_rules import CheckpointCost, PolicyState, RestoreBound
from siltstone.changelog.acknowledgement import Acknowledgement, merge_uploads
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
"""the fields of a policy's state that the catalog keeps: those about the chain"""


@dataclass
class StepReports:
    """The subtasks' acknowledgements since the last checkpoint, by operator."""

    last: dict[str, list[Acknowledgement]] = field(default_factory=dict)
    """those of the newest step"""
    rows_in: dict[str, int] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    restore_s: dict[str, float] = field(default_factory=dict)
    """seconds of the slowest subtask, if any had to restore from the changelog: those of the others by their rows"""
    event_times: list[datetime] = field(default_factory=list)
    """the highest of each subtask and step that saw any"""

    def add(self, operator: str, received: Sequence[Acknowledgement]) -> None:
        """Add one operator's part of one step."""
        self.last[operator] = list(received)
        self.rows_in[operator] = self.rows_in.get(operator, 0) + sum(a.rows_in for a in received)
        self.dead_letters[operator] = self.dead_letters.get(operator, 0) + sum(a.dead_letters for a in received)
        most = max((a.state_rows for a in received), default=0)
        restored = [a.seconds["restore"] * most / max(1, a.state_rows) for a in received if _tells(a, most)]
        if restored:
            self.restore_s[operator] = max(restored)
        self.event_times += [a.event_time_max for a in received if a.event_time_max is not None]

    def digests(self, max_parallelism: int) -> dict[str, dict[str, np.ndarray]]:
        """Assemble operator -> table or opaque variable -> uint64[max_parallelism] from the subtasks' digests."""
        received = ((name, a.key_groups, a.digests) for name, every in self.last.items() for a in every)
        return assemble_digests(received, max_parallelism)

    def event_time(self, before: datetime | None) -> datetime | None:
        """Return the highest event time so far, given that of the previous checkpoint."""
        return max([*self.event_times, *([before] if before else [])], default=None)


def _tells(a: Acknowledgement, most: int) -> bool:
    """Whether a subtask's restore tells how long that of the largest takes: if it has at least half of its rows."""
    return a.seconds.get("restore", 0.0) > 0 and 2 * a.state_rows >= most


def written_form(received: Sequence[Acknowledgement]) -> Form:
    """Return the form of an operator's part: a base only if every subtask wrote one."""
    forms = {h.form for a in received for h in a.handles if h.kind is Kind.INCREMENTAL}
    return Form.BASE if forms <= {Form.BASE} else Form.DELTA


def cost_of(received: Sequence[Acknowledgement]) -> CheckpointCost:
    """Return the cost of one operator's part of a checkpoint; seconds are those of the slowest subtask."""
    handles = [h for a in received for h in a.handles if h.kind is Kind.INCREMENTAL]
    form = written_form(received)
    # A delta includes the bases of subtasks whose delta was too large.
    phases = ("base", "persist") if form is Form.BASE else ("delta", "base", "persist")
    gave_way = sum(size for a in received for size in a.tracked_bytes.values())
    return CheckpointCost(
        form=form,
        bytes=sum(h.length for h in handles),
        seconds=max((sum(a.seconds.get(phase, 0.0) for phase in phases) for a in received), default=0.0),
        rows=sum(a.state_rows for a in received),
        log_s=max(tracked) if (tracked := [a.seconds["track"] for a in received if "track" in a.seconds]) else None,
        tracked_bytes=gave_way + sum(h.length for h in handles if h.form is Form.DELTA) if gave_way else None,
        index_bytes=_bytes_of(received, Kind.INDEX),
    )


def _bytes_of(received: Sequence[Acknowledgement], kind: Kind) -> int:
    return sum(h.length for a in received for h in a.handles if h.kind is kind)


def recorded_cost(record: CheckpointRecord, operator: str) -> CheckpointCost:
    """Return the cost of one operator's part of a recorded checkpoint."""
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
    """Return (first checkpoint, sizes and seconds) of one operator's chain, as recorded with the checkpoint.

    The rest of the policy's state is not recorded.
    """
    said = record.statistics.get("operators", {}).get(operator, {}).get("chain", {})
    return int(said.get("first", record.id)), PolicyState.from_json(said)


def materialized_chain(
    state: PolicyState,
    materialized: MaterializationRecord,
    since: Sequence[CheckpointRecord],
    observe: Callable[[PolicyState, CheckpointCost, Sequence[CheckpointCost]], PolicyState] = rebase,
) -> PolicyState:
    """Return `state` for a chain that begins with a materialization and has the deltas of the checkpoints since.

    A run gives `Policy.observe_materialization` to `observe` it.
    """
    base = CheckpointCost(form=Form.BASE, bytes=materialized.bytes or 0, seconds=0.0, rows=materialized.rows)
    deltas = [recorded_cost(record, materialized.operator) for record in since]
    return observe(state, base, deltas)


def uploads_of(gathered: StepReports) -> UploadStatistics:
    """Return the upload statistics of a checkpoint, all subtasks together."""
    return merge_uploads(a for received in gathered.last.values() for a in received)


def statistics_of(
    gathered: StepReports,
    stream: Stream,
    bounds: Mapping[str, RestoreBound],
    uploads: UploadStatistics,
    chains: Mapping[str, tuple[int, PolicyState]],
) -> dict[str, Any]:
    """Return the statistics that the catalog keeps of a checkpoint, for reports and to decide on materialization.

    Each operator has bytes, bounds, seconds by phase, and its chain (`recorded_chain`).
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
