"""Which types a column of the source may change to."""

from typing import Any

import pytest

from siltstone.errors import SchemaConflict, StateError
from siltstone.operator import SOURCE
from siltstone.run.definition import COLUMNS, SourceShape, check_source_shapes
from siltstone.run.widening_rules import describe, follows, may_become

ORDER = ["byte", "short", "integer", "long"]


def struct(**fields: Any) -> dict[str, Any]:
    return {"type": "struct", "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}


def of(kind: str, *parts: Any) -> dict[str, Any]:
    names = ["elementType"] if kind == "array" else ["keyType", "valueType"]
    return {"type": kind, **dict(zip(names, parts, strict=True))}


WIDER = [
    *((old, new) for at, old in enumerate(ORDER) for new in ORDER[at + 1 :]),
    *((old, "double") for old in ("byte", "short", "integer", "float")),
    ("byte", "decimal(3,0)"),
    ("long", "decimal(20,1)"),
    ("decimal(10,2)", "decimal(12,2)"),
    ("decimal(10,2)", "decimal(11,3)"),
    (struct(a="integer"), struct(b="string", a="long")),
    (of("array", "float"), of("array", "double")),
    (of("map", "string", struct(a="byte")), of("map", "string", struct(a="short", c="date"))),
]
OTHER = [
    ("long", "double"),
    ("integer", "float"),
    ("long", "decimal(18,0)"),
    ("long", "decimal(20,2)"),
    ("decimal(10,2)", "decimal(10,3)"),
    ("decimal(10,2)", "double"),
    ("integer", "string"),
    ("date", "timestamp"),
    ("timestamp", "timestamp_ntz"),
    (struct(a="integer", b="string"), struct(a="long")),
    (of("array", "string"), "string"),
    (of("array", "string"), of("map", "string", "string")),
    ({"type": "udt", "class": "a"}, {"type": "udt", "class": "b"}),
]


@pytest.mark.parametrize(("old", "new"), WIDER)
def test_a_wider_type_holds_all_values_and_the_narrow_one_does_not(old: Any, new: Any) -> None:
    assert may_become(old, new) and may_become(old, old) and not may_become(new, old)


@pytest.mark.parametrize(("old", "new"), OTHER)
def test_other_types_are_not_wider(old: Any, new: Any) -> None:
    assert not may_become(old, new) and not may_become(new, old)


def test_collations_stay() -> None:
    plain, collated = {"type": "string"}, {"type": "string", "collations": {"k": "icu.UNICODE"}}
    assert follows(collated, collated) and not follows(plain, collated) and not follows(collated, plain)
    assert not follows(plain, None)
    field, nested = {"name": "x", "type": "string"}, {"metadata": {"__COLLATIONS": {"x": "icu.UNICODE"}}}
    one, other = ({"type": of("array", {"type": "struct", "fields": [each]})} for each in (field, field | nested))
    assert follows(other, other) and not follows(one, other) and not follows(other, one)
    assert describe(collated) == "string with the collations icu.UNICODE"
    assert describe({"type": of("map", "string", struct(a="byte"))}) == "map<string, struct<a: byte>>"


def now(*, reads_all: bool = False, **kinds: str) -> SourceShape:
    every = {name: {"type": kind} for name, kind in kinds.items()}
    return SourceShape(every, {name: every[name] for name in every if reads_all or name != "more"}, reads_all)


def test_only_columns_that_are_read_matter() -> None:
    recorded = {COLUMNS: now(k="string", v="integer").read}
    check_source_shapes("s", {}, {SOURCE: now(k="date")})
    check_source_shapes("s", recorded, {SOURCE: now(k="string", v="long", more="date")})
    check_source_shapes("s", recorded, {SOURCE: now(k="string")})  # no operator reads v any more
    with pytest.raises(SchemaConflict, match="column v of the source of stream s was integer, and now there is none"):
        check_source_shapes("s", recorded, {SOURCE: now(reads_all=True, k="string")})
    with pytest.raises(SchemaConflict, match="column v of the source of stream s was integer, and now it is string"):
        check_source_shapes("s", recorded, {SOURCE: now(k="string", v="string")})


@pytest.mark.parametrize(
    "damaged", [[], {"v": 1}, {"v": {}}, {"v": {"type": {"type": "struct"}}}, {"v": {"type": None}}]
)
def test_a_damaged_record_is_an_error(damaged: Any) -> None:
    with pytest.raises((StateError, SchemaConflict)):
        check_source_shapes("s", {COLUMNS: damaged}, {SOURCE: now(v="integer")})
