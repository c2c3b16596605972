"""Find the code that an asset comes from, as a file and line that Dagster's page links to."""

from collections.abc import Callable
from types import CodeType
from typing import Any

import dagster as dg

from siltstone.dagster.names import EVENTS, SINK, asset_of
from siltstone.dagster.quiet import without_beta_warnings
from siltstone.stream import Stream


@without_beta_warnings()
def code_reference(stream: Stream, asset: dg.AssetKey) -> dict[str, Any]:
    """Make the metadata with an asset's code: the user's operator or sink, or else the stream's source.

    No file is read: compiled code knows its file and line.
    """
    assert asset.path[0] == stream.name, f"{asset} is of another stream"
    operator, what = asset_of(asset)
    if what == SINK:
        code, label = _user_code(stream.sinks[str(operator)]), f"sink of {operator}"
    elif operator is not None:
        by_name = {op.name: op for op in stream.operators}
        code, label = _user_code(type(by_name[operator]).process), f"operator {operator}"
    else:
        code, label = None, f"stream {stream.name}"
    if code is None and stream.source is not None:
        code = _user_code(stream.source)
        label = f"{'source of' if what == EVENTS else 'stream'} {stream.name}"
    if code is None:
        return {}
    place = dg.LocalFileCodeReference(file_path=code.co_filename, line_number=code.co_firstlineno, label=label)
    return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[place])}


def _user_code(what: Callable[..., Any] | object) -> CodeType | None:
    """Return the code of a function or of a callable object's class; None if it is Siltstone's own."""
    function = what if hasattr(what, "__code__") else type(what).__call__ if callable(what) else None
    if str(getattr(function, "__module__", "siltstone")).partition(".")[0] == "siltstone":
        return None
    return getattr(function, "__code__", None)
