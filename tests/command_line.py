"""Runs a command of the command line in the test's own process, and says how it ended."""

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from siltstone import cli


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one line on standard output; nothing else may be anywhere, but for events that are no errors."""
        assert (self.code, self.without_events("info", "warning")) == (0, []), self
        [line] = self.out.splitlines()
        return json.loads(line)

    def without_events(self, *levels: str) -> list[str]:
        """The lines on standard error that are no events of these levels (`siltstone.log`)."""
        event = re.compile(rf"[0-9-]{{10}}T[0-9:.]{{12}}Z (?:{'|'.join(levels)}) ")
        return [line for line in self.err.splitlines() if not event.match(line)]

    def failed(self, code: int, *said: str) -> None:
        """One line on standard error that says all this, nothing on standard output."""
        assert (self.code, self.out) == (code, ""), self
        [line] = self.without_events("info", "warning")
        assert line.startswith("siltstone: ") and len(line) > len("siltstone: ") + 10
        for words in said:
            assert words in line, line


def siltstone(*arguments: object, cwd: Path | None = None) -> Ended:
    """Run a command in this process, so that all share one JVM."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(cwd or Path.cwd()):
        patch.setattr(sys, "argv", ["siltstone", *map(str, arguments)])
        patch.setattr(sys, "path", sys.path.copy())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            cli.main()
    code = end.value.code
    return Ended(code if isinstance(code, int) else int(bool(code)), out.getvalue(), err.getvalue())


def plain(ended: Ended) -> list[str]:
    """Lines for people, in a pipe: nothing else is said, nothing is coloured or drawn over."""
    assert (ended.code, ended.err) == (0, "")
    assert not set("\x1b\r…") & set(ended.out)
    return ended.out.splitlines()
