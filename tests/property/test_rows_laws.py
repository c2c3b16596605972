"""What `Rows` computes for all keys at once is what a loop over the rows of each key computes."""

import math
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.errors import BadRow, UsageError
from siltstone.operator import Operator, ValueState
from siltstone.rows import Rows
from tests.examples import examples

NAN = float("nan")
LEAST, MOST = -(2**63), 2**63 - 1
WIDE = pa.decimal128(38, 2)
EXACT = Context(prec=60)
MOST_DECIMAL = Decimal("9" * 36 + ".99")


class Keyed(Operator):
    name = "keyed"
    key = {"k": pa.int64()}  # noqa: RUF012
    anything = ValueState(value={"v": pa.int64()})


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Small values, of which many are equal, and the extremes."""
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_integer(kind):
        least, most = (0, 255) if kind == pa.uint8() else (LEAST, MOST)
        return st.integers(0, 3) | st.sampled_from([least, most, most - 1]) | st.integers(least, most)
    if pa.types.is_floating(kind):
        return st.sampled_from([0.0, -0.0, NAN, math.inf, -math.inf, 1e308, 0.1]) | st.floats(width=64)
    if pa.types.is_decimal(kind):
        whole = st.integers(-(10**38) + 1, 10**38 - 1) | st.integers(-300, 300)
        return st.sampled_from([MOST_DECIMAL, EXACT.minus(MOST_DECIMAL)]) | whole.map(
            lambda n: EXACT.scaleb(Decimal(n), -2)
        )
    return st.text("abé", max_size=2)


def rows_of(kind: pa.DataType) -> st.SearchStrategy[list[tuple[int, Any, Any, Any]]]:
    """(key, value, restart, by): no row, one key, many keys."""
    by = st.none() | st.integers(0, 3)
    row = st.tuples(st.integers(0, 3), st.none() | values_of(kind), st.none() | st.booleans(), by)
    one_key = st.lists(
        st.tuples(st.just(7), *(st.none() | values_of(kind), st.none() | st.booleans(), by)), max_size=12
    )
    return st.lists(row, max_size=30) | one_key


NUMBERS = [pa.bool_(), pa.uint8(), pa.int64(), pa.float64(), WIDE]
KINDS = [*NUMBERS, pa.string()]


def given_rows(kind: pa.DataType) -> st.SearchStrategy[tuple[Rows, list[tuple[Any, ...]], list[Any]]]:
    """Rows, the same as tuples, and one initial value for each key of `Rows.keys`."""

    def with_initial(cells: list[tuple[Any, ...]]) -> st.SearchStrategy[Any]:
        columns = list(zip(*cells, strict=True)) or [(), (), (), ()]
        types = (pa.int64(), kind, pa.bool_(), pa.int64())
        table = pa.table(
            [pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=["k", "v", "restart", "by"]
        )
        rows = Rows.make(Keyed(), table, None, 8)
        count = len(rows.keys)
        return st.tuples(
            st.just(rows),
            st.just(cells),
            st.none() | st.lists(st.none() | values_of(kind), min_size=count, max_size=count),
        )

    return rows_of(kind).flatmap(with_initial)


def by_key(rows: Rows, cells: list[tuple[Any, ...]], initial: list[Any] | None) -> list[list[tuple[Any, ...]]]:
    """For each key of `Rows.keys` its rows, the initial value ahead as a row."""
    keys = rows.keys.columns["k"].to_pylist()
    ahead = [[] if initial is None else [(key, initial[i], None, None)] for i, key in enumerate(keys)]
    return [[*ahead[i], *(cell for cell in cells if cell[0] == key)] for i, key in enumerate(keys)]


def plain(value: Any) -> Any:
    """A value that can be compared: every NaN equals every other, and -0.0 equals 0.0."""
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def rank(value: Any) -> Any:
    """A value in Spark's order: NaN above every number, text by its bytes."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value.encode() if isinstance(value, str) else value


def total(kind: pa.DataType, values: list[Any], *, in_order: bool) -> Any:
    """The sum of values that are not null; OverflowError where it does not fit."""
    if not values:
        return None
    if pa.types.is_floating(kind):
        result = 0.0
        for value in values if in_order else sorted(values, key=rank):
            result += value
        return result
    result = sum(int(EXACT.scaleb(value, 2)) if isinstance(value, Decimal) else int(value) for value in values)
    if abs(result) >= 10**38 if pa.types.is_decimal(kind) else not LEAST <= result <= MOST:
        raise OverflowError
    return EXACT.scaleb(Decimal(result), -2) if pa.types.is_decimal(kind) else result


def same(got: Callable[[], pa.Array], wanted: Callable[[], list[Any]]) -> None:
    """Equal, or both refuse."""
    try:
        expected = wanted()
    except OverflowError:
        with pytest.raises(BadRow, match="the sum of column v leaves"):
            got()
    else:
        assert list(map(plain, got().to_pylist())) == list(map(plain, expected))


def initial_of(kind: pa.DataType, initial: list[Any] | None) -> pa.Array | None:
    if initial is None:
        return None
    return pa.array(initial, kind).cast(pa.int64()) if pa.types.is_boolean(kind) else pa.array(initial, kind)


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_sums(kind: pa.DataType) -> None:
    @settings(max_examples=examples(60))
    @given(given_rows(kind))
    def check(drawn: tuple[Rows, list[tuple[Any, ...]], list[Any] | None]) -> None:
        rows, cells, initial = drawn
        parts = by_key(rows, cells, initial)
        same(
            lambda: rows.sum("v", initial=initial_of(kind, initial)),
            lambda: [total(kind, [c[1] for c in part if c[1] is not None], in_order=False) for part in parts],
        )

    check()


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_running_sums(kind: pa.DataType) -> None:
    @settings(max_examples=examples(60))
    @given(given_rows(kind), st.booleans())
    def check(drawn: tuple[Rows, list[tuple[Any, ...]], list[Any] | None], restarts: bool) -> None:
        rows, cells, initial = drawn
        keys = rows.keys.columns["k"].to_pylist()

        def wanted() -> list[Any]:
            so_far = {key: [] if initial is None or initial[i] is None else [initial[i]] for i, key in enumerate(keys)}
            found = []
            for key, value, again, _ in cells:
                if again and restarts:
                    so_far[key] = []
                so_far[key] += [] if value is None else [value]
                found.append(total(kind, so_far[key], in_order=True))
            return found

        restart = "restart" if restarts else None
        same(lambda: rows.running("v", restart=restart, initial=initial_of(kind, initial)), wanted)

    check()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_least_greatest_first_and_last(kind: pa.DataType) -> None:
    @settings(max_examples=examples(60))
    @given(given_rows(kind))
    def check(drawn: tuple[Rows, list[tuple[Any, ...]], list[Any] | None]) -> None:
        rows, cells, initial = drawn
        start = None if initial is None else pa.array(initial, kind)
        own = [[c[1] for c in part if c[1] is not None] for part in by_key(rows, cells, initial)]
        same(lambda: rows.min("v", initial=start), lambda: [min(v, key=rank, default=None) for v in own])
        same(lambda: rows.max("v", initial=start), lambda: [max(v, key=rank, default=None) for v in own])
        same(lambda: rows.first("v", initial=start), lambda: [v[0] if v else None for v in own])
        same(lambda: rows.last("v", initial=start), lambda: [v[-1] if v else None for v in own])
        parts = by_key(rows, cells, None)
        timed = [[c for c in part if c[1] is not None and c[3] is not None] for part in parts]
        ranked = [sorted(part, key=lambda c: (c[3], rank(c[1]))) for part in timed]
        same(lambda: rows.first("v", by="by"), lambda: [part[0][1] if part else None for part in ranked])
        same(lambda: rows.last("v", by="by"), lambda: [part[-1][1] if part else None for part in ranked])
        # By more than one column, here the place of the row: ties do not come to that.
        place = np.arange(len(rows))
        later = [
            sorted(((c[3], i, c[1]) for i, c in enumerate(cells) if c in part), key=lambda t: t[:2]) for part in timed
        ]
        same(lambda: rows.last("v", by=("by", place)), lambda: [part[-1][2] if part else None for part in later])

    check()


@settings(max_examples=examples(60))
@given(given_rows(pa.int64()))
def test_counts_any_and_all(drawn: tuple[Rows, list[tuple[Any, ...]], list[Any] | None]) -> None:
    rows, cells, _ = drawn
    parts = by_key(rows, cells, None)
    counts, places = np.arange(len(parts)) + 5, np.arange(len(parts))
    initial = pa.array(counts, mask=places % 2 == 1)
    assert rows.count().to_pylist() == [len(part) for part in parts]
    assert rows.count("v").to_pylist() == [sum(c[1] is not None for c in part) for part in parts]
    assert rows.count(initial=initial).to_pylist() == [
        len(part) + (0 if i % 2 else i + 5) for i, part in enumerate(parts)
    ]
    flags = [[c[2] for c in part if c[2] is not None] for part in parts]
    assert rows.any("restart").to_pylist() == [any(own) if own else None for own in flags]
    assert rows.all("restart").to_pylist() == [all(own) if own else None for own in flags]
    before = pa.array(places % 2 == 0)
    assert rows.any("restart", initial=before).to_pylist() == [any(own) or not i % 2 for i, own in enumerate(flags)]
    assert rows.all("restart", initial=before).to_pylist() == [all(own) and not i % 2 for i, own in enumerate(flags)]
    seen: dict[int, int] = {}
    for found, (key, *_) in zip(rows.running().to_pylist(), cells, strict=True):
        seen[key] = seen.get(key, 0) + 1
        assert found == seen[key]


@settings(max_examples=examples(60))
@given(given_rows(pa.string()))
def test_longer_keys_and_some_of_the_rows(drawn: tuple[Rows, list[tuple[Any, ...]], list[Any] | None]) -> None:
    rows, cells, _ = drawn
    entries = rows.by("v")
    named = list(zip(*(entries.keys.columns[name].to_pylist() for name in ("k", "v")), strict=True))
    assert sorted(named, key=str) == sorted({c[:2] for c in cells}, key=str)
    assert [named[i] for i in entries.key_index] == [c[:2] for c in cells]
    assert dict(zip(named, entries.count().to_pylist(), strict=True)) == {
        each: sum(c[:2] == each for c in cells) for each in named
    }
    owners = dict(zip(rows.table["k"].to_pylist(), rows.key_groups.tolist(), strict=True))
    assert entries.keys.key_groups.tolist() == [owners[key] for key, _ in named]
    some = rows.filter("restart")
    kept = [c for c in cells if c[2]]
    assert some.table["k"].to_pylist() == [c[0] for c in kept]
    assert dict(zip(some.keys.columns["k"].to_pylist(), some.count("by").to_pylist(), strict=True)) == {
        key: sum(c[0] == key and c[3] is not None for c in kept) for key in {c[0] for c in kept}
    }


def test_a_long_run_of_floats_is_added_one_after_the_other() -> None:
    draw = np.random.default_rng(3)
    keys = np.concatenate([np.zeros(2000, np.int64), draw.integers(1, 900, 5000), np.full(300, 901)])
    draw.shuffle(keys)
    values = draw.uniform(-1e9, 1e9, len(keys))
    found = Rows.make(Keyed(), pa.table({"k": keys, "v": values}), None, 8).running("v").to_pylist()
    sums: dict[int, float] = {}
    for key, value, got in zip(keys.tolist(), values.tolist(), found, strict=True):
        sums[key] = sums.get(key, 0.0) + value
        assert got == sums[key]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda rows: rows.sum("nothing"), "operator keyed: the rows have no column nothing"),
        (lambda rows: rows.by("nothing"), "the rows have no column nothing"),
        (lambda rows: rows.sum("s"), "sum of column s cannot add up values of type string"),
        (lambda rows: rows.sum([1]), "1 values were given for 3 rows"),
        (lambda rows: rows.sum("v", initial=[1]), "initial has 1 values for 2 keys"),
        (lambda rows: rows.sum("v", initial=["a", "b"]), "initial is not int64"),
        (lambda rows: rows.any("v"), "column v is of type int64: booleans are needed here"),
        (lambda rows: rows.filter([1, 0, 1]), "the values given is of type int64: booleans are needed here"),
        (lambda rows: rows.first("v", by="s", initial=[1, 2]), "take either by or initial"),
    ],
)
def test_mistakes_are_said_at_once(call: Callable[[Rows], Any], said: str) -> None:
    rows = Rows.make(Keyed(), pa.table({"k": [1, 2, 1], "v": [1, 2, 3], "s": ["a", "b", "c"]}), None, 8)
    with pytest.raises(UsageError, match=said):
        call(rows)


def test_an_overflow_names_all_rows_of_its_key() -> None:
    rows = Rows.make(Keyed(), pa.table({"k": [1, 2, 1, 3], "v": [MOST, 1, 1, 5]}), None, 8)
    for call in (rows.sum, rows.running):
        with pytest.raises(BadRow, match="operator keyed: the sum of column v leaves int64 for k 1; use") as caught:
            call("v")
        assert caught.value.rows.tolist() == [True, False, True, False]
        assert caught.value.reason == "operator keyed: the sum of column v leaves int64"
    # Of some of the rows, the operator keys are named instead.
    with pytest.raises(BadRow) as caught:
        rows.filter(pa.array([True, False, True, True])).by("v").sum([MOST, MOST, 1], initial=[1, 1, 1])
    assert caught.value.rows.tolist() == [True, True, False]
    assert caught.value.keys.tolist() == rows.hashes[[0, 2, 3]].tolist()
