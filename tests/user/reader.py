"""Somebody who does what pages show, block after block, in one directory and an environment with the wheel."""

import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pages import ROOT, Block
from tests.user.console import SHIM
from tests.wheel import run_in

CONSOLE = Path(__file__).with_name("console.py")
LEFT_OUT = re.compile(r"^(make|pip install|siltstone|[A-Z_]+=\S+ siltstone) ")
"""what a line may begin with in a block that is not run: what can be proven all the same"""
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


@dataclass(frozen=True)
class Reader:
    """A reader of the guide."""

    directory: Path
    """where blocks are run and files are; what a page makes is there for the next"""
    environment: Mapping[str, str]
    socket: Path
    extras: frozenset[str]
    """that the installed package has"""

    def follow(self, block: Block, said: str) -> str:
        """Do what a block shows, or prove what can be proven of it; what was said.

        Args:
            said: what the blocks before it on its page said.
        """
        if block.unrun is not None:
            self._examine(block)
        elif block.file is not None:
            (self.directory / block.file).write_text(block.text)
        elif block.language == "sh":
            return run_in(self.directory, self.environment, "bash", "-euo", "pipefail", "-c", block.text)
        elif block.language == "python":
            return self.ask("python", block.text, page=block.page)
        elif block.language in ("toml", "yaml"):
            with tempfile.TemporaryDirectory() as directory:
                self.ask(block.language, block.text, directory=directory)
        else:
            assert block.language == "text", f"{block.page}:{block.line}: say in its fence what the block is"
            lines = {_without_numbers(line) for line in said.splitlines()}
            missing = [line for line in block.text.splitlines() if _without_numbers(line) not in lines]
            assert missing == [], said
        return ""

    def ask(self, kind: str, given: Any, *, directory: str = "", page: str = "") -> str:
        """What the console says to a request that has to succeed."""
        request = {"kind": kind, "given": given, "directory": directory or str(self.directory), "page": page}
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.socket))
            link.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(link.makefile().readline())
        assert answer["code"] == 0, answer["said"]
        return answer["said"]

    def _examine(self, block: Block) -> None:
        """See that targets of make, extras, commands and options are there that an unrun block names."""
        for line in filter(None, block.text.splitlines()):
            assert LEFT_OUT.match(line), f"{block.page}:{block.line}: neither run nor looked up: {line}"
            program, _, rest = line.partition(" ")
            if program == "make":
                assert rest.split()[0] in TARGET.findall((ROOT / "Makefile").read_text()), line
            elif program == "pip":
                [extras] = re.findall(r"siltstone\[(.*)\]", rest)
                assert set(extras.split(",")) <= self.extras, line
            else:
                self.ask("names", line[line.index("siltstone") :])


def _without_numbers(line: str) -> str:
    """A line whose numbers and widths do not count."""
    return " ".join(re.sub(r"\d+", "0", line).split())


@contextmanager
def reading(directory: Path, environment: Mapping[str, str]) -> Iterator[Reader]:
    """A reader whose `siltstone` is done by one process, on one JVM; it is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="reader-") as place:
        path, shim = Path(place, "socket"), Path(place, "siltstone")
        python = Path(environment["VIRTUAL_ENV"], "bin", "python")
        shim.write_text(SHIM.format(python=python, path=str(path)))
        shim.chmod(0o755)
        listed = "from importlib.metadata import metadata as m; print(*m('siltstone').get_all('Provides-Extra'))"
        extras = frozenset(run_in(directory, environment, str(python), "-c", listed).split())
        command = [str(python), "-P", str(CONSOLE), str(path)]
        with (directory / "console.log").open("w") as log:
            console = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
        try:
            while not path.exists():
                assert console.poll() is None, (directory / "console.log").read_text()
                time.sleep(0.02)
            shell = {**environment, "PATH": f"{place}:{environment['PATH']}"}
            yield Reader(directory, shell, path, extras)
        finally:
            console.kill()
            console.wait()
