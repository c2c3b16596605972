"""Operators whose keys may be null: every kind of variable, and what a definition may become."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from siltstone.errors import BadRow, SchemaConflict, UsageError
from siltstone.operator import MapState, Rows, State
from siltstone.run.definition import check_definition
from siltstone.state.schema import TableSchema
from tests.subtask import subtask
from tests.unit.test_operator_state import MOMENT, Everything


def test_null_is_a_key_of_every_variable_where_the_key_is_nullable():
    class Mixed(Everything):
        routes = MapState(key={"route": pa.float64()}, value={"flown": pa.int64()}, nullable=("route",))

    operator = Mixed(nullable=("plane",))
    assert operator.definition()["key"] == [["plane", "string", "nullable"], ["year", "int16"]]
    assert operator.tables()["routes"].to_json()["subkey"] == [["route", "double", "nullable"]]
    assert all(TableSchema.from_json(t.to_json()) == t for t in operator.tables().values())
    planes = [None, "a", None, ""]
    with subtask(operator) as task:
        for count in (1, 2):
            task.run(lambda state: _fill(task.rows({"plane": planes, "year": [2013] * 4}), state))
            totals = {row["plane"]: row["flights"] for row in task.dump("totals")}
            assert totals == {None: 2 * count, "a": count, "": count}
            routes = {(row["plane"], row["route"]): row["flown"] for row in task.dump("routes")}
            assert routes == {(plane, route): count for plane in ("a", "", None) for route in (None, 1.5)}
            assert sorted(row["position"] for row in task.dump("log") if row["plane"] is None) == [*range(2 * count)]
            assert sum(row["plane"] is None for row in task.dump("week")) == 2 * count
        with pytest.raises(BadRow, match="key column year is null in 1 of 1 rows"):
            task.rows({"plane": [None], "year": pa.array([None], pa.int16())})


def _fill(rows: Rows, state: State) -> None:
    totals = rows.count(initial=state.totals.get(rows.keys)["flights"])
    state.totals.put(rows.keys, {"flights": totals, "note": pa.nulls(len(rows.keys), pa.string())})
    for route in (None, 1.5):
        entries = rows.keys.with_columns({"route": pa.array([route] * len(rows.keys), pa.float64())})
        flown = pc.add(pc.fill_null(state.routes.get(entries)["flown"], 0), 1)
        state.routes.put(entries.append_column("flown", flown))
    state.log.append(rows.keys, rows.key_index, {"event": pa.array(["x"] * len(rows))})
    moments = pa.array([MOMENT] * len(rows), pa.timestamp("us", "UTC"))
    state.week.insert(rows.keys, rows.key_index, {"at": moments, "delay": pa.nulls(len(rows), pa.int32())})
    at, found = state.log.get(rows.keys)
    assert len(at) == len(found) and set(at.tolist()) == set(range(len(rows.keys)))


@pytest.mark.parametrize("nullable", ["plane", ("plan",), (7,)])
def test_nullable_names_columns_of_the_key(nullable):
    with pytest.raises(UsageError, match="nullable of the key of operator everything must be a tuple of its columns"):
        Everything(nullable=nullable)


def test_a_key_column_may_become_nullable_and_not_the_reverse():
    strict, loose = (Everything(nullable=names).definition() for names in ((), ("plane", "year")))
    definition = lambda operator: {"options": {}, "operators": {"everything": operator}}  # noqa: E731
    check_definition("s", definition(strict), definition(loose))
    with pytest.raises(SchemaConflict, match="changed its key"):
        check_definition("s", definition(loose), definition(strict))
    one, other = (Everything(nullable=names).tables()["totals"] for names in (("plane",), ("year",)))
    with pytest.raises(SchemaConflict, match="key columns may become nullable"):
        one.check_follows(other, "totals")
