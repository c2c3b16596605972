"""Kill runs of a stream with timers, at random moments, and compare what its sinks got with a computation row by row.

    python -m tests.fault.timed_kills --kills 300 [--seed N] [--directory DIR] [--cluster]

Sessions by a timer, the hours that they ended in by a timer of the operator that reads them, the first row of each user
and hour, counts of each user over sliding windows, the newest row of each user with a time to live, and alarms by the
time of day. The source has two partitions, of which one may lag, stay away and turn idle; or there are two sources, of
which one may. Then each has its own event times, some operators read both, and some one. Files come while runs wait, so
steps without rows are taken, too.

Runs and processes of their tasks are killed (`tests.fault.kills`). Once the input is used up, a last run finishes. Then

- the recorded clock never went back;
- each sink was delivered once what `Model` makes of the input at the recorded clocks, late rows included;
- nothing timed is left, every checkpoint is proven, and a replay comes to the same digests.

With `--cluster`, runs have a cluster of two workers that share no disk (`tests.cluster.cluster`), the objects are on S3
and the catalog is in PostgreSQL. Runs are killed as before; so are workers with all they have, and new ones take their
place. Needs root.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from sqlalchemy import URL

from siltstone.aggregates.functions import Count
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Sliding
from siltstone.catalog.records.source_entries import NO_OFFSET, decode_offsets
from siltstone.catalog.records.steps import StepKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.deduplicate import Deduplicate
from siltstone.operator import SOURCE, Due, Operator, Rows, State, ValueState
from siltstone.settings import Settings
from siltstone.spark.operations import RunRequest, run
from siltstone.state.ttl import TTL
from siltstone.stream import DEAD_LETTERS, Stream
from siltstone.time.clock_rules import StepClock, decode_clock
from siltstone.time.event_time import LATE, SOURCE_WIDE, EventTime
from siltstone.times import to_us
from tests.cluster.cluster import Cluster
from tests.fault.jumping_clock import OFFSET_S, jumping_clock
from tests.fault.kills import (
    Kills,
    Started,
    answers,
    arguments,
    check_proven,
    compare,
    files_of,
    lay_out,
    let_in,
    settings_of,
)
from tests.fault.warehouses import WAREHOUSES
from tests.postgres_server import new_schema, postgres_server
from tests.servers import use_test_credentials
from tests.timed_streams import CLICKS, GAP, HOUR, TIME, Alarms, Hours, Sessions, at, clicks, timed, values_of

USERS, A_FILE = 30, 40
NAME = "killed"
MINUTE, LONG_AGO = 60_000_000, -(1 << 63)
GIVES_UP, LIFE_S = 3, 120.0
_EVENT_TIMES = [
    {},
    {"per": "from"},
    {"per": "from", "idle_after": timedelta(seconds=2)},
    {"per": "from", "idle_after": timedelta(seconds=30)},
    {"idle_after": timedelta(seconds=2)},
]
Click = tuple[int, float]
"""user and minute"""


class SessionsWithHour(Sessions):
    """Sessions with the hour in which they ended, the key of `Hours`."""

    output = pa.schema([*Sessions.output, ("hour", TIME)])

    def on_timer(self, due: Due, state: State) -> pa.Table:
        made = super().on_timer(due, state)
        return made.append_column("hour", pc.floor_temporal(made["ended"], unit="hour"))  # pyright: ignore


class Newest(Operator):
    """Each user's newest click, for a day."""

    name = "newest"
    key = {"user": pa.int64()}  # noqa: RUF012
    row = ValueState({"at": TIME}, ttl=TTL("1 day"))

    def process(self, rows: Rows, state: State) -> None:
        old = state.row.get(rows.keys)
        state.row.put(rows.keys, {"at": rows.max(values_of(rows, "at"), initial=old["at"])})


class Files:
    """A sink that keeps a file per checkpoint; an id that comes again must bring the same rows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, rows: DataFrame, checkpoint: int) -> None:
        table = pa.Table.from_pylist(sorted((_in_utc(row.asDict()) for row in rows.collect()), key=repr))
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{checkpoint}.parquet"
        if path.exists():
            assert pq.read_table(path).equals(table), f"checkpoint {checkpoint} brings other rows"
            return
        pq.write_table(table, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def read(self) -> list[dict[str, Any]]:
        """All rows."""
        return [row for path in self.directory.glob("*.parquet") for row in pq.read_table(path).to_pylist()]


def _in_utc(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.items()}


@dataclass(frozen=True)
class Drawn:
    """What is drawn for a whole stream, given how many files it has.

    Attributes:
        event_times: of each source.
        lag: by how many files one partition, or source, is behind the other.
        away: the files in which it has no rows; they come after these.
    """

    files: int
    event_times: Mapping[str, EventTime]
    late: str
    lag: int
    away: range

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Drawn":
        """Draw by the seed."""
        draw, files = random.Random(given.seed), given.pieces
        sources = random.Random(f"sources {given.seed}").choice([(SOURCE,), ("clicks", "taps")])
        options = [_EVENT_TIMES[given.seed % len(_EVENT_TIMES)], draw.choice(_EVENT_TIMES)]
        event_times = {
            name: EventTime("at", delay="4 minutes", max_ahead=timedelta(days=36500), **each)
            for name, each in zip(sources, options, strict=False)
        }
        lags = len(sources) > 1 or event_times[SOURCE].per != SOURCE_WIDE
        begin = draw.randrange(files)
        away = range(begin, begin + draw.choice([0, 3, 5])) if lags else range(0)
        return cls(files, event_times, draw.choice(LATE[:2]), draw.choice([0, 1, 2]) if lags else 0, away)

    @property
    def sources(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.event_times)

    def read_by(self, operator: str) -> tuple[str, ...]:
        """The sources that an operator reads: these two read one."""
        return {"once": self.sources[:1], "counts": self.sources[-1:]}.get(operator, self.sources)

    def source_of(self, click: Click) -> str:
        """The source that a click comes by: those of a user by either."""
        return self.sources[round(100 * click[1]) % len(self.sources)]

    def comes_in(self, number: int, click: Click) -> int:
        """The file in which a click of an hour comes."""
        lags = click[0] % 2 if len(self.sources) == 1 else self.source_of(click) != self.sources[0]
        file = number + self.lag if lags else number
        return min(self.away.stop if lags and file in self.away else file, self.files - 1)


def inputs(given: argparse.Namespace) -> dict[str, list[list[Click]]]:
    """The files of each source: an hour each, in any order within three minutes, where nothing lags.

    Each user comes in every third hour, within eight minutes.
    """
    draw, drawn = np.random.default_rng(given.seed), Drawn.of(given)
    made: dict[str, list[list[Click]]] = {name: [[] for _ in range(drawn.files)] for name in drawn.sources}
    for number in range(drawn.files):
        users = [user for user in range(USERS) if user % 3 == number % 3]
        begins = {user: draw.uniform(60 * number, 60 * number + 50) for user in users}
        rows = [(user, begins[user] + draw.uniform(0, 8)) for user in draw.choice(users, A_FILE)]
        rows.sort(key=lambda row: row[1] + draw.uniform(-1.5, 1.5))
        for user, minute in rows:
            click = int(user), round(float(minute), 2)
            made[drawn.source_of(click)][drawn.comes_in(number, click)].append(click)
    return made


def define(given: argparse.Namespace) -> Stream:
    """The stream, whose files and sinks are below the directory; each run names two sources in any order."""
    drawn, directory = Drawn.of(given), given.directory
    sources: dict[str, Any] = {name: files_of(directory, name, CLICKS) for name in drawn.sources}
    reads: Any = {name: {"user": "user"} for name in sources}
    options: dict[str, Any] = {"sources": sources, "event_time": drawn.event_times}
    if len(sources) == 1:
        reads, options = SOURCE, {"source": sources[SOURCE], "event_time": drawn.event_times[SOURCE]}
    elif random.random() < 0.5:
        options["sources"] = dict(reversed(sources.items()))
    window = Sliding("20 minutes", every="10 minutes", on="at")
    [of_once], [of_counts] = drawn.read_by("once"), drawn.read_by("counts")
    counts = Aggregate("counts", {"user": pa.int64()}, [Count("clicks")], reads=of_counts, window=window)
    once = Deduplicate("once", {"user": pa.int64()}, "1 hour", on="at", reads=of_once)
    both = [SessionsWithHour(reads=reads), Newest(reads=reads), Alarms(reads=reads)]
    names = ["sessions", "hours", "once", "counts", "alarms", *([DEAD_LETTERS] if drawn.late == "dead-letter" else [])]
    return timed(
        NAME,
        late=drawn.late,
        operators=[*both, Hours(), once, counts],
        sinks={name: Files(directory / "sinks" / name) for name in names},
        max_parallelism=8,
        **options,
    )


@dataclass(frozen=True)
class Step:
    """What one operator sees of a step, of all sources that it reads: user and time of each row, and the watermarks of
    this step and of the one before. Times are microseconds since 1970."""

    rows: Sequence[tuple[int, int]]
    watermark: int
    before: int

    @classmethod
    def of(cls, sources: Sequence[str], rows: Mapping[str, Sequence[Click]], clock: StepClock) -> "Step":
        """Put together what an operator sees of these sources."""
        clocks = [clock.sources[name] for name in sources]
        return cls(
            [(user, to_us(at(minute))) for name in sources for user, minute in rows.get(name, ())],
            min(LONG_AGO if one.watermark is None else one.watermark for one in clocks),
            min(LONG_AGO if one.before is None else one.before for one in clocks),
        )


@dataclass
class Model:
    """The operators, computed row by row at the clocks that were recorded. Times are microseconds since 1970."""

    drawn: Drawn
    sessions: dict[int, tuple[int, int]] = field(default_factory=dict)
    hours: Counter[int] = field(default_factory=Counter)
    once: dict[int, int] = field(default_factory=dict)
    alarms: dict[int, int] = field(default_factory=dict)
    made: dict[str, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))
    """sink -> its rows; windows as (user, start) for each click"""
    late: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(operator, step) -> late rows"""

    def take(self, step: int, rows: Mapping[str, Sequence[Click]], clock: StepClock) -> None:
        """Take a step: the rows of each source, then what is due."""
        both, counts, once = (Step.of(self.drawn.read_by(name), rows, clock) for name in ("sessions", "counts", "once"))
        for user, t in both.rows:
            self.alarms[user] = clock.now + Alarms.AFTER // timedelta(microseconds=1)
            if t < both.before:
                self.late.update((name, step) for name in ("sessions", "newest"))
                continue
            count, ends = self.sessions.get(user, (0, LONG_AGO))
            self.sessions[user] = count + 1, max(ends, t + GAP // timedelta(microseconds=1))
        for user, t in counts.rows:
            starts = [start for start in _starts(t) if start + 20 * MINUTE > counts.before]
            self.made["counts"] += [(user, start) for start in starts]
            self.late["counts", step] += not starts
        for user, t in sorted(once.rows):
            if t < once.before:
                self.late["once", step] += 1
            elif t >= self.once.get(user, LONG_AGO):
                self.once[user] = t + 60 * MINUTE
                self.made["once"].append((user, t))
        self._fire(clock.now, both.watermark)

    def _fire(self, now: int, watermark: int) -> None:
        for user, (count, ends) in list(self.sessions.items()):
            if ends <= watermark:
                del self.sessions[user]
                self.made["sessions"].append((user, count, ends))
                self.hours[ends - ends % (60 * MINUTE)] += 1
        for hour in [hour for hour in self.hours if hour + HOUR // timedelta(microseconds=1) <= watermark]:
            self.made["hours"].append((hour, self.hours.pop(hour)))
        for user, due in list(self.alarms.items()):
            if due <= now:
                self.made["alarms"].append((user, self.alarms.pop(user)))


def _starts(t: int) -> list[int]:
    newest = t - t % (10 * MINUTE)
    return [newest - 10 * MINUTE, newest]


def model_of(settings: Settings, given: argparse.Namespace) -> tuple[Model, Counter[str]]:
    """Take the steps that the catalog has recorded, whose clock must never go back; count the kinds of steps."""
    made, files, kinds = Model(Drawn.of(given)), inputs(given), Counter[str]()
    with OpenWarehouse.open_existing(settings.warehouse, settings.catalog) as place:
        steps = place.catalog.input_log.list(NAME, place.catalog.checkpoints.last_id(NAME))
        kinds["epochs"] = len(place.catalog.runs.list(NAME))
        kinds["epochs with checkpoints"] = len({each.epoch for each in place.catalog.checkpoints.list(NAME)})
    assert [step.step for step in steps] == [*range(1, len(steps) + 1)], "not every step is recorded"
    batches = [step.batch_id for step in steps if step.batch_id is not None]
    assert batches == [*range(len(batches))], "not each batch once"
    last, before, read = 0, dict[str, int](), dict.fromkeys(files, 0)
    for step in steps:
        clock = decode_clock(step.clock)
        assert clock is not None, f"step {step.step} has no clock"
        # A change between two runs has the clock of the step before it.
        changes = step.kind is StepKind.CHANGE
        assert clock.now >= last, f"the clock of step {step.step} went back"
        for name, source in clock.sources.items():
            assert changes or source.before == before.get(name), f"the clock of {name} at step {step.step} went back"
            assert (source.watermark or LONG_AGO) >= before.get(name, LONG_AGO), (
                f"the watermark of {name} at step {step.step} went back"
            )
        last = clock.now
        before = {name: one.watermark for name, one in clock.sources.items() if one.watermark is not None}
        rows = dict[str, list[Click]]()
        for name, upto in files_upto(step.offsets).items():
            rows[name] = [row for file in files[name][read[name] : upto] for row in file]
            read[name] = max(upto, read[name])
        came = len([name for name, each in rows.items() if each])
        shape = "changes" if changes else f"steps with rows of {came} sources" if came else "steps without rows"
        kinds[shape] += 1
        if not changes:
            made.take(step.step, rows, clock)
    assert read == {name: len(each) for name, each in files.items()}, f"not every file was read: {read}"
    return made, kinds


def files_upto(offsets: str) -> dict[str, int]:
    """How many files of each source have been read by the end of a step, from its offsets: a file per batch."""
    return {
        name: 0 if offset == NO_OFFSET else json.loads(offset)["logOffset"] + 1
        for name, offset in decode_offsets(offsets).items()
    }


def check(given: argparse.Namespace) -> str:
    """Finish the stream, and compare; return what there was, for people."""
    directory = given.directory
    settings, stream = settings_of(given, random.Random(given.seed)), define(given)
    # Later than all clocks before; and then later than the alarms of the last rows, with nothing to read.
    for offset_s in (OFFSET_S + 30, OFFSET_S + 45):
        with jumping_clock(random.Random(), offset_s, offset_s):
            run(settings, stream, RunRequest(finish=True))
    model, kinds = model_of(settings, given)
    rows = {name: Files(directory / "sinks" / name).read() for name in stream.sinks}
    columns = {
        "sessions": ("user", "clicks", "ended"),
        "hours": ("hour", "sessions"),
        "once": ("user", "at"),
        "alarms": ("user", "at"),
    }
    found: dict[str, Counter[Any]] = {
        name: Counter(tuple(_us(row[c]) for c in of) for row in rows[name]) for name, of in columns.items()
    }
    wanted: dict[str, Counter[Any]] = {name: Counter(model.made[name]) for name in columns}
    found["counts"] = Counter({(r["user"], _us(r["window_start"])): r["clicks"] for r in rows["counts"]})
    wanted["counts"] = Counter(model.made["counts"])
    assert len(rows["counts"]) == len(found["counts"]), "a window came twice"
    if DEAD_LETTERS in rows:
        found[DEAD_LETTERS] = Counter((row["operator"], row["step"]) for row in rows[DEAD_LETTERS])
        wanted[DEAD_LETTERS] = +model.late
    for name, one in found.items():
        compare(name, one, wanted[name])
    assert not (model.sessions or model.hours or model.alarms), "something is left that is due"
    check_proven(settings, stream, directory)
    made = {name: len(model.made[name]) for name in columns}
    counts = ", ".join(f"{count} {what}" for what, count in {**kinds, **made, "late": model.late.total()}.items())
    return f"read {' and '.join(model.drawn.sources)}: {counts}"


def _us(value: Any) -> Any:
    return to_us(value) if isinstance(value, datetime) else value


# --- many runs -------------------------------------------------------------------------------------------------------


class TimedKills(Kills):
    """Runs of streams with timers that read files."""

    module = "tests.fault.timed_kills"

    def make_input(self, directory: Path) -> list[tuple[Path, ...]]:
        tables = {name: [clicks(*rows) for rows in files] for name, files in inputs(self.given).items()}
        return [*zip(*lay_out(directory, tables).values(), strict=True)]

    def give(self, piece: tuple[Path, ...], directory: Path) -> None:
        for file in piece:
            let_in(file, directory)


class ClusterKills(TimedKills):
    """The same on a cluster, of which workers are killed, too.

    Args:
        cluster: of two workers.
        server: where catalogs are.
    """

    def __init__(self, given: argparse.Namespace, cluster: Cluster, server: URL) -> None:
        super().__init__(given)
        self.cluster, self.server = cluster, server

    def kill_part(self, started: Started, draw: random.Random) -> None:
        """Kill a worker with its executors and its disk, and start another."""
        if draw.random() < 0.3:
            worker = draw.choice(self.cluster.workers)
            self.cluster.remove(worker)
            self.cluster.add_worker(worker.host)
            self.counts["workers"] += 1

    @contextmanager
    def options(self, directory: Path) -> Iterator[list[str]]:
        """The options of one stream's runs."""
        warehouse, spark = WAREHOUSES["s3"](self.cluster.private / "warehouse"), json.dumps(self.cluster.settings())
        with new_schema(self.server) as catalog:
            yield ["--warehouse", warehouse, "--catalog", catalog, "--master", self.cluster.master, "--spark", spark]

    def variables(self) -> dict[str, str]:
        """The driver's working state is where a worker's is."""
        return {"XDG_STATE_HOME": str(self.cluster.private / "home" / "state")}


def kill_on_cluster(given: argparse.Namespace, server: URL) -> None:
    """Kill runs and workers on a cluster of its own.

    Args:
        server: where catalogs are.
    """
    use_test_credentials()
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory)) as cluster:
        for host in ("127.0.0.2", "127.0.0.3"):
            cluster.add_worker(host)
        given.directory = cluster.shared
        ClusterKills(given, cluster, server).run()


def main() -> int:
    """Kill runs, one after the other, and check a stream each time its input is used up."""
    options = arguments(__doc__)
    options.add_argument("--cluster", action="store_true")
    given = options.parse_args()
    if answers(given, check, define):
        return 0
    if given.cluster:
        with postgres_server() as server:
            kill_on_cluster(given, server)
    else:
        TimedKills(given).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
