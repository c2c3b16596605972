"""Flights from New York City in 2013: aircraft, routes, carriers, and an alert when an aircraft stays late.

    source -> aircraft (tailnum) -> alerts -> carriers (carrier)
           '> routes (origin, dest)

A flight is late if it arrives at least `LATE_MINUTES` after schedule. A flight that was cancelled or landed elsewhere
has no arrival: it is counted, and neither lengthens nor ends a run of late flights. Flights without a tail number (all
of them cancelled) have the tail number `UNKNOWN`. The results depend only on the order of the flights, not on how they
are split into micro-batches.
"""

from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.aggregates.operator import Aggregate, Average, Count, First, Last, Max, Min, Sum
from siltstone.operator import (
    ListState,
    MapState,
    OpaqueState,
    Operator,
    Rows,
    State,
    ValueState,
    WindowState,
)
from siltstone.stream import Stream

from .flights_data import SCHEMA, check_period, prepare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UNKNOWN = "(unknown)"
LATE_MINUTES = 15
"""definition of late by the United States Department of Transportation"""
RUN = 3
"""number of late flights in a row that raise an alert, once per run"""
WEEK = timedelta(days=7)
HISTOGRAM_FROM_MINUTES, HISTOGRAM_WIDTH_MINUTES, HISTOGRAM_BINS = -60, 10, 128
"""bins of departure delays, from one hour early; the first and last bin have all delays beyond"""

TIME = pa.timestamp("us", tz="UTC")
ORDER = ("event_time", "sequence")
ALERT = pa.schema(
    [
        ("tailnum", pa.string()),
        ("event_time", TIME),
        ("sequence", pa.int64()),
        ("carrier", pa.string()),
        ("flight", pa.int64()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("arr_delay", pa.int64()),
        ("run_minutes", pa.int64()),
        ("flights_last_week", pa.int64()),
        ("late_last_week", pa.int64()),
    ]
)
"""The flight that made a run of late flights `RUN` long. `arr_delay` is its own delay, `run_minutes` that of the whole
run. `flights_last_week` and `late_last_week` count the aircraft's flights of the seven days up to and including it."""
IN_WINDOW = {
    "event_time": TIME,
    "sequence": pa.int64(),
    "origin": pa.string(),
    "dest": pa.string(),
    "arr_delay": pa.int64(),
}
IN_HISTORY = {
    "sequence": pa.int64(),
    "event_time": TIME,
    "tailnum": pa.string(),
    "run_minutes": pa.int64(),
}


def _empty_histogram() -> np.ndarray:
    return np.zeros(HISTOGRAM_BINS, "<i8")


def _histogram_bytes(histogram: np.ndarray) -> bytes:
    return histogram.tobytes()


def _histogram_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i8").copy()


class Aircraft(Operator):
    """Keeps totals, routes, delays and the last week of every aircraft, and raises alerts."""

    name = "aircraft"
    key = {"tailnum": pa.string()}  # noqa: RUF012
    inputs = tuple(name for name in SCHEMA.names if name != "tailnum")
    order_by = ORDER
    output = ALERT

    totals = ValueState(
        value={
            "flights": pa.int64(),
            "cancelled": pa.int64(),
            "diverted": pa.int64(),
            "late": pa.int64(),
            "dep_delay_minutes": pa.int64(),
            "arr_delay_minutes": pa.int64(),
            "air_time_minutes": pa.int64(),
            "distance_miles": pa.int64(),
            "first_seen": TIME,
            "last_seen": TIME,
            "late_run": pa.int64(),
            "late_run_minutes": pa.int64(),
        }
    )
    last_week = WindowState(value=IN_WINDOW, order="event_time")
    """the flights since seven days before the aircraft's last one"""
    routes = MapState(
        key={"origin": pa.string(), "dest": pa.string()},
        value={"flights": pa.int64(), "last_flown": TIME},
    )
    delays = OpaqueState(create=_empty_histogram, serialize=_histogram_bytes, deserialize=_histogram_of)
    """a histogram of departure delays: `HISTOGRAM_BINS` little-endian int64"""

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Process flights in event-time order; return the alerts they raise."""
        late, run, run_minutes = self._take_totals(rows, state)
        self._take_routes(rows, state)
        self._take_delays(rows, state)
        state.last_week.insert(rows.keys, rows.key_index, rows.table.select(list(IN_WINDOW)))
        raised = np.flatnonzero(pc.and_(late, pc.equal(run, RUN)))
        flown, of_them_late = _in_last_week(rows, raised, *state.last_week.get(rows.keys))
        state.last_week.evict(rows.keys, pc.subtract(rows.last("event_time"), WEEK))
        found = {
            "run_minutes": run_minutes.take(pa.array(raised)),
            "flights_last_week": pa.array(flown),
            "late_last_week": pa.array(of_them_late),
        }
        alerts = rows.table.take(pa.array(raised))
        columns = [found[name] if name in found else alerts.column(name) for name in ALERT.names]
        return pa.table(columns, schema=ALERT)

    @staticmethod
    def _take_totals(rows: Rows, state: State) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Update the totals. Return, per flight: whether it is late, and the length and minutes of its run so far."""
        cancelled, delay = rows.table["cancelled"], rows.table["arr_delay"]
        arrived = delay.is_valid()
        late = pc.fill_null(pc.greater_equal(delay, LATE_MINUTES), False)
        on_time = pc.and_not(arrived, late)
        added = {
            "cancelled": cancelled,
            "diverted": pc.and_not(pc.invert(cancelled), arrived),
            "late": late,
            "dep_delay_minutes": "dep_delay",
            "arr_delay_minutes": delay,
            "air_time_minutes": "air_time",
            "distance_miles": pc.if_else(cancelled, 0, rows.table["distance"]),
        }
        old = state.totals.get(rows.keys)
        run = rows.running(late, restart=on_time, initial=old["late_run"])
        late_minutes = pc.if_else(late, delay, 0)
        run_minutes = rows.running(late_minutes, restart=on_time, initial=old["late_run_minutes"])
        state.totals.put(
            rows.keys,
            {
                "flights": rows.count(initial=old["flights"]),
                **{name: rows.sum(column, initial=old[name]).fill_null(0) for name, column in added.items()},
                "first_seen": rows.first("event_time", initial=old["first_seen"]),
                "last_seen": rows.last("event_time"),
                "late_run": rows.last(run),
                "late_run_minutes": rows.last(run_minutes),
            },
        )
        return late, run, run_minutes

    @staticmethod
    def _take_routes(rows: Rows, state: State) -> None:
        flown = rows.filter(pc.invert(rows.table["cancelled"])).by("origin", "dest")
        old = state.routes.get(flown.keys.columns)
        flights, last_flown = flown.count(initial=old["flights"]), flown.max("event_time")
        state.routes.put(flown.keys.with_columns({"flights": flights, "last_flown": last_flown}))

    @staticmethod
    def _take_delays(rows: Rows, state: State) -> None:
        departed = rows.filter(rows.table["dep_delay"].is_valid())
        place = (departed.table["dep_delay"].to_numpy() - HISTOGRAM_FROM_MINUTES) // HISTOGRAM_WIDTH_MINUTES
        groups, group = np.unique(departed.key_groups, return_inverse=True)
        cell = group * HISTOGRAM_BINS + np.clip(place, 0, HISTOGRAM_BINS - 1)
        added = np.bincount(cell, minlength=len(groups) * HISTOGRAM_BINS).reshape(-1, HISTOGRAM_BINS)
        for key_group, histogram in zip(groups, added, strict=True):
            state.delays[key_group] += histogram


class Carriers(Operator):
    """Keeps the alerts of every carrier, and its aircraft with the most alerts; of several, the first to reach them."""

    name = "carriers"
    key = {"carrier": pa.string()}  # noqa: RUF012
    reads = "aircraft"
    inputs = ("tailnum", "event_time", "sequence", "run_minutes")
    order_by = ORDER

    totals = ValueState(
        value={
            "alerts": pa.int64(),
            "run_minutes": pa.int64(),
            "last_alert": TIME,
            "worst_tailnum": pa.string(),
            "worst_alerts": pa.int64(),
        }
    )
    offenders = MapState(key={"tailnum": pa.string()}, value={"alerts": pa.int64(), "run_minutes_most": pa.int64()})
    history = ListState(value=IN_HISTORY)
    """every alert, in event-time order"""

    def process(self, rows: Rows, state: State) -> None:
        """Process alerts in event-time order."""
        state.history.append(rows.keys, rows.key_index, rows.table.select(list(IN_HISTORY)))
        count = self._take_offenders(rows, state)
        old = state.totals.get(rows.keys)
        more = pc.greater(rows.max(count), pc.fill_null(old["worst_alerts"], 0))
        # For each carrier: the first of the alerts with the highest count of an aircraft.
        worst = rows.last("tailnum", by=(count, -np.arange(len(rows))))
        state.totals.put(
            rows.keys,
            {
                "alerts": rows.count(initial=old["alerts"]),
                "run_minutes": rows.sum("run_minutes", initial=old["run_minutes"]),
                "last_alert": rows.last("event_time"),
                "worst_tailnum": pc.if_else(more, worst, old["worst_tailnum"]),
                "worst_alerts": rows.max(count, initial=old["worst_alerts"]),
            },
        )

    @staticmethod
    def _take_offenders(rows: Rows, state: State) -> pa.Array:
        """Return, per alert, the number of alerts that its aircraft has had with this carrier, including this one."""
        offences = rows.by("tailnum")
        old = state.offenders.get(offences.keys.columns)
        alerts = offences.count(initial=old["alerts"])
        most = offences.max("run_minutes", initial=old["run_minutes_most"])
        state.offenders.put(offences.keys.with_columns({"alerts": alerts, "run_minutes_most": most}))
        return offences.running(initial=old["alerts"])


def source(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """Read the flights, with one micro-batch per day or week (option `period`); first prepare the files if needed.

    Raises:
        UsageError: an unknown period, or the package with the data is not installed.
    """
    period = check_period(options["period"])
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    directory = Path(options["directory"]) / period
    prepare(directory, period)
    reader = spark.readStream.schema(from_arrow_schema(SCHEMA)).option("maxFilesPerTrigger", 1)
    flights = reader.parquet(directory.absolute().as_uri())
    return flights.withColumn("tailnum", F.coalesce("tailnum", F.lit(UNKNOWN)))


def _in_last_week(rows: Rows, raised: np.ndarray, at: np.ndarray, week: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Count the flights, and the late flights, of the aircraft of some flights in the seven days up to each.

    `at` and `week` are the windows of all aircraft, ordered by aircraft and event time. So key and time combined, and
    key and sequence combined, are ascending numbers.
    """
    flights = rows.table.take(pa.array(raised))
    key = rows.key_index[raised] << 32
    since = pc.subtract(flights["event_time"], WEEK).to_numpy().astype("datetime64[s]").astype(np.int64)
    event_time = week["event_time"].to_numpy().astype("datetime64[s]").astype(np.int64)
    start = np.searchsorted((at << 32) + event_time, key + since)
    end = np.searchsorted((at << 32) + week["sequence"].to_numpy(), key + flights["sequence"].to_numpy(), side="right")
    late = week["arr_delay"].fill_null(0).to_numpy() >= LATE_MINUTES
    late_before = np.append(0, np.cumsum(late))
    return end - start, late_before[end] - late_before[start]


ROUTES = Aggregate(
    "routes",
    key={"origin": pa.string(), "dest": pa.string()},
    aggregates=[
        Count("flights"),
        Sum("cancelled", of="cancelled"),
        Count("arrived", of="arr_delay"),
        Sum("arr_delay_minutes", of="arr_delay"),
        Min("arr_delay_least", of="arr_delay"),
        Max("arr_delay_most", of="arr_delay"),
        Average("arr_delay_mean", of="arr_delay"),
        First("first_carrier", of="carrier", type=pa.string(), by="sequence", by_type=pa.int64()),
        Last("last_carrier", of="carrier", type=pa.string(), by="sequence", by_type=pa.int64()),
    ],
    output=False,
)

FLIGHTS = Stream(
    "flights",
    source=source,
    operators=[Aircraft(), ROUTES, Carriers()],
    event_time="event_time",
    event_days=(date(2013, 1, 1), date(2013, 12, 31)),
    sinks={"aircraft": None},  # a Delta table in the warehouse
    options={"period": "week"},
)
