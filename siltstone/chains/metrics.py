"""The health of materialization, and counts of refused rows, as OpenMetrics families."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from siltstone.chains.due import OperatorHealth
from siltstone.chains.materialization_rules import Health

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_GAUGES: dict[str, tuple[str, str, Callable[[OperatorHealth], float | None]]] = {
    "siltstone_materialization_failures": ("Failures since the last success or base.", "", lambda h: h.facts.failures),
    "siltstone_materialization_since_success_seconds": (
        "Time since the last success or base.",
        "seconds",
        lambda h: h.seconds_since,
    ),
    "siltstone_materialization_stalled": (
        "1 if there was no success or base for too long, else 0.",
        "",
        lambda h: float(h.health is Health.STALLED),
    ),
    "siltstone_chain_amplification_ratio": (
        "Bytes of the chain per byte of live state.",
        "ratio",
        lambda h: h.facts.amplification,
    ),
}


def health_metrics(health: Mapping[str, OperatorHealth], stream: str) -> "list[Metric]":
    """Return one gauge per number, with a sample per operator."""
    from prometheus_client.core import GaugeMetricFamily

    families = []
    for name, (text, unit, value_of) in _GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=["stream", "operator"], unit=unit)
        for operator, found in health.items():
            value = value_of(found)
            if value is not None:
                family.add_metric([stream, operator], value)
        families.append(family)
    return families


_ROWS_LEFT = {
    "siltstone_dead_letters": "Rows that an operator could not take, which went to the sink of dead letters.",
    "siltstone_late_rows": "Rows that were late for an operator, whatever happened to them.",
}


def row_metrics(dead_letters: Mapping[str, int], late: Mapping[str, int], stream: str) -> "list[Metric]":
    """Return counters of dead letters and of late rows, with a sample for each operator that has any."""
    from prometheus_client.core import CounterMetricFamily

    families = []
    for (name, text), counts in zip(_ROWS_LEFT.items(), (dead_letters, late), strict=True):
        family = CounterMetricFamily(name, text, labels=["stream", "operator"])
        for operator, count in counts.items():
            family.add_metric([stream, operator], count)
        families.append(family)
    return families
