"""Sums and averages against Python's own integers and decimals, at and beyond the edges of their types."""

import decimal
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from siltstone.aggregates.operator import Aggregate, Average, Function, Sum
from siltstone.errors import BadRow, UsageError
from siltstone.state.exact import fits_decimal, fits_int64, means, sum_int64, sum_words, to_decimal
from tests.examples import examples
from tests.subtask import subtask

LEAST, MOST = -(2**63), 2**63 - 1
EDGES = [LEAST, LEAST + 1, -(2**53) - 1, -1, 0, 1, 2**32, 2**53 + 1, MOST - 1, MOST]
longs = st.one_of(st.integers(LEAST, MOST), st.sampled_from(EDGES), st.integers(-9, 9))
whole = st.one_of(st.integers(1 - 10**38, 10**38 - 1), longs, st.sampled_from([10**38 - 1, 1 - 10**38]))
WHOLE = pa.decimal128(38, 0)
KEY = {"k": pa.int64()}


def words_of(numbers: list[int]) -> np.ndarray:
    data = b"".join((n % 2**128).to_bytes(16, "little") for n in numbers)
    return np.frombuffer(data, np.uint64).reshape(-1, 2)


def numbers_of(words: np.ndarray) -> list[int]:
    return [int.from_bytes(row.tobytes(), "little", signed=True) for row in np.ascontiguousarray(words)]


def grouped(rows: list[tuple[int, int]], size: int) -> list[int]:
    return [sum(n for group, n in rows if group == k) for k in range(size)]


@given(st.lists(st.tuples(st.integers(0, 3), longs), max_size=40))
def test_sums_of_integers_are_exact(rows: list[tuple[int, int]]) -> None:
    group = np.array([g for g, _ in rows], np.int64)
    wrapped, words = sum_int64(np.array([n for _, n in rows], np.int64), group, 4)
    exact = grouped(rows, 4)
    assert wrapped.tolist() == [(n + 2**63) % 2**64 - 2**63 for n in exact]
    if words is None:
        assert wrapped.tolist() == exact
    else:
        assert numbers_of(words) == exact
        assert fits_int64(words).tolist() == [LEAST <= n <= MOST for n in exact]


@given(st.lists(st.tuples(st.integers(0, 3), whole), max_size=12))
@example([(0, 10**38 - 1)] * 9)
@example([(0, 1 - 10**38)] * 9)
@example([(0, 10**38 - 1), (0, 1)])
def test_sums_of_decimals_are_exact_or_said_to_overflow(rows: list[tuple[int, int]]) -> None:
    sums, overflow = sum_words(words_of([n for _, n in rows]), np.array([g for g, _ in rows], np.int64), 4)
    exact = grouped(rows, 4)
    assert overflow.tolist() == [abs(n) >= 10**38 for n in exact]
    assert [n for n, beyond in zip(numbers_of(sums), overflow, strict=True) if not beyond] == [
        n for n in exact if abs(n) < 10**38
    ]


@given(st.lists(st.integers(-(2**127), 2**127 - 1), max_size=20))
@example([10**38, 10**38 - 1, -(10**38), 1 - 10**38])
def test_what_38_digits_hold(numbers: list[int]) -> None:
    assert fits_decimal(words_of(numbers)).tolist() == [abs(n) < 10**38 for n in numbers]


@given(st.lists(st.tuples(longs, st.integers(0, 2**64), st.integers(1, 2**27 - 1)), min_size=1, max_size=20))
@example([(MOST, 0, 1), (LEAST, 0, 1), (2**53 + 1, 0, 1), (-(2**53) - 1, 0, 3)])
def test_means_are_pythons(parts: list[tuple[int, int, int]]) -> None:
    """Totals are a mean times a count, and something less than the count."""
    totals = [mean * count + (rest % count if mean < MOST else 0) for mean, rest, count in parts]
    counts = [count for _, _, count in parts]
    found = means(words_of(totals), np.array(counts, np.int64)).tolist()
    assert found == [total / count for total, count in zip(totals, counts, strict=True)]


def test_a_mean_of_more_rows_than_31_bits_count() -> None:
    assert means(words_of([3 * 2**90, -7, 0]), np.array([2**40, 2**35, 0])).tolist() == [3 * 2**50, -7 / 2**35, 0]


cuts = st.lists(st.lists(st.tuples(st.integers(0, 1), st.one_of(st.none(), longs)), min_size=1, max_size=6), max_size=4)


def run(function: Function, cut: Any, kind: pa.DataType, map_side: bool) -> dict[int, Any]:
    """What the last output said of each key, of batches of (key, value)."""
    operator = Aggregate("a", key=KEY, aggregates=[function], map_side=map_side)
    found: dict[int, Any] = {}
    with subtask(operator) as task:
        for rows in cut:
            table = pa.table({"k": pa.array([k for k, _ in rows]), "v": pa.array([v for _, v in rows], kind)})
            output = task.process(operator.combine(table) if map_side else table)
            found |= {row["k"]: row["f"] for row in output.to_pylist()}
    return found


@settings(max_examples=examples(60))
@given(cuts, st.booleans())
@example([[(0, 1_700_000_000_000_000)] * 6] * 4, False)
@example([[(0, MOST)] * 6] * 4, True)
def test_an_average_of_integers_is_exact(cut: Any, map_side: bool) -> None:
    values = {k: [v for rows in cut for key, v in rows if key == k and v is not None] for rows in cut for k, _ in rows}
    expected = {k: sum(v) / len(v) if v else None for k, v in values.items()}
    assert run(Average("f", of="v"), cut, pa.int64(), map_side) == expected


@settings(max_examples=examples(60))
@given(cuts, st.booleans(), st.sampled_from(["fail", "null", "wrap"]))
@example([[(0, MOST), (0, 1)], [(0, -1)]], True, "null")
@example([[(0, MOST), (0, 1), (0, -1)]], True, "fail")
def test_a_sum_of_integers_that_overflows_does_what_it_was_told(cut: Any, map_side: bool, on_overflow: str) -> None:
    """A sum is looked at after each call: what leaves int64 within a call and comes back is a sum as others."""
    function = Sum("f", of="v", on_overflow=on_overflow)
    sums: dict[int, int | None] = {}
    gone: set[int] = set()
    for rows in cut:
        for key, value in rows:
            sums.setdefault(key, None)
            if value is not None:
                sums[key] = (sums[key] or 0) + value
        gone |= {k for k, n in sums.items() if n is not None and not LEAST <= n <= MOST}
        if gone and on_overflow == "fail":
            with pytest.raises(
                BadRow, match=f"operator a: f of column v leaves int64 for k ({'|'.join(map(str, gone))})"
            ):
                run(function, cut, pa.int64(), map_side)
            return
    found = run(function, cut, pa.int64(), map_side)
    if on_overflow == "wrap":
        assert found == {k: None if n is None else (n + 2**63) % 2**64 - 2**63 for k, n in sums.items()}
    else:
        assert found == {k: None if k in gone else n for k, n in sums.items()}


def test_whatever_lies_under_a_null_flag_overflows_no_sum() -> None:
    """A key that is new has no flag yet, and Arrow leaves the bits under a null as they are."""
    flags = pa.Array.from_buffers(pa.bool_(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(b"\x03")])
    assert flags.to_pylist() == [True, None]
    sums, overflowed = Sum("f", of="v", type=pa.int64(), on_overflow="null").reduce(
        [pa.array([None, 7], pa.int64()), flags], np.array([0, 1]), 2
    )
    assert (sums.to_pylist(), overflowed.to_pylist()) == ([None, 7], [True, False])


cents = st.one_of(st.decimals(-(10**9), 10**9, places=2), st.sampled_from([Decimal(10**36 - 1), Decimal(1 - 10**36)]))


@settings(max_examples=examples(60))
@given(st.lists(st.lists(st.tuples(st.integers(0, 1), cents), min_size=1, max_size=60), max_size=3), st.booleans())
@example([[(0, Decimal(10**36 - 1))] * 2], False)
def test_a_sum_of_decimals_is_exact_or_refused(cut: Any, map_side: bool) -> None:
    kind = pa.decimal128(38, 2)
    with decimal.localcontext(decimal.Context(prec=60)):
        sums: dict[int, Decimal] = {}
        for rows in cut:
            for key, value in rows:
                sums[key] = sums.get(key, Decimal(0)) + value
            if any(abs(total) >= 10**36 for total in sums.values()):
                with pytest.raises(BadRow, match=r"f of column v leaves decimal128\(38, 2\) for k"):
                    run(Sum("f", of="v", type=kind), cut, kind, map_side)
                return
        assert run(Sum("f", of="v", type=kind), cut, kind, map_side) == sums


def test_decimals_survive_the_way_through_words() -> None:
    numbers = [0, -1, 10**38 - 1, 1 - 10**38]
    array = to_decimal(words_of(numbers), WHOLE, np.array([False, False, True, False]))
    array.validate(full=True)
    assert array.to_pylist() == [0, -1, None, 1 - 10**38]


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="on_overflow of s is 'ignore': use 'fail', 'null' or 'wrap'"):
        Sum("s", of="v", on_overflow="ignore")
    with pytest.raises(UsageError, match="only integers can wrap"):
        Sum("s", of="v", type=pa.decimal128(9, 2), on_overflow="wrap")
