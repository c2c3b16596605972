"""Call the user's code, and say whose error it was if it fails."""

import inspect
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from siltstone.errors import SiltstoneError, StateError, summarize
from siltstone.operator import Operator

T = TypeVar("T")


class OperatorFailed(Exception):
    """The user's code raised an error. It is not a `SiltstoneError`, so that Spark retries the task."""


@contextmanager
def users_code(operator: Operator) -> Iterator[None]:
    """Turn an error of the user's code into `OperatorFailed`, with the operator, the error, and its line."""
    try:
        yield
    except SiltstoneError:
        raise
    except Exception as error:
        file = _file_of(operator)
        frames = traceback.extract_tb(error.__traceback__)
        frame = ([f for f in frames if f.filename == file] or frames)[-1]
        where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        raise OperatorFailed(f"operator {operator.name}: {summarize(error)} ({where})") from error


def _file_of(operator: Operator) -> str | None:
    # Not of its class: one from a notebook, or sent here by value, has no module to find a file by.
    code = getattr(inspect.unwrap(type(operator).process), "__code__", None)
    return None if code is None else code.co_filename


def call_within(timeout_s: float, operator: Operator, callback: Callable[[], T], name: str, option: str) -> T:
    """Call a callback of an operator; one that does not return in time is left behind in its thread.

    Args:
        name: of the callback.
        option: the setting with the time.

    Raises:
        SiltstoneError: the operator raised one.
        OperatorFailed: it raised anything else.
        StateError: it took longer.
    """
    made, errors = list[T](), list[BaseException]()

    def run() -> None:
        try:
            made.append(callback())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"siltstone-{operator.name}-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise StateError(
            f"operator {operator.name}: {name} did not return within {timeout_s:g} s",
            advice=f"make it faster, or raise {option}",
        )
    with users_code(operator):
        if errors:
            raise errors[0]
    return made[0]
