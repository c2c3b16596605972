"""Data Docs show what is in a stream's state as text, whatever it is."""

from pathlib import Path
from typing import Any, cast

import pandas as pd

from siltstone.dagster.checks.data_docs import build_data_docs
from siltstone.dagster.checks.facts import Subject
from siltstone.dagster.checks.suites import Suite

HOSTILE = '<img src=x onerror=alert(1)> $HOME ${x} & "quoted"'


class Named:
    name = "small"


def test_a_key_that_is_html_is_shown_as_text(tmp_path: Path) -> None:
    facts = pd.DataFrame({"examples": [HOSTILE, None], "unequal": [1, 0]})
    expected: dict[str, Any] = {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "unequal", "value_set": [0]},
    }
    named = {"type": "expect_column_values_to_be_null", "kwargs": {"column": "examples"}}
    suite = Suite("hostile", "No key is shown as anything but text.", lambda _: facts, [expected, named], ("examples",))
    index = build_data_docs(cast(Subject, Named()), tmp_path / "pages", [suite])
    pages = [page.read_text() for page in index.parent.rglob("*.html")]
    assert not any("<img src=x" in page for page in pages)
    assert any("&lt;img src=x" in page for page in pages), "it is shown"
