"""docs/dagster-in-production.md as processes: two code servers, web server and daemon, PostgreSQL, another directory.

Each code location merges a stream with assets of its own. One runs its stream in the step, the other by Dagster Pipes.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from sqlalchemy import URL, make_url

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.pipes.parts import BY_DAGSTER
from tests.dagster.page import HOST, STOP_S, Page
from tests.postgres_server import new_schema
from tests.servers import free_port

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "dagster-in-production.md"
STOPS_S = 10.0
LOCATIONS = """{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError {
  __typename ... on PythonError { message } } } } } }"""
SMALL = """
import dagster as dg
from deltalake import DeltaTable
from siltstone.dagster import StreamAsset, StreamTranslator, stream_definitions

class Ours(StreamTranslator):
    def get_asset_spec(self, asset: StreamAsset) -> dg.AssetSpec:
        if asset.part == "events":
            return asset.spec.replace_attributes(key=dg.AssetKey(["raw", "small"]))
        return asset.spec.replace_attributes(key=asset.spec.key.with_prefix("lake"), group_name="streaming")

@dg.asset(key=["raw", "small"])
def loaded() -> None: ...

@dg.asset(deps=[["lake", "small", "accounts_sink"]])
def read(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    sink = context.instance.get_latest_materialization_event(dg.AssetKey(["lake", "small", "accounts_sink"]))
    uri = sink.asset_materialization.metadata["dagster/uri"].value
    return dg.MaterializeResult(metadata={"rows": len(DeltaTable(uri).to_pyarrow_table())})

defs = dg.Definitions.merge(
    dg.Definitions(assets=[loaded, read], resources={"spark": "ours", "warehouse": "ours"}),
    stream_definitions("small", translator=Ours()),
)
"""
OTHER = """
import dagster as dg
from siltstone.dagster import in_subprocess, stream_definitions

@dg.asset(deps=[["other", "checkpoints"]])
def after(context: dg.AssetExecutionContext) -> None: ...

defs = dg.Definitions.merge(
    dg.Definitions(assets=[after], resources={"spark": "theirs"}), stream_definitions("other", launch=in_subprocess)
)
"""
STREAMS = """
from siltstone.stream import Stream
from tests.fault.small_stream import DAILY, SMALL, source
small = Stream("small", source=source, operators=SMALL.operators, sinks={"accounts": None})
other = Stream("other", source=source, operators=[DAILY])
"""
CONFIGURATION = """
streams = ["./team_streams.py"]
warehouse = "./warehouse"
master = "local[2]"
[ui]
sensors_s = 1
[recovery]
delay_s = 1
[spark]
"spark.driver.memory" = "1g"
"spark.sql.shuffle.partitions" = "2"
"""


@dataclass
class Deployment:
    """All processes, what they were started with, and the page of each code location."""

    directory: Path
    environment: Mapping[str, str]
    catalog: str
    processes: dict[str, subprocess.Popen[bytes]]
    page: Page

    def of(self, location: str) -> Page:
        return replace(self.page, location=location)

    def warehouse(self) -> OpenWarehouse:
        return OpenWarehouse.open_existing(str(self.directory / "project" / "warehouse"), self.catalog)


def block_of_page(language: str, begins: str) -> str:
    """A block of the guide's page, as a user copies it."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if block.startswith(begins))
    return found


@pytest.fixture(scope="module")
def deployment(postgres: URL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("production")
    project, home, elsewhere = (directory / name for name in ("project", "home", "elsewhere"))
    for each in (project, home, elsewhere):
        each.mkdir()
    (project / "team_streams.py").write_text(STREAMS)
    (project / "siltstone.toml").write_text(CONFIGURATION)
    (project / "small_project.py").write_text(SMALL)
    (project / "other_project.py").write_text(OTHER)
    (home / "dagster.yaml").write_text(
        block_of_page("yaml", "storage:").replace("poll_interval_seconds: 30", "poll_interval_seconds: 2")
    )
    ports = {name: free_port() for name in ("small", "other", "page")}
    workspace = yaml.safe_load(block_of_page("yaml", "load_from:"))
    for entry, name in zip(workspace["load_from"], ("small", "other"), strict=True):
        entry["grpc_server"].update(host=HOST, port=ports[name], location_name=name)
    (directory / "workspace.yaml").write_text(yaml.safe_dump(workspace))
    with ExitStack() as stack:
        catalog, runs = (stack.enter_context(new_schema(postgres)) for _ in range(2))
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "DAGSTER_HOME": str(home),
            "DAGSTER_POSTGRES_URL": make_url(runs)
            .set(drivername="postgresql+psycopg2")
            .render_as_string(hide_password=False),
            "SILTSTONE_CONFIG": str(project / "siltstone.toml"),
            "SILTSTONE_CATALOG": catalog,
        }
        bin, workspace_file = Path(sys.executable).parent, str(directory / "workspace.yaml")
        commands = {
            name: [
                *(str(bin / "dagster"), "code-server", "start", "-h", HOST, "-p", str(ports[name])),
                *("--location-name", name, "-f", str(project / f"{name}_project.py")),
            ]
            for name in ("small", "other")
        } | {
            "page": [str(bin / "dagster-webserver"), "-w", workspace_file, "-h", HOST, "-p", str(ports["page"])],
            "daemon": [str(bin / "dagster-daemon"), "run", "-w", workspace_file],
        }
        processes: dict[str, subprocess.Popen[bytes]] = {}
        log = directory / "log"
        output = stack.enter_context(log.open("ab"))
        made = Deployment(directory, environment, catalog, processes, Page(f"http://{HOST}:{ports['page']}", log, 0))
        try:
            for name, command in commands.items():
                processes[name] = subprocess.Popen(
                    command, cwd=elsewhere, env=environment, stdout=output, stderr=output, start_new_session=True
                )
                if name == "page":
                    made.page.wait(lambda: _loaded(made), "the code locations", 120)
            yield made
        finally:
            for process in processes.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_S)


def _loaded(deployment: Deployment) -> bool | None:
    try:
        entries = deployment.page.ask(LOCATIONS)["workspaceOrError"]["locationEntries"]
    except OSError:
        return None
    loaded = [entry["locationOrLoadError"] or {} for entry in entries]
    broken = [each for each in loaded if "Unreachable" not in each.get("message", "Unreachable")]
    assert not broken, broken
    return [each.get("__typename") for each in loaded] == ["RepositoryLocation"] * 2 or None


def of_run(stream: str, *operators: str) -> list[str]:
    parts = [f"{name}_{part}" for name in operators for part in ("base_checkpoint", "delta_chain")]
    return [f"{stream}/{part}" for part in (*parts, "checkpoints")]


def newest(deployment: Deployment) -> int:
    """The newest checkpoint of the other team's stream; 0 before the first."""
    try:
        with deployment.warehouse() as place:
            return place.catalog.checkpoints.last_id("other")
    except UsageError:
        return 0


def test_a_stream_is_a_guest_among_a_teams_assets(deployment: Deployment) -> None:
    """One run of theirs and ours, a process a step, as the deployment's executor has it."""
    page = deployment.of("small")
    ours = [*of_run("lake/small", "accounts", "places", "daily"), "lake/small/accounts_sink"]
    id = page.materialize("raw/small", *ours, "read")
    assert page.ended(id).status == "SUCCESS", page.events(id)[-12:]
    events = page.events(id)
    made = {"/".join(e["assetKey"]["path"]): e for e in events if e["__typename"] == "MaterializationEvent"}
    assert {"raw/small", "lake/small/checkpoints", "lake/small/accounts_sink", "read"} <= made.keys()
    (rows,) = (v["intValue"] for v in made["read"]["metadataEntries"] if v["label"] == "rows")
    assert rows == 24 * 300
    processes = {m[1] for e in events if (m := re.search(r"Executing step .* in subprocess|pid: (\d+)", str(e)))}
    assert processes
    with deployment.warehouse() as place:
        newest = place.catalog.checkpoints.get_latest("small")
    assert {"key": "dagster/data_version", "value": newest.digest} in made["lake/small/checkpoints"]["tags"]


def test_a_stream_of_another_team_runs_by_pipes(deployment: Deployment) -> None:
    page = deployment.of("other")
    id = page.launch("other", {"ops": {"other__run": {"config": {"batches": 2}}}})
    assert page.ended(id).status == "SUCCESS", page.events(id)[-12:]
    events = page.events(id)
    made = {"/".join(e["assetKey"]["path"]) for e in events if e["__typename"] == "MaterializationEvent"}
    assert {"other/checkpoints", "other/daily_base_checkpoint"} <= made
    assert [e["message"] for e in events if str(e.get("message", "")).startswith("checkpoint 2: ")]
    checks = {e["evaluation"]["checkName"] for e in events if e["__typename"] == "AssetCheckEvaluationEvent"}
    assert "digest" in checks


def test_a_run_by_pipes_that_is_terminated_takes_its_checkpoint(deployment: Deployment) -> None:
    page = deployment.of("other")
    before = newest(deployment)
    id = page.launch("other")
    page.wait(lambda: newest(deployment) > before or None, "a checkpoint")
    page.terminate(id)
    assert page.ended(id).status == "CANCELED"
    with deployment.warehouse() as place:
        run = place.catalog.runs.get_newest("other")
    assert run is not None and run.who == f"{BY_DAGSTER}{id}"
    assert run.ended_at is not None, "it ended by itself"


def test_a_run_that_is_killed_is_recovered_by_its_own_location(deployment: Deployment) -> None:
    """The process that it launched goes on for a while, and is fenced."""
    page = deployment.of("other")
    before = newest(deployment)
    id = page.launch("other")
    page.wait(lambda: newest(deployment) > before or None, "a checkpoint")
    os.kill(page.process(id), signal.SIGKILL)
    assert page.ended(id).status == "FAILURE"

    def recovered() -> bool | None:
        found = page.runs({"siltstone/recovers": id})
        return any(run.status == "SUCCESS" for run in found) or None

    page.wait(recovered, "the recovery")
    (run,) = page.runs({"siltstone/recovers": id})
    assert (run.job, run.tags["siltstone/stream"]) == ("siltstone__recover", "other")
    next = page.launch("other")
    assert page.ended(next).status == "SUCCESS", page.events(next)[-12:]
    assert not page.runs({"siltstone/stream": "small", "siltstone/operation": "recover"})


def test_everything_stops_within_ten_seconds(deployment: Deployment) -> None:
    began = time.monotonic()
    for process in deployment.processes.values():
        process.send_signal(signal.SIGTERM)
    for name, process in deployment.processes.items():
        left = began + STOPS_S - time.monotonic()
        assert process.wait(max(left, 0.1)) is not None, name
