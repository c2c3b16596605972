"""Count uploads in the process that makes them, send the counts in acknowledgements, merge them, format OpenMetrics.

UploadMetrics       counts, thread-safe; `take()` returns the counts since the last call
UploadStatistics    the counts, which can be merged, converted to JSON and asked for quantiles
Histogram           a distribution in logarithmic buckets, with values accurate to 1 %

The histogram is our own because every acknowledgement has one: one value takes 62 bytes of JSON, and 1046 bytes as a
sketch of ddsketch 3.0, which stores the whole array around it. Those of prometheus_client have fixed buckets and can be
merged only through files of one machine.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from siltstone.errors import StateError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import CollectorRegistry

_LOG_GAMMA = math.log(1.01 / 0.99)
"""two neighbouring buckets' ratio: their middle is within 1 % of all they hold (the DDSketch of Masson et al., 2019)"""
_LEAST = 1e-9
_SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SEGMENTS_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_ATTEMPTS_BOUNDS = (1, 2, 3, 5, 10, 20, 50, 100)
_BYTES_BOUNDS = tuple(float(1 << bits) for bits in range(12, 31, 2))
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class Histogram:
    """The number of values in each logarithmic bucket, and the sum of all values."""

    counts: Mapping[int, int] = field(default_factory=dict)
    sum: float = 0.0

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts.values())

    def merge(self, other: Self) -> Self:
        """Merge two histograms."""
        return type(self)(dict(Counter(self.counts) + Counter(other.counts)), self.sum + other.sum)

    def quantile(self, part: float) -> float:
        """Return the `part`-quantile of the values, accurate to 1 %; 0.0 if there are no values."""
        rank, seen = max(1, math.ceil(part * self.count)), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return _bucket_middle(bucket)
        return 0.0

    def count_below(self, bound: float) -> int:
        """Count the values up to `bound`, including those less than 2 % above it that share its bucket."""
        last = bucket_of(bound)
        return sum(count for bucket, count in self.counts.items() if bucket <= last)


def bucket_of(value: float) -> int:
    """Return the bucket of a value; all values below 1e-9 share one."""
    return math.ceil(math.log(max(value, _LEAST)) / _LOG_GAMMA)


def _bucket_middle(bucket: int) -> float:
    return 2 * math.exp(bucket * _LOG_GAMMA) / (1 + math.exp(_LOG_GAMMA))


@dataclass(frozen=True)
class UploadStatistics:
    """Counts of uploads during some time, in one or several processes.

    Attributes:
        requests: objects to store; each of them succeeds or fails.
        failures: requests that failed after all attempts.
        attempts: calls of the store, including retries and hedges. All requests of a large object count as one, and
            the retries of each.
        retries: calls after a failed one.
        objects: objects that were stored.
        bytes: their total size.
        hedges_sent: requests that were sent a second time because they were slow.
        hedges_won: hedges that finished first.
        hedges_late: requests or hedges that ended after the other one had answered.
        queue_high_water: most segments that waited at a time.
        in_flight_high_water_bytes: most bytes that waited or were being sent at a time.
        back_pressure_s: total seconds that writers waited for room.
        latency_s: seconds per stored object, from its first attempt to its answer; for one that is streamed, such as a
            large base, from its first byte.
        object_bytes: sizes of the stored objects.
        batch_segments: segments per batch.
        upload_attempts: calls of the store per stored object.
    """

    requests: int = 0
    failures: int = 0
    attempts: int = 0
    retries: int = 0
    objects: int = 0
    bytes: int = 0
    hedges_sent: int = 0
    hedges_won: int = 0
    hedges_late: int = 0
    queue_high_water: int = 0
    in_flight_high_water_bytes: int = 0
    back_pressure_s: float = 0.0
    latency_s: Histogram = field(default_factory=Histogram)
    object_bytes: Histogram = field(default_factory=Histogram)
    batch_segments: Histogram = field(default_factory=Histogram)
    upload_attempts: Histogram = field(default_factory=Histogram)

    def merge(self, other: "UploadStatistics") -> "UploadStatistics":
        """Merge two statistics: add counts, and take the higher of high-water marks."""
        merged: dict[str, Any] = {}
        for name in _NAMES:
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, Histogram):
                merged[name] = ours.merge(theirs)
            else:
                merged[name] = max(ours, theirs) if "high_water" in name else ours + theirs
        return UploadStatistics(**merged)

    def quantile(self, part: float) -> float:
        """Return the `part`-quantile of the stored objects' seconds."""
        return self.latency_s.quantile(part)

    def summary(self) -> dict[str, float]:
        """Return a flat summary: counts, latencies p50 to p99.9 in seconds, sizes of objects and batches."""
        plain = {name: getattr(self, name) for name in _NAMES if name not in _HISTOGRAMS}
        latencies = {f"latency_{name}_s": round(self.quantile(part), 6) for name, part in QUANTILES.items()}
        sizes = {
            "object_p50_bytes": self.object_bytes.quantile(0.5),
            "object_max_bytes": self.object_bytes.quantile(1.0),
            "batch_p50_segments": self.batch_segments.quantile(0.5),
            "batch_max_segments": self.batch_segments.quantile(1.0),
        }
        return plain | latencies | {name: float(round(value)) for name, value in sizes.items()}

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain dict that `from_json` reads; zeros are left out."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in _NAMES if name not in _HISTOGRAMS}
        for name in _HISTOGRAMS:
            histogram = getattr(self, name)
            if histogram.counts:
                pairs = sorted(histogram.counts.items())
                plain[name] = {"sum": histogram.sum, "buckets": [b for b, _ in pairs], "counts": [c for _, c in pairs]}
        return {name: value for name, value in plain.items() if value}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_json` made.

        Raises:
            StateError: the dict is not valid.
        """
        try:
            given = dict(plain)
            for name in _HISTOGRAMS & given.keys():
                part = given[name]
                pairs = zip(part["buckets"], part["counts"], strict=True)
                given[name] = Histogram({int(b): int(c) for b, c in pairs}, float(part["sum"]))
            for name in given.keys() - _HISTOGRAMS:
                given[name] = float(given[name]) if name.endswith("_s") else int(given[name])
            return cls(**given)
        except (TypeError, ValueError, KeyError) as error:
            raise StateError(f"upload statistics cannot be read: {error}") from None


_NAMES = tuple(f.name for f in fields(UploadStatistics))
_HISTOGRAMS = {"latency_s", "object_bytes", "batch_segments", "upload_attempts"}


class UploadMetrics:
    """Counts uploads; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._buckets: dict[str, Counter[int]] = {name: Counter() for name in _HISTOGRAMS}
        self._sums: dict[str, float] = dict.fromkeys(_HISTOGRAMS, 0.0)
        self._high = {"queue_high_water": 0, "in_flight_high_water_bytes": 0}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to the count `name` of `UploadStatistics`."""
        with self._lock:
            self._counts[name] += amount

    def count_stored(self, size_bytes: int, seconds: float, attempts: int) -> None:
        """Count a request that succeeded after this number of calls of the store, hedges included."""
        with self._lock:
            self._counts["objects"] += 1
            self._counts["bytes"] += size_bytes
            self._observe("latency_s", seconds)
            self._observe("object_bytes", size_bytes)
            self._observe("upload_attempts", attempts)

    def count_batch(self, segments: int) -> None:
        """Count a batch of this number of segments."""
        with self._lock:
            self._observe("batch_segments", segments)

    def note_level(self, queue: int, in_flight_bytes: int) -> None:
        """Record how much waits or is being sent now."""
        with self._lock:
            high = self._high
            high["queue_high_water"] = max(queue, high["queue_high_water"])
            high["in_flight_high_water_bytes"] = max(in_flight_bytes, high["in_flight_high_water_bytes"])

    def count_wait(self, seconds: float) -> None:
        """Count the seconds that a writer waited for room."""
        with self._lock:
            self._seconds += seconds

    def take(self) -> UploadStatistics:
        """Return the counts since the last `take`."""
        with self._lock:
            taken: dict[str, Any] = {**self._counts, **self._high, "back_pressure_s": self._seconds}
            for name in _HISTOGRAMS:
                taken[name] = Histogram(dict(self._buckets[name]), self._sums[name])
            self._reset()
            return UploadStatistics(**taken)

    def _observe(self, name: str, value: float) -> None:
        self._buckets[name][bucket_of(value)] += 1
        self._sums[name] += value


_COUNTERS = {
    "requests": ("siltstone_upload_requests", "Objects that were to be stored.", ""),
    "failures": ("siltstone_upload_failures", "Objects that could not be stored.", ""),
    "attempts": ("siltstone_upload_attempts", "Calls of the store.", ""),
    "retries": ("siltstone_upload_retries", "Calls of the store after a failed one.", ""),
    "objects": ("siltstone_upload_objects", "Objects stored.", ""),
    "bytes": ("siltstone_upload_bytes", "Bytes stored.", "bytes"),
    "hedges_sent": ("siltstone_upload_hedges_sent", "Slow requests sent again.", ""),
    "hedges_won": ("siltstone_upload_hedges_won", "Hedges that were the first to finish.", ""),
    "hedges_late": ("siltstone_upload_hedges_late", "Slower twins that ended after the answer.", ""),
    "back_pressure_s": ("siltstone_upload_back_pressure_seconds", "Time writers waited for room.", "seconds"),
}
_GAUGES = {
    "queue_high_water": ("siltstone_upload_queue_high_water_segments", "Most segments waiting.", "segments"),
    "in_flight_high_water_bytes": ("siltstone_upload_in_flight_high_water_bytes", "Most bytes under way.", "bytes"),
}
_DISTRIBUTIONS = {
    "latency_s": ("siltstone_upload_latency_seconds", "Time to store an object.", "seconds", _SECONDS_BOUNDS),
    "object_bytes": ("siltstone_upload_object_bytes", "Sizes of objects.", "bytes", _BYTES_BOUNDS),
    "batch_segments": ("siltstone_upload_batch_segments", "Segments in a batch.", "segments", _SEGMENTS_BOUNDS),
    "upload_attempts": ("siltstone_upload_object_attempts", "Calls of the store per object.", "", _ATTEMPTS_BOUNDS),
}


class _Collector:
    """Makes the families of a registry anew for each exposition."""

    def __init__(self, collect: "Callable[[], Iterable[Metric]]") -> None:
        self.collect = collect


def upload_families(statistics: UploadStatistics, labels: Mapping[str, str]) -> "Iterator[Metric]":
    """Yield one family for each number, with `labels` on each sample."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names, values = list(labels), list(labels.values())
    for name, (metric, text, unit) in _COUNTERS.items():
        counter = CounterMetricFamily(metric, text, labels=names, unit=unit)
        counter.add_metric(values, getattr(statistics, name))
        yield counter
    for name, (metric, text, unit) in _GAUGES.items():
        gauge = GaugeMetricFamily(metric, text, labels=names, unit=unit)
        gauge.add_metric(values, getattr(statistics, name))
        yield gauge
    for name, (metric, text, unit, bounds) in _DISTRIBUTIONS.items():
        histogram: Histogram = getattr(statistics, name)
        buckets = [(str(float(bound)), float(histogram.count_below(bound))) for bound in bounds]
        family = HistogramMetricFamily(metric, text, labels=names, unit=unit)
        family.add_metric(values, [*buckets, ("+Inf", float(histogram.count))], sum_value=histogram.sum)
        yield family


def registry_of(collect: "Callable[[], Iterable[Metric]]") -> "CollectorRegistry":
    """Make a registry of its own for families that `collect` makes anew for each exposition."""
    # Imported here, since every worker counts and only the driver shows.
    from prometheus_client.registry import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(collect))  # pyright: ignore[reportArgumentType]
    return registry


def openmetrics(statistics: UploadStatistics, labels: Mapping[str, str], further: "Sequence[Metric]" = ()) -> str:
    """Format statistics as OpenMetrics text with `labels` on each sample, then further families; ends in `# EOF`."""
    from prometheus_client.openmetrics.exposition import generate_latest

    return generate_latest(registry_of(lambda: [*upload_families(statistics, labels), *further])).decode()
