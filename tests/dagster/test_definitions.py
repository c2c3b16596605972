"""What loads: every stream's assets, checks, jobs, schedules, sensors, quickly, without Spark, whatever is broken."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from orchestration.definitions import definitions as deployed
from siltstone.dagster import project_of, stream_definitions
from siltstone.dagster.checks.suites import SUITES
from siltstone.dagster.names import asset_of
from siltstone.errors import UsageError
from siltstone.settings import Settings
from siltstone.sinks.arrow import ArrowSink
from siltstone.sinks.delta import DeltaSink
from siltstone.sinks.kafka import KafkaSink
from siltstone.stream import Stream
from tests.fault import small_stream
from tests.fault.small_stream import DAILY, SMALL, Accounts, source

REPOSITORY = Path(__file__).parents[2]
PARTS = ("base_checkpoint", "delta_chain")
SMALL_ASSETS = {
    "events": [],
    **{f"{operator}_base_checkpoint": ["events"] for operator in ("accounts", "daily")},
    **{f"{operator}_delta_chain": ["events", f"{operator}_base_checkpoint"] for operator in ("accounts", "daily")},
    "places_base_checkpoint": [f"accounts_{part}" for part in PARTS],
    "places_delta_chain": [*(f"accounts_{part}" for part in PARTS), "places_base_checkpoint"],
    "accounts_sink": [f"accounts_{part}" for part in PARTS],
    "checkpoints": [f"{operator}_{part}" for operator in ("accounts", "daily", "places") for part in PARTS],
    "materialization": ["checkpoints"],
    "full_snapshot": ["checkpoints"],
    "restored_state": ["checkpoints", "materialization"],
}
"""asset of the small stream -> what it is made from: `places` reads what `accounts` puts out"""


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(scope="module")
def small() -> dg.Definitions:
    """Of the small stream alone."""
    return stream_definitions(SMALL)


def specs(definitions: dg.Definitions) -> dict[str, dg.AssetSpec]:
    return {spec.key.to_user_string(): spec for spec in definitions.resolve_all_asset_specs()}


def check_specs(definitions: dg.Definitions) -> Iterator[dg.AssetCheckSpec]:
    return (spec for checks in definitions.asset_checks or [] for spec in checks.check_specs)


def names(definitions: dg.Definitions, what: str) -> set[str]:
    return {each.name for each in getattr(definitions, what) or []}


def test_assets_are_made_from_what_they_are_made_from(small: dg.Definitions) -> None:
    made_from = {
        key: sorted(dep.asset_key.to_user_string().removeprefix("small/") for dep in spec.deps)
        for key, spec in specs(small).items()
    }
    assert made_from == {f"small/{asset}": sorted(deps) for asset, deps in SMALL_ASSETS.items()}


def own_sink(rows: object, checkpoint: int) -> None:
    """A sink of a user's own."""


def test_assets_say_what_they_are_whose_and_from_which_code(small: dg.Definitions) -> None:
    found = specs(small)
    for key, spec in found.items():
        assert (spec.group_name, list(spec.owners)) == ("small", [])
        assert "spark" in spec.kinds and spec.description
        (reference,) = spec.metadata["dagster/code_references"].code_references
        assert Path(reference.file_path) == Path(small_stream.__file__), key
        may_be_left_out = (*PARTS, "_sink", "/restored_state", "/full_snapshot")
        assert spec.skippable == key.endswith(may_be_left_out), "no event for what a run did not make"
    assert "`totals`, `recent`, `visited`, `amounts`" in (found["small/accounts_base_checkpoint"].description or "")
    (reference,) = found["small/accounts_delta_chain"].metadata["dagster/code_references"].code_references
    assert reference.line_number == Accounts.process.__code__.co_firstlineno
    (reference,) = found["small/events"].metadata["dagster/code_references"].code_references
    assert reference.line_number == source.__code__.co_firstlineno
    own = specs(stream_definitions(replace(SMALL, sinks={"accounts": ArrowSink(own_sink)})))
    (reference,) = own["small/accounts_sink"].metadata["dagster/code_references"].code_references
    assert reference.line_number == own_sink.__code__.co_firstlineno
    # Of an aggregate there is no code but Siltstone's own, and the stream's file says more.
    (reference,) = found["small/daily_delta_chain"].metadata["dagster/code_references"].code_references
    assert (reference.label, reference.line_number) == ("stream small", source.__code__.co_firstlineno)


@pytest.mark.parametrize(("url", "kinds"), [("./warehouse", set()), ("s3://bucket/state", {"s3"})])
def test_kinds_tell_in_which_store_it_lies(url: str, kinds: set[str]) -> None:
    found = specs(stream_definitions(SMALL, settings=Settings(warehouse=url)))
    assert found["small/accounts_base_checkpoint"].kinds == {"spark", "parquet"} | kinds
    assert found["small/materialization"].kinds == {"spark", "parquet"} | kinds
    assert found["small/accounts_sink"].kinds == {"spark", "parquet"}, "a sink writes where it says"


@pytest.mark.parametrize(
    ("sink", "kind"),
    [
        (DeltaSink(), "deltalake"),
        (None, "deltalake"),
        (KafkaSink("sums", "broker:9092"), "kafka"),
        (ArrowSink(print), "python"),
        (print, "python"),
    ],
)
def test_kinds_tell_what_a_sink_writes(sink: object, kind: str) -> None:
    found = specs(stream_definitions(replace(SMALL, sinks={"accounts": sink})))
    assert found["small/accounts_sink"].kinds == {"spark", kind}


def test_checks_are_of_the_asset_they_are_about_and_block_where_going_on_would_spread_damage(
    small: dg.Definitions,
) -> None:
    found = {(spec.asset_key.to_user_string(), spec.name): spec for spec in check_specs(small)}
    assert {name for _, name in found} == {suite.name for suite in SUITES}
    assert {key: spec.blocking for key, spec in found.items()} == {
        ("small/checkpoints", "digest"): True,
        ("small/checkpoints", "no_gap"): True,
        ("small/checkpoints", "nothing_missing"): True,
        ("small/checkpoints", "restore_cost"): False,
        ("small/checkpoints", "space_amplification"): False,
        ("small/checkpoints", "no_orphan"): False,
        ("small/checkpoints", "sink_agrees"): False,
        ("small/materialization", "materialization_not_stalled"): False,
        ("small/full_snapshot", "restore_equals_snapshot"): True,
    }
    assert all(spec.description for spec in found.values())


def test_every_operation_has_a_job_a_pool_and_tags_that_tell_its_runs_apart(small: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(small)
    operations = ["materialize", "snapshot", "verify", "verify_deep", "truncate", "sweep", "optimize", "recover"]
    for operation in ["run", *operations]:
        job = small.resolve_job_def("small" if operation == "run" else f"siltstone__{operation}")
        assert job.tags.get("siltstone/stream") == ("small" if operation == "run" else None)
        assert job.tags["siltstone/operation"] == operation
        assert job.description
        assert job.executor_def is dg.in_process_executor
    pools = {node.name: node.pool for node in small.resolve_implicit_global_asset_job_def().all_node_defs}
    assert pools["small__run"] == "small__run"
    assert small.resolve_job_def("siltstone__recover").all_node_defs[0].pool is None, "none waits"
    assert pools["small__restored_state"] == "small__restore" != pools["small__materialization"]
    run = small.resolve_job_def("small")
    assert {key.to_user_string() for key in run.asset_layer.executable_asset_keys} == {
        f"small/{asset}" for asset in SMALL_ASSETS if asset_of(dg.AssetKey(asset))[0] or asset == "checkpoints"
    }
    assert names(small, "sensors") == {
        f"siltstone__{name}" for name in ("recover_failed", "sweep_recovered", "new_checkpoints", "alerts")
    }


def test_restored_state_has_a_partition_a_day_or_an_hour(small: dg.Definitions) -> None:
    partitions = specs(small)["small/restored_state"].partitions_def
    assert isinstance(partitions, dg.DynamicPartitionsDefinition) and partitions.name == "small__hours"
    flights = deployed()
    days = specs(flights)["flights/restored_state"].partitions_def
    assert isinstance(days, dg.DailyPartitionsDefinition)
    keys = days.get_partition_keys()
    assert (len(keys), keys[0], keys[-1]) == (365, "2013-01-01", "2013-12-31")
    assert specs(flights)["flights/checkpoints"].partitions_def is None


def crons(definitions: dg.Definitions) -> dict[str, str]:
    return {s.name: s.cron_schedule for s in definitions.schedules or [] if isinstance(s, dg.ScheduleDefinition)}


def test_schedules_have_defaults_and_can_be_set_and_turned_off_for_each_stream(small: dg.Definitions) -> None:
    usual = {
        "materialize": "*/10 * * * *",
        "truncate": "5 * * * *",
        "verify": "20 * * * *",
        "snapshot": "0 3 * * *",
        "verify_deep": "30 3 * * *",
        "sweep": "45 4 * * *",
        "optimize": "15 5 * * *",
    }
    assert crons(small) == {f"siltstone__{operation}__schedule": cron for operation, cron in usual.items()}
    on = {s.name for s in small.schedules or [] if s.default_status is dg.DefaultScheduleStatus.RUNNING}
    assert on == {f"siltstone__{operation}__schedule" for operation in ("snapshot", "verify_deep", "optimize")}
    other = replace(SMALL, name="other")
    given = Settings(schedules={"other": {"sweep": "0 5 * * 0", "verify_deep": "off"}})
    found = crons(stream_definitions(other, settings=given))
    of_all = {f"siltstone__{operation}__schedule": cron for operation, cron in usual.items()}
    assert found == {**of_all, "other__sweep__schedule": "0 5 * * 0"}


@pytest.mark.parametrize(
    ("schedules", "says"),
    [
        ({"smal": {"sweep": "off"}}, r"\[schedules\.smal\].*no stream 'smal' is defined \(defined: small\)"),
        (
            {"small": {"swep": "off"}},
            r"\[schedules\.small\].*'swep' is not an operation.*materialize, optimize, snapshot, sweep",
        ),
        ({"small": {"sweep": "daily-ish"}}, r"\[schedules\.small\].*sweep is 'daily-ish'.*not a cron expression"),
    ],
)
def test_a_mistake_in_schedules_is_one_clear_line(schedules: dict[str, dict[str, str]], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        given = Settings(schedules=schedules)
        for stream in project_of({SMALL.name: SMALL}, {}, given).streams:
            stream_definitions(stream, settings=given)


def test_schedules_of_streams_that_did_not_load_wait_for_them() -> None:
    given = Settings(schedules={"mine": {"sweep": "off"}})
    project = project_of({SMALL.name: SMALL}, {"streams_of_mine": "SyntaxError"}, given)
    assert list(project.streams) == [SMALL]


def test_the_deployment_shows_what_stream_definitions_shows() -> None:
    own, ready = deployed(), stream_definitions("flights", owners=["team:siltstone"])
    assert {key: (s.kinds, s.owners, s.metadata) for key, s in specs(own).items()} == {
        key: (s.kinds, s.owners, s.metadata) for key, s in specs(ready).items()
    }
    assert {spec.key for spec in check_specs(own)} == {spec.key for spec in check_specs(ready)}
    for what in ("jobs", "schedules", "sensors"):
        assert names(own, what) == names(ready, what)


def test_a_broken_module_shows_its_error_and_the_others_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "streams_of_mine.py").write_text("raise KeyError('no such plan')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "by_path.py").write_text("raise KeyError('nor this')\n")
    by_path = str(tmp_path / "by_path.py")
    monkeypatch.setenv("SILTSTONE_STREAMS", json.dumps(["streams_of_mine", by_path, "./streams"]))
    found = specs(deployed())
    assert "flights/checkpoints" in found
    broken = found["broken_stream_modules/streams_of_mine"]
    assert "KeyError: 'no such plan'" in (broken.description or "")
    assert any(name.endswith("/by_path/py") and "nor this" in (spec.description or "") for name, spec in found.items())
    assert "streams_of_mine did not load: KeyError: 'no such plan'" in "\n".join(caplog.messages)


def test_a_broken_module_fails_a_validation(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise KeyError('no such plan')\n")
    environment = {**os.environ, "SILTSTONE_STREAMS": json.dumps([str(tmp_path / "mine.py"), "./streams"])}
    for streams, code in ((environment["SILTSTONE_STREAMS"], 1), ('["./streams"]', 0)):
        done = subprocess.run(
            [sys.executable, "-m", "dagster", "definitions", "validate", "-m", "orchestration.definitions"],
            env={**environment, "SILTSTONE_STREAMS": streams, "DAGSTER_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert ("did not load: KeyError: 'no such plan'" in done.stdout + done.stderr) is bool(code)


def test_streams_that_dagster_cannot_tell_apart_are_named() -> None:
    streams = {name: Stream(name, source=source, operators=[DAILY]) for name in ("a-b", "a_b", "c")}
    project = project_of(streams, {})
    assert [stream.name for stream in project.streams] == ["a-b", "c"]
    dg.Definitions.validate_loadable(dg.Definitions.merge(*map(stream_definitions, project.streams)))
    (broken,) = project.broken_assets()
    assert broken.key.path == ["broken_stream_modules", "a_b"] and "stream a-b" in (broken.description or "")


@pytest.mark.parametrize("name", ["siltstone", "siltstone--sweep"])
def test_a_stream_cannot_be_called_like_what_all_streams_share(name: str) -> None:
    project = project_of({name: replace(SMALL, name=name)}, {})
    assert list(project.streams) == [] and "rename it" in project.not_loaded[name]


def test_no_stream_at_all_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_STREAMS", "[]")
    definitions = deployed()
    dg.Definitions.validate_loadable(definitions)
    assert specs(definitions) == {}


def test_an_unknown_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_CHECKPOINT_STEPS", "none")
    with pytest.raises(UsageError, match="option checkpoint_steps"):
        deployed()
