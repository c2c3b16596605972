"""`siltstone ui`: the real web server on a real port, where it keeps its runs, and what stops it from starting."""

import os
import socket
from pathlib import Path

import pytest

from siltstone import ui
from siltstone.errors import Unreachable, UsageError
from siltstone.settings import Settings
from tests.dagster.page import HOST, REPOSITORY
from tests.servers import free_port


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
    home.parent.mkdir()
    with pytest.raises(Became):
        ui.serve(Settings(warehouse=str(home.parent), catalog="sqlite:///elsewhere.db"), HOST, free_port())
    (environment,) = became
    assert environment["DAGSTER_HOME"] == str(home)
    assert environment["SILTSTONE_WAREHOUSE"] == home.parent.as_uri()
    assert environment["SILTSTONE_CATALOG"] == "sqlite:///elsewhere.db"


def test_dagsters_configuration_is_written_anew_from_the_project_alone(
    became: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "dagster" / "dagster.yaml"
    project = tmp_path / "project"
    project.mkdir()
    (project / "workspace.yaml").write_text("load_from: []\n")
    monkeypatch.chdir(project)

    def start(storage: str | None = None) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ui, "check_reachable", lambda *_: None)
            with pytest.raises(Became):
                ui.serve(Settings(warehouse=str(tmp_path), ui={"storage": storage}), HOST, free_port())  # pyright: ignore[reportArgumentType]
        return written.read_text()

    assert start() == ui.OURS + ui.INSTANCE
    written.write_text(ui.OURS + "of an older version: true\n")
    assert start("postgresql://me:secret@there/d") == ui.OURS + ui.INSTANCE + ui.IN_POSTGRES
    assert became[-1][ui.STORAGE] == "postgresql+psycopg2://me:secret@there/d"
    assert "secret" not in written.read_text()

    (project / "dagster.yaml").write_text("telemetry:\n  enabled: true\n")
    with pytest.raises(UsageError, match="is your own and does not use SILTSTONE_UI__STORAGE"):
        start("postgresql://there/d")
    (project / "dagster.yaml").write_text(ui.IN_POSTGRES)
    assert start("postgresql://there/d") == ui.OURS + ui.IN_POSTGRES


def test_a_configuration_of_dagster_that_lies_in_the_warehouse_is_not_trusted(
    became: list[dict[str, str]], tmp_path: Path
) -> None:
    home = tmp_path / "w" / "dagster"
    home.mkdir(parents=True)
    hostile = "run_launcher:\n  module: any.module\n  class: Any\n"
    (home / "dagster.yaml").write_text(hostile)
    with pytest.raises(UsageError, match="was not written by siltstone ui, and may name code to run"):
        ui.serve(Settings(warehouse=str(tmp_path / "w")), HOST, free_port())
    assert became == [] and (home / "dagster.yaml").read_text() == hostile

    (home / "dagster.yaml").write_text(ui.OURS + hostile)
    with pytest.raises(Became):
        ui.serve(Settings(warehouse=str(tmp_path / "w")), HOST, free_port())
    assert (home / "dagster.yaml").read_text() == ui.OURS + ui.INSTANCE

    (tmp_path / "other").write_text(ui.OURS)
    (home / "dagster.yaml").unlink()
    (home / "dagster.yaml").symlink_to(tmp_path / "other")
    with pytest.raises(Became):
        ui.serve(Settings(warehouse=str(tmp_path / "w")), HOST, free_port())
    assert (tmp_path / "other").read_text() == ui.OURS, "a link is not followed"


@pytest.mark.parametrize("url", ["mysql://there/d", "sqlite:///x.db", "nonsense"])
def test_a_storage_that_is_no_postgresql(became: list[dict[str, str]], tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match="Dagster's storage cannot be kept there: use postgresql://"):
        ui.serve(Settings(warehouse=str(tmp_path / "w"), ui={"storage": url}), HOST, free_port())  # pyright: ignore[reportArgumentType]
    assert became == []


def test_a_storage_that_does_not_answer_is_named_without_its_password(
    became: list[dict[str, str]], tmp_path: Path
) -> None:
    url = f"postgresql://me:hidden@{HOST}:{free_port()}/d"
    with pytest.raises(Unreachable, match="cannot use Dagster's storage postgresql") as caught:
        ui.serve(Settings(warehouse=str(tmp_path / "w"), ui={"storage": url}), HOST, free_port())  # pyright: ignore[reportArgumentType]
    assert "hidden" not in str(caught.value) and "\n" not in str(caught.value)
    assert became == []


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


@pytest.mark.parametrize(("host", "token"), [("0.0.0.0", None), ("::", None), ("0.0.0.0", "short"), (HOST, "short")])
def test_a_page_that_others_reach_has_a_token_that_nobody_guesses(
    became: list[dict[str, str]], tmp_path: Path, host: str, token: str | None
) -> None:
    with pytest.raises(UsageError, match="SILTSTONE_UI__TOKEN" if token is None else "use 16 or more"):
        ui.serve(Settings(warehouse=str(tmp_path / "w"), ui={"token": token}), host, free_port())  # pyright: ignore[reportArgumentType]
    assert became == [] and not (tmp_path / "w").exists()


def test_a_directory_without_a_code_location(
    became: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"no workspace.yaml and no streams in {tmp_path}" in refused(became, tmp_path / "w", HOST, free_port())


def test_dagster_is_not_installed(
    became: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ui, "NEEDED", ("dagster", "dagster_that_is_not_installed"))
    line = refused(became, tmp_path / "w", HOST, free_port())
    assert line == "the page needs dagster_that_is_not_installed: pip install 'siltstone[dagster]'"
