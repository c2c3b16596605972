"""Ends of the process: stood for by an error, where a test lets some code come no further, or real ones."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Stop(Exception):
    """Raised where the process would end."""


def stop(*_: object, **__: object) -> None:
    """In place of a function that is not reached any more."""
    raise Stop


KILLED_WHILE_DELETING = """
import os, signal, sys
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.store.paths import extract_prefix
from siltstone.store.filesystem import FilesystemStore

root, deletes, stream, *ids = sys.argv[1:]
delete, left = FilesystemStore.delete, int(deletes)

def one_by_one(self, names):
    global left
    for name in names:
        if name.startswith(extract_prefix(stream)):
            delete(self, [name])
            continue
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        delete(self, [name])

FilesystemStore.delete = one_by_one
with OpenWarehouse.open_existing(root) as place:
    {what}
"""
"""a program that kills itself once it has deleted so many objects, besides extracts"""


def killed_while_deleting(what: str, root: Path, deletes: int, stream: str, *ids: int) -> int:
    """Run `what`, code that has `place`, `stream` and `ids`, killed in the store after some deletes; the exit code."""
    program = KILLED_WHILE_DELETING.replace("{what}", what)
    command = [sys.executable, "-c", program, str(root), str(deletes), stream, *map(str, ids)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
