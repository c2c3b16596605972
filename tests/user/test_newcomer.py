"""The newcomer's way to a stream of one's own in Dagster, typed by a script, then clicked over GraphQL."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from siltstone.templates import DAYS
from tests.dagster.page import RUN_S, Page, serving
from tests.servers import free_port
from tests.user.conftest import Environments
from tests.wheel import run_in

SCRIPT = Path(__file__).with_name("newcomer.sh")
ASSETS = "{ assetNodes { assetKey { path } } }"
WARNING = re.compile(r"\b\w*Warning\b.*")
"""the category of a warning of Python's, as it is printed"""


@dataclass(frozen=True)
class Newcomer:
    """Whoever has run the script, and has its page open."""

    project: Path
    environment: dict[str, str]
    page: Page

    def said(self) -> str:
        """What the script, and the page that it has started, have printed."""
        return self.page.log.read_text()


@pytest.fixture(scope="module")
def newcomer(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """The script has run, in an environment with the extra that it names; its last command serves the page."""
    directory, port = tmp_path_factory.mktemp("newcomer"), free_port()
    environment = environments("dagster") | {"PORT": str(port)}
    log = tmp_path_factory.mktemp("log") / "newcomer.log"
    with serving(["bash", str(SCRIPT)], directory, environment, log, port, location="shop", seconds=RUN_S) as page:
        yield Newcomer(directory / "shop", environment, page)


def test_the_script_says_how_much_there_is_to_type() -> None:
    text = SCRIPT.read_text()
    edits = re.findall(r"<<'EDIT'\n(.*?)EDIT\n", text, re.DOTALL)
    typed = re.sub(r"^cat >>? .*?^EDIT\n", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    commands = [line for line in typed if line and not line.startswith(("#", "set "))]
    lines = sum(len(edit.splitlines()) for edit in edits)
    counted = f"{len(commands)} commands, {len(edits)} edits, {lines} lines"
    print(counted)
    assert f": {counted}." in text


def test_what_is_typed_works_and_warns_of_nothing(newcomer: Newcomer) -> None:
    said = newcomer.said()
    assert f"purchases: {DAYS + 1} checkpoints proven, 0 not" in said
    assert re.search(r"Ran 3 tests in .*\n\nOK\n", said), f"none was skipped: {said}"
    assert WARNING.findall(said) == []


def test_a_run_that_is_launched_in_the_page_brings_the_stream_to_its_next_checkpoint(newcomer: Newcomer) -> None:
    project, page = newcomer.project, newcomer.page
    shown = {"/".join(node["assetKey"]["path"]) for node in page.ask(ASSETS)["assetNodes"]}
    assert {"visits/checkpoints", "visits/pages_base_checkpoint", "purchases/restored_state"} <= shown
    (project / "visits" / "tuesday.json").write_text('{"page": "home", "seconds": 1}\n')
    run = page.launch("visits")
    assert page.ended(run).status == "SUCCESS", page.events(run)
    listed = json.loads(run_in(project, newcomer.environment, "siltstone", "checkpoints", "visits", "--json"))
    assert [checkpoint["id"] for checkpoint in listed["checkpoints"]] == [1, 2]
    read = "import siltstone as s; print(s.open('warehouse').stream('visits').table('pages', 'totals').to_table())"
    assert "home" in run_in(project, newcomer.environment, "python", "-c", read)


def test_a_day_is_restored_and_checked_in_the_page(newcomer: Newcomer) -> None:
    day = "2026-01-03"
    asset, check = "purchases/restored_state", "restored_equals_checkpoint"
    run = newcomer.page.materialize(asset, checks=[f"{asset}:{check}"], partition=day)
    assert newcomer.page.ended(run).status == "SUCCESS", newcomer.page.events(run)
    events = newcomer.page.events(run)
    assert [e["partition"] for e in events if e["__typename"] == "MaterializationEvent"] == [day]
    [checked] = [e["evaluation"] for e in events if "evaluation" in e]
    assert (checked["checkName"], checked["success"]) == (check, True)
    restored = newcomer.project / "warehouse" / "restored" / "purchases" / "series" / day
    assert (restored / "_restored.json").is_file()


def test_the_page_needs_no_workspace(environments: Environments, newcomer: Newcomer, tmp_path: Path) -> None:
    (tmp_path / "siltstone.toml").write_text(f'streams = ["{newcomer.project}/streams"]\n')
    port, location = free_port(), "siltstone.dagster.all_streams"
    command = ["siltstone", "ui", "--port", str(port)]
    log = tmp_path / "page.log"
    with serving(command, tmp_path, environments("dagster"), log, port, location=location) as page:
        assert {"visits", "purchases"} <= {node["assetKey"]["path"][0] for node in page.ask(ASSETS)["assetNodes"]}
