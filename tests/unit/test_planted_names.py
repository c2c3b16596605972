"""Names that whoever can write to a store chose stop no sweep, and reach no terminal as they are."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from rich.console import Console

from siltstone.catalog.outbox import OutputRecord
from siltstone.cli.output import escape_name
from siltstone.errors import CorruptObject, StateError
from siltstone.spark.delivery import deliverers
from siltstone.store.filesystem import FilesystemStore


@pytest.mark.parametrize("name", ["s/x[/bold]y", "s/a\x1b]0;owned\x07\x1b[2Jb", "s/q\udcff"])
def test_a_planted_name_is_shown_without_markup_or_control_characters(name: str) -> None:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(escape_name(name))
    assert capture.get() == "".join(c if c.isprintable() else "?" for c in name) + "\n"


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
    found = list(store.unfinished())
    assert [write.token for write in found] == ["1-left"]
    store.discard(found)
    assert list(store.unfinished()) == []


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
