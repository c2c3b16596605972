"""The tester for users: a stream's steps without Spark, with every kind of state, and with restarts of all kinds."""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import siltstone as st
from siltstone.errors import BadRow, ProofFailed, StateError, UsageError
from siltstone.operator import CheckpointWriter, OperatorCheckpoint
from siltstone.testing import OperatorFailed, StreamTester

BACKENDS = ("heap", "rocksdb")
GROUPS = 16


class Totals(st.Operator):
    """Adds up clicks by user."""

    name = "totals"
    key: ClassVar = {"user": pa.string()}
    inputs = ("clicks",)
    output: ClassVar = {"user": pa.string(), "clicks": pa.int64()}
    counts = st.ValueState({"clicks": pa.int64()})

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        """Add."""
        clicks = rows.sum("clicks", initial=state.counts.get(rows.keys)["clicks"])
        state.counts.put(rows.keys, {"clicks": clicks})
        return rows.keys.with_columns({"clicks": clicks})


class Levels(st.Operator):
    """Counts how often a user came to a level of clicks: it reads the totals."""

    name = "levels"
    reads = "totals"
    key: ClassVar = {"level": pa.int32()}
    seen = st.ValueState({"times": pa.int64()})
    output: ClassVar = {"level": pa.int32(), "times": pa.int64()}

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        """Count."""
        times = rows.count(initial=state.seen.get(rows.keys)["times"])
        state.seen.put(rows.keys, {"times": times})
        return rows.keys.with_columns({"times": times})


def stream(*operators: st.Operator, **options: Any) -> st.Stream:
    sinks = {op.name: None for op in operators if op.output is not None}
    return st.Stream("tested", None, operators, **{"sinks": sinks, "max_parallelism": GROUPS} | options)


def clicks(*rows: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"user": user, "clicks": n} for user, n in rows]


def ordered(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=str)


def test_a_step_gives_each_operators_output_and_state() -> None:
    with StreamTester(stream(Totals()), parallelism=2) as tester:
        out = tester.step(clicks(("a", 1), ("b", 5), ("a", 2)))
        assert ordered(out["totals"]) == clicks(("a", 3), ("b", 5))
        assert ordered(tester.step({"user": ["b"], "clicks": [1]})["totals"]) == clicks(("b", 6))
        assert ordered(tester.step(pa.table({"clicks": [1], "user": ["c"]}))["totals"]) == clicks(("c", 1))
        assert tester.state("totals", "counts").to_pylist() == clicks(("a", 3), ("b", 6), ("c", 1))
        assert ordered(tester.delivered("totals")) == clicks(("a", 3), ("b", 5), ("b", 6), ("c", 1))
        assert tester.dead_letters.num_rows == 0 and tester.replay() == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_chained_operators_come_to_what_pandas_does(backend: str) -> None:
    class ByTen(Totals):
        name = "totals"
        output: ClassVar = {**Totals.output, "level": pa.int32()}

        def process(self, rows: st.Rows, state: st.State) -> pa.Table:
            made = super().process(rows, state)
            return made.append_column("level", pa.array(made["clicks"].to_numpy() // 10, pa.int32()))

    random = np.random.default_rng(1)
    batches = [
        pd.DataFrame({"user": random.choice(list("abcdefg"), 40), "clicks": random.integers(0, 9, 40)})
        for _ in range(4)
    ]
    with StreamTester(stream(ByTen(), Levels()), parallelism=3, backend=backend, checkpoint_every=2) as tester:
        levels = pd.Series(dtype="int64")
        for n, batch in enumerate(batches, 1):
            out = tester.step(pa.Table.from_pandas(batch))
            expected = pd.concat(batches[:n]).groupby("user")["clicks"].sum()
            now = expected[expected.index.isin(batch["user"].unique())]
            assert out["totals"].to_pandas().set_index("user")["clicks"].sort_index().to_dict() == now.to_dict()
            assert (
                tester.state("totals", "counts").to_pandas().set_index("user")["clicks"].to_dict() == expected.to_dict()
            )
            levels = levels.add((now // 10).value_counts(), fill_value=0)
        assert tester.state("levels", "seen").to_pandas().set_index("level")["times"].to_dict() == levels.to_dict()
        assert tester.replay(parallelism=1) == 4


def test_aggregates_combine_before_the_rows_are_split() -> None:
    rows = [{"user": "abcd"[n % 4], "clicks": n} for n in range(50)]
    digests = []
    for map_side, parallelism in itertools.product((True, False), (1, 3)):
        aggregate = st.Aggregate(
            "sums",
            {"user": pa.string()},
            [st.Sum("total", of="clicks"), st.Max("most", of="clicks")],
            map_side=map_side,
        )
        with StreamTester(stream(aggregate, sinks={}), parallelism=parallelism) as tester:
            tester.step(rows)
            tester.step([])
            tester.step(rows[:7])
            digests.append(tester.digest)
            tester.replay()
            expected = pd.DataFrame(rows + rows[:7]).groupby("user")["clicks"].agg(["sum", "max"])
            out = tester.step(rows)["sums"].to_pandas().set_index("user").sort_index()
            assert (out["total"] - pd.DataFrame(rows).groupby("user")["clicks"].sum()).to_dict() == dict(
                expected["sum"]
            )
            assert out["most"].to_dict() == dict(expected["max"])
    assert len(set(digests)) == 1


PAIR = pa.struct([("n", pa.int64()), ("text", pa.string())])


class Every(st.Operator):
    """Has a variable of each kind."""

    name = "every"
    key: ClassVar = {"k": pa.int64()}
    order_by = ("n",)
    last = st.ValueState({"n": pa.int64(), "pair": PAIR})
    by_text = st.MapState({"text": pa.string()}, {"n": pa.int64()})
    history = st.ListState({"n": pa.int64()})
    recent = st.WindowState({"n": pa.int64()}, order="n")
    groups = st.OpaqueState(dict, lambda of: json.dumps(of).encode(), json.loads)

    def process(self, rows: st.Rows, state: st.State) -> None:
        """Keep them all."""
        n, text = rows.table["n"], rows.table["text"]
        newest = rows.last("n", by="n")
        pairs = pa.array([{"n": n, "text": "x" * n} for n in newest.to_pylist()], PAIR)
        state.last.put(rows.keys, {"n": newest, "pair": pairs})
        state.by_text.put(pa.table({"k": rows.table["k"], "text": text, "n": n}))
        state.history.append(rows.keys, rows.key_index, {"n": n})
        state.recent.insert(rows.keys, rows.key_index, {"n": n})
        for group in np.unique(rows.key_groups):
            state.groups[group] = {"rows": state.groups[group].get("rows", 0) + 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_kinds_of_state_are_shown_and_survive_whatever_happens(backend: str) -> None:
    variables = ("last", "by_text", "history", "recent", "recent.bounds", "groups")

    def shown() -> dict[str, list[dict[str, Any]]]:
        return {name: tester.state("every", name).to_pylist() for name in variables}

    with StreamTester(stream(Every()), parallelism=2, backend=backend, checkpoint_every=3) as tester:
        assert shown() == {name: [] for name in variables}
        tester.step([{"k": k, "n": n, "text": f"{n % 2}"} for k in (1, 2, 3) for n in (3, 1, 2)])
        tester.step([{"k": 1, "n": 4, "text": "0"}])
        live = shown()
        assert live["last"][0] == {"k": 1, "n": 4, "pair": {"n": 4, "text": "xxxx"}}
        assert [(row["text"], row["n"]) for row in live["by_text"] if row["k"] == 1] == [("0", 4), ("1", 3)]
        assert [row["n"] for row in live["history"] if row["k"] == 1] == [1, 2, 3, 4]
        assert sum(json.loads(row["value"])["rows"] for row in live["groups"]) >= 2
        for change in (
            tester.checkpoint,
            tester.restart,
            lambda: tester.restart(lost=True),
            lambda: tester.rescale(3),
            lambda: tester.rescale(1),
            tester.crash,
            lambda: tester.crash(lost=True),
        ):
            change()
            assert shown() == live
        tester.step([{"k": 1, "n": 5, "text": "1"}])
        tester.crash(lost=True)
        assert [row["n"] for row in shown()["recent"] if row["k"] == 1] == [1, 2, 3, 4, 5]
        tester.replay()
        tester.replay(since=1, parallelism=4, backend="heap")


def test_a_keyed_processor_is_tested_alike() -> None:
    class Sessions(st.KeyedProcessor):
        name = "sessions"
        key: ClassVar = {"user": pa.string()}
        output: ClassVar = {"user": pa.string(), "clicks": pa.int64()}
        totals = st.ValueState({"clicks": pa.int64()})

        def handle_input(
            self, key: tuple[Any, ...], rows: list[dict[str, Any]], state: Any
        ) -> Iterator[dict[str, Any]]:
            old = state.totals.get()
            total = sum(row["clicks"] for row in rows) + (old["clicks"] if old else 0)
            state.totals.put({"clicks": total})
            yield {"user": key[0], "clicks": total}

    with StreamTester(stream(Sessions()), parallelism=2) as tester:
        tester.step(clicks(("a", 1), ("b", 2)))
        tester.restart(lost=True)
        assert ordered(tester.step(clicks(("a", 1)))["sessions"]) == clicks(("a", 2))
        assert tester.state("sessions", "totals").to_pylist() == clicks(("a", 2), ("b", 2))


class Choosy(Totals):
    """Refuses 13 clicks."""

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        """Add, unless."""
        made = super().process(rows, state)
        if (unlucky := rows.table["clicks"].to_numpy() == 13).any():
            raise BadRow("13 is unlucky", rows=unlucky)
        return made


def test_bad_rows_become_dead_letters_once() -> None:
    class Counted(Choosy):
        key: ClassVar = {"user": pa.int64()}
        output: ClassVar = {**Totals.output, "user": pa.int64()}

    rows = [{"user": user, "clicks": n} for user, n in (("1", 1), ("2", 13), (None, 2), ("x", 3), ("01", 4))]
    with StreamTester(stream(Counted(), on_bad_row="dead-letter"), parallelism=2, checkpoint_every=2) as tester:
        assert tester.step(rows)["totals"].to_pylist() == [{"user": 1, "clicks": 1}]
        assert tester.dead_letters.num_rows == 0, "they come with the checkpoint"
        tester.crash(lost=True)
        tester.step(rows[:1])
        tester.crash()
        letters = sorted(
            (json.loads(row["row"])["user"] or "", row["reason"]) for row in tester.dead_letters.to_pylist()
        )
        cast = "operator totals: key column user cannot be cast to int64"
        assert letters == [
            ("", "operator totals: key column user is null"),
            ("01", cast),
            ("2", "13 is unlucky"),
            ("x", cast),
        ]
        assert set(tester.dead_letters["step"].to_pylist()) == {1}
        assert tester.state("totals", "counts").to_pylist() == [{"user": 1, "clicks": 2}]
        assert tester.replay() == 2
        with pytest.raises(UsageError, match="no sink of 'dead_letters'"):
            tester.delivered("dead_letters")


def test_a_step_that_fails_has_no_effect_and_a_restart_goes_on_without_it() -> None:
    with StreamTester(stream(Choosy()), checkpoint_every=2) as tester:
        tester.step(clicks(("a", 1)))
        for rows, error, said in (
            (clicks(("a", 13)), BadRow, "13 is unlucky"),
            ([{"user": None, "clicks": 1}], BadRow, "key column user is null in 1 of"),
            ({"user": ["a"], "clicks": ["many"]}, UsageError, "column clicks of the rows does not fit int64"),
            ({"user": ["a"]}, UsageError, r"reads clicks, which source does not have \(it has user\)"),
        ):
            with pytest.raises(error, match=said):
                tester.step(rows)
            if error is BadRow:
                with pytest.raises(StateError, match=r"has failed; call restart\(\)"):
                    tester.step()
            tester.restart()
            assert tester.state("totals", "counts").to_pylist() == clicks(("a", 1))
        tester.step(clicks(("a", 1)))
        tester.checkpoint()
        assert tester.delivered("totals").to_pylist() == clicks(("a", 1), ("a", 2))


def test_an_error_of_the_operator_is_shown_with_its_cause() -> None:
    class Broken(Totals):
        def process(self, rows: st.Rows, state: st.State) -> pa.Table:
            raise ZeroDivisionError("of clicks")

    with (
        StreamTester(stream(Broken())) as tester,
        pytest.raises(OperatorFailed, match="operator totals: ZeroDivisionError: of clicks") as caught,
    ):
        tester.step(clicks(("a", 1)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_callback_that_fails_comes_again_and_no_row_twice() -> None:
    fails = ["checkpoint", "region_checkpointed"]

    class Failing(Totals):
        def checkpoint(self, checkpoint: OperatorCheckpoint) -> None:
            if "checkpoint" in fails:
                raise RuntimeError("before")

        def region_checkpointed(self, checkpoint: int) -> None:
            if "region_checkpointed" in fails:
                raise RuntimeError("after")

    with StreamTester(stream(Failing()), parallelism=2) as tester:
        with pytest.raises(OperatorFailed, match="before"):
            tester.step(clicks(("a", 1)))
        fails.remove("checkpoint")
        with pytest.raises(OperatorFailed, match="after"):
            tester.restart()
        fails.remove("region_checkpointed")
        tester.restart()
        tester.step(clicks(("a", 1)))
        assert tester.delivered("totals").to_pylist() == clicks(("a", 1), ("a", 2)) and tester.replay() == 2


def test_an_output_has_its_own_types_and_its_reader_those_of_spark() -> None:
    class Unsigned(Totals):
        output: ClassVar = {"user": pa.string(), "clicks": pa.uint64()}

    class Reader(Totals):
        name, reads, output = "reader", "totals", None

        def process(self, rows: st.Rows, state: st.State) -> None:
            assert rows.table["clicks"].type == pa.decimal128(20, 0)
            state.counts.put(rows.keys, {"clicks": pa.array([1] * len(rows.keys))})

    with StreamTester(stream(Reader(), Unsigned()), parallelism=2) as tester:
        assert tester.step(clicks(("a", 1)))["totals"].schema.types == [pa.string(), pa.uint64()]
        assert tester.state("reader", "counts").to_pylist() == clicks(("a", 1))


HEARD: list[tuple[Any, ...]] = []


class Outside(Totals):
    """Notes its callbacks."""

    def drain(self, state: st.State) -> pa.Table:
        """Return a row."""
        return pa.table({"user": ["drained"], "clicks": [0]})

    def prepare_for_nonblocking_checkpoint(self, checkpoint: CheckpointWriter, state: st.State) -> None:
        """Name the checkpoint."""
        checkpoint.write(b"at %d" % checkpoint.id)

    def checkpoint(self, checkpoint: OperatorCheckpoint) -> None:
        """Note it."""
        HEARD.append(("checkpoint", checkpoint.id, checkpoint.prepared))

    def reset(self, checkpoint: OperatorCheckpoint, state: st.State) -> None:
        """Note it."""
        HEARD.append(("reset", checkpoint.id, checkpoint.prepared))

    def reset_to_initial_state(self) -> None:
        """Note it."""
        HEARD.append(("initial",))

    def region_checkpointed(self, checkpoint: int) -> None:
        """Note it."""
        HEARD.append(("checkpointed", checkpoint))


def test_callbacks_come_as_in_a_run() -> None:
    HEARD.clear()
    with StreamTester(stream(Outside()), checkpoint_every=2) as tester:
        tester.step(clicks(("a", 1)))
        out = tester.step(clicks(("a", 1)))
        assert ordered(out["totals"]) == clicks(("a", 2), ("drained", 0))
        done = [("checkpoint", 1, (b"at 1",)), ("checkpointed", 1)]
        assert [("initial",), *done] == HEARD
        tester.step()
        tester.rescale(2)
        tester.step(clicks(("a", 1)))
        assert HEARD[3:] == [
            *(("checkpoint", 2, (b"at 2",)), ("checkpointed", 2)),
            *(("reset", 2, (b"at 2",)), ("reset", 2, ())),
        ]
        heard = len(HEARD)
        assert tester.replay() == 5 and len(HEARD) == heard, "the driver is told nothing"


def test_an_operator_may_ask_for_a_checkpoint() -> None:
    class Asking(Totals):
        def process(self, rows: st.Rows, state: st.State) -> pa.Table:
            if len(rows) > 1:
                state.request_checkpoint()
            return super().process(rows, state)

    with StreamTester(stream(Asking()), parallelism=2, checkpoint_every=9) as tester:
        tester.step(clicks(("a", 1)))
        assert tester.digest is None and tester.delivered("totals").num_rows == 0
        tester.step(clicks(("a", 1), ("a", 1)))
        assert tester.digest is not None and tester.delivered("totals").num_rows == 2
        assert tester.checkpoint() == 1 and tester.replay() == 3


def test_a_run_in_three_parallelisms_is_the_run_in_one() -> None:
    digests = []
    for parallelisms in ((1, 3, 2), (2, 2, 2)):
        with StreamTester(stream(Totals()), checkpoint_every=2) as tester:
            for n, parallelism in enumerate(parallelisms):
                tester.rescale(parallelism)
                tester.step(clicks(*((user, n) for user in "abcdef")))
            tester.checkpoint()
            assert len(tester.delivered("totals")) == 18
            digests.append(tester.digest)
            tester.replay()
            with pytest.raises(UsageError, match="parallelism"):
                tester.rescale(GROUPS + 1)
            tester.step(clicks(("a", 1)))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("lost", [False, True])
def test_steps_after_the_newest_checkpoint_come_again_after_a_crash(lost: bool) -> None:
    levels = st.Aggregate("levels", {"clicks": pa.int64()}, [st.Count("n")], reads="totals")
    with StreamTester(stream(Totals(), levels), parallelism=2, checkpoint_every=3) as tester:
        for n in range(5):
            tester.step(clicks(("a", n), ("b", 1)))
        before = tester.delivered("totals")
        tester.crash(lost=lost)
        tester.crash(lost=lost)
        assert tester.delivered("totals") == before and len(before) == 6
        assert tester.state("totals", "counts").to_pylist() == clicks(("a", 10), ("b", 5))
        tester.step(clicks(("a", 1)))
        assert sorted(tester.delivered("totals")["clicks"].to_pylist()) == [0, 1, 1, 2, 3, 3, 4, 5, 6, 10, 11]
        assert tester.replay() == 6


def differing(kind: str) -> st.Operator:
    """An operator that depends on something else than rows and state."""
    calls = itertools.count()

    class Differing(Totals):
        def process(self, rows: st.Rows, state: st.State) -> pa.Table:
            made = super().process(rows, state)
            n = next(calls)
            if kind == "state":
                state.counts.put(rows.keys, {"clicks": np.full(len(rows.keys), n)})
            return made.set_column(1, "clicks", pa.array([n] * len(made))) if kind == "output" else made

    return Differing()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("state", "other state in totals.counts, key groups "),
        ("output", r"other rows of totals \(1 rows before, 1 now\)"),
    ],
)
def test_an_operator_that_is_not_deterministic_is_found(kind: str, said: str) -> None:
    with StreamTester(stream(differing(kind)), checkpoint_every=2) as tester:
        tester.step(clicks(("a", 5)))
        with pytest.raises(ProofFailed, match=f"step 1 of tested was taken again and gave {said}"):
            tester.replay()
        with pytest.raises(ProofFailed, match=said):
            tester.crash()
        with pytest.raises(StateError, match="has failed"):
            tester.step()


def test_what_an_operator_keeps_in_attributes_is_gone_after_the_task() -> None:
    class Keeping(Totals):
        def __init__(self) -> None:
            super().__init__()
            self.lock, self.seen = threading.Lock(), 0

        def process(self, rows: st.Rows, state: st.State) -> pa.Table:
            self.seen += 1
            return rows.keys.with_columns({"clicks": [self.seen] * len(rows.keys)})

    operator = Keeping()
    with StreamTester(stream(operator)) as tester:
        assert [tester.step(clicks(("a", 1)))["totals"]["clicks"].to_pylist() for _ in range(2)] == [[1], [1]]
    assert operator.seen == 0


def test_rows_of_a_task_are_sorted_as_spark_does() -> None:
    class Order(st.Operator):
        name = "order"
        key: ClassVar = {"k": pa.int64()}
        order_by = ("x", "n")
        places = st.ListState({"x": pa.float64(), "n": pa.int64()})

        def process(self, rows: st.Rows, state: st.State) -> None:
            state.places.append(rows.keys, rows.key_index, rows.table.select(["x", "n"]))

    xs = [float("nan"), 1.0, None, -1.0, None, float("inf")]
    with StreamTester(stream(Order())) as tester:
        tester.step(pa.table({"k": [1] * 6, "x": pa.array(xs), "n": [5, 4, 3, 2, 1, 0]}))
        assert tester.state("order", "places")["n"].to_pylist() == [1, 3, 2, 4, 0, 5]


NAN, INF = float("nan"), float("inf")
CASTS: list[tuple[pa.DataType, pa.DataType, list[tuple[Any, Any]]]] = [
    (pa.float64(), pa.int64(), [(2.0, 2), (1.25, None), (-0.5, None), (NAN, None), (1e19, None), (2.0**60, None)]),
    (pa.float64(), pa.decimal128(20, 0), [(2.0**53, 2**53), (2.0**64, None), (5.5, None)]),
    (pa.float32(), pa.int64(), [(16777216.0, 16777216), (1e18, None)]),
    (pa.float64(), pa.int32(), [(-7.0, -7), (4294967301.0, None)]),
    (pa.float64(), pa.float32(), [(0.5, 0.5), (0.1, None), (INF, INF), (1e300, None)]),
    (pa.int64(), pa.int32(), [(5, 5), (4294967301, None), (None, None)]),
    (pa.int64(), pa.float64(), [(2**53, 2.0**53), (2**53 + 1, None), (2**63 - 1, None)]),
    (pa.int32(), pa.float32(), [(16777216, 2.0**24), (16777217, None)]),
    (pa.int32(), pa.decimal128(4, 2), [(12, Decimal("12.00")), (123, None)]),
    (pa.decimal128(10, 4), pa.int64(), [(Decimal("3"), 3), (Decimal("1.7500"), None)]),
    (pa.decimal128(10, 4), pa.decimal128(10, 0), [(Decimal("3"), Decimal(3)), (Decimal("1.5"), None)]),
    (pa.decimal128(10, 4), pa.decimal128(20, 6), [(Decimal("1.75"), Decimal("1.75"))]),
    (pa.decimal128(20, 0), pa.float64(), [(Decimal(2**53 + 1), None), (Decimal(2**53), 2.0**53)]),
    (pa.string(), pa.int64(), [("1", 1), ("01", None), (" 1 ", None), ("1.0", None), ("1e2", None), ("abc", None)]),
    (pa.string(), pa.bool_(), [("true", True), ("yes", None)]),
    (pa.string(), pa.date32(), [("2024-02-29", date(2024, 2, 29)), ("2024-02-30", None), ("2024-2-1", None)]),
    (pa.timestamp("ns"), pa.timestamp("us", "UTC"), [(datetime(2024, 1, 1), pd.Timestamp("2024-01-01", tz="UTC"))]),
    (pa.uint16(), pa.int64(), [(5, 5)]),
    (pa.large_string(), pa.string(), [("a", "a")]),
    (pa.dictionary(pa.int8(), pa.string()), pa.string(), [("a", "a")]),
    (pa.null(), pa.string(), [(None, None)]),
]
REFUSED = [
    (pa.timestamp("us"), pa.date32()),
    (pa.string(), pa.float64()),
    (pa.string(), pa.decimal128(10, 2)),
    (pa.int32(), pa.string()),
    (pa.float64(), pa.bool_()),
    (pa.binary(), pa.string()),
]


def counts_by(kind: pa.DataType, **options: Any) -> st.Stream:
    return stream(st.Aggregate("counts", {"key": kind}, [st.Count("n")], nullable=("key",), **options), sinks={})


@pytest.mark.parametrize(("given", "declared", "values"), CASTS)
def test_a_key_is_cast_if_it_stays_the_same(given: pa.DataType, declared: pa.DataType, values: Iterable[Any]) -> None:
    with StreamTester(counts_by(declared), parallelism=2) as tester:
        for value, expected in values:
            rows = pa.table({"key": pa.array([value], given)})
            if expected is None and value is not None:
                with pytest.raises(OperatorFailed, match=r'key column key cannot be cast to .*: {"key":'):
                    tester.step(rows)
                tester.restart()
            else:
                assert tester.step(rows)["counts"]["key"].to_pylist() == [expected]


@pytest.mark.parametrize(("given", "declared"), REFUSED)
def test_a_cast_that_would_make_one_of_two_is_refused(given: pa.DataType, declared: pa.DataType) -> None:
    with (
        StreamTester(counts_by(declared)) as tester,
        pytest.raises(UsageError, match=r"counts: key column key is .* in source, and .* where it is declared"),
    ):
        tester.step(pa.table({"key": pa.nulls(1, given)}))


def test_columns_keep_the_types_that_they_had_first() -> None:
    schema = pa.schema([("user", pa.string())])
    with StreamTester(stream(Totals()), schema=schema, checkpoint_every=3) as tester:
        assert tester.step([])["totals"].to_pylist() == []
        tester.step([{"clicks": 1, "user": "a"}, {"user": "b", "clicks": None}])
        assert tester.step([{"user": "a"}])["totals"].to_pylist() == clicks(("a", 1))
        tester.step()
        with pytest.raises(UsageError, match=r"column clicks of the rows does not fit int64: .*; give a schema"):
            tester.step([{"user": "a", "clicks": 0.5}])
        assert tester.checkpoint() == tester.checkpoint() == 2


def test_unknown_names_are_told_with_those_that_there_are() -> None:
    with StreamTester(stream(Totals(), sinks={})) as tester:
        with pytest.raises(UsageError, match="has no operator 'x': it has totals"):
            tester.state("x", "counts")
        with pytest.raises(UsageError, match="operator totals has no variable 'x': it has counts"):
            tester.state("totals", "x")
        with pytest.raises(UsageError, match=r"no sink of 'totals' \(sinks: none\)"):
            tester.delivered("totals")
    for options in ({"backend": "disk"}, {"parallelism": GROUPS + 1}, {"checkpoint_every": 0}):
        with pytest.raises(UsageError):
            StreamTester(stream(Totals()), **options)


def test_nothing_is_left_of_a_tester() -> None:
    before = set(threading.enumerate())
    with StreamTester(stream(Totals())) as tester:
        tester.step(clicks(("a", 1)))
        started = set(threading.enumerate()) - before
    assert started
    for use in (tester.step, tester.restart, lambda: tester.state("totals", "counts")):
        with pytest.raises(UsageError, match="the tester of tested is closed: use it within its with block"):
            use()
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


def test_it_needs_no_spark() -> None:
    code = "import sys, siltstone.testing; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
