"""Find the code that an asset comes from: a file and line that Dagster's page links to, and a version."""

import ast
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any

import dagster as dg

from siltstone.dagster.names import asset_of
from siltstone.dagster.quiet import without_beta_warnings
from siltstone.operator import Operator
from siltstone.pipes.parts import EVENTS, SINK
from siltstone.stream import Stream

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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


def code_version(operator: Operator) -> str:
    """Return the version of an operator's code, by which Dagster shows what older code made.

    It changes with what the operator's class says, not with its comments and layout, with the values that the operator
    was made with, and with its state. Functions that it calls do not count, nor does Siltstone's own code.
    """
    classes = [each for each in type(operator).__mro__ if not _is_ours(each)]
    values = {name: _ADDRESS.sub("", repr(value)) for name, value in sorted(vars(operator).items())}
    parts = [operator.definition(), type(operator).__qualname__, list(map(_source_of, classes)), values]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _source_of(what: type) -> str:
    """Return the code of a class in a form of its own; only its name, if its source is not to be had."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(what))))
    except (OSError, TypeError, SyntaxError):
        return what.__qualname__


def _is_ours(what: Any) -> bool:
    """Whether a class or function is Siltstone's own, or Python's."""
    return str(getattr(what, "__module__", "siltstone")).partition(".")[0] in ("siltstone", "builtins", "abc")


def _user_code(what: Callable[..., Any] | object) -> CodeType | None:
    """Return the code of a function or of a callable object's class; None if it is Siltstone's own."""
    function = what if hasattr(what, "__code__") else type(what).__call__ if callable(what) else None
    return None if _is_ours(function) else getattr(function, "__code__", None)
