"""The ready-made aggregates: what SQL says of nulls, ties, types, and rows aggregated before the shuffle."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from siltstone.aggregates.distinct import ApproxDistinct
from siltstone.aggregates.lists import CollectList, TopN
from siltstone.aggregates.operator import Aggregate, Average, Count, First, Last, Max, Min, Sum
from siltstone.errors import BadRow, UsageError
from siltstone.operator import Operator
from siltstone.state.reduction import choose_by, order_codes
from tests.subtask import subtask

KEY = {"k": pa.string()}
NAN = float("nan")


def moment(second):
    return None if second is None else dt.datetime(2013, 1, 1, 0, 0, second, tzinfo=dt.UTC)


def rows(*entries):
    """(key, value, second) each."""
    keys, values, seconds = zip(*entries, strict=True)
    times = pa.array([moment(s) for s in seconds], pa.timestamp("us", "UTC"))
    return {"k": list(keys), "v": list(values), "event_time": times}


def by_key(table):
    """Key -> the other columns as a tuple."""
    return {row.pop("k"): tuple(row.values()) for row in table.to_pylist()}


FUNCTIONS = [
    Count("n"),
    Count("n_v", of="v"),
    Sum("total", of="v"),
    Min("lo", of="v"),
    Max("hi", of="v"),
    Average("mean", of="v"),
    First("first", of="v"),
    Last("last", of="v"),
]


def test_aggregates_of_several_batches():
    with subtask(Aggregate("a", key=KEY, aggregates=FUNCTIONS)) as task:
        got = task.process(rows(("x", 3, 5), ("y", None, 1), ("x", None, 0), ("x", 7, 2)))
        assert got.schema == task.operator.output
        assert by_key(got) == {
            "x": (3, 2, 10, 3, 7, 5.0, 7, 3),
            "y": (1, 0, None, None, None, None, None, None),
        }
        got = task.process(rows(("y", -4, 9), ("x", 1, 4)))
        assert by_key(got) == {"x": (4, 3, 11, 1, 7, 11 / 3, 7, 3), "y": (2, 1, -4, -4, -4, -4.0, -4, -4)}
        kept = task.dump("totals")
        assert [r for r in kept if r["k"] == "x"] == [
            {
                "k": "x", "n": 4, "n_v": 3, "total": 11, "lo": 1, "hi": 7, "mean_sum": 11, "mean_count": 3,
                "first": 7, "first_by": moment(2), "last": 3, "last_by": moment(5),
            }
        ]  # fmt: skip


def test_ties_in_time_are_broken_by_value_and_null_times_skipped():
    with subtask(Aggregate("a", key=KEY, aggregates=[First("f", of="v"), Last("l", of="v")])) as task:
        task.process(rows(("x", 5, 1), ("x", 9, 1), ("x", 7, 1), ("x", 0, None)))
        assert by_key(task.process(rows(("x", 6, 1), ("y", 1, None)))) == {"x": (5, 9), "y": (None, None)}
        assert by_key(task.process(rows(("x", 1, 1), ("x", 10, 1))))["x"] == (1, 10)


@pytest.mark.parametrize(
    ("kind", "values", "least", "greatest"),
    [
        (pa.string(), ["b", "é", "a", "ab"], "a", "é"),
        (pa.binary(), [b"\xff", b"", b"\x00", b"a"], b"", b"\xff"),
        (
            pa.decimal128(30, 2),
            [Decimal("1.50"), Decimal("-9.00"), Decimal("10.25")],
            Decimal("-9.00"),
            Decimal("10.25"),
        ),
        (pa.bool_(), [True, False, True], False, True),
        (pa.uint64(), [2**64 - 1, 0, 2**63], 0, 2**64 - 1),
        (pa.int8(), [-128, 127, 0], -128, 127),
        (pa.date32(), [dt.date(2013, 1, 2), dt.date(1969, 1, 1)], dt.date(1969, 1, 1), dt.date(2013, 1, 2)),
        (
            pa.timestamp("us", "UTC"),
            [dt.datetime(2013, 1, 2, tzinfo=dt.UTC), dt.datetime(1969, 1, 1, tzinfo=dt.UTC)],
            dt.datetime(1969, 1, 1, tzinfo=dt.UTC),
            dt.datetime(2013, 1, 2, tzinfo=dt.UTC),
        ),
        (pa.uint32(), [2**32 - 1, 0, 2**31], 0, 2**32 - 1),
        (pa.float32(), [1.5, -2.5, 0.0], -2.5, 1.5),
        (pa.float64(), [1.5, -float("inf"), float("inf")], -float("inf"), float("inf")),
    ],
    ids=str,
)
def test_least_and_greatest_of_every_type(kind, values, least, greatest):
    functions = [Min("lo", of="v", type=kind), Max("hi", of="v", type=kind)]
    for order in (values, values[::-1]):
        with subtask(Aggregate("a", key=KEY, aggregates=functions)) as task:
            column = pa.array([*order[:1], None], kind)
            task.process({"k": ["x", "x"], "v": column})
            got = task.process({"k": ["x"] * len(order), "v": pa.array(order, kind)})
            assert by_key(got) == {"x": (least, greatest)}


def test_nan_is_above_every_number_and_zeros_have_no_sign():
    functions = [Min("lo", of="v", type=pa.float64()), Max("hi", of="v", type=pa.float64())]
    with subtask(Aggregate("a", key={"k": pa.int64()}, aggregates=functions)) as task:
        got = task.process({"k": [1, 1, 2, 3, 3], "v": [NAN, 5.0, NAN, -0.0, 0.0]})
        found = {row["k"]: (row["lo"], row["hi"]) for row in got.to_pylist()}
        assert found[1][0] == 5.0
        assert np.isnan([found[1][1], *found[2]]).all()
        assert not np.signbit(found[3]).any()


def test_sums_keep_their_kind():
    functions = [
        Sum("d", of="d", type=pa.decimal128(10, 2)),
        Average("dm", of="d", type=pa.decimal128(10, 2)),
        Sum("i", of="i", type=pa.int8()),
        Sum("f", of="f", type=pa.float32()),
    ]
    with subtask(Aggregate("a", key=KEY, aggregates=functions)) as task:
        cents = pa.array([Decimal("0.10"), Decimal("99999999.99"), None], pa.decimal128(10, 2))
        columns = {"k": ["x", "x", "y"], "d": cents, "i": pa.array([100, 100, 1], pa.int8())}
        got = task.process({**columns, "f": pa.array([0.5, 0.25, None], pa.float32())})
        assert by_key(got)["x"] == (Decimal("100000000.09"), 50000000.045, 200, 0.75)
        assert by_key(got)["y"] == (None, None, 1, None)
        assert got.schema.field("d").type == pa.decimal128(38, 2)
        got = task.process({**columns, "f": pa.array([1, 1, 1], pa.float32())})
        assert by_key(got)["x"][0] == Decimal("200000000.18")


def test_float_sums_do_not_see_the_order_of_rows():
    values = np.random.default_rng(5).normal(0, 1, 2000) * 10.0 ** np.random.default_rng(6).integers(-12, 12, 2000)
    functions = [Sum("s", of="v", type=pa.float64()), Average("m", of="v", type=pa.float64())]
    operator = Aggregate("a", key={"k": pa.int64()}, aggregates=functions)
    assert operator.order_by == ("k", "v")
    results = set()
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(2000)
        with subtask(operator) as task:
            task.process({"k": [0], "v": [1e-3]})
            got = task.process({"k": np.zeros(2000, np.int64), "v": values[order]})
            results.add((got["s"][0].as_py(), got["m"][0].as_py()))
    assert len(results) == 1


@pytest.mark.parametrize("kind", [pa.uint32(), pa.uint64(), pa.float64(), pa.string()], ids=str)
def test_rows_aggregated_before_the_shuffle_make_the_same_state(kind):
    keys = pa.array([1, 2, 1, 3, 2, 1, 1, 3]).cast(kind)
    table = pa.table(rows(*((str(i), v, s) for i, (v, s) in enumerate([(5, 1), (None, 2), (7, 1), (0, 9)] * 2))))
    table = table.set_column(0, "k", keys)
    direct = Aggregate("a", key={"k": kind}, aggregates=FUNCTIONS)
    early = Aggregate("a", key={"k": kind}, aggregates=FUNCTIONS, map_side=True)
    with subtask(direct) as one, subtask(early) as two:
        for start in (0, 4):
            half = table.slice(start, 4)
            expected = one.process(half)
            pieces = [early.combine(half.slice(0, 3)), early.combine(half.slice(3))]
            assert all(piece.schema == early.combined for piece in pieces)
            assert pieces[0].num_rows < 3
            got = two.process(pa.concat_tables(pieces))
            assert sorted(map(str, got.to_pylist())) == sorted(map(str, expected.to_pylist()))
        assert one.state.tables["totals"].digests.tolist() == two.state.tables["totals"].digests.tolist()
    assert set(early.combined.names) == {
        "k",
        *(f"__partial_{c}" for c in early.tables()["totals"].value.names),
    }


def test_null_is_a_key_on_either_way():
    operator = Aggregate("a", key=KEY, aggregates=[Count("n")], map_side=True)
    source = pa.table({"k": pa.array(["x", None, None])})
    for table in (source, operator.combine(source)):
        with subtask(operator) as task:
            assert by_key(task.process(table)) == {"x": (1,), None: (2,)}
            assert by_key(task.process(table)) == {"x": (2,), None: (4,)}


def test_a_null_key_is_refused_on_either_way_where_it_must_not_be():
    operator = Aggregate("a", key=KEY, aggregates=[Count("n")], map_side=True, nullable=())
    source = pa.table({"k": pa.array(["x", None, None])})
    with subtask(operator) as task:
        for table in (source, operator.combine(source)):
            with pytest.raises(BadRow, match="operator a: key column k is null"):
                task.rows(table)
    assert by_key(operator.combine(source)) == {"x": (1,), None: (2,)}


def test_no_output_and_what_it_reads():
    operator = Aggregate(
        "a", key=KEY, aggregates=[Count("n"), Sum("s", of="v"), Last("l", of="w", by="t")], output=False
    )
    assert operator.output is None
    assert operator.inputs == ("k", "v", "w", "t")
    assert operator.order_by == ()
    with subtask(Aggregate("a", key=KEY, aggregates=[Count("n")], output=False)) as task:
        assert task.process({"k": ["x"]}) is None
        assert task.dump("totals") == [{"k": "x", "n": 1}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregates": []}, "operator a needs aggregates"),
        ({"aggregates": ["count"]}, "operator a needs aggregates"),
        ({"aggregates": [Count("n"), Sum("n", of="v")]}, "names must be distinct"),
        ({"aggregates": [Count("k")]}, "names must be distinct"),
        ({"aggregates": [Average("m", of="v"), Count("m_count")]}, "names must be distinct"),
        ({"aggregates": [Average("k", of="v")]}, "keys and aggregates must be distinct"),
        (
            {"aggregates": [Sum("s", of="v", type=pa.string())]},
            "aggregate s cannot add up values of type string",
        ),
        ({"aggregates": [Count("n")], "reads": "No"}, "'No' is not a source or operator name"),
    ],
)
def test_a_wrong_definition_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        Aggregate("a", key=KEY, **fields)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (Max, {"of": "v", "type": pa.list_(pa.int8())}, "column v has type list.*aggregate m is of flat values"),
        (First, {"of": "v", "by_type": pa.struct([("a", pa.int8())])}, "column event_time has type struct"),
        (ApproxDistinct, {"of": "v", "precision": 17}, "precision of m is 17: use a number from 4 to 16"),
        (ApproxDistinct, {"of": "v", "type": pa.list_(pa.int8())}, "aggregate m cannot count values of type list"),
        (CollectList, {"of": "v", "limit": 0}, "limit of m is 0: use a number of rows, at least 1"),
        (CollectList, {"of": "v", "by": "v"}, "aggregate m: v is the column to sort by"),
        (CollectList, {"of": "v", "by": "w", "by_type": pa.list_(pa.int8())}, "cannot sort by column w of type list"),
        (CollectList, {"of": "v", "type": pa.list_(pa.float16())}, "column v of type list.*use float32"),
        (CollectList, {"of": "v", "type": pa.time64("us")}, "column v has type time64.*use int64"),
        (TopN, {"n": 0, "by": "v"}, "n of m is 0: use a number of rows"),
        (TopN, {"n": True, "by": "v"}, "n of m is True: use a number of rows"),
        (TopN, {"n": 2, "by": "v", "of": {"v": pa.int64()}}, "aggregate m: v is the column to sort by"),
        (Last, {"of": "v", "by": "v"}, "aggregate m takes v by itself: use Min or Max"),
        (TopN, {"n": 2, "by": "v", "of": ["w"]}, "of of aggregate m must be a pyarrow schema or a dict"),
    ],
)
def test_a_wrong_function_is_refused(function, options, message):
    with pytest.raises(UsageError, match=message):
        function("m", **options)


def test_columns_that_do_not_fit_are_refused():
    with subtask(Aggregate("a", key=KEY, aggregates=[Count("n"), Sum("s", of="v"), Count("c", of="w")])) as task:
        for columns, message in [
            ({"k": ["x"], "w": [1]}, "operator a: column v is missing"),
            ({"k": ["x"], "v": [1]}, "operator a: column w is missing"),
            ({"k": ["x"], "v": [1.5], "w": [1]}, "operator a: column v does not fit int64"),
        ]:
            with pytest.raises(UsageError, match=message):
                task.process(columns)
            task.state.rollback()
        assert task.dump("totals") == []


def test_an_aggregate_is_an_operator_like_others():
    operator = Aggregate("a", key=KEY, aggregates=FUNCTIONS, reads="other")
    assert isinstance(operator, Operator)
    assert list(operator.variables()) == ["totals"]
    assert operator.definition()["variables"]["totals"]["kind"] == "ValueState"


def test_choosing_by_several_orders():
    first = pa.array([2, 1, 1, None, 5])
    second = pa.array(["a", "z", "b", "a", None])
    chosen, absent = choose_by([first, second], np.array([0, 0, 0, 0, 1]), 3)
    assert chosen[0] == 2
    assert absent.tolist() == [False, True, True]
    chosen, _ = choose_by([first, second], np.array([0, 0, 0, 0, 1]), 3, largest=True)
    assert chosen[0] == 0


def test_order_codes_of_floats_ascend():
    values = np.array([-np.inf, -1e300, -1.0, -5e-324, 0.0, 5e-324, 1.0, np.inf, NAN])
    assert (np.diff(order_codes(pa.array(values))) > 0).all()
    assert order_codes(pa.array([-0.0])) == order_codes(pa.array([0.0]))
