"""A running `siltstone ui`, and what its page asks it: GraphQL over plain HTTP."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.servers import free_port

REPOSITORY = Path(__file__).parents[2]
HOST = "127.0.0.1"
START_S, RUN_S, STOP_S, POLL_S = 300.0, 600.0, 20.0, 0.5
"""how long each may take on a machine that has other things to do"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DONE = {"SUCCESS", "FAILURE", "CANCELED"}
LOCATION, REPOSITORY_NAME = "siltstone", "__repository__"
TOKEN = "SILTSTONE_UI__TOKEN"
Found = TypeVar("Found")

LOADED = "{ workspaceOrError { ... on Workspace { locationEntries { name loadStatus } } } }"
LAUNCH = """mutation Launch($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
BACKFILL = """mutation Backfill($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
BACKFILL_STATUS = """query Status($id: String!) { partitionBackfillOrError(backfillId: $id) {
  ... on PartitionBackfill { status numPartitions } } }"""
RUNS = """query Runs($filter: RunsFilter!) { runsOrError(filter: $filter, limit: 100) {
  ... on Runs { results { runId status jobName tags { key value } } } } }"""
TERMINATE = """mutation Terminate($id: String!) { terminateRun(runId: $id) { __typename } }"""
EVENTS = """query Events($id: ID!) { logsForRun(runId: $id, limit: 1000) { ... on EventConnection { events {
  __typename ... on MessageEvent { message eventType } ... on ErrorEvent { error { message causes { message } } }
  ... on MaterializationEvent { assetKey { path } partition tags { key value } metadataEntries { ...Value } }
  ... on AssetCheckEvaluationEvent { evaluation { checkName success description metadataEntries { ...Value } } }
} } } }
fragment Value on MetadataEntry { __typename label ... on TextMetadataEntry { text }
  ... on IntMetadataEntry { intValue }
  ... on FloatMetadataEntry { floatValue } ... on BoolMetadataEntry { boolValue } ... on PathMetadataEntry { path }
  ... on MarkdownMetadataEntry { mdStr } ... on JsonMetadataEntry { jsonString } }"""


@dataclass(frozen=True)
class Run:
    """A run as the page lists it."""

    id: str
    status: str
    job: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Page:
    """The page at an address, and what its processes write to `log`."""

    address: str
    log: Path
    pid: int
    token: str | None = None
    location: str = LOCATION

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """The answer to one query.

        Raises:
            OSError: nobody answers.
        """
        body = json.dumps({"query": query, "variables": variables}).encode()
        headers = {"Content-Type": "application/json"} | self.authorization
        request = urllib.request.Request(f"{self.address}/graphql", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = json.load(answer)
        assert "errors" not in said, said["errors"]
        return said["data"]

    @property
    def authorization(self) -> dict[str, str]:
        """The header that shows the token, where one is needed."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def launch(self, job: str, config: Mapping[str, Any] | None = None) -> str:
        """Launch a job; the run's id."""
        return self._launch({"jobName": job}, config)

    def materialize(self, *assets: str, checks: Sequence[str] = (), partition: str | None = None) -> str:
        """Launch a run of some assets, and of checks `<asset>:<name>`; the run's id."""
        of_checks = [check.split(":") for check in checks]
        selector = {
            "jobName": "__ASSET_JOB",
            "assetSelection": [{"path": asset.split("/")} for asset in assets],
            "assetCheckSelection": [{"assetKey": {"path": a.split("/")}, "name": name} for a, name in of_checks],
        }
        return self._launch(selector, None, {"dagster/partition": partition} if partition else {})

    def _launch(
        self, selector: Mapping[str, Any], config: Mapping[str, Any] | None, tags: Mapping[str, str] | None = None
    ) -> str:
        where = {"repositoryLocationName": self.location, "repositoryName": REPOSITORY_NAME}
        given = [{"key": key, "value": value} for key, value in (tags or {}).items()]
        params = {
            "selector": where | dict(selector),
            "runConfigData": config or {},
            "executionMetadata": {"tags": given},
        }
        said = self.ask(LAUNCH, params=params)["launchRun"]
        assert said["__typename"] == "LaunchRunSuccess", said
        return said["run"]["runId"]

    def terminate(self, id: str) -> None:
        """Terminate a run as the page's button does."""
        said = self.ask(TERMINATE, id=id)["terminateRun"]
        assert said["__typename"] == "TerminateRunSuccess", said

    def backfill(self, asset: str, partitions: Sequence[str]) -> str:
        """Launch a backfill; its id."""
        params = {"assetSelection": [{"path": asset.split("/")}], "partitionNames": list(partitions)}
        said = self.ask(BACKFILL, params=params)["launchPartitionBackfill"]
        assert said["__typename"] == "LaunchBackfillSuccess", said
        return said["backfillId"]

    def backfilled(self, id: str) -> dict[str, Any]:
        """A backfill once it is done: its status, and how many partitions it had."""

        def done() -> dict[str, Any] | None:
            said = self.ask(BACKFILL_STATUS, id=id)["partitionBackfillOrError"]
            return said if said["status"].startswith(("COMPLETED", "FAILED", "CANCELED")) else None

        return self.wait(done, "the backfill to end")

    def runs(self, tags: Mapping[str, str]) -> list[Run]:
        """The runs with these tags, newest first."""
        wanted = [{"key": key, "value": value} for key, value in tags.items()]
        results = self.ask(RUNS, filter={"tags": wanted})["runsOrError"]["results"]
        return [Run(r["runId"], r["status"], r["jobName"], {t["key"]: t["value"] for t in r["tags"]}) for r in results]

    def ended(self, id: str) -> Run:
        """A run once it has ended."""
        return self.reached(id, DONE)

    def reached(self, id: str, statuses: Collection[str]) -> Run:
        """A run once it has one of these statuses."""

        def found() -> Run | None:
            (result,) = self.ask(RUNS, filter={"runIds": [id]})["runsOrError"]["results"]
            run = Run(id, result["status"], result["jobName"], {t["key"]: t["value"] for t in result["tags"]})
            return run if run.status in statuses else None

        return self.wait(found, f"run {id} to be {' or '.join(sorted(statuses))}")

    def events(self, id: str) -> list[dict[str, Any]]:
        """What a run has said."""
        return self.ask(EVENTS, id=id)["logsForRun"]["events"]

    def process(self, id: str) -> int:
        """The process that executes a run."""

        def said() -> int | None:
            found = (re.search(r"\(pid: (\d+)\)", event.get("message", "")) for event in self.events(id))
            return next((int(match[1]) for match in found if match), None)

        return self.wait(said, f"run {id} to have a process")

    def wait(self, find: Callable[[], Found | None], what: str, seconds: float = RUN_S) -> Found:
        """What `find` finds, asked again and again until it does."""
        deadline = time.monotonic() + seconds
        while (found := find()) is None:
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}; {self.log.read_text()[-5000:]}"
            time.sleep(POLL_S)
        return found


def browser() -> str | None:
    """The program of a Chromium, if there is one here."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def served(warehouse: Path, log: Path, **environment: str) -> Iterator[Page]:
    """A running `siltstone ui` of this repository that has loaded; it and all it started are gone at the end."""
    port = free_port()
    command = [sys.executable, "-m", "siltstone.cli", "ui", "--warehouse", str(warehouse), "--port", str(port)]
    page = serving(command, REPOSITORY, os.environ | environment, log, port, token=environment.get(TOKEN))
    with page as loaded:
        yield loaded


@contextmanager
def serving(
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    log: Path,
    port: int,
    *,
    location: str = LOCATION,
    token: str | None = None,
    seconds: float = START_S,
) -> Iterator[Page]:
    """The page that a command serves, once its code location has loaded; all that it started is gone at the end.

    `seconds`: how long the command may take until then.
    """
    with log.open("a") as output:
        server = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    page = Page(f"http://{HOST}:{port}", log, server.pid, token, location)

    def loaded() -> bool | None:
        assert server.poll() is None, log.read_text()
        try:
            entries = page.ask(LOADED)["workspaceOrError"]["locationEntries"]
        except OSError:
            return None
        return [(entry["name"], entry["loadStatus"]) for entry in entries] == [(location, "LOADED")] or None

    try:
        page.wait(loaded, "the page", seconds)
        yield page
        if server.poll() is None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):  # a daemon in the middle of a tick takes long
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(STOP_S)
