"""What a run has done so far, as metric families that are made when they are asked for.

The run adds to counts as its steps and checkpoints complete. Nothing here asks Spark, the store or the catalog, so the
metrics stay available while one of these is away.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.chains.background import MaterializationEvent
from siltstone.chains.costs import recorded_cost, recorded_states
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.model import Form
from siltstone.run.lag import LagWatch
from siltstone.run.pending import Completed

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_MATERIALIZED, _LOG = "materialized", "log"
QUERY_POLL_S = 1.0
"""least seconds between two readings of Spark's query progress"""
_RUN_COUNTERS = {
    "steps": ("siltstone_steps", "Steps that this run has processed, those that it repeated after a reset included."),
    "checkpoints": ("siltstone_checkpoints", "Checkpoints that this run has completed."),
    "resets": ("siltstone_resets", "Times that this run went back to its newest checkpoint by itself."),
    "moves": ("siltstone_placement_moves", "Times that a subtask was moved to another executor."),
}
_OPERATOR_COUNTERS = {
    "input_rows": ("siltstone_input_rows", "Rows that the operator has processed, repeated steps included.", ""),
    "restores": ("siltstone_restores", "Times that a subtask restored its state from the store.", ""),
    "roll_forwards": ("siltstone_roll_forwards", "Times that a subtask applied logged changes to older state.", ""),
    "restored_bytes": ("siltstone_restored_bytes", "Bytes that subtasks read from the store to restore.", "bytes"),
}
_OPERATOR_GAUGES = {
    "step_rows": ("siltstone_step_input_rows", "Rows that the operator got in the newest step."),
    "waiting_rows": ("siltstone_uncommitted_input_rows", "Rows processed that are in no completed checkpoint yet."),
    "state_rows": ("siltstone_state_rows", "Rows of the operator's state after the newest step."),
}


@dataclass(frozen=True)
class _Newest:
    """The newest completed checkpoint; `seconds` is None if another run or epoch has completed it."""

    checkpoint: CheckpointRecord | Completed
    committed_at: datetime
    seconds: float | None = None


def _now() -> datetime:
    return datetime.now(UTC)


class RunProgress:
    """Counts what one run does, over all of its writer epochs; thread-safe.

    Attributes:
        is_watched: whether somebody may ask for the families. If not, neither Spark nor the catalog is asked for what
            only they show.

    Args:
        now: returns the time, in UTC.
    """

    def __init__(self, stream: str, now: Callable[[], datetime] = _now) -> None:
        self.is_watched = False
        self._stream, self._now, self._began = stream, now, now()
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        self._waited_s = 0.0
        self._by_operator: dict[str, dict[str, float]] = {name: {} for name in (*_OPERATOR_COUNTERS, *_OPERATOR_GAUGES)}
        self._materializations = Counter[tuple[str, str]]()
        """(operator, `MaterializationEvent`) -> how often"""
        self._materialized_s = dict[str, float]()
        """operator -> seconds of its newest materialization"""
        self._waiting_steps = 0
        self._epochs = 0
        self._newest: _Newest | None = None
        self._query: Mapping[tuple[str, str], float] = {}
        self._query_read_s = 0.0
        self.lag = LagWatch(stream)
        """how far the run is behind its sources"""

    def begin_epoch(self, newest: CheckpointRecord | None) -> None:
        """Note that a writer epoch begins, after the stream's newest completed checkpoint.

        After a reset, a checkpoint that is new then is one of this run whose commit got no answer.
        """
        with self._lock:
            before, found = self._newest.checkpoint.id if self._newest else 0, newest.id if newest else 0
            self._counts["checkpoints"] += max(0, found - before) if self._epochs else 0
            if found != before:
                # a recovery may have rolled everything back
                self._newest = None if newest is None else _Newest(newest, newest.committed_at)
            self._epochs += 1
            self._forget_waiting()

    def add_step(self, received: Mapping[str, Sequence[Acknowledgement]], moves: int) -> None:
        """Count a step.

        Args:
            received: operator -> the acknowledgements of its subtasks.
            moves: subtasks that were moved to another executor since the step before.
        """
        with self._lock:
            self._counts["steps"] += 1
            self._counts["moves"] += moves
            self._waiting_steps += 1
            for operator, each in received.items():
                rows = sum(a.rows_in for a in each)
                self._set("step_rows", operator, rows)
                self._set("state_rows", operator, sum(a.state_rows for a in each))
                self._add("input_rows", operator, rows)
                self._add("waiting_rows", operator, rows)
                self._add("restores", operator, sum("restore" in a.seconds for a in each))
                self._add("roll_forwards", operator, sum("forward" in a.seconds for a in each))
                self._add("restored_bytes", operator, sum(a.restored_bytes for a in each))

    @property
    def waited_s(self) -> float:
        """Seconds that steps have waited for checkpoints."""
        return self._waited_s

    @contextmanager
    def count_wait(self) -> Iterator[None]:
        """Count the seconds of the block, in which the stream waits for a checkpoint."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._waited_s += time.perf_counter() - start

    def add_checkpoint(self, completed: Completed) -> None:
        """Count a completed checkpoint."""
        with self._lock:
            self._counts["checkpoints"] += 1
            self._newest = _Newest(completed, self._now(), completed.seconds)
            self._waiting_steps = max(0, self._waiting_steps - completed.steps)
            for operator, rows in completed.operator_rows.items():
                self._add("waiting_rows", operator, -rows)

    def add_materialization(self, operator: str, event: MaterializationEvent, seconds: float) -> None:
        """Count what a materialization of the run's own did, `seconds` after its beginning."""
        with self._lock:
            self._materializations[operator, event] += 1
            if event is MaterializationEvent.COMPLETED:
                self._materialized_s[operator] = seconds

    def add_reset(self) -> None:
        """Count a reset: the steps since the newest checkpoint will be repeated."""
        with self._lock:
            self._counts["resets"] += 1
            self._forget_waiting()

    def refresh_query(self, read: Callable[[], Mapping[tuple[str, str], float]]) -> None:
        """Note what Spark tells of the query, if it is time to ask again.

        Args:
            read: returns (number of the source, or "" for the query; name as Spark has it) -> number.
        """
        if self.is_watched and time.monotonic() >= self._query_read_s + QUERY_POLL_S:
            found = read()
            self._query_read_s = time.monotonic()
            with self._lock:
                self._query = found or self._query

    def families(self) -> "list[Metric]":
        """Return the metrics as of now, each sample with the label `stream`."""
        with self._lock:
            return [*self._counters(), *self._gauges(), *self._checkpoint(), *self._source()]

    def _counters(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily

        for key, (name, text) in _RUN_COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=["stream"])
            yield self._fill(family, {(): self._counts[key]})
        text = "Time that steps have waited for checkpoints."
        waited = CounterMetricFamily("siltstone_checkpoint_wait_seconds", text, labels=["stream"], unit="seconds")
        yield self._fill(waited, {(): self._waited_s})
        for key, (name, text, unit) in _OPERATOR_COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=["stream", "operator"], unit=unit)
            yield self._fill(family, {(operator,): n for operator, n in self._by_operator[key].items()})

        text = "Materializations by this run that were started, completed, failed or given up."
        family = CounterMetricFamily("siltstone_materializations", text, labels=["stream", "operator", "event"])
        yield self._fill(family, self._materializations)

    def _gauges(self) -> "Iterator[Metric]":
        text = "Time that the newest materialization by this run took."
        took = {(operator,): seconds for operator, seconds in self._materialized_s.items()}
        yield self._gauge("siltstone_materialization_seconds", text, took, "operator", unit="seconds")
        for key, (name, text) in _OPERATOR_GAUGES.items():
            samples = {(operator,): n for operator, n in self._by_operator[key].items()}
            yield self._gauge(name, text, samples, "operator")
        text = "Steps processed that are in no completed checkpoint yet."
        yield self._gauge("siltstone_uncommitted_steps", text, {(): self._waiting_steps})
        text = "Time since the run began."
        yield self._gauge("siltstone_run_age_seconds", text, {(): self._seconds_since(self._began)}, unit="seconds")

    def _checkpoint(self) -> "Iterator[Metric]":
        newest = self._newest
        if newest is None:
            return
        plain: list[tuple[str, str, str, float | None]] = [
            ("siltstone_checkpoint_id", "Id of the newest completed checkpoint.", "", newest.checkpoint.id),
            (
                "siltstone_checkpoint_age_seconds",
                "Time since the newest checkpoint completed.",
                "seconds",
                self._seconds_since(newest.committed_at),
            ),
            (
                "siltstone_event_time_lag_seconds",
                "Time since the highest event time in the newest checkpoint.",
                "seconds",
                newest.checkpoint.event_time_max and self._seconds_since(newest.checkpoint.event_time_max),
            ),
            ("siltstone_checkpoint_bytes", "Bytes stored for the newest checkpoint.", "bytes", newest.checkpoint.bytes),
            (
                "siltstone_checkpoint_seconds",
                "Time the driver took to complete the newest checkpoint.",
                "seconds",
                newest.seconds,
            ),
        ]
        for name, text, unit, value in plain:
            if value is not None:
                yield self._gauge(name, text, {(): value}, unit=unit)
        yield from self._parts(newest.checkpoint)
        text = "How many deltas the policy allows the operator before the next base (D)."
        yield self._gauge(
            "siltstone_checkpoint_d", text, {(name,): d for name, d in newest.checkpoint.d.items()}, "operator"
        )
        shown = tuple(Form)
        forms = {
            (name, form.value): float(form is has) for name, has in newest.checkpoint.forms.items() for form in shown
        }
        text = "1 for the form that the newest checkpoint has of the operator, 0 for the others."
        yield self._gauge("siltstone_checkpoint_form", text, forms, "operator", "form")

    def _parts(self, checkpoint: CheckpointRecord | Completed) -> "Iterator[Metric]":
        """The sizes of FLIP-158's two parts of a checkpoint: what is materialized (bases), and the log (deltas)."""
        record = checkpoint.commit if isinstance(checkpoint, Completed) else checkpoint
        whole, new = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for operator, of in record.statistics.get("operators", {}).items():
            for state in recorded_states(record, operator):
                whole[operator, _MATERIALIZED] += round(state.base_bytes)
                whole[operator, _LOG] += round(state.deltas_bytes + state.index_bytes)
            for table in of.get("tables", {}):
                cost = recorded_cost(record, operator, table)
                new[operator, _LOG if cost.form is Form.DELTA else _MATERIALIZED] += cost.bytes
                new[operator, _LOG] += cost.index_bytes
        text = "Bytes that a restore of the newest checkpoint reads of an operator: of bases, and of deltas."
        yield self._gauge("siltstone_chain_bytes", text, whole, "operator", "part", unit="bytes")
        text = "Bytes that the newest checkpoint has stored of an operator: as bases, and as deltas."
        yield self._gauge("siltstone_checkpoint_part_bytes", text, new, "operator", "part", unit="bytes")

    def _source(self) -> "Iterator[Metric]":
        rates = {"inputRowsPerSecond": "input", "processedRowsPerSecond": "processed"}
        for key, kind in rates.items():
            if ("", key) in self._query:
                text = f"Spark's {key} of its newest micro-batch."
                yield self._gauge(f"siltstone_query_{kind}_rows_per_second", text, {(): self._query["", key]})
        lag = self.lag.lag
        if lag is not None:
            text = "Rows that wait in sources which tell it, after the newest micro-batch."
            yield self._gauge("siltstone_lag_rows", text, {(): lag.rows})
            if lag.left_s is not None:
                text = "Time until no row waits, at the rate since the run began to be behind."
                yield self._gauge("siltstone_catch_up_seconds", text, {(): lag.left_s}, unit="seconds")
        reported = {key: value for key, value in self._query.items() if key[0]}
        text = "Numbers that a source reports to Spark, such as Kafka's maxOffsetsBehindLatest."
        yield self._gauge("siltstone_source_reported", text, reported, "source", "name")

    def _gauge(
        self, name: str, text: str, samples: Mapping[tuple[str, ...], float], *labels: str, unit: str = ""
    ) -> "Metric":
        from prometheus_client.core import GaugeMetricFamily

        return self._fill(GaugeMetricFamily(name, text, labels=["stream", *labels], unit=unit), samples)

    def _fill(self, family: Any, samples: Mapping[tuple[str, ...], float]) -> "Metric":
        for labels, value in samples.items():
            family.add_metric([self._stream, *labels], value)
        return family

    def _seconds_since(self, time: datetime) -> float:
        return max(0.0, (self._now() - time).total_seconds())

    def _set(self, name: str, operator: str, value: float) -> None:
        self._by_operator[name][operator] = value

    def _add(self, name: str, operator: str, value: float) -> None:
        counts = self._by_operator[name]
        counts[operator] = counts.get(operator, 0) + value

    def _forget_waiting(self) -> None:
        self._waiting_steps, self._query = 0, {}
        self._by_operator["waiting_rows"] = dict.fromkeys(self._by_operator["waiting_rows"], 0)
