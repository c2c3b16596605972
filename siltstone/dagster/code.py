"""Find the code that an asset comes from: a file and line that Dagster's page links to, and a version."""

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from datetime import date, timedelta
from enum import Enum
from types import CodeType, FunctionType
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa

from siltstone.dagster.names import asset_of
from siltstone.dagster.quiet import without_beta_warnings
from siltstone.operator import Operator
from siltstone.pipes.parts import EVENTS, SINK
from siltstone.sinks.arrow import ArrowSink
from siltstone.stream import Stream

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@without_beta_warnings()
def code_reference(stream: Stream, asset: dg.AssetKey) -> dict[str, Any]:
    """Make the metadata with an asset's code: the user's operator or sink, or else the stream's first source.

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
    if code is None and (source := next(filter(None, stream.source_functions.values()), None)) is not None:
        code = _user_code(source)
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
    classes = [_source_of(each) for each in type(operator).__mro__ if not _is_ours(each)]
    parts = [operator.definition(), type(operator).__qualname__, classes, _describe(vars(operator))]
    return hashlib.sha256(repr(parts).encode(errors="backslashreplace")).hexdigest()[:16]


def _source_of(what: Any) -> Any:
    """Return the code of a class or function in a form of its own; compiled, if its source is not to be had."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(what))))
    except (OSError, TypeError, SyntaxError, ValueError):
        inside = vars(what).values() if isinstance(what, type) else [what]
        return [what.__qualname__, *(_compiled(each.__code__) for each in inside if hasattr(each, "__code__"))]


def _compiled(code: CodeType) -> list[Any]:
    constants = [_compiled(each) if isinstance(each, CodeType) else _describe(each) for each in code.co_consts]
    return [code.co_name, code.co_code, code.co_names, constants]


def _describe(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Describe a value so that equal ones are described alike in every process, and others hardly ever."""
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return sorted(repr([_describe(key, inside), _describe(each, inside)]) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return ["set", *sorted(repr(_describe(each, inside)) for each in value)]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(_describe(each, inside) for each in value)]
    if value is None or isinstance(value, str | bytes | int | float | complex | Enum | date | timedelta):
        return repr(value)
    if isinstance(value, np.ndarray):
        content = (
            _describe(value.tolist(), inside) if value.dtype.hasobject else hashlib.sha256(value.tobytes()).digest()
        )
        return [value.dtype.str, value.shape, content]
    if isinstance(value, pa.Array | pa.ChunkedArray | pa.Table | pa.RecordBatch):
        return [repr(getattr(value, "schema", None) or value.type), repr(value.to_pylist())]
    if isinstance(value, type | FunctionType):
        return value.__qualname__ if _is_ours(value) else _source_of(value)
    try:
        return [type(value).__qualname__, _described_as(value) or _describe(vars(value), inside)]
    except Exception:  # a repr of the user's, or an object without attributes
        return type(value).__qualname__


def _described_as(value: Any) -> str | None:
    """Return what an object says of itself; None if that is its address, or made from its attributes."""
    own = type(value).__repr__ is not object.__repr__ and not is_dataclass(value)
    return _ADDRESS.sub("", repr(value)) if own else None


def _is_ours(what: Any) -> bool:
    """Whether a class or function is Siltstone's own, or Python's."""
    return str(getattr(what, "__module__", "siltstone")).partition(".")[0] in ("siltstone", "builtins", "abc")


def _user_code(what: Callable[..., Any] | object) -> CodeType | None:
    """Return the code of a function, of the function in an `ArrowSink`, or of a callable object's class; None if
    it is Siltstone's own."""
    what = what.function if isinstance(what, ArrowSink) else what
    function = what if hasattr(what, "__code__") else type(what).__call__ if callable(what) else None
    return None if _is_ours(function) else getattr(function, "__code__", None)
