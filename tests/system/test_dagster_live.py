"""Web server and daemon as users run them: each test goes on in the warehouse that the one before has left."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from tests.dagster.page import HOST, Page, Run, served
from tests.examples import is_thorough
from tests.system.live_stream import DAYS, LIVE, PARTITIONS

NAME = LIVE.name
PLANTED = "pl4nted-in-the-page"
ENVIRONMENT = {
    "SILTSTONE_STREAMS": '["tests.system.live_stream"]',
    "SILTSTONE_MASTER": "local[2]",
    "SILTSTONE_SPARK": json.dumps(
        {
            "spark.driver.memory": "1g",
            "spark.sql.shuffle.partitions": "2",
            "spark.hadoop.fs.s3a.secret.key": f"{PLANTED}-spark",
        }
    ),
    "SILTSTONE_UI__TOKEN": f"{PLANTED}-token",
    "SILTSTONE_ALERTS__WEBHOOK": f"http://{HOST}:9/{PLANTED}-webhook",
    "LIVE_PASSWORD": f"{PLANTED}-option",
    "SILTSTONE_RECOVERY__DELAY_S": "1",
    "SILTSTONE_UI__SENSORS_S": "1",
}
STREAM, OPERATION = "siltstone/stream", "siltstone/operation"
EVERYTHING = (
    "{ runsOrError { ... on Runs { results { runId runConfigYaml tags { key value } } } } }",
    "{ instance { info daemonHealth { allDaemonStatuses { lastHeartbeatErrors { message } } } } }",
    """{ assetNodes { assetKey { path } description configField { configType { key } }
      metadataEntries { __typename label description } } }""",
    """{ repositoriesOrError { ... on RepositoryConnection { nodes {
      sensors { name description sensorState {
        ticks { status error { message stack } logEvents { events { message } } } } }
      schedules { name description }
      pipelines { name description runTags { key value }
        modes { resources { name description configField { defaultValueAsJson } } } } } } } }""",
)
"""what a page can be asked about what it knows"""


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live") / "warehouse"


class Server:
    """`siltstone ui` on one warehouse, which may be killed and started again."""

    def __init__(self, warehouse: Path, stack: ExitStack) -> None:
        self._warehouse, self._stack = warehouse, stack
        self.page = self.start()

    def start(self, **environment: str) -> Page:
        """Start it with further variables."""
        log = self._warehouse.with_name("log")
        self.page = self._stack.enter_context(served(self._warehouse, log, **ENVIRONMENT | environment))
        return self.page

    def kill(self, *others: int) -> None:
        """Kill all of its processes and some others, as when a machine goes down."""
        for pid in (*group(self.page.pid), *others):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(warehouse: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(warehouse, stack)


@pytest.fixture
def page(server: Server) -> Page:
    """The page as it is served now."""
    return server.page


def materializations(page: Page, run: str) -> dict[str, list[dict[str, Any]]]:
    """Asset -> its events in a run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in page.events(run):
        if event["__typename"] == "MaterializationEvent":
            found.setdefault("/".join(event["assetKey"]["path"]), []).append(event)
    return found


def version(event: dict[str, Any]) -> str:
    return {tag["key"]: tag["value"] for tag in event["tags"]}["dagster/data_version"]


def metadata(event: dict[str, Any]) -> dict[str, Any]:
    """Label -> value, where it is a text, a number or a path."""
    kinds = ("text", "intValue", "floatValue", "boolValue", "path", "mdStr")
    return {
        entry["label"]: next((entry[kind] for kind in kinds if kind in entry), None)
        for entry in event["metadataEntries"]
    }


def launch(page: Page, batches: int | None = None) -> str:
    return page.launch(NAME, {"ops": {f"{NAME}__run": {"config": {"parallelism": 2, "batches": batches}}}})


def succeeded(page: Page, id: str) -> Run:
    run = page.ended(id)
    assert run.status == "SUCCESS", [e for e in page.events(id) if "FAILURE" in str(e.get("eventType"))]
    return run


@pytest.mark.smoke
def test_a_run_of_the_stream_is_told_as_versions_of_its_assets(page: Page, warehouse: Path) -> None:
    run = launch(page, 6)
    succeeded(page, run)
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        newest = place.catalog.checkpoints.list(NAME)[-1]
    events = materializations(page, run)
    (checkpoints,) = events[f"{NAME}/checkpoints"]
    said = metadata(checkpoints)
    assert (said["checkpoint"], said["digest"], said["dagster/row_count"]) == (newest.id, newest.digest, newest.rows)
    assert version(checkpoints) == newest.digest
    assert "data:image/" in said["chain_picture"]
    for operator in LIVE.operators:
        (base,) = events[f"{NAME}/{operator.name}_base_checkpoint"]
        assert version(base) == metadata(base)["digest"]
    assert f"{NAME}/accounts_sink" in events
    checks = {e["evaluation"]["checkName"]: e["evaluation"] for e in page.events(run) if "evaluation" in e}
    assert checks["digest"]["success"] is True


def test_a_run_that_is_terminated_ends_behind_its_step_and_is_canceled(page: Page, warehouse: Path) -> None:
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        catalog = place.catalog
        before = catalog.checkpoints.last_id(NAME)
        run = launch(page)
        page.wait(lambda: catalog.checkpoints.last_id(NAME) > before or None, "a checkpoint")
        page.terminate(run)
        assert page.ended(run).status == "CANCELED"
        assert (catalog.runs.list(NAME)[-1].outcome, catalog.leases.list_live(NAME)) == ("stopped", [])
        assert before < catalog.checkpoints.last_id(NAME) < DAYS


def test_a_run_that_is_killed_is_recovered_and_then_swept(page: Page, warehouse: Path) -> None:
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        before = place.catalog.checkpoints.list(NAME)[-1].id
        killed = launch(page)
        process = page.process(killed)
        page.wait(
            lambda: place.catalog.checkpoints.list(NAME)[-1].id > before + 2 or None, "checkpoints to kill behind"
        )
        os.kill(process, signal.SIGKILL)
    assert page.ended(killed).status == "FAILURE"

    recovery = page.wait(lambda: next(iter(page.runs({"siltstone/recovers": killed})), None), "a recovery")
    assert (recovery.job, recovery.tags["siltstone/attempt"]) == ("siltstone__recover", "1")
    assert (recovery.tags[STREAM], recovery.tags[OPERATION]) == (NAME, "recover")
    succeeded(page, recovery.id)
    sweep = page.wait(lambda: next(iter(page.runs({"siltstone/follows": recovery.id})), None), "a sweep")
    assert sweep.job == "siltstone__sweep"
    succeeded(page, sweep.id)


def test_a_run_whose_server_was_killed_too_fails_when_the_page_is_back(server: Server, warehouse: Path) -> None:
    run = launch(server.page)
    process = server.page.process(run)
    server.page.reached(run, {"STARTED"})  # what only starts has minutes before it counts as lost
    server.kill(process)
    page = server.start(SILTSTONE_RECOVERY__ATTEMPTS="0")
    assert page.ended(run).status == "FAILURE"
    assert page.ended(launch(page)).status == "SUCCESS", "its place in the pool must be free again"
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        records = place.catalog.checkpoints.list(NAME)
    assert len(records) == DAYS, "it went on behind both kills to the end of the input"


def test_a_backfill_of_days_is_one_run_and_says_each_digest(page: Page, warehouse: Path) -> None:
    days = PARTITIONS if is_thorough() else PARTITIONS[:8]
    backfill = page.backfill(f"{NAME}/restored_state", days)
    assert page.backfilled(backfill) == {"status": "COMPLETED_SUCCESS", "numPartitions": len(days)}
    (run,) = page.runs({"dagster/backfill": backfill})
    events = materializations(page, run.id)[f"{NAME}/restored_state"]
    said = {event["partition"]: metadata(event) for event in events}
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        digests = [record.digest for record in place.catalog.checkpoints.list(NAME)]
    assert [said[day]["digest"] for day in days] == digests[: len(days)]
    assert all((Path(said[day]["path"]) / "_restored.json").is_file() for day in days)
    assert {path.name for path in Path(said[days[0]]["path"]).parent.iterdir()} == set(days)


def test_one_broken_byte_fails_the_check_by_name_and_nothing_is_restored(page: Page, warehouse: Path) -> None:
    with OpenWarehouse.open_existing(str(warehouse)) as place:
        (*_, damaged) = (o for o in place.catalog.objects.list(NAME) if o.kind is ObjectKind.SEGMENT)
        path = place.warehouse.local.objects / damaged.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)

    checkpoints = page.ask("{ assetNodes { assetKey { path } opNames } }")["assetNodes"]
    of_run = ["/".join(n["assetKey"]["path"]) for n in checkpoints if n["opNames"] == [f"{NAME}__run"]]
    run = page.materialize(
        *of_run, f"{NAME}/restored_state", checks=[f"{NAME}/checkpoints:digest"], partition=PARTITIONS[-1]
    )
    assert page.ended(run).status == "FAILURE"
    (check,) = (event["evaluation"] for event in page.events(run) if "evaluation" in event)
    assert (check["checkName"], check["success"]) == ("digest", False)
    assert damaged.name in f"{check['description']} {check['metadataEntries']}"
    assert f"{NAME}/restored_state" not in materializations(page, run)


@pytest.mark.parametrize(
    "config",
    [
        {"ops": {f"{NAME}__run": {"config": {"policy": {"env": "LIVE_PASSWORD"}}}}},
        {"resources": {"siltstone_warehouse": {"config": {"url": {"env": "LIVE_PASSWORD"}}}}},
    ],
)
def test_a_launch_reads_no_variable_of_the_environment(page: Page, config: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="RunConfigValidationInvalid") as caught:
        page.launch(NAME, config)
    assert PLANTED not in str(caught.value)


def test_what_runs_were_given_in_secret_is_found_nowhere(page: Page, warehouse: Path) -> None:
    told = [json.dumps(page.ask(query)) for query in EVERYTHING]
    runs = page.runs({})
    told += [json.dumps(page.events(run.id)) for run in runs]
    listed = subprocess.check_output(["ps", "-ewwo", "args="], text=True)
    assert runs and any(NAME in each for each in told) and "siltstone.dagster.page.dev" in listed
    written = [path for path in warehouse.parent.rglob("*") if path.is_file()]
    assert {"log", "catalog.db", "dagster.yaml"} <= {path.name for path in written}
    for path in written:
        with suppress(FileNotFoundError):  # the page's processes are at work
            told.append(path.read_bytes().decode("latin-1"))
    for found in (*told, listed):
        assert PLANTED not in found, found[max(0, found.index(PLANTED) - 500) :][:1000]


def group(leader: int) -> list[int]:
    """The processes of a group."""
    said = subprocess.run(["ps", "-eo", "pid=,pgid="], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, of in (line.split() for line in said.splitlines()) if int(of) == leader]
