"""Pins: what keeps the files of one version of a heap for a snapshot's readers (docs/adr/0045).

    pins/<version>-<random>/
        lock                   held (flock) by the owner of the snapshot
        header                 of that version
        opaque/, tables/       hard links to the files of that version
        undo/<n>-<step>        hard links to the undo files of later steps, in the order in which the steps began

The process that uses the directory makes and links pins; the owner, in any process, removes its own. A pin whose lock
is not held belongs to an owner that died: the next step removes it.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from siltstone.state.backends.heap.header import render

PARTS = ("rows", "offsets", "bytes")
_DROPPED = ".dropped"


def make_pin(directory: Path, header: dict[str, Any], later: Iterable[tuple[int, Path]]) -> tuple[Path, int]:
    """Pin the version of `header`; return the pin and the descriptor that holds its lock.

    Args:
        later: the steps after that version, in order, and their undo files.
    """
    pin = directory / "pins" / f"{header['version']}-{secrets.token_hex(8)}"
    for part in ("opaque", "tables", "undo"):
        (pin / part).mkdir(parents=True)
    lock = os.open(pin / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, table in header["tables"].items():
            (pin / "tables" / name).mkdir()
            for part in PARTS:
                os.link(directory / "tables" / name / str(table["generation"]) / part, pin / "tables" / name / part)
        for variable, step in header["opaque_steps"].items():
            os.link(directory / "opaque" / f"{variable}.{step}", pin / "opaque" / variable)
        for step, path in later:
            _link_undo(pin, step, path)
        (pin / "header").write_bytes(render(header))
    except BaseException:
        remove_pin(pin)
        os.close(lock)
        raise
    return pin, lock


def link_undo(directory: Path, step: int, path: Path) -> None:
    """Give each pin the undo file of a step that begins; remove pins whose owners died.

    Call this before the step's first mutation.
    """
    for pin in _pins(directory):
        if _is_held(pin):
            with suppress(FileNotFoundError):  # its owner removes it just now
                _link_undo(pin, step, path)
        else:
            remove_pin(pin)


def drop_pins(directory: Path, above: int) -> None:
    """Remove pins of versions above `above`, which a rollback is about to overwrite; their readers notice."""
    for pin in _pins(directory):
        version = pin.name.partition("-")[0]
        if not version.isdigit() or int(version) > above:
            remove_pin(pin)


def remove_pin(pin: Path) -> None:
    """Remove a pin. Readers see all of its undo files or none, because it is renamed first."""
    dropped = pin
    if pin.suffix != _DROPPED:
        dropped = pin.with_name(pin.name + _DROPPED)
        with suppress(FileNotFoundError):
            os.rename(pin, dropped)
    shutil.rmtree(dropped, ignore_errors=True)


def later_steps(pin: Path) -> list[tuple[int, Path]]:
    """Return the steps after the pin's version and their undo files, in the order in which they began.

    Raises:
        FileNotFoundError: the pin is gone.
    """
    names = sorted(os.listdir(pin / "undo"))
    return [(int(name.partition("-")[2]), pin / "undo" / name) for name in names]


def _link_undo(pin: Path, step: int, path: Path) -> None:
    # A step may begin twice, rolled back in between: its files have the same step and other numbers.
    os.link(path, pin / "undo" / f"{len(os.listdir(pin / 'undo')):012d}-{step}")


def _pins(directory: Path) -> list[Path]:
    try:
        return list((directory / "pins").iterdir())
    except FileNotFoundError:
        return []


def _is_held(pin: Path) -> bool:
    try:
        lock = os.open(pin / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return pin.suffix != _DROPPED
    else:
        return False
    finally:
        os.close(lock)
