"""The version of an operator's code: what changes it, and what does not."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.aggregates.operator import Aggregate, Count, Sum
from siltstone.dagster import stream_definitions
from siltstone.dagster.code import code_version
from siltstone.operator import Operator
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


def made_with(value: object) -> Operator:
    operator = Aggregate("a", KEY, [Count("n")])
    vars(operator)["given"] = value
    return operator


@dataclass
class Given:
    names: frozenset[str]


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


OTHERS = [
    *({"one"}, {"two"}, Given(frozenset({"a"})), Given(frozenset({"b"})), Plain(1), Plain(2)),
    *(np.arange(2000), np.where(np.arange(2000) == 1000, 0, np.arange(2000))),
    *(pa.table({"n": np.arange(2000)}), pa.table({"n": np.where(np.arange(2000) == 1000, 0, np.arange(2000))})),
    *(lambda row: row + 1, Silent(), {"a": 1}, ["a", 1]),
]


def test_values_that_differ_are_told_apart_and_none_is_an_error() -> None:
    versions = [code_version(made_with(value)) for value in OTHERS]
    assert len(set(versions)) == len(OTHERS)
    assert versions == [code_version(made_with(value)) for value in OTHERS]
    itself: list[object] = []
    itself.append(itself)
    assert code_version(made_with(itself))


def test_sets_are_alike_in_every_process() -> None:
    says = "from tests.dagster.test_code import *; print(code_version(made_with({'x': Given(frozenset('abcdef'))})))"
    found = {
        subprocess.check_output(
            [sys.executable, "-c", says], env={"PYTHONPATH": str(Path.cwd()), "PYTHONHASHSEED": seed}
        )
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1


def test_code_without_a_source_counts_by_what_it_is_compiled_to() -> None:
    def compiled(more: str) -> str:
        names: dict[str, Any] = {"Base": type(SMALL.operators[0]), "__name__": "notebook"}
        exec(f"class Mine(Base):\n    def process(self, rows, state):\n        return rows.count({more})", names)  # noqa: S102 as a notebook does
        return code_version(names["Mine"]())

    assert compiled("") != compiled("initial=None")
    assert compiled("") == compiled("")
