"""The manifest of the guide is what Kubernetes and Siltstone read; it has run on no cluster yet."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from siltstone.settings import load_settings
from siltstone.store.open import Warehouse

MANIFEST = Path(__file__).parents[2] / "docs" / "kubernetes.yaml"


def _objects() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def test_its_settings_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "siltstone.toml").write_text(_objects()["ConfigMap"]["data"]["siltstone.toml"])
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert settings.master.startswith("k8s://") and all(name.startswith("spark.") for name in settings.spark)
    assert str(Warehouse.at(settings.warehouse).local.root) == "/data/siltstone"
    cores = int(settings.spark["spark.executor.instances"]) * int(settings.spark["spark.executor.cores"])
    assert settings.parallelism == cores


def test_its_parts_name_each_other() -> None:
    found = _objects()
    driver, names = found["StatefulSet"]["spec"], {each["metadata"]["name"] for each in found.values()}
    (container,) = driver["template"]["spec"]["containers"]
    spark = found["ConfigMap"]["data"]["siltstone.toml"]
    name = found["StatefulSet"]["metadata"]["name"]
    assert {each["metadata"]["namespace"] for each in found.values()} == {"streams"} and len(names) == 2
    assert f"{name}-0" in spark and f"{found['Service']['metadata']['name']}.streams.svc" in spark
    assert driver["serviceName"] == found["Service"]["metadata"]["name"]
    assert found["Service"]["spec"]["selector"] == driver["template"]["metadata"]["labels"]
    assert {each["containerPort"] for each in container["ports"]} == {7078, 7079}
    assert {port["port"] for port in found["Service"]["spec"]["ports"]} == {7078, 7079}
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in driver["template"]["spec"]["volumes"]}
    assert container["image"] in spark
    assert set(found["Secret"]["stringData"]) == {"catalog", "access-key", "secret-key"}
