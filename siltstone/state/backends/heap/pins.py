"""What a pin of a heap keeps for a snapshot's readers: files of one version, and before-images of later steps.

pins/<version>-<random>/   see `siltstone.state.backends.pins`
    header                 of that version
    opaque/, tables/       hard links to the files of that version
    undo/<n>-<step>        hard links to the undo files of later steps, in the order in which the steps began
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from siltstone.state.backends.heap.header import render
from siltstone.state.backends.pins import all_pins, held_pins, remove_pin
from siltstone.store.private import private_mode, write_private_file

PARTS = ("rows", "offsets", "bytes")


def fill_pin(pin: Path, directory: Path, header: dict[str, Any], later: Iterable[tuple[int, Path]]) -> None:
    """Link the files of the version of `header` into a pin.

    Args:
        later: the steps after that version, in order, and their undo files.
    """
    for part in ("opaque", "tables", "undo"):
        (pin / part).mkdir(private_mode(of_directory=True))
    for name, table in header["tables"].items():
        (pin / "tables" / name).mkdir(private_mode(of_directory=True))
        for part in PARTS:
            os.link(directory / "tables" / name / str(table["generation"]) / part, pin / "tables" / name / part)
    for variable, step in header["opaque_steps"].items():
        os.link(directory / "opaque" / f"{variable}.{step}", pin / "opaque" / variable)
    for step, path in later:
        _link_undo(pin, step, path)
    write_private_file(pin / "header", render(header))


def link_undo(directory: Path, step: int, path: Path) -> None:
    """Give each pin the undo file of a step that begins; remove pins whose owners died.

    Call this before the step's first mutation.
    """
    for pin in held_pins(directory):
        with suppress(FileNotFoundError):  # its owner removes it just now
            _link_undo(pin, step, path)


def drop_pins(directory: Path, above: int) -> None:
    """Remove pins of versions above `above`, which a rollback is about to overwrite; their readers notice."""
    for pin in all_pins(directory):
        version = pin.name.partition("-")[0]
        if not version.isdigit() or int(version) > above:
            remove_pin(pin)


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
