"""Commands that Dagster Pipes launches: real processes, which tell the step what they did."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.pipes.utils import PipesBlobStoreMessageReader, PipesFileContextInjector
from dagster_pipes import decode_param as _decoded
from dagster_pipes import encode_param as _encoded

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.dagster import WholeMessages, in_subprocess, stream_definitions
from tests.dagster_runs import Wing, made
from tests.fault.small_stream import SMALL
from tests.region_run import RegionRun
from tests.s3_place import FreshBucket
from tests.servers import moto
from tests.sums import NAME, POLICY, STREAM, rows

COMMAND = [sys.executable, "-m", "siltstone.cli"]
BATCHES = 2


@pytest.fixture
def there(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The settings of the processes, which are those of this one."""
    monkeypatch.setenv("SILTSTONE_STREAMS", json.dumps(["tests.fault.small_stream"]))
    monkeypatch.setenv("SILTSTONE_MASTER", "local[2]")
    monkeypatch.setenv("SILTSTONE_PARALLELISM", "2")
    return url


@pytest.fixture
def s3() -> Iterator[FreshBucket]:
    yield FreshBucket(moto())


def materialize(
    definitions: dg.Definitions, instance: dg.DagsterInstance, *assets: str, **config: Any
) -> dg.ExecuteInProcessResult:
    return definitions.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance,
        asset_selection=[dg.AssetKey.from_user_string(asset) for asset in assets],
        run_config={"ops": config},
        raise_on_error=False,
    )


def test_a_run_elsewhere_says_what_one_here_says(
    there: str, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wing = Wing(SMALL, there, instance)
    wing.definitions = stream_definitions(SMALL, launch=in_subprocess)
    launched = wing.make("checkpoints", *_parts(), run={"batches": BATCHES})
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", str(tmp_path / "other"))
    with dg.DagsterInstance.ephemeral() as other:
        here = Wing(SMALL, str(tmp_path / "other"), other).make("checkpoints", *_parts(), run={"batches": BATCHES})
    there_, here_ = made(launched), made(here)
    assert there_.keys() == here_.keys()
    for name, event in here_.items():
        assert event.version == there_[name].version or name == "accounts_sink", "a sink has no digest"
        assert there_[name].metadata.keys() == event.metadata.keys()
        told = {n: v for n, v in event.metadata.items() if n in ("checkpoint", "digest", "dagster/row_count", "form")}
        assert told.items() <= there_[name].metadata.items()
    assert [row["checkpoint"] for row in there_["checkpoints"].metadata["newest_checkpoints"]] == [2, 1]
    assert there_["checkpoints"].metadata["chain_picture"].startswith("![chain of small](data:image/svg+xml")
    with OpenWarehouse.open_existing(there) as place:
        assert place.catalog.runs.get_newest("small").who == f"Dagster run {launched.run_id}"
    again = made(wing.make("checkpoints", *_parts(), run={"batches": 1}))
    assert {"checkpoints", "accounts_delta_chain"} <= again.keys() < there_.keys(), "no base was due"
    logged = [entry.user_message for entry in instance.all_logs(launched.run_id)]
    assert any(line.startswith("checkpoint 2: ") for line in logged), "each checkpoint is a line of the run's log"


@pytest.mark.parametrize(
    ("does", "says", "code"),
    [
        pytest.param(["run", "nope"], "none of them is nope/checkpoints", 2, id="another stream"),
        pytest.param(["run", "small", "--parallelism", "0"], "option parallelism", 2, id="bad input"),
        pytest.param(["--version"], "reported nothing: let it be `siltstone run small`", 2, id="another command"),
        pytest.param(None, "failed with code -9", 1, id="killed"),
    ],
)
def test_a_run_elsewhere_that_fails_says_whether_a_recovery_may_help(
    does: list[str] | None, says: str, code: int, there: str, instance: dg.DagsterInstance
) -> None:
    def launch(context: dg.AssetExecutionContext, command: Sequence[str], extras: Mapping[str, Any]) -> Any:
        ours = [*COMMAND, *does] if does else ["sh", "-c", "kill -9 $$"]
        return _client().run(context=context, command=ours, extras=dict(extras))

    wing = Wing(SMALL, there, instance)
    wing.definitions = stream_definitions(SMALL, launch=launch)
    failed = wing.make("checkpoints", *_parts())
    assert not failed.success
    (event,) = failed.get_step_failure_events()
    found = event.step_failure_data.user_failure_data
    assert found is not None and found.metadata["exit_code"].value == code
    logged = [entry.message for entry in instance.all_logs(failed.run_id)]
    assert any(says in line for line in [*logged, found.description or ""]), logged


def test_a_run_that_the_catalog_here_does_not_show_is_a_failure(
    there: str, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    def launch(context: dg.AssetExecutionContext, command: Sequence[str], extras: Mapping[str, Any]) -> Any:
        elsewhere = {"SILTSTONE_WAREHOUSE": str(tmp_path / "another")}
        client = _client(elsewhere)
        return client.run(context=context, command=[*COMMAND, *command], extras=dict(extras))

    with OpenWarehouse.open_writable(there):
        pass
    wing = Wing(SMALL, there, instance)
    wing.definitions = stream_definitions(SMALL, launch=launch)
    failed = wing.make("checkpoints", *_parts(), run={"batches": 1})
    assert not failed.success and not made(failed)
    (event,) = failed.get_step_failure_events()
    assert (
        "reported checkpoint 1, and the catalog here does not show it"
        in event.step_failure_data.user_failure_data.description
    )


def test_an_older_checkpoint_of_another_warehouse_is_not_taken_for_that_of_the_run(
    there: str, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """Both have the same input, and so the same digests."""

    def launch(context: dg.AssetExecutionContext, command: Sequence[str], extras: Mapping[str, Any]) -> Any:
        client = _client({"SILTSTONE_WAREHOUSE": str(tmp_path / "another")})
        return client.run(context=context, command=[*COMMAND, *command], extras=dict(extras))

    wing = Wing(SMALL, there, instance)
    assert wing.make("checkpoints", *_parts(), run={"batches": 1}).success
    wing.definitions = stream_definitions(SMALL, launch=launch)
    assert not wing.make("checkpoints", *_parts(), run={"batches": 1}).success


def test_a_check_that_fails_is_a_result_and_no_error(there: str, instance: dg.DagsterInstance) -> None:
    with OpenWarehouse.open_writable(there) as place:
        RegionRun(place, STREAM, POLICY).step(rows(1))
        place.catalog.checkpoints.record_proof(NAME, 1, False, "an object is away", epoch=1)
        stored = [each.name for each in place.catalog.objects.list(NAME) if each.kind is ObjectKind.BASE]
        path = next(Path(there).rglob(Path(stored[0]).name))
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-8] + b"damaged!")

    @dg.asset_check(asset=[NAME, "checkpoints"], name="digest")
    def digest(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        command, wants = [*COMMAND, "verify", NAME], {"siltstone": {"checks": True}}
        done = _client().run(context=context.op_execution_context, command=command, extras=wants)
        return done.get_asset_check_result()

    job = dg.define_asset_job("check", selection=dg.AssetSelection.checks(digest))
    result = (
        dg.Definitions(asset_checks=[digest], jobs=[job]).resolve_job_def("check").execute_in_process(instance=instance)
    )
    (found,) = result.get_asset_check_evaluations()
    assert (found.passed, found.metadata["failing"].value) == (False, 1)


def test_an_asset_of_ones_own_is_the_only_one_that_is_meant(there: str, instance: dg.DagsterInstance) -> None:
    """As a project writes that has nothing else of Siltstone in its code location."""

    @dg.asset(key=["lake", "flights"], check_specs=[dg.AssetCheckSpec("digest", asset=["lake", "flights"])])
    def flights(context: dg.AssetExecutionContext) -> Iterator[Any]:
        client = _client()
        run = client.run(context=context, command=[*COMMAND, "run", "small", "--batches", "1"])
        wants = {"siltstone": {"checks": True}}
        proven = client.run(context=context, command=[*COMMAND, "verify", "small", "--sample", "0"], extras=wants)
        yield from run.get_results()
        yield from proven.get_results(implicit_materializations=False)
        assert proven.get_custom_messages()[0]["proven"] == [1]

    @dg.multi_asset(specs=[dg.AssetSpec("one"), dg.AssetSpec("two")])
    def several(context: dg.AssetExecutionContext) -> Iterator[Any]:
        yield from _client().run(context=context, command=[*COMMAND, "run", "small", "--batches", "1"]).get_results()

    definitions = dg.Definitions(assets=[flights, several])
    result = materialize(definitions, instance, "lake/flights")
    assert result.success
    (event,) = result.get_asset_materialization_events()
    with OpenWarehouse.open_existing(there) as place:
        record = place.catalog.checkpoints.get_latest("small")
    assert event.step_materialization_data.materialization.tags["dagster/data_version"] == record.digest
    (check,) = result.get_asset_check_evaluations()
    assert (check.check_name, check.passed, check.metadata["facts"].value) == ("digest", True, 1)
    assert not materialize(definitions, instance, "one", "two").success
    with OpenWarehouse.open_existing(there) as place:
        assert place.catalog.checkpoints.last_id("small") == 1, "refused before it ran"


class FromS3(PipesBlobStoreMessageReader):
    """Reads messages from a bucket, as that of `dagster-aws` does."""

    def __init__(self, bucket: FreshBucket) -> None:
        super().__init__(interval=0.2)
        self.at = bucket

    @contextmanager
    def get_params(self) -> Iterator[Mapping[str, Any]]:
        yield {"bucket": self.at.bucket, "key_prefix": "messages"}

    def no_messages_debug_text(self) -> str:
        return "none in the bucket"

    def messages_are_readable(self, params: Mapping[str, Any]) -> bool:
        return True

    def download_messages_chunk(self, index: int, params: Mapping[str, Any]) -> str | None:
        try:
            found = self.at.client.get_object(Bucket=self.at.bucket, Key=f"messages/{index}.json")
        except self.at.client.exceptions.NoSuchKey:
            return None
        return found["Body"].read().decode()


def test_messages_may_go_to_s3_and_parameters_come_as_arguments(
    there: str, instance: dg.DagsterInstance, s3: FreshBucket
) -> None:
    """As on EMR, and on Glue."""
    with OpenWarehouse.open_writable(there) as place:
        RegionRun(place, STREAM, POLICY).step(rows(1))

    @dg.op
    def sweep(context: dg.OpExecutionContext) -> None:
        injector = PipesFileContextInjector(str(Path(there).parent / "context.json"))
        with dg.open_pipes_session(context, injector, FromS3(s3)) as session:
            parameters = [text for pair in session.get_bootstrap_cli_arguments().items() for text in pair]
            here = {"AWS_ENDPOINT_URL": s3.server.endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            command = [*COMMAND, "sweep", NAME, "--dry-run", *parameters]
            subprocess.run(command, env={**os.environ, **here, "AWS_DEFAULT_REGION": "us-east-1"}, check=True)
        (told,) = session.get_custom_messages()
        context.add_output_metadata({"result": told["result"], "deleted": told["deleted"]})

    @dg.job
    def swept() -> None:
        sweep()

    result = swept.execute_in_process(instance=instance)
    (output,) = (e for e in result.all_events if e.is_successful_output)
    said = output.step_output_data.metadata
    assert (said["result"].value, said["deleted"].value) == ("SweepResult", 0)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"DAGSTER_PIPES_CONTEXT": "nonsense"}, "cannot report to Dagster"),
        (
            {
                "DAGSTER_PIPES_CONTEXT": _encoded({"data": {"asset_keys": None, "extras": {"siltstone": None}}}),
                "DAGSTER_PIPES_MESSAGES": _encoded({"path": "/dev/null"}),
            },
            "cannot report to Dagster",
        ),
        ({"DAGSTER_PIPES_CONTEXT": _encoded({"path": "/nowhere"}), "DAGSTER_PIPES_MESSAGES": _encoded({})}, "/nowhere"),
    ],
    ids=["nonsense", "extras", "no file"],
)
def test_a_process_that_cannot_report_does_nothing(
    variables: dict[str, str], says: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = subprocess.run([*COMMAND, "run", "small"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr and "check DAGSTER_PIPES_CONTEXT and DAGSTER_PIPES_MESSAGES" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not Path(there).exists()


def _parts() -> list[str]:
    names = [f"{op.name}_{part}" for op in SMALL.operators for part in ("base_checkpoint", "delta_chain")]
    return [*names, "accounts_sink"]


def test_a_message_that_is_just_being_written_is_read_whole(instance: dg.DagsterInstance) -> None:
    """One of some pages of a file is written in more than one step: the reader may come in between."""

    @dg.op
    def slow(context: dg.OpExecutionContext) -> None:
        with dg.open_pipes_session(context, dg.PipesEnvContextInjector(), WholeMessages()) as session:
            path = _decoded(session.get_bootstrap_env_vars()["DAGSTER_PIPES_MESSAGES"])["path"]
            for piece in ('{"__dagster_pipes_version": "0.1", "method": "report_custom_me', 'ssage", "params": ', "{"):
                _append(path, piece)
            _append(path, '"payload": {"much": "' + "x" * 20_000 + '"}}}\n')
            _append(path, '{"__dagster_pipes_version": "0.1", "method": "closed", "params": {}}\n')
        (told,) = session.get_custom_messages()
        context.add_output_metadata({"read": len(told["much"])})

    @dg.job
    def told() -> None:
        slow()

    result = told.execute_in_process(instance=instance)
    (output,) = (e for e in result.all_events if e.is_successful_output)
    assert output.step_output_data.metadata["read"].value == 20_000


def _client(env: Mapping[str, str] | None = None) -> dg.PipesSubprocessClient:
    return dg.PipesSubprocessClient(env=env, message_reader=WholeMessages())


def _append(path: str, text: str) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(text)
    time.sleep(0.1)
