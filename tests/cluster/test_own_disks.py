"""A warehouse that is a directory: refused where machines do not share it, whatever is asked of it."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.settings import Settings
from siltstone.spark.operations import materialize, restore, verify
from siltstone.spark.operations.recovering import recover
from tests.cluster.conftest import ClusterRun

MISSING = "does not have the warehouse .*, which is a directory of another machine"


def place_of(cluster_run: ClusterRun, root: Path, scheme: str) -> Settings:
    path = root / uuid.uuid4().hex
    return cluster_run.settings.model_copy(update={"warehouse": f"{scheme}{path}"})


@pytest.mark.parametrize("scheme", ["", "rocksdb://"])
def test_a_run_is_refused_and_nothing_is_complete(cluster_run: ClusterRun, scheme: str) -> None:
    """Seen: its checkpoints were complete, and their objects on the disks of workers."""
    own = replace(cluster_run, settings=place_of(cluster_run, cluster_run.cluster.private, scheme))
    with pytest.raises(UsageError, match=MISSING):
        own.run(1)
    with OpenWarehouse.open_existing(own.settings.warehouse, own.settings.catalog) as place:
        assert not place.catalog.checkpoints.list(own.stream.name)


def test_one_that_all_machines_share_works(cluster_run: ClusterRun) -> None:
    shared = replace(cluster_run, settings=place_of(cluster_run, cluster_run.shared, ""))
    shared.run(2)
    shared.check(2)
    assert not verify(shared.settings, shared.stream.name, every=True).failed


@pytest.mark.parametrize(
    "ask",
    [
        lambda settings, stream: verify(settings, stream, every=True),
        restore,
        materialize,
        recover,
    ],
    ids=["verify", "restore", "materialize", "recover"],
)
def test_what_is_asked_of_machines_that_lack_it_is_refused_and_finds_no_damage(
    cluster_run: ClusterRun, ask: Callable[[Settings, str], Any]
) -> None:
    """No checkpoint is found damaged because a machine cannot read it."""
    own = replace(cluster_run, settings=place_of(cluster_run, cluster_run.shared, ""))
    own.run(2)
    moved = own.settings.model_copy(update={"warehouse": str(cluster_run.cluster.private / uuid.uuid4().hex)})
    Path(own.settings.warehouse).rename(moved.warehouse)
    with pytest.raises(UsageError, match=MISSING):
        ask(moved, own.stream.name)
    with OpenWarehouse.open_existing(moved.warehouse, moved.catalog) as place:
        assert [record.proof for record in place.catalog.checkpoints.list(own.stream.name)] == [None, None]
