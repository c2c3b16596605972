"""An operator with a TTL on every kind of state, and a dictionary that tells what it must hold after each step."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siltstone.operator import TTL, Keys, ListState, MapState, Operator, Rows, State, ValueState, WindowState
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime
from siltstone.times import to_us

UNIT = timedelta(seconds=20)
AFTER = timedelta(minutes=64)
"""so a stamp is a whole minute"""
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
SOURCE = pa.schema([("k", pa.int64()), ("do", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
ENTRIES = 3
TABLES: tuple[str, ...] = ("value", "map", "list", "window")
VALUE = {"n": pa.int64()}


class Kept(Operator):
    """Puts, reads or drops what it has of a key, in all of its variables."""

    name = "kept"
    key = {"k": pa.int64()}  # noqa: RUF012

    def __init__(self, ttls: Mapping[str, TTL | None]) -> None:
        self.value = ValueState(VALUE, ttl=ttls["value"])
        self.map = MapState({"m": pa.int64()}, VALUE, ttl=ttls["map"])
        self.list = ListState(VALUE, ttl=ttls["list"])
        self.window = WindowState(VALUE, order="n", ttl=ttls["window"])
        super().__init__()

    def process(self, rows: Rows, state: State) -> None:
        table = rows.table
        for do in ("put", "read", "drop"):
            chosen = rows.filter(pc.equal(table["do"], do))  # pyright: ignore[reportAttributeAccessIssue]
            if len(chosen):
                getattr(self, f"_{do}")(chosen, state)

    def _put(self, rows: Rows, state: State) -> None:
        n = rows.max("n")
        state.value.put(rows.keys, {"n": n})
        state.map.put(rows.keys.with_columns({"m": n.to_numpy() % ENTRIES, "n": n}))
        for variable, write in ((state.list, "append"), (state.window, "insert")):
            getattr(variable, write)(rows.keys, rows.key_index, rows.table.select(["n"]))

    def _read(self, rows: Rows, state: State) -> None:
        assert state.value.get(rows.keys).column_names == ["n"]
        assert state.map.get(_entries(rows.keys, range(ENTRIES))).column_names == ["n"]
        for variable in (state.list, state.window):
            at, found = variable.get(rows.keys)
            assert found.column_names == ["n"] and len(at) == len(found)

    def _drop(self, rows: Rows, state: State) -> None:
        state.value.delete(rows.keys)
        state.map.delete(_entries(rows.keys, [0]))
        state.list.delete(rows.keys)
        state.window.evict(rows.keys, rows.max("n"))


def _entries(keys: Keys, of: Any) -> pa.Table:
    owners = keys.columns.take(pa.array(np.repeat(np.arange(len(keys)), len(of))))
    return owners.append_column("m", pa.array(np.tile(np.array(of, np.int64), len(keys))))


def kept(ttls: Mapping[str, TTL | None], **options: Any) -> Stream:
    """A stream of it. Late rows are processed."""
    event_time = EventTime("at", delay="0 minutes", max_ahead=timedelta(days=36500))
    operators = options.pop("operators", None) or [Kept(ttls)]
    return Stream("s", None, operators, event_time=event_time, max_parallelism=8, late="process", **options)


def rows_of(found: Mapping[int, tuple[str, int, int]]) -> pa.Table:
    """Rows of key -> (what to do, n, event time in units)."""
    plain = [{"k": k, "do": do, "n": n, "at": BEGIN + unit * UNIT} for k, (do, n, unit) in found.items()]
    return pa.Table.from_pylist(plain, SOURCE)


class Model:
    """What the state is: variable -> (key, further key) -> [n, stamp in microseconds or None]."""

    def __init__(self, ttls: Mapping[str, TTL | None]) -> None:
        self.ttls = ttls
        self.held: dict[str, dict[tuple[int, int], list[int | None]]] = {name: {} for name in TABLES}
        self.tails: dict[str, dict[int, int]] = {"list": {}, "window": {}}

    def step(self, rows: Mapping[int, tuple[str, int, int]], clocks: Mapping[str, datetime | None]) -> None:
        for name in TABLES:
            ttl = self.ttls[name]
            now = None if ttl is None or ttl.after is None else clocks[ttl.clock]
            us = None if now is None else to_us(now)
            stamp = None if us is None or ttl is None or ttl.after_us is None else us - us % (ttl.after_us // 64)
            for key, (do, n, _) in rows.items():
                getattr(self, f"_{do}")(name, key, n, stamp)
            if us is not None and ttl is not None and ttl.after_us is not None:
                self._expire(name, us, ttl.after_us, stamp)
            if name in self.tails:
                owners = {key for key, _ in self.held[name]}
                self.tails[name] = {key: tail for key, tail in self.tails[name].items() if key in owners or not ttl}

    def _put(self, name: str, key: int, n: int, stamp: int | None) -> None:
        further = {"value": 0, "map": n % ENTRIES}.get(name)
        if further is None:
            further = self.tails[name].get(key, 0)
            self.tails[name][key] = further + 1
        self.held[name][key, further] = [n, stamp]

    def _read(self, name: str, key: int, n: int, stamp: int | None) -> None:
        ttl = self.ttls[name]
        for (owner, _), row in self.held[name].items():
            if owner == key and ttl is not None and ttl.renew == "read" and stamp is not None:
                row[1] = stamp if row[1] is None else max(row[1], stamp)

    def _drop(self, name: str, key: int, n: int, stamp: int | None) -> None:
        for owner, further in [*self.held[name]]:
            row = self.held[name][owner, further]
            gone = {"map": further == 0, "window": (row[0] or 0) < n}.get(name, True)
            if owner == key and gone:
                del self.held[name][owner, further]
        if name == "list":
            self.tails[name].pop(key, None)
        if name == "window" and self.ttls[name] and all(owner != key for owner, _ in self.held[name]):
            self.tails[name].pop(key, None)

    def _expire(self, name: str, us: int, after_us: int, stamp: int | None) -> None:
        for address, row in [*self.held[name].items()]:
            if row[1] is None:
                row[1] = stamp
            elif row[1] + after_us <= us:
                del self.held[name][address]

    def check(self, tester: StreamTester) -> None:
        """The tester has this state, as a restore shows it."""
        for name in TABLES:
            shown = tester.state("kept", name)
            stamped = "written_at" in shown.column_names
            assert stamped == (self.ttls[name] is not None)
            stamps = shown["written_at"].cast(pa.int64()).to_pylist() if stamped else [None] * len(shown)
            further = {"value": [0] * len(shown), "map": "m"}.get(name, "position")
            further = shown[further].to_pylist() if isinstance(further, str) else further
            rows = zip(shown["k"].to_pylist(), further, shown["n"].to_pylist(), stamps, strict=True)
            assert {(k, m): [n, at] for k, m, n, at in rows} == self.held[name], name
            if name in self.tails:
                bounds = tester.state("kept", f"{name}.bounds").to_pylist()
                assert {each["k"]: each["tail"] for each in bounds} == self.tails[name], name
                for each in bounds:
                    first = min((at for k, at in self.held[name] if k == each["k"]), default=each["tail"])
                    assert each["head"] == first or (name == "list" and not self.ttls[name])


class Checked:
    """A tester beside the model: `step` and `advance` take a step of both."""

    def __init__(self, ttls: Mapping[str, TTL | None], **options: Any) -> None:
        self.tester = StreamTester(kept(ttls), schema=SOURCE, now=BEGIN, **options)
        self.model = Model(ttls)

    def step(self, rows: Mapping[int, tuple[str, int, int]]) -> None:
        self.tester.step(rows_of(rows))
        self._follow(rows)

    def advance(self, units: int) -> None:
        self.while_stepping(lambda: self.tester.advance(units * UNIT))

    def while_stepping(self, do: Any) -> None:
        """Do something that may take a step without rows."""
        before = len(self.tester._steps)  # noqa: SLF001  (a tester shows no steps)
        do()
        taken = len(self.tester._steps) - before  # noqa: SLF001  (as above)
        assert taken in (0, 1)
        if taken:
            self._follow({})

    def _follow(self, rows: Mapping[int, tuple[str, int, int]]) -> None:
        self.model.step(rows, {"event": self.tester.watermark, "processing": self.tester.now})
        self.model.check(self.tester)
