"""Signals that a process sends itself at a line of the engine's code: of all of it, or of what one function runs."""

import os
import sys
import threading
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import siltstone

ROOT = os.path.dirname(siltstone.__file__) + os.sep
ENGINE = tuple(
    ROOT + part + os.sep
    for part in (
        "catalog",
        "chains",
        "change",
        "changelog",
        "format",
        "restore",
        "retention",
        "run",
        "sinks",
        "spark",
        "store",
    )
)


@dataclass(frozen=True, order=True)
class Within:
    """A function of the engine: its file below `siltstone/`, its name with that of its class, and about how many lines
    it runs in one command, to begin with."""

    file: str
    function: str
    lines: int = 150

    def __str__(self) -> str:
        return self.function

    def is_(self, code: CodeType) -> bool:
        """Whether that is its code."""
        return code.co_qualname == self.function and code.co_filename == ROOT + self.file


def signal_at(line: int, number: int, within: Within | None) -> None:
    """Let this process send itself a signal when it comes to its `line`-th line of the engine's code, in any thread.

    Args:
        within: only lines count that this function runs, or what it calls.
    """
    counted = 0
    entered = threading.local()

    def count() -> None:
        nonlocal counted
        counted += 1
        if counted == line:
            os.kill(os.getpid(), number)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if within is None or getattr(entered, "depth", 0):
            if event == "line":
                count()
        elif event == "call" and within.is_(frame.f_code):
            entered.depth = 1
            return leave
        return trace

    def leave(_: FrameType, event: str, __: Any) -> Any:
        """The outermost frame of the function."""
        if event == "line":
            count()
        elif event == "return":
            entered.depth = 0
        return leave

    threading.settrace(trace)
    sys.settrace(trace)
