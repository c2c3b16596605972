"""Compare facts with expectations: whether a property holds, and the rows that fail."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from siltstone.dagster.checks.facts import Facts, Subject
from siltstone.dagster.checks.suites import Suite
from siltstone.pipes.metadata import Metadata, table
from siltstone.pipes.outcomes import CheckOutcome
from siltstone.pipes.parts import asset_name

if TYPE_CHECKING:
    from great_expectations import ExpectationSuite
    from great_expectations.data_context import AbstractDataContext

ROWS_SHOWN = 100


@dataclass(frozen=True)
class Outcome:
    """The result of checking one property.

    Attributes:
        suite: the property.
        holds: whether it holds.
        summary: the result in one line.
        facts: number of rows checked.
        failing: number of rows that fail an expectation.
        rows: at most `ROWS_SHOWN` of the failing rows, with the suite's `row` columns and what was `expected`.
    """

    suite: Suite
    holds: bool
    summary: str
    facts: int
    failing: int
    rows: list[dict[str, Any]]

    def told(self, stream: str) -> CheckOutcome:
        """Return what Dagster is told."""
        metadata: Metadata = {"summary": self.summary, "facts": self.facts, "failing": self.failing}
        if self.rows:
            names = self.rows[0].keys()
            rows = [{name: None if row[name] is None else str(row[name]) for name in names} for row in self.rows]
            metadata["rows"] = table(dict.fromkeys(names, "string"), rows)
        severity = "ERROR" if self.suite.blocking else "WARN"
        return CheckOutcome(asset_name(stream, self.suite.about), self.suite.name, self.holds, metadata, severity)


def check(subject: Subject, suite: Suite) -> Outcome:
    """Gather the facts of one property, and compare them with what is expected.

    Raises:
        SiltstoneError: the facts cannot be read.
    """
    return validate(suite, suite.gather(subject))


def validate(suite: Suite, facts: Facts) -> Outcome:
    """Compare facts with what is expected of them."""
    if facts.empty:
        summary = "nothing to check" if suite.needs_rows else "nothing found"
        return Outcome(suite, not suite.needs_rows, summary, 0, 0, [])
    context = quiet_context()
    source = context.data_sources.add_pandas("facts")
    batch = source.add_dataframe_asset(suite.name).add_batch_definition_whole_dataframe("all")
    indexed = facts.reset_index(names="__row")
    result = batch.get_batch({"dataframe": indexed}).validate(
        expectation_suite(suite),
        result_format={"result_format": "COMPLETE", "unexpected_index_column_names": ["__row"]},
    )
    expected: dict[int, str] = {}
    for found in result.results:
        config = found.expectation_config
        assert config is not None
        if (found.exception_info or {}).get("raised_exception"):
            raise RuntimeError(f"expectation {config.type} of {suite.name}: {found.exception_info}")
        for at in found.result.get("unexpected_index_list") or []:
            expected.setdefault(int(at["__row"]), _describe(config.type, config.kwargs))
    failing = sorted(expected)
    rows = [
        {"expected": expected[at], **{name: _to_json(facts.iloc[at][name]) for name in suite.row}}
        for at in failing[:ROWS_SHOWN]
    ]
    summary = (
        f"{len(facts)} of {len(facts)} as expected" if not failing else _summary(rows[0], len(failing), len(facts))
    )
    return Outcome(suite, bool(result.success), summary, len(facts), len(failing), rows)


def expectation_suite(suite: Suite) -> "ExpectationSuite":
    """Make the Great Expectations suite of a property."""
    import great_expectations as gx

    return gx.ExpectationSuite(suite.name, expectations=list(suite.expectations), meta={"notes": suite.description})


def quiet_context(directory: str | None = None) -> "AbstractDataContext":
    """Make a data context without analytics and progress bars, in memory or in files below `directory`."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    with _without_connect():
        import great_expectations as gx
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    if directory is None:
        stores = InMemoryStoreBackendDefaults(init_temp_docs_sites=False)  # True would leave a directory each time
        context = gx.get_context(mode="ephemeral", project_config=DataContextConfig(store_backend_defaults=stores))
    else:
        context = gx.get_context(mode="file", project_root_dir=directory)
    context.enable_analytics(False)
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    return context


@contextmanager
def _without_connect() -> Iterator[None]:
    """Make Spark Connect impossible to import in this block.

    Great Expectations imports it. If a package that it needs is missing, pyspark mistakes a process that
    multiprocessing spawned, such as a run of Dagster, for a run of its own doctests, and ends it.
    """
    name = "pyspark.sql.connect"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[name]


def _describe(type: str, kwargs: Mapping[str, Any]) -> str:
    """Describe an expectation in a few words, such as `proven True`, `stored_bytes = recorded_bytes`."""
    if "column" not in kwargs:
        a, b = kwargs["column_A"], kwargs["column_B"]
        return f"{a} = {b}" if "equal" in type else f"{b} at most {a}"
    if "value_set" in kwargs:
        return f"{kwargs['column']} {' or '.join(map(str, kwargs['value_set']))}"
    return f"{kwargs['column']} {'known' if 'not_be_null' in type else 'none'}"


def _summary(first: dict[str, Any], failing: int, facts: int) -> str:
    values = ", ".join(f"{name} {value}" for name, value in first.items() if value is not None and name != "expected")
    return f"{failing} of {facts} not as expected ({first['expected']}), such as {values}"


def _to_json(value: Any) -> Any:
    """Convert a value of a table to a JSON value."""
    value = value.item() if hasattr(value, "item") else value
    return None if pd.isna(value) else value
