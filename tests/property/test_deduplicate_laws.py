"""`Deduplicate` passes on what a row by row reading of the same rows does, however they are cut and run again."""

from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.deduplicate import Deduplicate
from siltstone.errors import UsageError
from siltstone.testing import StreamTester
from tests.timed_streams import BEGIN, at, timed

DELAY, WITHIN = 4, 6
SCHEMA = {"id": pa.int64(), "at": pa.timestamp("us", "UTC"), "n": pa.int64()}
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=30)
CUTS = st.lists(st.integers(1, 8), min_size=1, max_size=8)
AFTER = st.sampled_from(["", "", "crash", "restart", "lost", "rescale"])


def once(**options: object) -> Deduplicate:
    arguments = {"within": f"{WITHIN} minutes", "on": "at", "columns": {"n": pa.int64()}, **options}
    return Deduplicate("once", {"id": pa.int64()}, **arguments)  # pyright: ignore[reportArgumentType]


def batches(rows: list[tuple[int, int]], cuts: list[int]) -> list[list[dict[str, object]]]:
    """The rows, numbered, in micro-batches."""
    numbered = [{"id": id, "at": at(minute), "n": n} for n, (id, minute) in enumerate(rows)]
    made, done = [], 0
    while done < len(numbered):
        size = cuts[len(made) % len(cuts)]
        made.append(numbered[done : done + size])
        done += size
    return made


def expected(made: list[list[dict[str, object]]]) -> tuple[list[object], int]:
    """The numbers of the rows that pass, and how many are late: read one by one, the earliest of a batch first."""
    until, passed, late = dict[object, object](), list[object](), 0
    high = watermark = before = None
    for batch in made:
        watermark, before = (None if high is None else high - timedelta(minutes=DELAY)), watermark
        for row in sorted(batch, key=lambda row: (row["at"], row["n"])):
            moment = row["at"]
            if before is not None and moment < before:
                late += 1
            elif row["id"] not in until or moment >= until[row["id"]]:
                until[row["id"]] = moment + timedelta(minutes=WITHIN)
                passed.append(row["n"])
            high = moment if high is None else max(high, moment)
    return sorted(passed), late


@settings(deadline=None)
@given(ROWS, CUTS, st.lists(AFTER, max_size=8), st.sampled_from(["heap", "rocksdb"]), st.integers(1, 3))
def test_it_passes_on_the_first_row_of_each_key(
    rows: list[tuple[int, int]], cuts: list[int], after: list[str], backend: str, parallelism: int
) -> None:
    stream = timed("d", operators=[once()], delay=f"{DELAY} minutes", sinks={"once": None}, max_parallelism=8)
    made = batches(rows, cuts)
    with StreamTester(stream, parallelism=parallelism, backend=backend, schema=SCHEMA, now=BEGIN) as tester:
        passed = []
        for number, batch in enumerate(made):
            passed += tester.step(batch)["once"]["n"].to_pylist()
            does = after[number] if number < len(after) else ""
            if does == "rescale":
                tester.rescale(3 if tester.parallelism == 1 else 1)
            elif does:
                getattr(tester, "restart" if does == "lost" else does)(**({"lost": True} if does == "lost" else {}))
        wanted, _ = expected(made)
        assert sorted(passed) == wanted == sorted(tester.delivered("once")["n"].to_pylist())
        tester.finish()
        assert tester.state("once", "seen").num_rows == 0
        tester.replay()


def test_by_the_time_of_day() -> None:
    operator = once(on=None, clock="processing")
    with StreamTester(timed("d", operators=[operator], event_time=None), schema=SCHEMA, now=BEGIN) as tester:
        row = {"id": 1, "n": 0}
        assert tester.step([row, row])["once"].num_rows == 1
        tester.advance("5 minutes")
        assert tester.step([row])["once"].num_rows == 0
        tester.advance("1 minute")
        assert tester.state("once", "seen").num_rows == 0
        assert tester.step([row])["once"].num_rows == 1


@pytest.mark.parametrize(
    "options",
    [
        {"on": None},
        {"clock": "processing"},
        {"within": "0s"},
        {"within": "365001 days"},
        {"clock": "moon"},
        {"on": "n"},
        {"on": "id"},
    ],
)
def test_a_wrong_argument_is_said(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        once(**options)
