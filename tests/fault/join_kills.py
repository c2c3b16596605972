"""Kill runs of a stream that joins two sources, at random moments, and compare what its sinks got with all rows joined.

    python -m tests.fault.join_kills --kills 100 [--seed N] [--directory DIR]

All kinds of `IntervalJoin` and a `LookupJoin` read the same two sources, whose files come in any turn while runs wait,
a window reads one of the joins, and an operator has one source as a broadcast table. Each run names the sources in
another order. A third source comes with some run, and may be given up by a later one. Runs and processes of their tasks
are killed (`tests.fault.kills`). Once the input is used up, a last run finishes. Then each sink was given what the rows
of all files come to in SQL (`tests.join_answers`); no kept row is left, every checkpoint is proven, and a replay comes
to the same digests.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from siltstone.aggregates.functions import Count
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Tumbling
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.joins.interval import IntervalJoin
from siltstone.joins.lookup import LookupJoin
from siltstone.operator import BroadcastState, Due, Operator, Rows, State, Timer, ValueState
from siltstone.spark.operations import RunRequest, run
from siltstone.stream import Stream
from siltstone.time.event_time import EventTime
from tests.fault.kills import (
    Kills,
    answers,
    arguments,
    check_proven,
    compare,
    files_of,
    lay_out,
    let_in,
    settings_of,
)
from tests.fault.timed_kills import Files
from tests.join_answers import join_answer, lookup_answer
from tests.join_streams import (
    BOUNDS,
    DELAY,
    JOIN,
    SCHEMA,
    TIME,
    Batch,
    less,
    minutes,
)
from tests.timed_streams import BEGIN

KEYS, A_FILE, FILE_MINUTES = 12, 25, 6
HOWS = ("inner", "left", "right", "full", "semi", "anti")
WINDOW = timedelta(minutes=10)
NAME = "killed"
NOTES = {"notes": {"id": pa.int64()}}
NOTES_A_FILE, NOTES_EVERY = 10, 3
END = datetime(9000, 1, 1, tzinfo=UTC)


class Known(Operator):
    """Tells of each key, at the very end, how many bids it had, and what the broadcast table of all asks has of it."""

    name = "known"
    key = {"k": pa.int64()}  # noqa: RUF012
    reads = {"bids": {"k": "k"}}  # noqa: RUF012
    inputs = {"bids": ("b",)}  # noqa: RUF012
    output = {"k": pa.int64(), "bids": pa.int64(), "a": pa.int64(), "asks": pa.int64()}  # noqa: RUF012
    counts = ValueState({"n": pa.int64()})
    end = Timer("event")
    asks = BroadcastState("asks", {"id": pa.int64()}, {"at": TIME, "a": pa.int64()}, by="at")

    def process(self, rows: Rows, state: State) -> None:
        """Count the bids."""
        state.counts.put(rows.keys, {"n": rows.count(initial=state.counts.get(rows.keys)["n"])})
        state.end.set(rows.keys, END)

    def on_timer(self, due: Due, state: State) -> pa.Table:
        """Tell what there is, and forget the key."""
        counts = state.counts.get(due.keys)["n"]
        state.counts.delete(due.keys)
        found = state.asks.get({"id": due.keys.columns["k"]})["a"]
        every = pa.array([len(state.asks.table)] * len(due), pa.int64())
        return due.keys.with_columns({"bids": counts, "a": found, "asks": every})


class Noted(Operator):
    """Counts the rows of each key of the third source: one."""

    name = "noted"
    key = {"id": pa.int64()}  # noqa: RUF012
    reads = "notes"
    output = {"id": pa.int64(), "n": pa.int64()}  # noqa: RUF012
    counts = ValueState({"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Count."""
        n = rows.count(initial=state.counts.get(rows.keys)["n"])
        state.counts.put(rows.keys, {"n": n})
        return rows.keys.with_columns({"n": n})


def has_notes(given: argparse.Namespace) -> bool:
    """Whether the stream of a run, or of the check after the last one, has the third source."""
    draw = random.Random(f"notes {given.seed}")
    begin, end = draw.choice([0, 1, 2, 3]), draw.choice([1, 2, 4, 1000, 1000])
    return begin <= given.child < begin + end


def given_up(given: argparse.Namespace) -> list[str]:
    """What a run has to give up: the third source, if the stream's newest checkpoint has it and its code has not."""
    if has_notes(given):
        return []
    with OpenWarehouse.open_writable(given.warehouse, given.catalog) as place:
        known = {stream.name: stream for stream in place.catalog.streams.list()}
        if NAME not in known or not place.catalog.checkpoints.last_id(NAME):
            return []
        return ["source.notes", "noted"] if "noted" in known[NAME].definition["operators"] else []


def known_by_hand(batches: Sequence[Batch]) -> Counter[tuple[Any, ...]]:
    """Return the rows that the operator `Known` is to return at the end.

    Its broadcast table has one ask for each id: the newest, and of several newest ones the one with the least `a`.
    """
    newest, bids = dict[Any, Any](), Counter[Any](k for batch in batches for k, *_ in batch.bids)
    for id, at, _, a in (ask for batch in batches for ask in batch.asks):
        order = (BEGIN - at, a is None, a or 0)
        newest[id] = min(order, newest.get(id, order))
    told = {id: None if is_null else a for id, (_, is_null, a) in newest.items()}
    return Counter((k, count, told.get(k), len(told)) for k, count in bids.items())


def pieces(given: argparse.Namespace) -> list[tuple[str, Batch]]:
    """The source of each file, in the order in which they come, and its rows: none is late."""
    draw, numbers, made = random.Random(given.seed), dict.fromkeys(SCHEMA, 0), list[tuple[str, Batch]]()
    for _ in range(given.pieces):
        source = draw.choice(sorted(SCHEMA))
        begin, batch = numbers[source] * FILE_MINUTES, Batch([], [])
        numbers[source] += 1
        for _ in range(A_FILE):
            # Those of the file before are at most at its end.
            moment = BEGIN + minutes(max(0, begin - draw.randrange(DELAY + 1))) + minutes(draw.randrange(FILE_MINUTES))
            key, value = draw.randrange(KEYS), draw.choice([None, *range(9)])
            moment = min(moment, BEGIN + minutes(begin + FILE_MINUTES - 1))
            if source == "asks":
                until = None if draw.random() < 0.2 else moment + minutes(draw.randrange(9))
                batch.asks.append((key, moment, until, value))
            else:
                batch.bids.append((key, moment, value))
        made.append((source, batch))
    return made


def bounds_of(given: argparse.Namespace, how: str) -> tuple[int, int | str]:
    """The interval of a kind of join, by the seed."""
    fitting = [each for each in BOUNDS if how not in ("inner",) or not isinstance(each[1], str)]
    return random.Random(f"{given.seed} {how}").choice(fitting)


def operators(given: argparse.Namespace) -> list[Operator]:
    """The joins, and the window over the first of them."""
    options: dict[str, Any] = JOIN
    joins: list[Operator] = []
    for how in HOWS:
        lower, upper = bounds_of(given, how)
        between = minutes(lower), upper if isinstance(upper, str) else minutes(upper)
        joins.append(IntervalJoin(how, between=between, how=how, where=less, **options))
    joins.append(LookupJoin("lookup", **options))
    window = Tumbling(WINDOW, on=str(joins[0].output_time))
    joins.append(Aggregate("pairs", {"k": pa.int64()}, [Count("n")], window=window, reads="inner"))
    return [*joins, Known()]


def define(given: argparse.Namespace) -> Stream:
    """The stream, whose files and sinks are below the directory."""
    schemas, made = SCHEMA | (NOTES if has_notes(given) else {}), operators(given)
    names = sorted(schemas)
    random.shuffle(names)
    made += [Noted()] if has_notes(given) else []
    return Stream(
        NAME,
        sources={name: files_of(given.directory, name, pa.schema(schemas[name])) for name in names},
        event_time={name: EventTime("at", delay=minutes(DELAY)) for name in SCHEMA},
        operators=made,
        sinks={operator.name: Files(given.directory / "sinks" / operator.name) for operator in made},
        max_parallelism=8,
    )


def check(given: argparse.Namespace) -> str:
    """Finish the stream, and compare; return what there was, for people."""
    settings, stream = settings_of(given, random.Random(given.seed)), define(given)
    run(settings, stream, RunRequest(finish=True, drop=given_up(given)))
    batches, counts = [batch for _, batch in pieces(given)], dict[str, int]()
    found = {
        name: Counter(tuple(row.values()) for row in Files(given.directory / "sinks" / name).read())
        for name in stream.sinks
    }
    wanted = {how: join_answer(batches, how, bounds_of(given, how), where=True) for how in HOWS}
    wanted |= {"lookup": lookup_answer(batches, "left"), "known": known_by_hand(batches)}
    at = 1 if stream.output_times["inner"] == "at" else 4
    windows = Counter[tuple[Any, ...]]()
    for row, count in wanted["inner"].items():
        start = BEGIN + (row[at] - BEGIN) // WINDOW * WINDOW
        windows[row[0], start] += count
    for how, one in wanted.items():
        compare(how, found[how], one)
        counts[how] = one.total()
    told = check_notes(given)
    shown = [dict(zip(stream.outputs["pairs"].output.names, row, strict=True)) for row in found["pairs"].elements()]
    compare("pairs", Counter({(r["k"], r["window_start"]): r["n"] for r in shown}), windows)
    assert len(shown) == len(windows), "a window came twice"
    # The newest versions and the counts of notes are kept for ever.
    check_proven(settings, stream, given.directory, keeping=("lookup", "known", "noted"))
    return ", ".join([*(f"{count} {how}" for how, count in counts.items()), told])


def check_notes(given: argparse.Namespace) -> str:
    """Check that the third source was read from its first file on, each row once; and all of it, unless it was given
    up; return what there was, for people."""
    found = Counter((row["id"], row["n"]) for row in Files(given.directory / "sinks" / "noted").read())
    files = given.pieces // NOTES_EVERY if has_notes(given) else -(-len(found) // NOTES_A_FILE)
    compare("noted", found, Counter((id, 1) for id in range(files * NOTES_A_FILE)))
    return f"{files} files of notes" + ("" if has_notes(given) else ", then given up")


class JoinKills(Kills):
    """Runs of streams that join two sources of files."""

    module = "tests.fault.join_kills"

    def make_input(self, directory: Path) -> list[Path]:
        made, tables = pieces(self.given), dict[str, list[pa.Table]]()
        ids = [range(n * NOTES_A_FILE, (n + 1) * NOTES_A_FILE) for n in range(self.given.pieces // NOTES_EVERY)]
        tables["notes"] = [pa.table({"id": each}, schema=pa.schema(NOTES["notes"])) for each in ids]
        for name, columns in SCHEMA.items():
            rows = [batch.rows().get(name, []) for source, batch in made if source == name]
            tables[name] = [pa.Table.from_pylist(each, pa.schema(columns)) for each in rows]
        left = {name: iter(files) for name, files in lay_out(directory, tables).items()}
        coming = [next(left[source]) for source, _ in made]
        for n, file in enumerate(left["notes"]):
            coming.insert(n * (NOTES_EVERY + 1), file)
        return coming

    def give(self, piece: Path, directory: Path) -> None:
        let_in(piece, directory)


def main() -> int:
    """Kill runs, one after the other, and check a stream each time its input is used up."""
    given = arguments(__doc__).parse_args()
    if not answers(given, check, define, given_up):
        JoinKills(given).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
