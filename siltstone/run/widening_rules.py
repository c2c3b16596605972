"""Which types a column of the source may change to: those that hold every value it had, and nothing else.

A type is described as Spark does in JSON: a name such as `long` or `decimal(10,2)`, or an object with `type` struct,
array or map. As in Delta's type widening:

    byte -> short -> integer -> long        float -> double        byte, short, integer -> double
    byte, short, integer, long -> a decimal with room for all of their digits
    decimal -> a decimal with as many digits or more before the point, and after it
    struct -> a struct with more fields; fields, elements, keys and values likewise

A number that becomes a timestamp, or text in another collation, is read as something else, and is not wider.
"""

import re
from collections.abc import Mapping
from typing import Any

_INTEGERS = {"byte": 3, "short": 5, "integer": 10, "long": 19}
"""names, from the narrowest on -> digits of the largest value"""
_DOUBLE = ("byte", "short", "integer", "float")
COLLATIONS = "__COLLATIONS"
"""where Spark writes the collations of a column's texts"""
_DECIMAL = re.compile(r"decimal\(([0-9]{1,2}),(-?[0-9]{1,2})\)")
_PARTS = {"array": ("elementType",), "map": ("keyType", "valueType")}


def may_become(old: Any, new: Any) -> bool:
    """Whether the new type is the old one, or holds all of its values."""
    if old == new:
        return True
    if isinstance(old, str) and isinstance(new, str):
        return _holds(old, new)
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)) or old.get("type") != new.get("type"):
        return False
    if old["type"] == "struct":
        fields = {field["name"]: field for field in new["fields"]}
        return all(follows(field, fields.get(field["name"])) for field in old["fields"])
    parts = _PARTS.get(old["type"], ())
    return bool(parts) and all(may_become(old[part], new[part]) for part in parts)


def follows(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> bool:
    """Whether a described column may take the place of another: it is there, as wide, and compared as it was."""
    return new is not None and may_become(old["type"], new["type"]) and _collations(old) == _collations(new)


def _collations(column: Mapping[str, Any]) -> Any:
    """Where it is within another column, it is described as Spark does."""
    return column.get("collations") or column.get("metadata", {}).get(COLLATIONS)


def _holds(old: str, new: str) -> bool:
    digits = _INTEGERS.get(old)
    if digits is not None and new in _INTEGERS:
        return digits <= _INTEGERS[new]
    if new == "double":
        return old in _DOUBLE
    wide, narrow = _DECIMAL.fullmatch(new), _DECIMAL.fullmatch(old)
    if wide is None or (digits is None and narrow is None):
        return False
    before, after = (digits or 0, 0) if narrow is None else (int(narrow[1]) - int(narrow[2]), int(narrow[2]))
    return int(wide[1]) - int(wide[2]) >= before and int(wide[2]) >= after


def describe(column: Mapping[str, Any]) -> str:
    """Return a described column's type for people."""
    collations = column.get("collations")
    return _text(column["type"]) + (f" with the collations {', '.join(collations.values())}" if collations else "")


def _text(kind: Any) -> str:
    if not isinstance(kind, Mapping):
        return str(kind)
    if kind["type"] == "struct":
        fields = (f"{field['name']}: {_text(field['type'])}" for field in kind["fields"])
        return f"struct<{', '.join(fields)}>"
    return f"{kind['type']}<{', '.join(_text(kind[part]) for part in _PARTS.get(kind['type'], ()))}>"
