"""How streams are found."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pyarrow as pa
import pytest

from siltstone import stream as module
from siltstone.errors import UnknownStream
from siltstone.operator import Operator, ValueState
from siltstone.stream import Stream, find_stream, find_streams


class Kept(Operator):
    name = "kept"
    key = {"k": pa.int64()}  # noqa: RUF012
    totals = ValueState(value={"n": pa.int64()})


MINE = Stream("mine", source=lambda spark, options: spark.sql(""), operators=[Kept()])


@pytest.mark.parametrize("value", [__name__, f"{__name__}:MINE"])
def test_an_entry_point_names_a_module_or_a_stream_in_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("mine", value, module.ENTRY_POINTS)]
    monkeypatch.setattr(module, "entry_points", lambda group: points if group == module.ENTRY_POINTS else [])
    assert find_streams() == ({"mine": MINE}, {})


def test_what_did_not_import_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_streams.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownStream, match=r"broken_streams did not import \(ZeroDivisionError"):
        find_stream("yours", ["broken_streams"])
