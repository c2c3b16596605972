"""`ApproxDistinct`, `CollectList`, `TopN` and `Bloom`: how far off they are, what is equal, and what is refused."""

import ast
import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

import siltstone
from siltstone.aggregates import hyperloglog
from siltstone.aggregates.distinct import ApproxDistinct
from siltstone.aggregates.functions import EVENT_TIME, Function
from siltstone.aggregates.lists import CollectList, TopN
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.totals import Totals
from siltstone.bloom import Bloom
from siltstone.errors import SchemaConflict, UsageError
from siltstone.keyed import KeyedProcessor
from siltstone.operator import TTL, ListState, Operator, Rows, State
from siltstone.run.definition import check_definition, definition_of
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from siltstone.time.event_time import EventTime
from tests.subtask import subtask

KEY = {"k": pa.string()}
NAN = float("nan")


def aggregated(function: Function, *tables: Any, **options: Any) -> Any:
    """Key -> the function's result, after these steps."""
    operator = Aggregate("a", key=KEY, aggregates=[function], **options)
    found: dict[Any, Any] = {}
    with subtask(operator) as task:
        for given in tables:
            table = given if isinstance(given, pa.Table) else pa.table(given)
            made = task.process(operator.combine(table) if operator.map_side else table)
            found |= {row["k"]: row[function.name] for row in made.to_pylist()}
    return found


def of_one(values: Any, kind: pa.DataType) -> pa.Table:
    """Rows of the key x."""
    return pa.table({"k": pa.array(["x"] * len(values), pa.string()), "v": pa.array(values, kind)})


# Approximate numbers of distinct values


@pytest.mark.parametrize("precision", [6, 8, 12, 16])
def test_estimates_are_within_four_standard_errors_and_have_no_bias(precision: int) -> None:
    function = ApproxDistinct("d", of="v", precision=precision)
    for count in (0, 1, 7, 60, 900, 5_000, 60_000, 400_000):
        groups = max(4, min(64, 400_000 // max(count, 1)))
        values = pa.array(np.random.default_rng(count).permutation(groups * count))
        group = np.arange(groups * count) % groups
        merged = function.reduce(function.lift([values]), group, groups)
        off = function.result(merged).to_numpy() - count
        error = 1.04 / 2 ** (precision / 2) * count
        assert np.abs(off).max() <= 1 + 4 * error
        assert abs(off.mean()) <= 0.2 + 4 * error / groups**0.5


def test_the_parts_of_a_large_merge_make_what_it_makes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    function, chosen = ApproxDistinct("d", of="v", precision=6), np.random.default_rng(3)
    values, group = pa.array(chosen.integers(0, 10**6, 3000)), chosen.integers(0, 60, 3000) ** 2 // 60
    lifted = function.lift([values])
    once = function.reduce(lifted, group, 70)
    monkeypatch.setattr(hyperloglog, "_CHUNK_BYTES", 130)
    halves = [function.reduce([lifted[0][part]], group[part], 70)[0] for part in (slice(0, 900), slice(900, 3000))]
    again = function.reduce([pa.concat_arrays(halves)], np.tile(np.arange(70), 2), 70)
    assert {len(sketch) for sketch in once[0].to_pylist()} >= {0, 64} and len(set(once[0].to_pylist())) > 40
    assert once == again
    assert function.result(once) == function.result(again)
    assert function.reduce([halves[0][::-1].slice(3, 20)], np.zeros(20, np.int64), 1) == function.reduce(
        [pa.array(halves[0][::-1].to_pylist()[3:23], pa.binary())], np.zeros(20, np.int64), 1
    )


@pytest.mark.parametrize(
    ("kinds", "values"),
    [
        ([pa.int8(), pa.int16(), pa.int32(), pa.int64()], [-1, 0, 5, 127]),
        ([pa.uint8(), pa.uint32(), pa.int64(), pa.uint64()], [0, 5, 255]),
        ([pa.float32(), pa.float64()], [0.5, -0.0, 0.0, NAN]),
        ([pa.decimal128(4, 2), pa.decimal128(18, 2), pa.decimal128(30, 2)], [Decimal("1.50"), Decimal("-99.99")]),
    ],
    ids=str,
)
def test_a_column_that_widens_counts_on(kinds: list[pa.DataType], values: list[Any]) -> None:
    states = set[Any]()
    for kind in kinds:
        with subtask(Aggregate("a", key=KEY, aggregates=[ApproxDistinct("d", of="v", type=kind)])) as task:
            task.process(of_one(values, kind))
            states.add(task.dump("totals")[0]["d_hll12"])
    assert len(states) == 1


@pytest.mark.parametrize(
    ("kind", "values", "count"),
    [
        (pa.float64(), [0.0, -0.0, NAN, -NAN, None], 2),
        (pa.uint64(), [2**64 - 1, 2**63, 0, None], 3),
        (pa.binary(), [b"", b"\0", b"\0\0", b"\xff", None], 4),
        (pa.string(), ["a", "a\0", "é", ""], 4),
        (pa.bool_(), [True, False, None], 2),
        (pa.date32(), [dt.date(1, 1, 1), dt.date(2026, 1, 1)], 2),
        (pa.timestamp("us", "UTC"), [dt.datetime(2026, 1, 1, tzinfo=dt.UTC)] * 2, 1),
        (pa.decimal128(38, 3), [Decimal("1.000"), Decimal("1"), Decimal("-1")], 2),
        (pa.int64(), [None, None], 0),
    ],
    ids=str,
)
def test_values_are_equal_as_in_keys(kind: pa.DataType, values: list[Any], count: int) -> None:
    function = ApproxDistinct("d", of="v", type=kind)
    assert aggregated(function, of_one(values, kind), of_one(values[::-1], kind)) == {"x": count}


def test_sketches_of_2_gib_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperloglog, "BYTES_MAX", 8000)
    with pytest.raises(UsageError, match=r"aggregate d: its sketches of 1 keys take 2 GiB or more in one call"):
        aggregated(ApproxDistinct("d", of="v", precision=13), of_one(range(5000), pa.int64()))


def test_lists_of_2_gib_are_refused_in_one_line() -> None:
    text = pa.array([b"x" * (1 << 27)])
    kept = CollectList("l", of="v", type=pa.binary())
    totals = Totals("operator a", [kept])
    with pytest.raises(UsageError, match=r"operator a: columns of state do not fit: .*overflow"):
        totals.take(kept.lift([text]), np.zeros(17, np.int64))


def test_another_precision_does_not_read_old_sketches() -> None:
    streams = [
        Stream("s", None, [Aggregate("a", key=KEY, aggregates=[ApproxDistinct("d", of="v", precision=p)])])
        for p in (12, 13)
    ]
    recorded, now = (definition_of(stream, {}) for stream in streams)
    with pytest.raises(SchemaConflict, match="d_hll12"):
        check_definition("s", recorded, now)
    function = ApproxDistinct("d", of="v", precision=4)
    for wrong in (b"abc", b"\0" * 20, b"\1\x10\0\0", b"\x3e\0\0\0", b"\x3e" * 16):
        with pytest.raises(UsageError, match="aggregate d: its state has bytes that are not a sketch of precision 4"):
            function.result(function.reduce([pa.array([b"", wrong])], np.zeros(2, np.int64), 1))


# Lists


NESTED = pa.struct([("a", pa.list_(pa.int8())), ("b", pa.string())])


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        (pa.string(), ["b", "a\0", "é", "a", None, "a"], ["a", "a", "a\0", "b", "é"]),
        (pa.binary(), [b"\xff", b"\0", b""], [b"", b"\0", b"\xff"]),
        (pa.uint64(), [2**64 - 1, 0, 2**63], [0, 2**63, 2**64 - 1]),
        (pa.decimal128(38, 1), [Decimal("1.5"), Decimal("-9.0")], [Decimal("-9.0"), Decimal("1.5")]),
        (pa.bool_(), [True, None, False], [False, True]),
        (pa.float32(), [float("inf"), 0.5, -1.5], [-1.5, 0.5, float("inf")]),
        (pa.int64(), [None, None], []),
        (
            NESTED,
            [{"a": [1, None], "b": None}, None, {"a": None, "b": "x"}, {"a": [1, None], "b": None}],
            [{"a": None, "b": "x"}, {"a": [1, None], "b": None}, {"a": [1, None], "b": None}],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("map_side", [False, True])
def test_lists_of_every_type(kind: pa.DataType, values: list[Any], wanted: list[Any], map_side: bool) -> None:
    function = CollectList("l", of="v", type=kind)
    for cut in (0, 1, len(values)):
        parts = [of_one(part, kind) for part in (values[cut:], values[:cut]) if part]
        assert aggregated(function, *parts, map_side=map_side) == {"x": wanted}


def test_nan_is_greatest_and_zeros_have_no_sign_in_lists() -> None:
    rows = of_one([NAN, -0.0, float("inf"), 0.0, -NAN], pa.float64())
    listed = aggregated(CollectList("l", of="v", type=pa.float64(), distinct=True), rows, rows)["x"]
    assert listed[:2] == [0.0, float("inf")] and len(listed) == 3 and not np.signbit(listed[0])
    top = aggregated(TopN("t", 3, by="v", by_type=pa.float64()), rows)["x"]
    assert np.isnan([row["v"] for row in top[:2]]).all() and top[2]["v"] == float("inf")


def test_a_null_by_comes_last_in_a_list_and_is_skipped_in_a_ranking() -> None:
    rows = pa.table({"k": ["x"] * 4, "v": [1, 2, None, 3], "w": pa.array([None, 5, 4, 5], pa.int64())})
    assert aggregated(CollectList("l", of="v", by="w", by_type=pa.int64()), rows) == {"x": [2, 3, 1]}
    top = [{"w": 5, "v": 2}, {"w": 5, "v": 3}, {"w": 4, "v": None}]
    assert aggregated(TopN("t", 9, by="w", of={"v": pa.int64()}), rows) == {"x": top}
    assert aggregated(TopN("t", 1, by="w", largest=False), rows) == {"x": [{"w": 4}]}


def test_lists_that_are_newer_than_a_row_are_empty() -> None:
    absent = pa.nulls(2, pa.list_(pa.int64()))
    function = CollectList("l", of="v")
    assert function.result([absent]).to_pylist() == [[], []]
    assert function.reduce([absent], np.array([1, 1]), 2)[0].to_pylist() == [[], []]
    assert ApproxDistinct("d", of="v").result([pa.nulls(2, pa.binary())]).to_pylist() == [0, 0]


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (CollectList("l", of="v", limit=3), CollectList("l", of="v", limit=2), [[1, 2], [7]]),
        (CollectList("l", of="v", by="w"), CollectList("l", of="v", by="w", limit=2), [[3, 2], [7]]),
        (TopN("l", 3, by="v"), TopN("l", 2, by="v"), [[{"v": 3}, {"v": 2}], [{"v": 7}]]),
    ],
)
def test_a_list_that_is_longer_than_is_kept_now_is_cut(old: Any, new: Any, wanted: list[Any]) -> None:
    columns = {"v": pa.array([2, 1, 3, 7]), "w": pa.array([2, 3, 1, 0], EVENT_TIME)}
    kept = old.reduce(old.lift([columns[name] for name in old.inputs()]), np.array([0, 0, 0, 2]), 3)
    assert new.result(kept).to_pylist() == [wanted[0], [], wanted[1]]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view(), pa.large_string(), pa.large_binary()])
def test_a_tester_takes_every_form_of_text(kind: pa.DataType) -> None:
    wanted = pa.string() if "string" in str(kind) else pa.binary()
    with StreamTester(Stream("s", None, [Aggregate("a", KEY, [CollectList("l", of="v", type=wanted)])])) as tester:
        tester.step(pa.table({"k": ["x", "x"], "v": pa.array(["b", "a"], wanted).cast(kind)}))
        assert tester.state("a", "totals")["l"].to_pylist() == [pa.array(["a", "b"], wanted).to_pylist()]


def test_a_tester_sorts_lists_as_spark_does() -> None:
    kind = pa.list_(pa.struct([("x", pa.float64()), ("y", pa.list_(pa.string()))]))

    class Order(Operator):
        name = "order"
        key: ClassVar = KEY
        order_by = ("l",)
        places = ListState({"l": kind})

        def process(self, rows: Rows, state: State) -> None:
            state.places.append(rows.keys, rows.key_index, rows.table.select(["l"]))

    one, two = {"x": 1.0, "y": []}, {"x": 2.0, "y": None}
    wanted = [None, [], [None], [{"x": None, "y": ["b"]}], [{"x": 1.0, "y": None}], [one], [one, one]]
    wanted += [[{"x": 1.0, "y": [None]}], [{"x": 1.0, "y": ["a"]}], [two], [{"x": NAN, "y": None}]]
    with StreamTester(Stream("s", None, [Order()])) as tester:
        shuffled = pa.array([wanted[n] for n in np.random.default_rng(1).permutation(len(wanted))], kind)
        tester.step(pa.table({"k": ["x"] * len(wanted), "l": shuffled}))
        assert str(tester.state("order", "places")["l"].to_pylist()) == str(wanted)


def test_a_large_group_and_a_key_of_several_columns() -> None:
    key = {"k": pa.string(), "j": pa.decimal128(5, 1)}
    values = np.random.default_rng(1).permutation(60_000)
    functions = [CollectList("l", of="v", limit=5), CollectList("all", of="v"), TopN("t", 2, by="v")]
    with subtask(Aggregate("a", key=key, aggregates=functions)) as task:
        for part in np.split(values, 3):
            keys = {"k": ["a\0"] * 20_000, "j": pa.array([None] * 20_000, pa.decimal128(5, 1))}
            made = task.process({**keys, "v": part}).to_pylist()
        [row] = made
        assert row["l"] == [0, 1, 2, 3, 4] and row["all"] == list(range(60_000))
        assert row["t"] == [{"v": 59_999}, {"v": 59_998}]


class _Skipping(CollectList):
    """Leaves out rows without a value, rather than make empty lists of them."""

    def lift(self, columns: list[pa.Array]) -> list[pa.Array]:
        return super().lift([column.drop_null() for column in columns])


@pytest.mark.parametrize("options", [{}, {"map_side": True}])
def test_a_function_has_a_value_of_each_row(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="operator a: lift of l is to return l with a value for each row"):
        aggregated(_Skipping("l", of="v"), {"k": ["x", "y"], "v": [None, 1]}, **options)


def test_functions_of_no_rows() -> None:
    for function in (ApproxDistinct("d", of="v"), CollectList("l", of="v", by="w"), TopN("t", 2, by="v")):
        columns = [pa.array([], kind) for kind in function.inputs().values()]
        lifted = function.lift(columns)
        assert [c.type for c in lifted] == list(function.columns().values())
        none = np.empty(0, np.int64)
        assert len(function.result(function.reduce(lifted, none, 0))) == 0
        assert function.result(function.reduce(lifted, none, 2)).to_pylist() in ([0, 0], [[], []])


# Bloom filters


class Seen(Operator):
    """Adds each row's value."""

    name = "seen"
    key = KEY

    def __init__(self, **options: Any) -> None:
        self.pages = Bloom(**{"values": {"v": pa.int64()}, "capacity": 1000} | options)
        super().__init__()

    def process(self, rows: Rows, state: State) -> None:
        state.pages.add(rows.table)


@pytest.mark.parametrize(("capacity", "error"), [(1, 0.01), (100, 0.01), (20_000, 0.1), (20_000, 0.01), (9_000, 0.001)])
def test_mistakes_are_as_many_as_allowed_at_capacity(capacity: int, error: float) -> None:
    probes, groups = 400_000, 8
    operator = Seen(capacity=capacity, error=error)
    with subtask(operator) as task:
        keys = [str(i) for i in range(groups)]
        task.process({"k": np.repeat(keys, capacity), "v": np.tile(np.arange(capacity), groups)})

        def ask(state: State) -> tuple[Any, Any]:
            added = pa.table({"k": np.repeat(keys, capacity), "v": np.tile(np.arange(capacity), groups)})
            others = pa.table({"k": np.resize(keys, probes), "v": np.arange(probes) + 10**9})
            return state.pages.might_contain(added), state.pages.might_contain(others)

        found, mistaken = task.run(ask)
        assert found.all()
        spread = 4 * (error / probes) ** 0.5 + 0.15 * error
        assert mistaken.mean() <= error + spread
        if capacity > 1000:
            assert mistaken.mean() >= error - spread
        assert task.state.tables["pages"].rows <= groups * operator.pages.blocks


def test_a_value_that_is_there_writes_nothing() -> None:
    with subtask(Seen()) as task:
        task.process({"k": ["a", "a", "b"], "v": [1, 2, 1]})
        task.run(lambda state: task.state.tables["pages"].mark())
        task.process({"k": ["a", "b"], "v": [2, 1]})
        assert task.state.tables["pages"].changes()[0].num_rows == 0
        task.process({"k": ["a", "b"], "v": [3, 1]})
        assert task.state.tables["pages"].changes()[0].num_rows == 1


def test_a_filter_with_a_ttl_forgets_what_was_not_added_again() -> None:
    begin = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    operator = Seen(ttl=TTL("1 hour"), capacity=100_000)
    stream = Stream("s", None, [operator], event_time=EventTime("at", max_ahead="400 days"))
    with StreamTester(stream, now=begin) as tester:
        for minute in (0, 20, 40, 60, 80, 100):
            at = begin + dt.timedelta(minutes=minute)
            values = [1, 2] if minute == 0 else [1]
            tester.step(pa.table({"k": ["x"] * len(values), "v": values, "at": pa.array([at] * len(values))}))
        assert tester.state("seen", "pages").num_rows == 1
        tester.finish()
        assert tester.state("seen", "pages").num_rows == 0


def test_filters_of_other_options_are_refused() -> None:
    recorded = definition_of(Stream("s", None, [Seen()]), {})
    later = Seen(ttl=TTL("1 day", clock="processing"))
    check_definition("s", recorded, definition_of(Stream("s", None, [later]), {}))
    for options in ({"capacity": 2000}, {"error": 0.1}, {"values": {"v": pa.int32()}}):
        with pytest.raises(SchemaConflict, match="pages"):
            check_definition("s", recorded, definition_of(Stream("s", None, [Seen(**options)]), {}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity of a Bloom filter is 0"),
        ({"capacity": 10**13}, "use a lower capacity"),
        ({"error": 0}, "error of a Bloom filter is 0"),
        ({"error": 1}, "error of a Bloom filter is 1"),
        ({"values": {}}, "the values of a Bloom filter are columns"),
        ({"values": {"v": pa.list_(pa.int8())}}, "the values of a Bloom filter are columns"),
        ({"values": pa.int64()}, "the values of a Bloom filter are columns"),
        ({"ttl": 5}, "ttl is 5"),
    ],
)
def test_a_wrong_filter_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Seen(**options)


def test_values_of_a_filter_are_cast_and_checked() -> None:
    with subtask(Seen()) as task:
        task.process({"k": ["a", "a"], "v": pa.array([1, None], pa.int8())})
        both = pa.table({"k": ["a", "a", "a"], "v": [1.0, None, 7.0]})
        assert task.run(lambda state: state.pages.might_contain(both)).tolist() == [True, True, False]
        task.process({"k": pa.array([], pa.string()), "v": pa.array([], pa.int64())})
        for columns, message in (({"k": ["a"], "v": [1.5]}, "do not fit"), ({"k": ["a"]}, "do not fit")):
            with pytest.raises(UsageError, match=message):
                task.process(columns)
            task.state.rollback()


def test_a_variable_without_calls_for_one_key_is_refused() -> None:
    class Each(KeyedProcessor):
        name = "each"
        key = KEY
        seen = Bloom({"v": pa.int64()}, capacity=10)

    with pytest.raises(UsageError, match="variable seen is a Bloom, which has no calls for one key: write process"):
        Each()


def test_bloom_uses_what_is_public_alone() -> None:
    tree = ast.parse(Path(siltstone.__file__).with_name("bloom.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports if (node.module or "").startswith("siltstone") for alias in node.names}
    assert names and names <= set(siltstone.__all__)
    private = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    own = {"_name", "_blocks", "_variable", "_read", "_locate", "__init__"}
    assert private <= own
