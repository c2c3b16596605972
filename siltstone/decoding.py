"""Shared by all decoders: one error for every failure, JSON of bounded depth, checks of numbers.

Anyone who can write to the bucket or the catalog can write these bytes. A decoder therefore fails in one way only:
recovery acts on `CorruptObject`, and an unforeseen error would switch it off.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

from siltstone.errors import CorruptObject, Fenced, NewerFormat, StateError, Unreachable
from siltstone.times import as_utc

T = TypeVar("T")

FREE_BYTES = 64 << 20
RATIO = 64
"""decoded data takes at most `FREE_BYTES` of memory, plus `RATIO` bytes per stored byte; an encoder pads data that
compresses better than that, or leaves it uncompressed"""
JSON_FREE_BYTES = 4 << 20
JSON_RATIO = 8
"""the same limits for JSON text, in which two characters may become an object"""
JSON_DEPTH_MAX = 32
"""levels of nesting in stored JSON; copying deeper values would raise RecursionError"""
_WHY_CHARACTERS = 200


@contextmanager
def translate_decode_errors(name: str, what: str, error: type[StateError] = CorruptObject) -> Iterator[None]:
    """Translate any exception in a `with` block into one error that names what was being decoded.

    MemoryError passes: lengths are bounded, so the bytes did not cause it. So do errors that a decoder raises itself.

    Args:
        name: the object, as messages call it.
        what: what it should be, such as "a manifest".
        error: the class to raise.
    """
    try:
        yield
    except (StateError, NewerFormat, Unreachable, Fenced, MemoryError):
        raise
    except Exception as caught:
        lines = str(caught).splitlines() or [type(caught).__name__]
        if isinstance(caught, KeyError):
            lines = [f"{lines[0]} is missing"]
        raise error(f"{name} cannot be read as {what}: {lines[0][:_WHY_CHARACTERS]}") from caught


def decoded_bytes_max(stored_bytes: int) -> int:
    """Return how many bytes of memory data stored in `stored_bytes` bytes may take when decoded."""
    return FREE_BYTES + RATIO * stored_bytes


def json_bytes_max(stored_bytes: int) -> int:
    """Return how many bytes of JSON text there may be in data stored in `stored_bytes` bytes."""
    return JSON_FREE_BYTES + JSON_RATIO * stored_bytes


def parse_json(text: str | bytes) -> Any:
    """Parse stored JSON.

    Raises:
        ValueError, RecursionError: it is not JSON, or nested more than `JSON_DEPTH_MAX` deep.
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
    """Return `value` if it is an integer from `least` to `most`.

    Raises:
        ValueError: it is not; the message calls it `what`.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {str(value)[:40]!r}, which is not an integer of {least} to {most}")
    return value


def check_object(value: object, what: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object.

    Raises:
        ValueError: it is not; the message calls it `what`.
    """
    return _check_type(value, dict, "a JSON object", what)


def check_text(value: object, what: str) -> str:
    """Return `value` if it is a text; ValueError as `check_object`."""
    return _check_type(value, str, "a text", what)


def check_flag(value: object, what: str) -> bool:
    """Return `value` if it is true or false; ValueError as `check_object`."""
    return _check_type(value, bool, "true or false", what)


def _check_type(value: object, kind: type[T], called: str, what: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {type(value).__name__}, not {called}")
    return value


def check_time(value: object) -> datetime:
    """Return the time that a decoded value describes, in UTC.

    Raises:
        ValueError: it does not describe one.
    """
    return as_utc(datetime.fromisoformat(check_text(value, "a time")))
