"""Broadcast tables: what they hold, the same in every subtask whatever happens, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import siltstone as st
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import policy_by_name
from siltstone.errors import BadRow, UsageError
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.state.broadcast import BroadcastAccess
from siltstone.testing import StreamTester

SCHEMA: dict[str, Any] = {
    "payments": {"card": pa.int64(), "country": pa.string(), "amount": pa.int64()},
    "rules": {"country": pa.string(), "limit": pa.int64(), "version": pa.int64(), "gone": pa.bool_()},
}


class Checked(st.Operator):
    """Counts each card's payments above the limit of their country."""

    name = "checked"
    key: Any = {"card": pa.int64()}  # noqa: RUF012
    reads: Any = {"payments": {"card": "card"}}  # noqa: RUF012
    output: Any = {"card": pa.int64(), "amount": pa.int64(), "limit": pa.int64(), "rules": pa.int64()}  # noqa: RUF012
    order_by = ("payments.amount",)
    above = st.ValueState(value={"count": pa.int64()})
    rules = st.BroadcastState(
        reads="rules",
        key={"country": pa.string()},
        value={"limit": pa.int64(), "version": pa.int64(), "gone": pa.bool_()},
        by="version",
        removed="gone",
    )

    def process(self, rows: st.Rows, state: st.State) -> pa.Table:
        payments = rows.of("payments")
        limits = state.rules.get(payments.table)["limit"]
        found = state.rules.table
        is_above = np.asarray(pc.fill_null(pc.greater(payments.table["amount"], limits), False))
        above = payments.filter(is_above)
        if len(above):
            old = state.above.get(above.keys)
            state.above.put(above.keys, {"count": above.count(initial=old["count"])})
        count = pa.array(np.full(len(payments), len(found)))
        return payments.table.select(["card", "amount"]).append_column("limit", limits).append_column("rules", count)


def card_tester(parallelism: int = 1, **options: Any) -> StreamTester:
    given = {key: options.pop(key) for key in ("on_bad_row",) if key in options}
    stream = st.Stream(
        "cards",
        sources={"payments": None, "rules": None},
        operators=[Checked()],
        sinks={"checked": None},
        max_parallelism=16,
        **given,
    )
    return StreamTester(stream, parallelism=parallelism, schema=SCHEMA, **options)


def rule(country: str | None, limit: int, version: int | None, gone: bool | None = None) -> dict[str, Any]:
    return {"country": country, "limit": limit, "version": version, "gone": gone}


def payment(card: int, country: str, amount: int) -> dict[str, Any]:
    return {"card": card, "country": country, "amount": amount}


def limits_of(out: Any) -> dict[int, int | None]:
    return {row["card"]: row["limit"] for row in out["checked"].to_pylist()}


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_every_subtask_has_the_newest_rule_of_the_step(parallelism: int, backend: str) -> None:
    with card_tester(parallelism, backend=backend) as t:
        cards = [payment(card, "de", 7) for card in range(8)]
        out = t.step({"rules": [rule("de", 5, 1), rule("at", 9, 1)], "payments": cards})
        assert limits_of(out) == dict.fromkeys(range(8), 5)
        out = t.step({"rules": [rule("de", 4, 1), rule("de", 6, 2)], "payments": cards})
        assert limits_of(out) == dict.fromkeys(range(8), 6)
        t.step({"rules": [rule("de", 99, 1)]})  # an older one that comes late
        t.step({"rules": [rule("at", 0, 2, True)]})
        out = t.step({"rules": [rule("at", 8, 1)], "payments": [payment(card, "at", 7) for card in range(8)]})
        assert limits_of(out) == dict.fromkeys(range(8))
        assert {row["rules"] for row in out["checked"].to_pylist()} == {1}
        assert t.state("checked", "rules").num_rows == 2


def test_values_are_as_of_the_rows_that_came_so_far_and_start_empty() -> None:
    with card_tester(2) as t:
        assert limits_of(t.step({"payments": [payment(1, "de", 5)]})) == {1: None}
        assert limits_of(t.step({"rules": [rule("de", 5, 1)]})) == {}
        assert limits_of(t.step({"payments": [payment(1, "de", 5)]})) == {1: 5}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (rule(None, 1, 1), "broadcast table checked.rules: country is null"),
        (rule("de", 1, None), "broadcast table checked.rules: version is null"),
    ],
)
def test_a_row_without_key_or_order_is_bad(row: dict[str, Any], why: str) -> None:
    with card_tester(2) as t, pytest.raises(BadRow, match=f"{why} in 1 rows"):
        t.step({"rules": [row]})
    with card_tester(3, on_bad_row="dead-letter") as t:
        out = t.step({"rules": [row, rule("de", 5, 1)], "payments": [payment(card, "de", 7) for card in range(6)]})
        assert limits_of(out) == dict.fromkeys(range(6), 5)
        [letter] = t.dead_letters.to_pylist()
        assert (letter["operator"], letter["reason"]) == ("checked", why)
        assert letter["row"].startswith('{"rules": {"country": ')
        t.restart(lost=True)
        t.replay()


@pytest.mark.parametrize("countries", [[None, "de"], ["fr"], [None], []])
def test_nothing_exists_for_a_null_or_a_value_of_another_type(countries: list[str | None]) -> None:
    found: Any = {}

    class Looks(Checked):
        def process(self, rows: st.Rows, state: st.State) -> None:
            found["versions"] = state.versions.get({"version": rows.of("payments").table["country"]})[
                "limit"
            ].to_pylist()
            countries = rows.of("payments").table["country"].cast(pa.string_view())
            found["limits"] = state.rules.get({"country": countries})["limit"].to_pylist()

        versions = st.BroadcastState("rules", {"version": pa.int8()}, {"limit": pa.int64()}, by="limit")

    stream = st.Stream("cards", sources={"payments": None, "rules": None}, operators=[Looks()], max_parallelism=4)
    with StreamTester(stream, parallelism=1, schema=SCHEMA) as t:
        given = [payment(1, country, 1) for country in countries]  # type: ignore[arg-type]
        t.step({"rules": [rule("de", 5, 1), rule("at", 6, 2)], "payments": given})
        if given:
            limits = [5 if country == "de" else None for country in countries]
            assert found == {"versions": [None] * len(given), "limits": limits}
        t.restart(lost=True)
        t.step({"payments": [payment(2, "2", 1)]})
        assert found == {"versions": [6], "limits": [None]}


def test_a_nested_value_that_does_not_fit_is_bad() -> None:
    class Nested(Checked):
        rules = st.BroadcastState(
            "rules", {"k": pa.int64()}, {"v": pa.struct({"x": pa.list_(pa.int32())}), "b": pa.int64()}, by="b"
        )

        def process(self, rows: st.Rows, state: st.State) -> None: ...

    schema = {**SCHEMA, "rules": {"k": pa.int64(), "v": pa.struct({"x": pa.list_(pa.int64())}), "b": pa.int64()}}
    sources: Any = {"payments": None, "rules": None}
    stream = st.Stream("s", sources=sources, operators=[Nested(output=None)], on_bad_row="dead-letter")
    with StreamTester(stream, parallelism=2, schema=schema) as t:
        t.step({"rules": [{"k": 1, "v": {"x": [1, 2**40]}, "b": 1}, {"k": 2, "v": {"x": [7]}, "b": 1}]})
        assert [row["reason"] for row in t.dead_letters.to_pylist()] == [
            "broadcast table checked.rules: v does not fit struct<x: list<item: int32>>"
        ]
        assert t.state("checked", "rules").to_pylist() == [{"k": 2, "v": {"x": [7]}, "b": 1}]


def test_event_time_means_nothing_to_a_broadcast_input() -> None:
    times = {"rules": st.EventTime("at")}
    sources: Any = {"payments": None, "rules": None}
    assert st.Stream("s", sources=sources, operators=[Checked()], event_time=times).event_times == {}

    class Alone(Checked):
        name = "alone"

    keyed = type("Keyed", (Checked,), {"rules": st.ValueState({"n": pa.int64()})})(
        name="keyed", reads={"rules": {"version": "card"}}, order_by=()
    )
    both = st.Stream("s", sources=sources, operators=[keyed], autonomous=[st.Autonomous(Alone())], event_time=times)
    assert both.autonomous_streams()[0].event_times == {}


def test_rows_of_every_subtask_count_once() -> None:
    with card_tester(3) as t:
        t.step({"rules": [rule("de", 1, 1), rule("at", 1, 1)], "payments": [payment(n, "de", 1) for n in range(5)]})
        statistics = t._place.catalog.checkpoints.get_latest("cards").statistics  # noqa: SLF001
    assert statistics["rows_in"] == 7
    assert statistics["operators"]["checked"]["rows_in"] == 7
    assert statistics["state_rows"] == 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"reads": "payments"}, "has the broadcast table rules, so reads is a dict"),
        ({"reads": {"rules": {"card": "card"}}}, "reads rules by key and for its broadcast table rules"),
        ({"rules": st.BroadcastState("r", {"a": pa.int64()}, {"b": pa.int64()}, by="c")}, "rules: by is 'c': name the"),
        (
            {"rules": st.BroadcastState("r", {"a": pa.int64()}, {"b": pa.int64()}, by="b", removed="b")},
            "rules: removed is 'b': name a boolean column of its value",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        type("Other", (Checked,), fields)()


def test_its_checkpoints_cannot_be_files(tmp_path: Path) -> None:
    stream = st.Stream("cards", sources={"payments": None, "rules": None}, operators=[Checked()])
    with (
        OpenWarehouse.open_writable(str(tmp_path / "w")) as place,
        pytest.raises(UsageError, match="--policy marginal-cost"),
    ):
        options = RegionOptions(backend="rocksdb")
        ConsistentRegion.open(stream, place.warehouse, place.catalog, policy_by_name("files"), options, "me")


def test_the_table_is_read_only() -> None:
    assert not hasattr(BroadcastAccess, "put")
