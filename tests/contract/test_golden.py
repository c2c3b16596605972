"""What some version of Siltstone stored is read, proven and continued by this one (`tests/golden_warehouse.py`)."""

from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import open_client
from tests.golden_warehouse import FORK, GOLDEN, NAME, POLICY, STREAM, batch, contents, opened
from tests.proofs import failures
from tests.region_run import RegionRun

ARCHIVES = sorted(GOLDEN.glob("*.se*.tar.xz"))


def test_there_are_archives_of_both_kinds_of_store() -> None:
    assert {path.name.split(".")[-3] for path in ARCHIVES} == {"segments", "sections"}


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_what_was_stored_is_read_and_continued(archive: Path, tmp_path: Path) -> None:
    with opened(archive, tmp_path) as (root, expected):
        open_client(str(root)).upgrade()
        with OpenWarehouse.writable(str(root)) as place:
            assert contents(place) == expected
            assert not failures(place, NAME) and not failures(place, FORK)
            before = len(place.catalog.checkpoints.list(NAME))
            run = RegionRun(place, STREAM, POLICY, parallelism=2)
            for n in (14, 15):
                run.step(batch(n))
            assert len(place.catalog.checkpoints.list(NAME)) == before + 2 and not failures(place, NAME)
