"""Which code an asset comes from, as a place in a file that Dagster's page shows."""

from collections.abc import Callable
from types import CodeType
from typing import Any

import dagster as dg

from assets.names import BASE_CHECKPOINT, DELTA_CHAIN, EVENTS, SINK
from siltstone.stream import Stream


def code_reference(stream: Stream, asset: dg.AssetKey) -> dict[str, Any]:
    """Metadata of an asset: the user's code, where there is any; else the stream's source, in whose file it is defined.

    Nothing is read for it: compiled code knows its file and line.
    """
    name, *what = asset.path
    assert name == stream.name, f"{asset} is of another stream"
    match what:
        case [operator, part] if part in (BASE_CHECKPOINT, DELTA_CHAIN):
            by_name = {op.name: op for op in stream.operators}
            code, label = _own_code(type(by_name[operator]).process), f"operator {operator}"
        case [operator, part] if part == SINK:
            code, label = _own_code(stream.sinks[operator]), f"sink of {operator}"
        case _:
            code, label = None, f"stream {name}"
    if code is None and stream.source is not None:
        code, label = _own_code(stream.source), f"source of {name}" if what == [EVENTS] else f"stream {name}"
    if code is None:
        return {}
    place = dg.LocalFileCodeReference(file_path=code.co_filename, line_number=code.co_firstlineno, label=label)
    return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[place])}


def _own_code(what: Callable[..., Any] | object) -> CodeType | None:
    """The code of a function or of a callable object's class; None for Siltstone's own, which says nothing."""
    function = what if hasattr(what, "__code__") else type(what).__call__ if callable(what) else None
    if str(getattr(function, "__module__", "siltstone")).partition(".")[0] == "siltstone":
        return None
    return getattr(function, "__code__", None)
