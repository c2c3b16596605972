"""The page of this repository as `siltstone ui` serves it, with its runs in PostgreSQL."""

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from sqlalchemy import URL, create_engine, text

from tests.dagster.page import served

SENSORS = [f"siltstone__{each}" for each in ("recover_failed", "sweep_recovered", "new_checkpoints", "alerts")]
ASSETS = """{
  assetNodes { assetKey { path } groupName kinds assetChecksOrError { ... on AssetChecks { checks { name } } } }
  shouldShowNux
  instance { runLauncher { name } }
  sensorsOrError(repositorySelector: { repositoryLocationName: "siltstone", repositoryName: "__repository__" }) {
    ... on Sensors { results { name sensorState { status } } }
  }
}"""


def test_the_page_shows_the_streams_of_the_repository_and_keeps_runs_in_postgresql(
    tmp_path: Path, postgres: URL
) -> None:
    warehouse = tmp_path / "warehouse"
    url = postgres.set(drivername="postgresql", password="no-secret-of-anybody").render_as_string(hide_password=False)
    with served(warehouse, tmp_path / "log", SILTSTONE_UI__STORAGE=url, SILTSTONE_UI__TOKEN="t" * 32) as page:
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"{page.address}/server_info")
        found = page.ask(ASSETS)
        run = page.launch("siltstone__sweep", {"ops": {"siltstone__sweep__op": {"config": {"stream": "flights"}}}})
        assert page.ended(run).status == "FAILURE", "there is no stream to sweep"
    assert found["shouldShowNux"] is False
    assert found["instance"]["runLauncher"]["name"] == "CodeServerRunLauncher"
    sensors = {each["name"]: each["sensorState"]["status"] for each in found["sensorsOrError"]["results"]}
    assert sensors.pop("default_automation_condition_sensor") == "STOPPED", "nothing is restored until people want it"
    assert sensors == dict.fromkeys(SENSORS, "RUNNING")
    nodes = {"/".join(node["assetKey"]["path"]): node for node in found["assetNodes"]}
    assert {"flights/events", "flights/checkpoints", "flights/restored_state"} <= set(nodes)
    assert "digest" in {check["name"] for check in nodes["flights/checkpoints"]["assetChecksOrError"]["checks"]}
    assert all(node["groupName"] == "flights" and "spark" in node["kinds"] for node in nodes.values())

    home = warehouse / "dagster"
    assert not (home / "history").exists()
    written = [path.read_bytes() for path in (*home.rglob("*"), tmp_path / "log") if path.is_file()]
    assert written and not any(b"no-secret-of-anybody" in content for content in written)
    engine = create_engine(postgres)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT run_id FROM runs")).scalars().all() == [run]
    engine.dispose()
