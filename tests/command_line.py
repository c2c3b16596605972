"""Runs a command of the command line, in the test's own process or in another, and reports how it ended."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from siltstone import cli
from siltstone.catalog.warehouse import OpenWarehouse

ROOT = Path(__file__).parents[1]
CONFIGURATION = 'streams = ["tests.spark_streams"]\nwarehouse = "w"\nparallelism = 2\n'
"""of a project: its `siltstone.toml`"""


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


def in_process(*arguments: object, cwd: Path, **options: Any) -> Ended:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "siltstone.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, **options)
    return Ended(done.returncode, done.stdout, done.stderr)


def contents(warehouse: Path) -> tuple[Any, ...]:
    """All that a command that fails must leave alone: streams, runs, checkpoints and every file but the catalog's."""
    files = sorted((str(p), p.stat().st_size) for p in warehouse.rglob("*") if not p.name.startswith("catalog.db"))
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        streams = place.catalog.streams.list()
        return files, [(s, place.catalog.runs.list(s.name), place.catalog.checkpoints.list(s.name)) for s in streams]


def plain(ended: Ended) -> list[str]:
    """Lines for people, in a pipe: nothing else is said, nothing is coloured or drawn over."""
    assert (ended.code, ended.err) == (0, "")
    assert not set("\x1b\r…") & set(ended.out)
    return ended.out.splitlines()
