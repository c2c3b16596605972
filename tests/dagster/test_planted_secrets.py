"""A secret planted in every place where one can be given, and searched for in everything that is written or shown."""

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._config import ConfigTypeKind
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster_shared.serdes import serialize_value
from pyspark import cloudpickle
from rich.console import Console

from orchestration.definitions import definitions as project_definitions
from siltstone import demo, log, ui
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.dagster import stream_definitions
from siltstone.dagster.all_streams import all_streams
from siltstone.dagster.assets.run import events_asset
from siltstone.dagster.resources import WebhookNotifier
from siltstone.dagster.resources.notifier import Alert
from siltstone.errors import SiltstoneError
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.secret import Secret
from siltstone.settings import Settings, given_settings, load_settings
from siltstone.spark.sources import open_input
from siltstone.store.keyvalue.redis_client import RedisOptions, Server
from siltstone.store.open import Warehouse, open_store
from tests.dagster.page import HOST, REPOSITORY
from tests.fault.small_stream import SMALL, purchases
from tests.region_run import RegionSteps
from tests.servers import free_port

PLANTED = "pl4nted"
POLICY = policy_by_name("adjust-d", PolicyOptions())


def secret(place: str) -> str:
    """One for each place, with what is special in URLs."""
    return f"{PLANTED}-{place}%40-{PLANTED}"


def source(spark: Any, options: Any) -> Any:
    """Fails as clients do that tell what they were given."""
    assert options["password"] == secret("option"), "the run gets it"
    assert options["from_file"] == secret("file")
    raise RuntimeError(f"no login with {dict(options)}")


STREAM = replace(SMALL, source=source, options={"password": Secret("OF_OPTION"), "from_file": Secret("OF_FILE")})


class Became(Exception):
    """Raised in place of starting another program."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """With a secret wherever one goes. Nobody answers at the addresses, so that every error is told."""
    dead = f"{HOST}:{free_port()}"
    (tmp_path / "secrets").mkdir()
    files = {"OF_FILE": secret("file"), "SILTSTONE_CATALOG": f"postgresql://me:{secret('catalog')}@{dead}/d"}
    for name, content in files.items():
        (tmp_path / "secrets" / name).write_text(content)
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / "secrets" / name))
    monkeypatch.setenv("OF_OPTION", secret("option"))
    monkeypatch.setenv("SILTSTONE_ALERTS__WEBHOOK", f"http://{dead}/{secret('webhook')}")
    monkeypatch.setenv("SILTSTONE_UI__STORAGE", f"postgresql://me:{secret('storage')}@{dead}/d")
    monkeypatch.setenv("SILTSTONE_UI__TOKEN", secret("token"))
    monkeypatch.setenv("SILTSTONE_WAREHOUSE", str(tmp_path / "w"))
    monkeypatch.setenv("SILTSTONE_SPARK", json.dumps({"spark.hadoop.fs.s3a.secret.key": secret("spark")}))
    return load_settings()


def refusal(call: Callable[[], object]) -> str:
    """What a call fails with, as people read it."""
    with pytest.raises(SiltstoneError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def logged(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The lines of a command line's log in the format of the parameter, with all that anybody logs."""
    lines: list[str] = []
    log.configure("debug", request.param, lines.append)
    caplog.set_level(logging.DEBUG)
    yield lines
    log.unconfigure()


def say_of_a_run(settings: Settings) -> tuple[list[str], list[bytes]]:
    """Write state, catalog and manifests; returns what is said, and the tasks that Spark would get."""
    with OpenWarehouse.open_writable(settings.warehouse) as place:
        run = RegionSteps(
            ConsistentRegion.open(STREAM, place.warehouse, place.catalog, POLICY, RegionOptions(), "a test")
        )
        run.step(purchases()[0])
        run.step(purchases()[1])
        pickled = [cloudpickle.dumps(task) for task in run.region.begin_step(ends=True).values()]
        said = refusal(lambda: open_input(None, STREAM, place.warehouse, {}))  # pyright: ignore[reportArgumentType]
        run.region.close("failed")
    return [said], pickled


def say_on_the_page(settings: Settings) -> list[str]:
    """What the page gets of the definitions, and what an alert that cannot be sent says."""
    definitions = stream_definitions(STREAM, settings=settings)
    snapshot = serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))
    description = str(events_asset(STREAM).description)
    assert "notifier" in snapshot and "OF_OPTION" in description, "it is this that the page shows"
    alert = Alert(STREAM.name, "proof", "a proof failed", "now")
    return [snapshot, description, refusal(lambda: WebhookNotifier().notify(alert))]


def say_of_addresses(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[bytes]]:
    """What is said of what cannot be reached and of what is given in arguments; and a warehouse as tasks get it."""
    told = [refusal(lambda: OpenWarehouse.open_writable(settings.warehouse, settings.catalog, 0.0))]
    redis = f"redis://me:{secret('warehouse')}@{HOST}:{free_port()}/0?attempts=1"
    told.append(refusal(lambda: open_store(redis)))
    given_settings(redis, settings.catalog)
    monkeypatch.setenv("SILTSTONE_REDIS_PASSWORD", secret("redis"))
    bare = Warehouse.at(f"redis://me@{HOST}:{free_port()}/0?attempts=1")
    assert Server.of(bare.store_url, RedisOptions()).password == secret("redis"), "tasks have it from where they run"
    told.append(refusal(bare.check_readable))
    return told, [cloudpickle.dumps(bare)]


def start_processes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[list[str]]]:
    """Start the page and the demo; returns what is said, and what the list of processes would show of them."""
    arguments: list[list[str]] = []

    def become(program: str, given: list[str], environment: dict[str, str]) -> None:
        arguments.append(given)
        raise Became

    def start(given: list[str], **_: Any) -> None:
        arguments.append(given)
        raise Became

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr(subprocess, "Popen", start)
    said = refusal(lambda: ui.serve(settings, HOST, free_port()))
    monkeypatch.setattr(ui, "check_reachable", lambda *_: None)
    with pytest.raises(Became):
        ui.serve(settings, HOST, free_port())
    of_demo = settings.model_copy(update={"warehouse": str(tmp_path / "shown"), "streams": ["./streams"]})
    with pytest.raises(Became):
        demo.run_demo(of_demo, Console(file=(tmp_path / "console").open("w")))
    assert len(arguments) == 2
    return [said], arguments


@pytest.mark.parametrize("logged", ["text", "json"], indirect=True)
def test_a_planted_secret_is_found_nowhere(
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    logged: list[str],
) -> None:
    of_run, tasks = say_of_a_run(settings)
    on_page = say_on_the_page(settings)
    of_addresses, warehouse = say_of_addresses(settings, monkeypatch)
    messages = "\n".join(caplog.messages)
    assert "the password in --catalog" in messages and "the password in --warehouse" in messages
    of_start, arguments = start_processes(settings, tmp_path, monkeypatch)

    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "secrets"]
    assert {"catalog.db", "manifest.arrow", "dagster.yaml", "console"} <= {path.name for path in written}
    assert any("the password in --catalog" in line for line in logged)
    everything = [
        *(repr(settings), *of_run, *on_page, *of_addresses, *of_start),
        *(*logged, "\n".join(caplog.messages), str(arguments)),
        *(*tasks, *warehouse, *(path.read_bytes() for path in written)),
    ]
    for found in everything:
        assert PLANTED not in (found if isinstance(found, str) else found.decode("latin-1")), found[:2000]


def launches(kind: Any, given: Any) -> Iterator[Any]:
    """The run configurations of a type that hold `given` in one field, each in another one."""
    if hasattr(kind, "fields"):
        for name, each in kind.fields.items():
            yield from ({name: inner} for inner in launches(each.config_type, given))
    elif hasattr(kind, "key_type"):
        yield from ({"any": inner} for inner in launches(kind.inner_type, given))
    elif kind.kind is ConfigTypeKind.ARRAY:
        yield from ([inner] for inner in launches(kind.inner_type, given))
    elif kind.kind is ConfigTypeKind.NONEABLE:
        yield from launches(kind.inner_type, given)
    else:
        yield given


@pytest.mark.parametrize("definitions", [project_definitions, all_streams])
def test_no_field_of_a_launch_reads_the_environment(
    definitions: Callable[[], dg.Definitions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
    monkeypatch.setenv("COUNT", "4711")
    fields: set[str] = set()
    for job in definitions().get_repository_def().get_all_jobs():
        for variable in ("AWS_SECRET_ACCESS_KEY", "COUNT"):
            for launch in launches(job.run_config_schema.run_config_schema_type, {"env": variable}):
                fields.add(str(launch))
                try:
                    said = str(dg.validate_run_config(job, launch))
                except dg.DagsterInvalidConfigError as error:
                    said = str(error)
                assert PLANTED not in said and "4711" not in said and "env variable" not in said, launch
    for name in ("url", "catalog", "master", "conf", "options", "policy", "batches", "at", "operators", "limit", "due"):
        assert any(f"'{name}'" in field for field in fields), f"{name} was not tried"
