"""Timers against a model of one key: whatever the batches, restarts, crashes, rescales and backends, each fires once,
in order, at the step that the clock tells, and steps that are taken again come to the same."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.errors import BadRow
from siltstone.keyed import KeyedProcessor
from siltstone.operator import Timer, ValueState
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime
from tests.examples import examples
from tests.timed_streams import BEGIN, TIME

MINUTE, FIRST, END = 60_000_000, int(BEGIN.timestamp()) * 1_000_000, (1 << 63) - 1
DELAY, IDLE, GAP, QUIET = 2 * MINUTE, 20 * MINUTE, 5 * MINUTE, 4 * MINUTE
EVENT_TIME = EventTime(
    "at", delay=timedelta(minutes=2), idle_after=timedelta(minutes=20), per="part", max_ahead=timedelta(days=1)
)
SCHEMA = {"user": pa.int64(), "at": TIME, "part": pa.string(), "bad": pa.bool_()}


class Paired(KeyedProcessor):
    """Two timers of each key, of which each may clear or move the other, also to a time that has passed."""

    name = "paired"
    key = {"user": pa.int64()}  # noqa: RUF012
    output = pa.schema([("user", pa.int64()), ("what", pa.string()), ("at", TIME), ("now", TIME), ("rows", pa.int64())])
    seen = ValueState({"rows": pa.int64()})
    ends = Timer()
    quiet = Timer("processing")

    def handle_input(self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any) -> None:
        old, ends = state.seen.get(), max(row["at"] for row in rows) + timedelta(microseconds=GAP)
        state.seen.put({"rows": len(rows) + (old["rows"] if old else 0)})
        state.ends.set(max(filter(None, (ends, state.ends.get()))))
        state.quiet.set(state.clock.now + timedelta(microseconds=QUIET))
        if any(row["bad"] for row in rows):
            raise BadRow("bad", rows=[row["bad"] for row in rows])

    def handle_timer(self, key: tuple[Any, ...], timer: str, at: datetime, state: Any) -> Iterable[dict[str, Any]]:
        rows = (state.seen.get() or {"rows": 0})["rows"]
        yield {"user": key[0], "what": timer, "at": at, "now": state.clock.now, "rows": rows}
        if timer == "ends":
            state.seen.remove()
            if key[0] % 3 == 0:
                state.quiet.clear()
            elif key[0] % 3 == 1 and state.quiet.get() is not None:
                state.quiet.set(min(state.quiet.get(), state.clock.now))
        elif key[0] % 2 == 0:
            state.ends.clear()
        elif rows > 1:
            state.seen.put({"rows": rows - 1})
            state.ends.set(at - timedelta(microseconds=rows * MINUTE))


@dataclass
class Key:
    """One key of the model: what is set, and what it counts."""

    user: int
    rows: int = 0
    timers: dict[str, int] = field(default_factory=dict)

    def fire(self, upto: dict[str, int | None], now: int) -> Iterable[tuple[int, str, int, int, int]]:
        """Fire all that is due, round by round."""
        while due := sorted(
            (at, name) for name, at in self.timers.items() if (most := upto[name]) is not None and at <= most
        ):
            for at, name in due:
                if self.timers.get(name) != at:
                    continue
                del self.timers[name]
                yield self.user, name, at, now, self.rows
                if name == "ends":
                    self.rows = 0
                    if self.user % 3 == 0:
                        self.timers.pop("quiet", None)
                    elif self.user % 3 == 1 and "quiet" in self.timers:
                        self.timers["quiet"] = min(self.timers["quiet"], now)
                elif self.user % 2 == 0:
                    self.timers.pop("ends", None)
                elif self.rows > 1:
                    self.timers["ends"] = at - self.rows * MINUTE
                    self.rows -= 1


Row = tuple[int, int | None, str, bool]
"""user, minute, part, whether it is bad"""


class Model:
    """The whole stream: its clock, and its keys."""

    def __init__(self, every: int) -> None:
        self.now, self.watermark, self.before = FIRST, None, None
        self.every, self.open, self.late, self.bad = every, 0, 0, 0
        self.parts: dict[str, tuple[int, int]] = {}
        self.keys: dict[int, Key] = {}
        self.made: list[tuple[int, str, int, int, int]] = []

    def next_watermark(self) -> int | None:
        """The watermark of a step that begins now."""
        active = [high for high, seen in self.parts.values() if seen + IDLE > self.now]
        highs = active or [high for high, _ in self.parts.values()]
        reached = [min(highs) - DELAY] if highs else []
        return max([*reached, *([] if self.watermark is None else [self.watermark])], default=None)

    def is_due(self) -> bool:
        """Whether a step without rows fires something."""
        upto = {"ends": self.next_watermark(), "quiet": self.now}
        timers = [pair for key in self.keys.values() for pair in key.timers.items()]
        return any((most := upto[name]) is not None and at <= most for name, at in timers)

    def step(self, rows: Iterable[Row] = (), *, ends: bool = False, finishes: bool = False) -> None:
        """Take a step."""
        self.before, self.watermark = self.watermark, END if finishes else self.next_watermark()
        for user, minute, part, bad in rows:
            at = None if minute is None else FIRST + minute * MINUTE
            if at is None:
                self.bad += 1
                continue
            high, _ = self.parts.get(part, (at, 0))
            self.parts[part] = max(at, high), self.now
            if self.before is not None and at < self.before:
                self.late += 1
            elif bad:
                self.bad += 1
            else:
                key = self.keys.setdefault(user, Key(user))
                key.rows += 1
                key.timers["ends"] = max(at + GAP, key.timers.get("ends", at + GAP))
                key.timers["quiet"] = self.now + QUIET
        for key in self.keys.values():
            self.made += key.fire({"ends": self.watermark, "quiet": self.now}, self.now)
        self.open += 1
        if ends or self.open == self.every:
            self.open = 0


def step_of(tester: StreamTester) -> int:
    """The number of the newest step."""
    return tester._region.step  # noqa: SLF001  (a tester shows no step numbers)


def times(rows: pa.Table, name: str) -> list[int]:
    """A column of times as microseconds."""
    return rows[name].cast(pa.int64()).to_pylist()


def check_same(tester: StreamTester, model: Model) -> None:
    """The tester's working state, and what it has counted, are the model's."""
    for timer in ("ends", "quiet"):
        rows = tester.state("paired", timer)
        found = dict(zip(rows["user"].to_pylist(), times(rows, "due"), strict=True))
        assert found == {key.user: key.timers[timer] for key in model.keys.values() if timer in key.timers}
    rows = tester.state("paired", "seen")
    counts = dict(zip(rows["user"].to_pylist(), rows["rows"].to_pylist(), strict=True))
    assert counts == {key.user: key.rows for key in model.keys.values() if key.rows}


ROWS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from([None, *range(-9, 61, 3)]),
        st.sampled_from("aab"),
        st.sampled_from([False] * 9 + [True]),
    ),
    max_size=8,
)
CHANGES = st.sampled_from(["restart", "lost", "crash", "crash, lost", "rescale", "checkpoint", "nothing"])
STEPS = st.lists(st.tuples(ROWS | st.none(), st.sampled_from([0, 1, 5, 25]), CHANGES), min_size=2, max_size=7)


@given(STEPS, st.sampled_from(["heap", "rocksdb"]), st.integers(1, 3), st.integers(1, 3), st.sampled_from("dD"))
@settings(max_examples=examples(40))
def test_timers_fire_as_they_would_for_each_key_alone(
    steps: list[tuple[list[Row] | None, int, str]], backend: str, parallelism: int, every: int, late: str
) -> None:
    stream = Stream(
        "s",
        None,
        [Paired()],
        event_time=EVENT_TIME,
        sinks={"paired": None},
        late={"d": "drop", "D": "dead-letter"}[late],
        on_bad_row="dead-letter",
        max_parallelism=4,
    )
    model = Model(every)
    with StreamTester(
        stream, parallelism=parallelism, backend=backend, checkpoint_every=every, schema=SCHEMA, now=BEGIN
    ) as tester:
        for rows, minutes, change in steps:
            if rows is not None:
                columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
                columns[1] = [None if m is None else BEGIN + timedelta(minutes=m) for m in columns[1]]
                tester.step(dict(zip(SCHEMA, columns, strict=True)))
                model.step(rows)
            model.now += minutes * MINUTE
            was_due, before = model.is_due(), step_of(tester)
            tester.advance(timedelta(minutes=minutes))
            assert step_of(tester) == before + was_due, "a step is taken only when something is due"
            if was_due:
                model.step()
            if change in ("restart", "lost", "rescale", "checkpoint") and model.open:
                model.step(ends=True)
            match change:
                case "restart" | "lost":
                    tester.restart(lost=change == "lost")
                case "crash" | "crash, lost":
                    tester.crash(lost=change != "crash")
                case "rescale":
                    parallelism = parallelism % 3 + 1
                    tester.rescale(parallelism)
                case "checkpoint":
                    tester.checkpoint()
            check_same(tester, model)
        tester.finish()
        model.step(ends=True, finishes=True)
        check_same(tester, model)
        assert not tester.state("paired", "ends").num_rows, "nothing in event time is left"
        out = tester.delivered("paired")
        shown = zip(out["user"].to_pylist(), out["what"].to_pylist(), times(out, "at"), times(out, "now"), strict=True)
        made = [(*row, n) for row, n in zip(shown, out["rows"].to_pylist(), strict=True)]
        for user in model.keys:
            assert [row for row in made if row[0] == user] == [row for row in model.made if row[0] == user]
        assert tester.dead_letters.num_rows == model.bad + (model.late if late == "D" else 0)
        assert tester.replay(parallelism=parallelism % 3 + 1, backend="rocksdb" if backend == "heap" else "heap")
        assert tester.replay()
