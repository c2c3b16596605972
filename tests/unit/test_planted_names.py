"""Names that whoever can write to a store chose stop no sweep, and reach no terminal as they are."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from rich.text import Text

from siltstone import log
from siltstone.catalog.records.edits import Edit
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.cli.output import Terminal, table
from siltstone.errors import CorruptObject, StateError
from siltstone.log import escape_unprintable
from siltstone.spark.delivery import deliverers
from siltstone.store.filesystem import FilesystemStore
from tests.command_line import plain, siltstone
from tests.region_run import RegionRun, run_tasks
from tests.sums import NAME, POLICY, Sums, rows, stream_of

HOSTILE = "x[/bold]\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.:boom:\nall proven"
"""markup, a title, a cleared screen, a colour by one character, a changed reading order, an emoji, a line of its own"""
SHOWN = r"x[/bold]\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.:boom:\nall proven"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("name", ["s/x[/bold]y", "s/a\x1b]0;owned\x07\x1b[2Jb", "s/q\udcff", HOSTILE])
def test_a_terminal_interprets_nothing_in_what_it_shows(name: str, is_terminal: bool) -> None:
    """The cases are a string, a styled text, a cell and a heading of a table, and a line above a spinner."""
    terminal = Terminal(width=200, force_terminal=is_terminal, color_system=None)
    cells = table(name)
    cells.add_row(name)
    with terminal.capture() as capture:
        for each in (name, Text(name, "red"), cells):
            terminal.print(each)
        with terminal.status(Text(name)):
            terminal.print(name)
    drawn = re.sub(r"\x1b\[(?:\?25[lh]|1A|2K)|\r", "", capture.get())  # by rich itself
    assert all(line.isprintable() for line in drawn.split("\n"))
    assert drawn.count(escape_unprintable(name.split("\n", maxsplit=1)[0])) >= 4, "also where its width is measured"


def test_what_somebody_else_wrote_reaches_no_terminal_as_it_is(tmp_path: Path) -> None:
    """An edit's author and source, an object's name, an error and a line of another program."""
    root = tmp_path / "w"
    with OpenWarehouse.open_writable(str(root)) as place:
        run = RegionRun(place, stream_of(Sums()), POLICY)
        run.step(rows(0))
        for name, task in run.region.begin_step(ends=True).items():
            run.region.acknowledge(name, run_tasks(task, {})[1])
        run.region.complete(edit=Edit(NAME, "totals", 1, 0, HOSTILE, None, HOSTILE))
        run.region.close("done")
        (root / "objects" / NAME / "00000001" / HOSTILE.replace("/", "")).write_bytes(b"x")
    options = "--warehouse", root
    shown = siltstone("show", NAME, 2, *options)
    [line] = [line for line in plain(shown) if line.startswith("edited by ")]
    assert line.startswith(f"edited by {SHOWN} at ") and line.endswith(f", from {SHOWN}")
    assert json.loads(siltstone("show", NAME, 2, "--json", *options).out)["edit"]["who"] == HOSTILE
    swept = plain(siltstone("sweep", NAME, "--dry-run", "--age-guard", "0h", *options))
    assert any(line.rstrip().endswith(SHOWN.replace("/", "")) for line in swept)
    siltstone("show", NAME, HOSTILE, *options).failed(2, SHOWN)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_of_another_program_is_shown_without_what_a_terminal_obeys(form: log.Format) -> None:
    lines = list[str]()
    log.configure("info", form, lines.append)
    try:
        log.relay_line("\tat x.Y\x1b[2J\x9b")
    finally:
        log.unconfigure()
    [line] = lines
    assert line.isprintable() and (line == r"        at x.Y\x1b[2J\x9b" or json.loads(line)["event"].endswith("\x9b"))


def test_what_is_nested_too_deep_is_not_listed(tmp_path: Path) -> None:
    """1200 directories, one in another, ended a sweep in RecursionError."""
    store = FilesystemStore(tmp_path)
    store.put("s/1/a", b"x")
    before = os.getcwd()
    os.chdir(tmp_path / "s")
    try:
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        Path("f").touch()
        assert list(store.list("")) == [("s/1/a", 1)]
        os.unlink("f")
        for _ in range(1200):  # pytest could not remove them
            os.chdir("..")
            os.rmdir("d")
    finally:
        os.chdir(before)


def test_what_no_writer_left_under_tmp_is_not_taken_for_unfinished(tmp_path: Path) -> None:
    """A directory there, or a file whose name is no object's, stopped each sweep."""
    store = FilesystemStore(tmp_path)
    store.put("s/1/a", b"x")
    (tmp_path / ".tmp/adir").mkdir()
    (tmp_path / ".tmp/a b").touch()
    (tmp_path / ".tmp/1-left").touch()
    found = list(store.list_unfinished())
    assert [write.token for write in found] == ["1-left"]
    store.discard(found)
    assert list(store.list_unfinished()) == []


def test_staged_rows_altered_before_their_delivery_are_not_blamed_on_the_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark wraps the CorruptObject of its tasks, so it was told as a failure of the sink."""

    def deliver(*_: object) -> None:
        raise RuntimeError("an exception was thrown from the Python worker")

    monkeypatch.setattr("siltstone.spark.delivery.staged_rows", lambda *_: None)
    store = FilesystemStore(tmp_path / "objects")
    give = deliverers(cast(Any, None), {"by_key": deliver}, store.url)["by_key"]
    stored = store.put("s/00000001/000000000001/by_key.00000.x.output.arrow", b"whole")
    schema = pa.schema([]).serialize().to_pybytes()
    output = OutputRecord("by_key", schema, 0, (), "s", 1, 1, 1, lost=False, delivered_at=None)
    with pytest.raises(StateError, match="the sink of by_key failed") as failed:
        give(output)
    assert not isinstance(failed.value, CorruptObject)
    output = replace(output, objects=(stored,))
    (tmp_path / "objects" / stored.name).write_bytes(b"wrong")
    with pytest.raises(CorruptObject, match="by_key"):
        give(output)
