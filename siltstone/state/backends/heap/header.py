"""The header of a heap: the counts, digests and shapes of one version, with a checksum."""

import json
from pathlib import Path
from typing import Any

import xxhash

from siltstone.errors import StateError

DISTRUST = "delete this working state and restore it"


def render(header: dict[str, Any]) -> bytes:
    """Return the bytes of a header."""
    text = json.dumps(header).encode()
    return f"{xxhash.xxh3_64_hexdigest(text)}\n".encode() + text


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """Return the header of these bytes; `path` names them in an error.

    Raises:
        StateError: they are damaged.
    """
    checksum, _, text = data.partition(b"\n")
    if checksum.decode("ascii", "replace") != xxhash.xxh3_64_hexdigest(text):
        raise StateError(f"{path} is damaged", advice=DISTRUST)
    return json.loads(text)
