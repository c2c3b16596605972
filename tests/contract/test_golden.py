"""What Siltstone stored is read, proven and continued (`tests/golden_archives.py`)."""

from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.import_savepoint import import_savepoint, prove_export
from siltstone.client import open_client
from tests import golden_extras as extras
from tests import golden_files
from tests.files_cases import files_of, run_of
from tests.files_cases import rows as file_rows
from tests.golden_warehouse import FORK, GOLDEN, NAME, POLICY, STREAM, batch, contents, opened, rows_of, unpack
from tests.places import place_at
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun


def test_the_archives_are_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 600_000


@pytest.mark.parametrize("name", ["segments", "sections"])
def test_what_was_stored_is_read_and_continued(name: str, tmp_path: Path) -> None:
    with opened(GOLDEN / f"{name}.tar.xz", tmp_path) as (root, expected):
        open_client(str(root)).upgrade()
        with OpenWarehouse.open_writable(str(root)) as place:
            assert contents(place) == expected
            assert not failures(place, NAME) and not failures(place, FORK)
            before = len(place.catalog.checkpoints.list(NAME))
            run = RegionRun(place, STREAM, POLICY, parallelism=2)
            for n in (14, 15):
                run.step(batch(n))
            assert len(place.catalog.checkpoints.list(NAME)) == before + 2 and not failures(place, NAME)


def test_checkpoints_as_files_of_rocksdb_are_read_and_continued(tmp_path: Path) -> None:
    expected = unpack(GOLDEN / "row-files.tar.xz", tmp_path)
    url = str(tmp_path / "warehouse")
    open_client(url).upgrade()
    with OpenWarehouse.open_writable(url) as place:
        assert contents(place, (golden_files.NAME, golden_files.FORK)) == expected
        for stream in (golden_files.NAME, golden_files.FORK):
            assert not failures(place, stream)
            run = run_of(place, 1, name=stream)
            before = run.region.completed
            for n in (20, 21):
                run.step(file_rows(n, golden_files.KEYS, 5))
            files = [files_of(place, id, stream) for id in range(before, before + 3)]
            assert not files[0] & files[1], "a run goes on only with files that it has written"
            assert files[1] & files[2]
            assert not failures(place, stream)


@pytest.mark.parametrize("name", ["values.files", "values.rocksdb"])
def test_nested_values_null_keys_what_was_prepared_and_outputs_are_read_and_continued(
    name: str, tmp_path: Path
) -> None:
    url, expected = extras.opened(GOLDEN / f"{name}.tar.xz", tmp_path)
    open_client(url).upgrade()
    with OpenWarehouse.open_writable(url) as place:
        assert contents(place, extras.STREAMS) == expected
        assert not failures(place, extras.NAME) and not failures(place, extras.ALONE)
        extras.SAID.clear()
        run = extras.ExtrasRun(place)
        run.step(extras.batch(8))
        assert [told for told in extras.SAID if told] == [(b"7:0",), (b"7:5",)], "a part per subtask"
        run.deliver()
        numbers = [(1, 2, 3, 4, 5, 7, 8), (7, 8)][not extras.has_tables(place)]
        for sink, wanted in extras.delivered(numbers).items():
            assert extras.rows_in(run, place, sink) == wanted
        [alone] = extras.STREAM.autonomous_streams()
        beside = RegionRun(place, alone, extras.POLICY)
        for n in (9, 10):
            beside.step(extras.batch(n))
        assert not failures(place, extras.NAME) and not failures(place, extras.ALONE)


def test_an_exported_savepoint_is_imported(tmp_path: Path) -> None:
    _, expected = extras.opened(GOLDEN / "values.files.tar.xz", tmp_path)
    with place_at(tmp_path / "new") as place:
        made = import_savepoint(place, prove_export(str(tmp_path / "export")))
        kept = expected[extras.NAME][str(made.exported_checkpoint)]
        assert made.digest == kept["digest"] == restored_digest(place, extras.NAME, 1)
        assert rows_of(place, extras.NAME, 1) == kept["rows"]
        extras.ExtrasRun(place).step(extras.batch(5))
        assert not failures(place, extras.NAME)
