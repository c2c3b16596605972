"""What every decoder shares: one edge for whatever it fails with, JSON of bounded depth, checks of numbers.

Stored bytes come from whoever can write to the bucket or to the catalog. A decoder fails in one way only, so that
recovery, which acts on `CorruptObject`, is not switched off by an error that nobody thought of.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from siltstone.errors import CorruptObject, Fenced, NewerFormat, StateError, Unreachable

FREE_BYTES = 64 << 20
RATIO = 64
"""what is decoded takes `FREE_BYTES` of memory at most, or `RATIO` for each byte that it is stored in, if it is large;
whatever encodes leaves uncompressed, or pads, what compresses better"""
JSON_FREE_BYTES = 4 << 20
JSON_RATIO = 8
"""the same of JSON text, of which two characters may become an object"""
JSON_DEPTH_MAX = 32
"""levels of nesting in stored JSON; what goes deeper would end in RecursionError wherever it is copied"""
_WHY_CHARACTERS = 200


@contextmanager
def decoding(name: str, what: str, error: type[StateError] = CorruptObject) -> Iterator[None]:
    """Turn whatever the block fails with into one error that names what was being decoded.

    MemoryError passes, since it is no property of the bytes once every length is bounded; so do the errors that a
    decoder raises on purpose.

    Args:
        name: the object, as messages call it.
        what: what it should be, such as "a manifest".
        error: what to raise.
    """
    try:
        yield
    except (StateError, NewerFormat, Unreachable, Fenced, MemoryError):
        raise
    except Exception as caught:
        lines = str(caught).splitlines() or [type(caught).__name__]
        raise error(f"{name} cannot be read as {what}: {lines[0][:_WHY_CHARACTERS]}") from caught


def room_for(stored_bytes: int) -> int:
    """How many bytes of memory something may take that is stored in `stored_bytes`."""
    return FREE_BYTES + RATIO * stored_bytes


def parse_json(text: str | bytes) -> Any:
    """The value of stored JSON.

    Raises:
        ValueError, RecursionError: no JSON, or nested more than `JSON_DEPTH_MAX` deep.
    """
    value = json.loads(text)
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        nested = [each for each in level if isinstance(each, (dict, list))]
        if not nested:
            return value
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    raise ValueError(f"JSON is nested more than {JSON_DEPTH_MAX} deep")


def check_integer(value: object, least: int, most: int, what: str) -> int:
    """Return `value` if it is an integer of `least` to `most`.

    Raises:
        ValueError: it is not; `what` says what it counts.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {str(value)[:40]!r}, which is not an integer of {least} to {most}")
    return value


def check_object(value: object, what: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object.

    Raises:
        ValueError: it is not; `what` says what it should be.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, not a JSON object")
    return value
