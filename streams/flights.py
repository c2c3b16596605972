"""Flights from New York City in 2013: aircraft, routes, carriers, and an alert when an aircraft stays late.

    source -> aircraft (tailnum) -> alerts -> carriers (carrier)
           '> routes (origin, dest)

A flight is late if it arrives at least `LATE_MINUTES` after schedule. One that was cancelled, or that landed
elsewhere, has no arrival: it is counted, and neither lengthens nor ends a run of late flights. Flights that
have no tail number (all of them cancelled) are kept under the tail number `UNKNOWN`. Every result depends on
the order of the flights alone, not on how they are cut into micro-batches.
"""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

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
from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import Stream
from streams.flights_data import SCHEMA, check_period, prepare
from streams.grouped import Grouped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UNKNOWN = "(unknown)"
LATE_MINUTES = 15
"""late by the definition of the United States Department of Transportation"""
RUN = 3
"""so many late flights in a row raise an alert, once a run"""
WEEK = np.timedelta64(7, "D")
HISTOGRAM_FROM_MINUTES, HISTOGRAM_WIDTH_MINUTES, HISTOGRAM_BINS = -60, 10, 128
"""departure delays from an hour early; the outer bins hold what lies beyond"""

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
"""The flight that made a run of late ones `RUN` long: `arr_delay` is its own delay, `run_minutes` that of the
whole run; and how many flights the aircraft had in the seven days up to this one, itself included, and how
many of them late."""
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
    """What every aircraft has done, and alerts."""

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
        """Take flights in event-time order; returns the alerts they raise."""
        flights = Grouped(rows)
        late, run, run_minutes = self._take_totals(flights, rows, state)
        self._take_routes(flights, rows, state)
        self._take_delays(flights, state)
        state.last_week.insert(rows.keys, flights.group, flights.table.select(list(IN_WINDOW)))
        raised = np.flatnonzero(late & (run == RUN))
        flown, of_them_late = _in_last_week(flights, raised, *state.last_week.get(rows.keys))
        state.last_week.evict(rows.keys, flights.last(flights.values("event_time")) - WEEK)
        found = {
            "run_minutes": pa.array(run_minutes[raised]),
            "flights_last_week": pa.array(flown),
            "late_last_week": pa.array(of_them_late),
        }
        alerts = flights.table.take(pa.array(raised))
        columns = [found[name] if name in found else alerts.column(name) for name in ALERT.names]
        return pa.table(columns, schema=ALERT)

    @staticmethod
    def _take_totals(flights: Grouped, rows: Rows, state: State) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which flights were late, how many in a row up to each flight, and by how many minutes together."""
        cancelled, arrived = flights.values("cancelled"), flights.present("arr_delay")
        delay, at = flights.values("arr_delay"), flights.values("event_time")
        late = arrived & (delay >= LATE_MINUTES)
        added = {
            "flights": np.ones(len(late)),
            "cancelled": cancelled,
            "diverted": ~cancelled & ~arrived,
            "late": late,
            "dep_delay_minutes": flights.values("dep_delay"),
            "arr_delay_minutes": delay,
            "air_time_minutes": flights.values("air_time"),
            "distance_miles": np.where(cancelled, 0, flights.values("distance")),
        }
        lookup = state.totals.lookup(rows.keys)
        old = {name: _numbers(lookup.values.column(name)) for name in [*added, "late_run", "late_run_minutes"]}
        on_time = arrived & ~late
        run = flights.running(late, on_time, old["late_run"])
        run_minutes = flights.running(np.where(late, delay, 0), on_time, old["late_run_minutes"])
        first_seen = np.where(lookup.found, lookup.values.column("first_seen").to_numpy(), flights.first(at))
        state.totals.put(
            rows.keys,
            {
                **{name: old[name] + flights.sums(values) for name, values in added.items()},
                "first_seen": first_seen,
                "last_seen": flights.last(at),
                "late_run": flights.last(run),
                "late_run_minutes": flights.last(run_minutes),
            },
        )
        return late, run, run_minutes

    @staticmethod
    def _take_routes(flights: Grouped, rows: Rows, state: State) -> None:
        flown = np.flatnonzero(~flights.values("cancelled"))
        first, entry = flights.entries(flown, "origin", "dest")
        at, subkeys = flights.group[first], flights.table.select(["origin", "dest"]).take(pa.array(first))
        last_flown = flights.values("event_time")[first]
        np.maximum.at(last_flown, entry, flights.values("event_time")[flown])
        old = _numbers(state.routes.get(rows.keys, at, subkeys).column("flights"))
        new = {"flights": old + np.bincount(entry, minlength=len(first)), "last_flown": last_flown}
        state.routes.put(rows.keys, at, subkeys, new)

    @staticmethod
    def _take_delays(flights: Grouped, state: State) -> None:
        departed = np.flatnonzero(flights.present("dep_delay"))
        place = (flights.values("dep_delay")[departed] - HISTOGRAM_FROM_MINUTES) // HISTOGRAM_WIDTH_MINUTES
        groups, group = np.unique(flights.key_groups[departed], return_inverse=True)
        cell = group * HISTOGRAM_BINS + np.clip(place, 0, HISTOGRAM_BINS - 1)
        added = np.bincount(cell, minlength=len(groups) * HISTOGRAM_BINS).reshape(-1, HISTOGRAM_BINS)
        for key_group, histogram in zip(groups, added, strict=True):
            state.delays[key_group] += histogram


class Carriers(Operator):
    """The alerts of every carrier, and its aircraft with most (of several, the first to get there)."""

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
        """Take alerts in event-time order."""
        alerts = Grouped(rows)
        state.history.append(rows.keys, alerts.group, alerts.table.select(list(IN_HISTORY)))
        count = self._take_offenders(alerts, rows, state)
        old = state.totals.get(rows.keys)
        # For each carrier the first of the alerts that raised an aircraft's count highest.
        worst = np.lexsort((np.arange(len(count)), -count, alerts.group))[alerts.starts]
        before = _numbers(old.column("worst_alerts"))
        new_worst = count[worst] > before
        candidates = pa.chunked_array(
            [old.column("worst_tailnum").combine_chunks(), alerts.table.column("tailnum").combine_chunks()]
        )
        state.totals.put(
            rows.keys,
            {
                "alerts": _numbers(old.column("alerts")) + alerts.sums(np.ones(len(count))),
                "run_minutes": _numbers(old.column("run_minutes")) + alerts.sums(alerts.values("run_minutes")),
                "last_alert": alerts.last(alerts.values("event_time")),
                "worst_tailnum": candidates.take(
                    pa.array(np.where(new_worst, len(before) + worst, np.arange(len(before))))
                ),
                "worst_alerts": np.maximum(before, count[worst]),
            },
        )

    @staticmethod
    def _take_offenders(alerts: Grouped, rows: Rows, state: State) -> np.ndarray:
        """int64[n]: how many alerts each alert's aircraft has had with this carrier, this one included."""
        first, entry = alerts.entries(np.arange(len(alerts.group)), "tailnum")
        at, subkeys = alerts.group[first], alerts.table.select(["tailnum"]).take(pa.array(first))
        old = state.offenders.get(rows.keys, at, subkeys)
        had, most = _numbers(old.column("alerts")), _numbers(old.column("run_minutes_most"))
        np.maximum.at(most, entry, alerts.values("run_minutes"))
        added = np.bincount(entry, minlength=len(first))
        state.offenders.put(rows.keys, at, subkeys, {"alerts": had + added, "run_minutes_most": most})
        rank = np.empty(len(entry), np.int64)
        rank[np.argsort(entry, kind="stable")] = np.arange(len(entry)) - np.repeat(np.cumsum(added) - added, added)
        return had[entry] + rank + 1


def source(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """The flights, a micro-batch a day or week (option `period`), prepared below `directory` at first.

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


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """The column with 0 for what is not there yet; the caller may write to it."""
    return np.array(column.fill_null(0).to_numpy())


def _in_last_week(
    flights: Grouped, raised: np.ndarray, at: np.ndarray, week: pa.Table
) -> tuple[np.ndarray, np.ndarray]:
    """For some flights, how many their aircraft had in the seven days up to each, and how many of them late.

    `at` and `week` are the windows of all aircraft, by aircraft and event time; so key and time, and key and
    sequence, each make one ascending number.
    """
    group = flights.group[raised] << 32
    since = (flights.values("event_time")[raised] - WEEK).astype("datetime64[s]").astype(np.int64)
    event_time = week.column("event_time").to_numpy().astype("datetime64[s]").astype(np.int64)
    start = np.searchsorted((at << 32) + event_time, group + since)
    end = np.searchsorted(
        (at << 32) + week.column("sequence").to_numpy(),
        group + flights.values("sequence")[raised],
        side="right",
    )
    late = week.column("arr_delay").fill_null(0).to_numpy() >= LATE_MINUTES
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
    sinks={"aircraft": ParquetSink()},
    options={"period": "week"},
)
