"""`siltstone ui`: the real web server on a real port, and what stops it from starting."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from siltstone import ui
from siltstone.errors import UsageError
from siltstone.settings import Settings

REPOSITORY = Path(__file__).parents[2]
HOST = "127.0.0.1"
START_S, STOP_S, POLL_S = 120.0, 30.0, 0.5
ASSETS = """{
  assetNodes { assetKey { path } groupName kinds assetChecksOrError { ... on AssetChecks { checks { name } } } }
  workspaceOrError { ... on Workspace { locationEntries { name loadStatus } } }
  shouldShowNux
}"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def served(warehouse: Path, port: int, log: Path) -> Iterator[str]:
    """The address of a running `siltstone ui`; it and all it started are gone at the end."""
    command = [sys.executable, "-m", "siltstone.cli", "ui", "--warehouse", str(warehouse), "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield f"http://{HOST}:{port}"
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(STOP_S)


def ask(address: str, query: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["data"]


def ask_when_up(address: str, log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return ask(address, ASSETS)
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)


def test_the_page_shows_the_streams_of_the_repository(tmp_path: Path) -> None:
    warehouse, log = tmp_path / "warehouse", tmp_path / "log"
    with served(warehouse, free_port(), log) as address:
        found = ask_when_up(address, log)
    assert found["workspaceOrError"]["locationEntries"] == [{"name": "siltstone", "loadStatus": "LOADED"}]
    assert found["shouldShowNux"] is False
    nodes = {"/".join(node["assetKey"]["path"]): node for node in found["assetNodes"]}
    assert set(nodes) == {"flights/checkpoints", "flights/restored_state"}
    assert nodes["flights/checkpoints"]["assetChecksOrError"] == {"checks": [{"name": "digest"}]}
    assert all(node["groupName"] == "flights" and node["kinds"] == ["parquet", "spark"] for node in nodes.values())
    assert "enabled: false" in (warehouse / "dagster" / "dagster.yaml").read_text()
    assert (warehouse / "dagster" / "history").is_dir(), "runs must be kept in the warehouse"


class Became(Exception):
    """Raised in place of becoming another program."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments that this process would have become Dagster with."""
    environments: list[dict[str, str]] = []

    def become(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        environments.append(environment)
        raise Became

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(os, "execve", become)
    return environments


def test_runs_from_the_page_see_the_same_warehouse_and_catalog(
    became: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "my warehouse" / "dagster"
    home.mkdir(parents=True)
    (home / "dagster.yaml").write_text("# mine\n")
    with pytest.raises(Became):
        ui.serve(Settings(warehouse=str(home.parent), catalog="sqlite:///elsewhere.db"), HOST, free_port())
    (environment,) = became
    assert environment["DAGSTER_HOME"] == str(home)
    assert environment["SILTSTONE_WAREHOUSE"] == home.parent.as_uri()
    assert environment["SILTSTONE_CATALOG"] == "sqlite:///elsewhere.db"
    assert (home / "dagster.yaml").read_text() == "# mine\n"


def refused(became: list[dict[str, str]], warehouse: Path, host: str, port: int) -> str:
    with pytest.raises(UsageError) as caught:
        ui.serve(Settings(warehouse=str(warehouse)), host, port)
    assert became == []
    assert not warehouse.exists()
    return str(caught.value)


def test_a_port_that_is_taken(became: list[dict[str, str]], tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"cannot listen on {HOST}, port {port} (address already in use)" in refused(
            became, tmp_path / "w", HOST, port
        )


def test_an_address_that_is_not_this_machine(became: list[dict[str, str]], tmp_path: Path) -> None:
    assert "cannot listen on 192.0.2.1" in refused(became, tmp_path / "w", "192.0.2.1", free_port())


def test_a_directory_without_a_code_location(
    became: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"no workspace.yaml in {tmp_path}" in refused(became, tmp_path / "w", HOST, free_port())


def test_dagster_is_not_installed(
    became: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ui, "NEEDED", ("dagster", "dagster_that_is_not_installed"))
    line = refused(became, tmp_path / "w", HOST, free_port())
    assert line == "the page needs dagster_that_is_not_installed: pip install 'siltstone[dagster]'"
