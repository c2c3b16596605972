"""What the subtasks of a run have reported since its last checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from siltstone.chains.policy_rules import RestoreBound
from siltstone.changelog.acknowledgement import Acknowledgement, merge_uploads
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.model import Kind
from siltstone.run.stream_clock import earliest_due
from siltstone.state.digest import assemble_digests
from siltstone.stream import Stream


@dataclass
class StepReports:
    """The subtasks' acknowledgements since the last checkpoint, by operator."""

    last: dict[str, list[Acknowledgement]] = field(default_factory=dict)
    """those of the newest step"""
    rows_in: dict[str, int] = field(default_factory=dict)
    rows_of: dict[tuple[str, str], int] = field(default_factory=dict)
    """(operator, source) -> rows, of operators that read several inputs"""
    dead_letters: dict[str, int] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    restore_s: dict[str, float] = field(default_factory=dict)
    """seconds of the slowest subtask, if any had to restore from the changelog: those of the others by their rows"""
    event_times: list[datetime] = field(default_factory=list)
    """the highest of each subtask and step that saw any"""

    def add(self, operator: str, received: Sequence[Acknowledgement]) -> None:
        """Add one operator's part of one step."""
        self.last[operator] = list(received)
        self.rows_in[operator] = self.rows_in.get(operator, 0) + sum(a.rows_in for a in received)
        for each in received:
            for source, rows in each.rows_of.items():
                self.rows_of[operator, source] = self.rows_of.get((operator, source), 0) + rows
        self.dead_letters[operator] = self.dead_letters.get(operator, 0) + sum(a.dead_letters for a in received)
        self.late[operator] = self.late.get(operator, 0) + sum(a.late for a in received)
        most = max((a.state_rows for a in received), default=0)
        restored = [a.seconds["restore"] * most / max(1, a.state_rows) for a in received if _is_representative(a, most)]
        if restored:
            self.restore_s[operator] = max(restored)
        self.event_times += [a.event_time_max for a in received if a.event_time_max is not None]

    def digests(self, max_parallelism: int) -> dict[str, dict[str, np.ndarray]]:
        """Assemble operator -> table or opaque variable -> uint64[max_parallelism] from the subtasks' digests."""
        received = ((name, a.key_groups, a.digests) for name, every in self.last.items() for a in every)
        return assemble_digests(received, max_parallelism)

    def event_time(self, before: datetime | None) -> datetime | None:
        """Return the highest event time so far, given the previous checkpoint's."""
        return max([*self.event_times, *([before] if before else [])], default=None)

    def source_rows(self, stream: Stream) -> int:
        """Return how many rows the sources gave: the operators that read one all see the same of it."""
        total = 0
        for source in stream.read_sources:
            alone = [self.rows_in.get(op.name, 0) for op in stream.operators if op.reads == source]
            total += max([*alone, *(rows for (_, of), rows in self.rows_of.items() if of == source)], default=0)
        return total

    def uploads(self) -> UploadStatistics:
        """Return the upload statistics of the acknowledgements in `last`, all subtasks together."""
        return merge_uploads(a for received in self.last.values() for a in received)

    def statistics(
        self,
        stream: Stream,
        uploads: UploadStatistics,
        tables: Mapping[str, Mapping[str, Mapping[str, Any]]],
        bounds: Mapping[str, RestoreBound],
    ) -> dict[str, Any]:
        """Return the statistics that the catalog keeps of a checkpoint, for reports and to decide on materialization.

        Each operator has bytes, bounds, seconds by phase, and its tables with their chains (`recorded_chains`).

        Args:
            tables: operator -> table or opaque variable -> what `table_statistics` returns of it.
            bounds: operator -> the sum of its tables' bounds.
        """
        operators = {
            name: {
                "rows_in": self.rows_in[name],
                "state_rows": sum(a.state_rows for a in received),
                "bytes": sum(a.stored_bytes for a in received),
                "incremental_bytes": sum(a.bytes_of(Kind.INCREMENTAL) for a in received),
                "index_bytes": sum(a.bytes_of(Kind.INDEX) for a in received),
                "tables": tables[name],
                **({"due": due} if (due := earliest_due(received)) is not None else {}),
                "restore_bound_bytes": round(bounds[name].bytes),
                "restore_bound_s": round(bounds[name].seconds, 6),
                "seconds": {
                    phase: round(max(a.seconds.get(phase, 0.0) for a in received), 6)
                    for phase in sorted({p for a in received for p in a.seconds})
                },
            }
            for name, received in self.last.items()
        }
        return {
            "rows_in": self.source_rows(stream),
            "dead_letters": {name: count for name, count in self.dead_letters.items() if count},
            **({"late": late} if (late := {name: count for name, count in self.late.items() if count}) else {}),
            "state_rows": sum(o["state_rows"] for o in operators.values()),
            "parallelism": max((len(received) for received in self.last.values()), default=0),
            "operators": operators,
            "uploads": uploads.to_json(),
        }


def _is_representative(a: Acknowledgement, most: int) -> bool:
    """Whether a subtask was restored with at least half of `most` rows, so that its time stands for the largest's."""
    return a.seconds.get("restore", 0.0) > 0 and 2 * a.state_rows >= most
