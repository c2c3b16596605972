"""What a definition records of named sources, and how the next one may differ."""

from typing import Any

import pyarrow as pa
import pytest

from siltstone.aggregates.operator import Aggregate, Count
from siltstone.catalog.records.commit_details import decode_definition
from siltstone.errors import SchemaConflict, SiltstoneError, UsageError
from siltstone.run.definition import (
    SourceShape,
    check_definition,
    check_source_shapes,
    definition_of,
    drop_state,
    keep_shapes,
    with_shapes,
)
from siltstone.stream import Stream

LONG, DATE = {"v": {"type": "long"}}, {"v": {"type": "date"}}


def definition(*sources: str) -> dict[str, Any]:
    """Of a stream with these sources; of one with a source without a name if there are none."""
    operators = [
        Aggregate(f"of-{name}", {"k": pa.string()}, [Count("n")], reads=name) for name in sources or ["source"]
    ]
    return definition_of(Stream("s", operators=operators, sources=dict.fromkeys(sources)), {})


def shape(columns: dict[str, Any], *sources: str) -> SourceShape:
    return SourceShape(columns, columns, False, sources or None)


def test_each_source_keeps_what_was_recorded_of_it() -> None:
    first = with_shapes(definition("clicks", "orders"), {"clicks": shape(LONG, "files 1"), "orders": shape(DATE)})
    assert first["inputs"] == {"clicks": {"columns": LONG, "sources": ["files 1"]}, "orders": {"columns": DATE}}
    kept = keep_shapes(first, definition("visits", "clicks"))
    assert kept["inputs"] == {"visits": {}, "clicks": first["inputs"]["clicks"]}
    assert with_shapes(first, {"clicks": shape(DATE)})["inputs"]["clicks"] == {"columns": DATE, "sources": ["files 1"]}
    assert decode_definition(first) == first


def test_a_source_without_a_name_is_the_one_called_source() -> None:
    short = with_shapes(definition(), {"source": shape(LONG, "files 1")})
    assert (short["columns"], short["sources"]) == (LONG, ["files 1"]) and "inputs" not in short
    both = keep_shapes(short, definition("source", "orders"))
    assert both["inputs"] == {"source": {"columns": LONG, "sources": ["files 1"]}, "orders": {}}
    assert keep_shapes(both, definition()) == short
    check_definition("s", short, {**definition("orders", "source"), "operators": short["operators"]})
    with pytest.raises(SchemaConflict, match=r"lost source source: .*clicks; .*siltstone run s --drop source\.source"):
        check_definition("s", short, definition("clicks"))
    assert definition("source") == definition(), "its name alone changes nothing"


def test_what_is_read_of_each_source_may_only_widen() -> None:
    recorded = with_shapes(definition("clicks", "orders"), {"clicks": shape(LONG, "a", "b"), "orders": shape(DATE)})
    check_source_shapes("s", recorded, {"orders": shape(DATE), "visits": shape(DATE), "clicks": shape(LONG, "a", "b")})
    for name, now, said in (
        ("orders", shape(LONG), "column v of source orders of stream s was date, and now it is long"),
        ("clicks", shape(LONG, "a"), "source clicks of stream s reads 1 of Spark's sources, and was recorded with 2"),
        ("clicks", shape(LONG, "b", "a"), "the sources of source clicks of stream s have another order"),
    ):
        with pytest.raises(SchemaConflict, match=said):
            check_source_shapes("s", recorded, {name: now})


def test_a_source_is_given_up_by_saying_so() -> None:
    recorded = with_shapes(definition("clicks", "orders"), {"clicks": shape(LONG), "orders": shape(DATE)})
    now = definition("clicks")
    with pytest.raises(SchemaConflict, match=r"stream s lost source orders: its sources are clicks"):
        check_definition("s", {**recorded, "operators": now["operators"]}, now)
    left, dropped = drop_state("s", recorded, now, ["source.orders", "of-orders"])
    check_definition("s", left, now)
    assert dropped == ("source.orders", "of-orders")
    assert drop_state("s", left, now, ["source.orders"], {"source.orders"})[1] == ()
    for drop, said in (
        ("source.clicks", "still has source.clicks in its code"),
        ("source.nosuch", r"has no source\.nosuch to drop: it has .*, source\.clicks, source\.orders"),
    ):
        with pytest.raises(UsageError, match=said):
            drop_state("s", recorded, now, [drop])


@pytest.mark.parametrize(
    "damaged",
    [
        [],
        {"clicks": []},
        {"../a": {}},
        {"clicks": {"columns": []}},
        {"clicks": {"sources": {}}},
        {"clicks": {"sources": [1]}},
    ],
    ids=str,
)
def test_damaged_records_of_sources_are_errors(damaged: Any) -> None:
    with pytest.raises((ValueError, TypeError, SiltstoneError)):
        decode_definition({**definition("clicks"), "inputs": damaged})
