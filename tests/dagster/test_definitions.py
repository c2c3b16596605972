"""What loads: every stream's assets and checks, quickly, without Spark, whatever else is broken."""

import json
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from orchestration.definitions import definitions_of, siltstone
from siltstone.errors import UsageError
from siltstone.stream import Stream
from tests.fault.small_stream import DAILY, SMALL, source

REPOSITORY = Path(__file__).parents[2]
LOAD_S = 3.0


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def specs(definitions: dg.Definitions) -> dict[str, dg.AssetSpec]:
    return {spec.key.to_user_string(): spec for spec in definitions.resolve_all_asset_specs()}


def test_every_stream_has_its_assets_and_its_check() -> None:
    found = specs(siltstone())
    assert set(found) == {"flights/checkpoints", "flights/restored_state"}
    for spec in found.values():
        assert spec.group_name == "flights"
        assert spec.kinds == {"spark", "parquet"}
        assert "flights" in (spec.description or "")
    (dependency,) = found["flights/restored_state"].deps
    assert dependency.asset_key == dg.AssetKey(["flights", "checkpoints"])
    (check,) = check_specs(siltstone())
    assert (check.asset_key.to_user_string(), check.name, check.blocking) == ("flights/checkpoints", "digest", True)


def check_specs(definitions: dg.Definitions) -> list[dg.AssetCheckSpec]:
    return [spec for checks in definitions.asset_checks or [] for spec in checks.check_specs]


def test_loading_is_quick_and_starts_no_jvm() -> None:
    # Processor time, as neighbours of a busy machine only stretch the time on the wall.
    script = (
        "import json, sys, time\n"
        "from orchestration.definitions import siltstone\n"
        "import dagster as dg\n"
        "dg.Definitions.validate_loadable(siltstone())\n"
        "print(json.dumps([time.process_time(), sorted({'pyspark', 'py4j', 'matplotlib'} & sys.modules.keys())]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    seconds, heavy = json.loads(done.stdout)
    assert heavy == []
    assert seconds < LOAD_S


def test_it_validates_in_an_empty_environment() -> None:
    command = [sys.executable, "-m", "dagster", "definitions", "validate"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Validation successful for code location siltstone" in done.stderr + done.stdout


def test_a_broken_module_shows_its_error_and_the_others_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "streams_of_mine.py").write_text("raise KeyError('no such plan')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SILTSTONE_STREAMS", '["streams_of_mine", "streams"]')
    found = specs(siltstone())
    assert "flights/checkpoints" in found
    broken = found["broken_stream_modules/streams_of_mine"]
    assert "KeyError: 'no such plan'" in (broken.description or "")
    assert "streams_of_mine did not load: KeyError: 'no such plan'" in caplog.text


def test_streams_that_dagster_cannot_tell_apart_are_named() -> None:
    streams = {name: Stream(name, source=source, operators=[DAILY]) for name in ("a-b", "a_b", "c")}
    definitions = definitions_of(streams, {})
    dg.Definitions.validate_loadable(definitions)
    found = specs(definitions)
    assert {"a-b/checkpoints", "c/checkpoints"} < set(found)
    assert "a_b/checkpoints" not in found
    assert "stream a-b" in (found["broken_stream_modules/a_b"].description or "")


def test_no_stream_at_all_still_loads() -> None:
    definitions = definitions_of({}, {})
    dg.Definitions.validate_loadable(definitions)
    assert specs(definitions) == {}


def test_an_unknown_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILTSTONE_CHECKPOINT_STEPS", "none")
    with pytest.raises(UsageError, match="option checkpoint_steps"):
        siltstone()


def test_operators_and_what_they_read_are_described() -> None:
    found = specs(definitions_of({SMALL.name: SMALL}, {}))
    assert "`places` reads accounts" in (found["small/checkpoints"].description or "")
