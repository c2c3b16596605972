"""A newcomer's first project: `siltstone init`, and what its Makefile does, with the wheel and no checkout."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from siltstone.templates import DAYS
from tests.dagster.page import HOST, LOADED, START_S, STOP_S, Page
from tests.servers import free_port
from tests.wheel import install_wheel

ASSETS = "{ assetNodes { assetKey { path } } }"
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The wheel with Dagster and the demo's data, and nothing of this repository."""
    installed = install_wheel(tmp_path_factory.mktemp("wheel"), ["dagster", "demo"])
    return {name: value for name, value in installed.items() if not name.startswith("SILTSTONE_")}


@pytest.fixture(scope="module")
def project(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project, whose demo has run."""
    directory = tmp_path_factory.mktemp("newcomer")
    said = run(["siltstone", "init", "shop", "--stream", "till"], directory, environment)
    assert "stream till" in said and "make demo" in said
    return directory / "shop"


def run(command: list[str], directory: Path, environment: dict[str, str]) -> str:
    """What a command says that has to succeed."""
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def page_of(command: list[str], directory: Path, environment: dict[str, str], log: Path, port: int) -> Iterator[Page]:
    """The page that a command serves, once it answers; all that it started is gone at the end."""
    with log.open("w") as out:
        server = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    page = Page(f"http://{HOST}:{port}", log, server.pid, None)

    def loaded() -> list[str] | None:
        assert server.poll() is None, log.read_text()
        try:
            entries = page.ask(LOADED)["workspaceOrError"]["locationEntries"]
        except OSError:
            return None
        return [entry["name"] for entry in entries if entry["loadStatus"] == "LOADED"] or None

    try:
        page.wait(loaded, "the page", START_S)
        yield page
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(STOP_S)


def assets(page: Page) -> set[str]:
    """The assets that a page shows."""
    return {"/".join(node["assetKey"]["path"]) for node in page.ask(ASSETS)["assetNodes"]}


def test_its_demo_runs_and_proves_and_its_tests_pass(project: Path, environment: dict[str, str]) -> None:
    said = run(["make", "demo"], project, environment)
    assert f"till: {DAYS} checkpoints proven, 0 not" in said, said
    said = run(["make", "test"], project, environment)
    assert re.search(r"Ran 2 tests in .*\n\nOK\n", said), "none was skipped: " + said


def test_its_page_shows_the_stream(project: Path, environment: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    with page_of(["make", "ui", f"PORT={port}"], project, environment, tmp_path / "page.log", port) as page:
        assert {"till/checkpoints", "till/customers_base_checkpoint", "till/restored_state"} <= assets(page)


def test_the_page_needs_no_workspace(environment: dict[str, str], project: Path, tmp_path: Path) -> None:
    (tmp_path / "siltstone.toml").write_text(f'streams = ["{project}/streams"]\n')
    port = free_port()
    command = ["siltstone", "ui", "--port", str(port)]
    with page_of(command, tmp_path, environment, tmp_path / "page.log", port) as page:
        assert "till/checkpoints" in assets(page)


def test_the_demo_needs_no_checkout(environment: dict[str, str], tmp_path: Path) -> None:
    said = run(["siltstone", "demo", "--seed", "1"], tmp_path, environment)
    assert re.search(r"336,776 flights in the source, 336,776 counted", said.replace("\n", " ")), said
    assert "siltstone-chain" not in said and (tmp_path / "warehouse" / "flights-chain.png").is_file()


def test_dg_finds_the_component(environment: dict[str, str], tmp_path: Path) -> None:
    listed = "from importlib.metadata import entry_points as e; print(e(group='dagster_dg_cli.registry_modules'))"
    assert "value='siltstone.dagster'" in run(["python", "-c", listed], tmp_path, environment)
