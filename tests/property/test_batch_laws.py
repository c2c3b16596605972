"""Timed operators come to what a batch query says of the accepted rows, whatever happens to the stream meanwhile.

By pandas, over all rows at once (`tests.batch_answers`). Not for `emit="update"`, of which only the last row of a
window is what the window is (`test_window_laws`), and not for the time of day, which no row has.
"""

import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from siltstone.aggregates.functions import Average, Count, First, Last, Max, Min, Sum
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Cumulative, Session, Sliding, Tumbling
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.deduplicate import Deduplicate
from siltstone.operator import SOURCE
from siltstone.state.schema import DELETED
from siltstone.stream import Stream
from siltstone.time.event_time import EventTime
from tests.batch_answers import Frame, aligned, counted, firsts, merge_counts, pd, windows
from tests.examples import examples
from tests.timed_run import TimedLife

TIME = pa.timestamp("us", "UTC")
ROWS = pa.schema([("user", pa.int64()), ("at", TIME), ("v", pa.int64()), ("id", pa.int64()), ("n", pa.int64())])
FUNCTIONS = (
    Count("n"), Count("n_v", of="v"), Sum("total", of="v"), Min("least", of="v"), Max("most", of="v"),
    Average("mean", of="v"), First("first", of="v", by="at"), Last("last", of="v", by="at"),
)  # fmt: skip
SHOWN = tuple(each.name for each in FUNCTIONS)
DELAY, WITHIN = 5, 60
"""in units"""
NEVER = -(1 << 40)
MINUTES: tuple[timedelta, datetime, dict[str, Any]] = (
    timedelta(minutes=4),
    datetime(2026, 3, 1, tzinfo=UTC),
    {
        "tumbling": Tumbling("40 minutes", on="at", offset="8 minutes"),
        "sliding": Sliding("80 minutes", "20 minutes", on="at"),
        "cumulative": Cumulative("80 minutes", "20 minutes", on="at"),
        "session": Session("12 minutes", on="at"),
    },
)


def days(begin: datetime) -> tuple[timedelta, datetime, dict[str, Any]]:
    """Windows of days in Berlin, across the night in which clocks change."""
    return (
        timedelta(hours=4),
        begin,
        {
            "tumbling": Tumbling("1 day", on="at", zone="Europe/Berlin"),
            "sliding": Sliding("2 days", "1 day", on="at", zone="Europe/Berlin"),
            "cumulative": Cumulative("1 day", "6 hours", on="at", zone="Europe/Berlin"),
            "session": Session("12 hours", on="at"),
        },
    )


FAMILIES = {
    "minutes": MINUTES,
    "spring": days(datetime(2026, 3, 28, tzinfo=UTC)),
    "autumn": days(datetime(2026, 10, 24, tzinfo=UTC)),
}
IN_TIME, LATE = st.integers(-6, 6), st.integers(-40, -7)
ROW = st.tuples(
    st.integers(0, 2), st.one_of(IN_TIME, IN_TIME, IN_TIME, LATE, st.none()), st.none() | st.integers(-9, 9)
)
ACTIONS = st.sampled_from(
    [
        "none",
        "none",
        "advance",
        "restart",
        "lost",
        "crash",
        "crash lost",
        "rescale",
        "backend",
        "roll back",
        "touch",
        "erase",
    ]
)
BATCHES = st.lists(st.tuples(st.lists(ROW, max_size=8), ACTIONS), min_size=3, max_size=6)


def chain_window(family: str) -> Tumbling:
    """The windows of the operator that reads windows: twice as long as these."""
    one = FAMILIES[family][2]["tumbling"]
    return Tumbling(2 * one.size, on="window_time", zone=one.zone, offset=one.offset)


def stream_of(family: str, late: str) -> Stream:
    """A stream with each timed operator of the library."""
    unit, _, chosen = FAMILIES[family]
    key = {"user": pa.int64()}
    once = Deduplicate("once", {"id": pa.int64()}, within=WITHIN * unit, on="at", columns={"n": pa.int64()})
    operators = [Aggregate(name, key, FUNCTIONS, window=window) for name, window in chosen.items()]
    chain = Aggregate("chain", key, [Sum("n", of="n")], reads="tumbling", window=chain_window(family))
    return Stream(
        "s",
        None,
        [*operators, chain, once],
        event_time=EventTime("at", delay=DELAY * unit, max_ahead=timedelta(days=36500)),
        sinks=dict.fromkeys([*chosen, "chain", "once"]),
        late=late,
        on_bad_row="dead-letter",
        max_parallelism=4,
    )


class Checked(TimedLife):
    """A life of such a stream, and what edits took out of its state."""

    def __init__(self, place: OpenWarehouse, family: str, late: str, **options: Any) -> None:
        self.unit, self.begins, self.windows = FAMILIES[family]
        self.edited = 0
        """the checkpoint of the newest edit"""
        self.erased: list[tuple[str, int, int, int | None]] = []
        """(operator, user, batches until then, the watermark)"""
        super().__init__(place, stream_of(family, late), self.begins, **options)

    def take(self, rows: list[tuple[int, int | None, int | None]]) -> None:
        """Take a micro-batch: times move on by seven units per batch."""
        number, so_far = len(self.given), sum(map(len, self.given))
        self.step(
            pa.Table.from_pylist(
                [
                    {
                        "user": user,
                        "at": None if jitter is None else self.begins + (7 * number + jitter) * self.unit,
                        "v": v,
                        "id": user + 10 * (number // 2),
                        "n": so_far + place,
                    }
                    for place, (user, jitter, v) in enumerate(rows)
                ],
                ROWS,
            )
        )

    def act(self, what: str) -> None:
        """Do to the stream what may be done to it."""
        newest = self.place.catalog.checkpoints.last_id("s")
        match what:
            case "advance":
                self.advance()
            case "restart" | "lost":
                self.restart(lost=what == "lost")
            case "crash" | "crash lost":
                self.crash(lost="lost" in what)
            case "rescale":
                self.restart(parallelism=self.options["parallelism"] % 3 + 1)
            case "backend":
                self.crash(backend="heap" if self.options["backend"] == "rocksdb" else "rocksdb")
            case "roll back" if newest - 2 >= max(self.edited, 1):
                self.roll_back(newest - 2, elsewhere_us=-self.now_us if newest % 2 else 3 * self.now_us)
            case "touch":
                for operator, variable in (("sliding", "totals"), ("once", "seen")):
                    self._edit(operator, variable, self._read(operator, variable))
            case "erase":
                for operator in ("tumbling", "sliding", "cumulative"):
                    self._erase(operator, "totals", "user")
                self._erase("once", "seen", "id")

    def _read(self, operator: str, variable: str) -> pa.Table:
        self.checkpoint()
        return self.rows(operator, variable)

    def _edit(self, operator: str, variable: str, changes: pa.Table) -> None:
        if len(changes):
            self.edit(operator, variable, changes)
            self.edited = self.run.region.completed

    def _erase(self, operator: str, variable: str, key: str) -> None:
        """Delete all that is kept of user 1."""
        rows, clock = self._read(operator, variable), self.source_clock
        rows = rows.filter(pa.array(np.array(rows[key].to_pylist(), np.int64) % 10 == 1))
        self.erased.append((operator, 1, len(self.given), None if clock is None else clock.watermark))
        self._edit(operator, variable, rows.append_column(DELETED, pa.array([True] * len(rows), pa.bool_())))

    def frame(self, operator: str) -> Frame:
        """The rows that are not bad, with what the stream decided of each."""
        parts = []
        for number, rows in enumerate(self.given):
            clock = self.clocks[number]
            part = rows.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get).assign(step=number)
            part["before"] = times_of(None if clock is None else clock.before, len(rows))
            part["until"] = times_of(None, len(rows))
            part["era"] = 0
            for _, user, batches, watermark in (each for each in self.erased if each[0] == operator):
                gone = (part["user"] == user) & (number < batches) & part["until"].isna()
                part["until"] = part["until"].mask(gone, times_of(NEVER if watermark is None else watermark, len(rows)))
                part.loc[(part["user"] == user) & (number >= batches), "era"] += 1
            parts.append(part)
        whole = pd.concat(parts)
        return whole[whole["at"].notna()]


def times_of(us: int | None, count: int) -> Any:
    """A watermark as a column."""
    return pd.Series([us] * count, dtype="Int64").astype("datetime64[us, UTC]")


def find_late(rows: Frame, window: Any) -> Mapping[int, int]:
    """Count the late rows of each batch: all of whose windows ended by the watermark of the step before."""
    if isinstance(window, Session):
        last = rows["at"] + window.gap + pd.Timedelta(microseconds=1)
    elif window is None:
        last = rows["at"] + pd.Timedelta(microseconds=1)
    else:
        last = aligned(rows, window).groupby("n")["end"].max().reindex(rows["n"]).set_axis(rows.index)
    late = rows["before"].notna() & (last <= rows["before"])
    return late.groupby(rows["step"]).sum().to_dict()


def check_counts(life: Checked, late: str) -> None:
    """Of each operator and batch, accepted, late and bad rows are all rows."""
    for operator in (each for each in life.stream.operators if each.reads == SOURCE):
        found = find_late(life.frame(operator.name), life.windows.get(operator.name))
        for number, rows in enumerate(life.given):
            bad, too_late = rows["at"].null_count, int(found.get(number, 0))
            letters = bad + (too_late if late == "dead-letter" else 0)
            assert life.counts[number][operator.name] == (len(rows), too_late, letters), operator.name


def made_windows(life: Checked, name: str) -> dict[Any, Any]:
    """What a sink has: each window once."""
    rows = life.delivered(name)
    made = {(r["user"], r["window_start"], r["window_end"]): tuple(r[each] for each in SHOWN) for r in rows}
    assert len(made) == len(rows)
    return made


def chained(life: Checked, family: str) -> dict[tuple[Any, ...], int]:
    """(user, start, end) -> rows counted, by a query over the windows that were delivered."""
    made = [(r["user"], r["window_time"], r["n"], None, None) for r in life.delivered("tumbling")]
    if not made:
        return {}
    rows = pd.DataFrame(made, columns=["user", "at", "n", "before", "until"])
    return plain_times(aligned(rows, chain_window(family)).groupby(["user", "start", "end"])["n"].sum())


def plain_times(found: Any) -> dict[tuple[Any, ...], int]:
    """A number per user and window."""
    return {(user, start.to_pydatetime(), end.to_pydatetime()): n for (user, start, end), n in found.to_dict().items()}


def in_order(rows: Frame, gap: timedelta) -> bool:
    """Whether no row is behind the watermark, and yet so little that an interval of its own is not over."""
    return not ((rows["at"] < rows["before"]) & (rows["at"] + gap >= rows["before"])).any()


LAW = settings(
    max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@LAW
@given(
    st.sampled_from(list(FAMILIES)),
    BATCHES,
    st.sampled_from(["heap", "rocksdb"]),
    st.integers(0, 2),
    st.integers(1, 2),
    st.sampled_from(["drop", "dead-letter"]),
)
def test_timed_operators_equal_a_batch_query(
    family: str, batches: list[Any], backend: str, pending: int, every: int, late: str
) -> None:
    with tempfile.TemporaryDirectory() as root, OpenWarehouse.open_writable(root) as place:
        life = Checked(place, family, late, backend=backend, pending=pending, every=every)
        for rows, action in batches:
            life.take(rows)
            life.act(action)
        life.finish()
        check_counts(life, late)
        for name, window in life.windows.items():
            rows = life.frame(name)
            if not isinstance(window, Session):
                assert made_windows(life, name) == windows(rows, window), name
            elif in_order(rows, window.gap):
                accepted = rows[rows["before"].isna() | (rows["at"] + window.gap >= rows["before"])]
                assert made_windows(life, name) == windows(accepted, window)
            assert life.rows(name, "totals").num_rows == 0, "nothing timed is left"
        wanted = chained(life, family)
        assert merge_counts(life.delivered("chain")) == wanted and len(life.delivered("chain")) == len(wanted)
        rows = life.frame("once")
        rows = rows[rows["before"].isna() | (rows["at"] >= rows["before"])]
        first = firsts(rows, ["id", "era"], ["step", "at", "n"])
        assert sorted(row["n"] for row in life.delivered("once")) == sorted(first["n"])
        assert life.rows("once", "seen").num_rows == 0
        life.run.region.close("completed")


@settings(LAW, max_examples=examples(3))
@given(st.sampled_from(list(FAMILIES)), BATCHES, st.sampled_from(["heap", "rocksdb"]), st.integers(0, 2))
def test_late_rows_that_are_processed_count_once(family: str, batches: list[Any], backend: str, pending: int) -> None:
    with tempfile.TemporaryDirectory() as root, OpenWarehouse.open_writable(root) as place:
        life = Checked(place, family, "process", backend=backend, pending=pending)
        for rows, action in batches:
            life.take(rows)
            life.act(action if action not in ("erase", "touch") else "none")
        life.finish()
        check_counts(life, "process")
        for name, window in life.windows.items():
            rows, made = life.frame(name), life.delivered(name)
            assert life.rows(name, "totals").num_rows == 0
            if isinstance(window, Session):
                assert sum(row["n"] for row in made) == len(rows)
                continue
            joined = aligned(rows, window)
            last = joined.groupby("n")["end"].transform("max")
            whole = joined["before"].isna() | (last > joined["before"])
            both = pd.concat([counted(joined[whole]), joined[~whole]])
            assert merge_counts(made) == plain_times(both.groupby(["user", "start", "end"]).size())
        assert merge_counts(life.delivered("chain")) == chained(life, family)
        life.run.region.close("completed")
