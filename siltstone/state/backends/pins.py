"""Pins: directories that keep one version of a subtask's state for a snapshot's readers (docs/adr/0045, 0050).

    pins/<version>-<random>/
        lock                   held (flock) by the owner of the snapshot
        ...                    what the backend keeps there

The process that uses the directory makes pins; the owner, in any process, removes its own. A pin whose lock is not held
belongs to an owner that died: the next step removes it.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from siltstone.errors import StateError
from siltstone.store.private import make_private_directory, open_private

PINS, LOCK = "pins", "lock"
_DROPPED = ".dropped"


def make_pin(directory: Path, version: int, fill: Callable[[Path], None]) -> tuple[Path, int]:
    """Pin a version; return the pin and the descriptor that holds its lock.

    Args:
        fill: writes into the pin what keeps the version. If it fails, the pin is removed.
    """
    pin = directory / PINS / f"{version}-{secrets.token_hex(8)}"
    make_private_directory(pin, exist_ok=False)
    lock = open_private(pin / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fill(pin)
    except BaseException:
        remove_pin(pin)
        os.close(lock)
        raise
    return pin, lock


def remove_pin(pin: Path) -> None:
    """Remove a pin. Readers see all of it or nothing, because it is renamed first."""
    dropped = pin
    if pin.suffix != _DROPPED:
        dropped = pin.with_name(pin.name + _DROPPED)
        with suppress(FileNotFoundError):
            os.rename(pin, dropped)
    shutil.rmtree(dropped, ignore_errors=True)


def all_pins(directory: Path) -> list[Path]:
    """Return a directory's pins, also those that are being removed."""
    try:
        return list((directory / PINS).iterdir())
    except FileNotFoundError:
        return []


def held_pins(directory: Path) -> list[Path]:
    """Return the pins of owners that live; remove the others."""
    held = []
    for pin in all_pins(directory):
        if _is_held(pin):
            held.append(pin)
        else:
            remove_pin(pin)
    return held


def snapshot_gone_error(pin: Path) -> StateError:
    """Return the error of a reader whose pin was removed."""
    return StateError(
        f"the snapshot {pin.name} is gone: it was released, or the stream rolled back behind it, moved or restored "
        "its working state",
        advice="take it again",
    )


def _is_held(pin: Path) -> bool:
    try:
        lock = os.open(pin / LOCK, os.O_RDWR)
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
