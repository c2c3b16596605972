"""The version of an operator's code: what changes it, and what does not."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.dagster import stream_definitions
from siltstone.dagster.code import code_version
from tests.fault.small_stream import SMALL

KEY = {"k": pa.int64()}
MODULE = """
import pyarrow as pa
from siltstone.operator import Operator, ValueState


class Mine(Operator):
    {comment}
    name = "mine"
    key = {{"k": pa.int64()}}
    totals = ValueState(value={{"n": pa.int64()}})

    def process(self, rows, state):
        state.totals.put(rows.keys, {{"n": rows.count({more})}})
"""


def version_of(directory: Path, *, comment: str = "", more: str = "", seed: str = "1") -> str:
    """The version in a process of its own, as each code server and run is."""
    (directory / "mine.py").write_text(MODULE.format(comment=comment, more=more))
    says = "from mine import Mine; from siltstone.dagster.code import code_version as v; print(v(Mine()))"
    environment = {"PYTHONPATH": f"{directory}:{Path.cwd()}", "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run([sys.executable, "-c", says], env=environment, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def test_changed_code_is_another_version_and_comments_are_not(tmp_path: Path) -> None:
    first = version_of(tmp_path)
    assert version_of(tmp_path, comment="# more to say", seed="2") == first
    assert version_of(tmp_path, more="initial=None") != first


def test_what_an_operator_was_made_with_counts() -> None:
    versions = {
        code_version(Aggregate("a", KEY, aggregates))
        for aggregates in ([Count("n")], [Count("m")], [Count("n"), Sum("s", of="v")])
    }
    assert len(versions) == 3
    assert code_version(Aggregate("a", KEY, [Count("n")])) in versions


def test_assets_have_columns_and_versions() -> None:
    specs = {s.key.path[-1]: s for s in stream_definitions(SMALL).resolve_all_asset_specs()}
    by_name = {operator.name: operator for operator in SMALL.operators}
    for name, operator in by_name.items():
        for part in ("base_checkpoint", "delta_chain"):
            assert specs[f"{name}_{part}"].code_version == code_version(operator)
    assert specs["accounts_sink"].code_version == code_version(by_name["accounts"])
    assert specs["checkpoints"].code_version is None
    columns = specs["accounts_sink"].metadata["dagster/column_schema"].columns
    assert [(each.name, each.type) for each in columns][:2] == [
        ("sequence", "int64"),
        ("event_time", "timestamp[us, tz=UTC]"),
    ]
    of_state = {each.name for each in specs["accounts_base_checkpoint"].metadata["dagster/column_schema"].columns}
    assert {"totals.account", "totals.spent", "visited.place"} <= of_state
    assert {each.name for each in specs["daily_base_checkpoint"].metadata["dagster/column_schema"].columns} >= {
        "place",
        "day",
    }
