"""Savepoints travel between warehouses of all kinds, and a run goes on there as it would have here."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.export_savepoint import export_savepoint
from siltstone.change.import_savepoint import import_savepoint, prove_export
from siltstone.errors import CorruptObject, UsageError
from siltstone.retention.sweep import sweep
from siltstone.store.paths import EXPORT, CheckpointPath
from tests.orphans import PLACES, check_whole
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun, clock_of
from tests.savepoint_cases import AT, SAVED, write_saved
from tests.store_cases import FACTORIES, Case
from tests.sums import NAME, POLICY, STREAM, rows

pytestmark = pytest.mark.server
WAYS = [
    ("filesystem", "redis", "s3"),
    ("redis", "s3-moto", "rocksdb"),
    ("s3", "rocksdb", "filesystem"),
    ("rocksdb", "filesystem", "redis"),
]


@dataclass(frozen=True)
class Journey:
    """A warehouse with a full savepoint, an empty place of another kind of store, and an empty warehouse of a third."""

    source: OpenWarehouse
    between: Case
    target: OpenWarehouse


@pytest.fixture(params=WAYS, ids="-".join)
def journey(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journey]:
    here, between, there = request.param
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        source = stack.enter_context(PLACES[here](tmp_path / "a"))
        target = stack.enter_context(PLACES[there](tmp_path / "c"))
        write_saved(source)
        yield Journey(source, FACTORIES[between](tmp_path / "b"), target)


def test_a_stream_goes_on_in_another_warehouse(journey: Journey) -> None:
    source, target, url = journey.source, journey.target, journey.between.url
    made, recorded = export_savepoint(source, NAME, SAVED, url), source.catalog.checkpoints.get(NAME, AT)
    assert (made.checkpoint, made.digest, made.copied) == (AT, recorded.digest, made.objects)
    again = export_savepoint(source, NAME, SAVED, url)
    assert (again.objects, again.bytes, again.copied) == (made.objects, made.bytes, 0)

    got = import_savepoint(target, prove_export(url))
    assert (got.stream, got.checkpoint, got.exported_checkpoint, got.digest) == (NAME, 1, AT, recorded.digest)
    assert got.rows == recorded.rows and restored_digest(target, NAME, 1) == recorded.digest
    assert [(s.name, s.checkpoint) for s in target.catalog.savepoints.list(NAME)] == [(SAVED, 1)]
    before = source.catalog.input_log.get_position(NAME, AT)
    after = target.catalog.input_log.get_position(NAME, 1)
    assert [s.offsets for s in after.newest] == [s.offsets for s in before.newest]
    assert (after.next_batch, after.beginning) == (before.next_batch, before.beginning)
    assert target.catalog.input_log.get_clock(NAME, 1) == clock_of(AT) == source.catalog.input_log.get_clock(NAME, AT)

    here, there = RegionRun(source, STREAM, POLICY), RegionRun(target, STREAM, POLICY, parallelism=2)
    ours, theirs = [here.step(rows(6))], [there.step(rows(n)) for n in (5, 6)]
    assert ours[-1] and theirs[-1] and ours[-1].digest == theirs[-1].digest
    offset = target.catalog.streams.get(NAME).sink_offset
    assert theirs[-1].id + offset == ours[-1].id, "sinks know it by the same id"
    assert sweep(target, NAME).found == 0 and not failures(target, NAME)
    check_whole(target)


def test_a_damaged_export_is_not_imported(journey: Journey) -> None:
    """Whatever is damaged or missing is found before the warehouse changes."""
    between, target = journey.between, journey.target
    export_savepoint(journey.source, NAME, SAVED, between.url)
    manifest = CheckpointPath(NAME, 1, 1).manifest()
    store = between.open()
    sizes = dict(store.list(""))
    for name in (next(n for n in sizes if n not in (EXPORT, manifest)), manifest, EXPORT):
        good = store.read_range(name, 0, sizes[name]).to_pybytes()
        between.alter(name, good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
        with pytest.raises(CorruptObject, match=name):
            import_savepoint(target, prove_export(between.url))
    between.alter(EXPORT, None)
    with pytest.raises(UsageError, match="no exported savepoint"):
        prove_export(between.url)
    assert not target.catalog.streams.list() and not [n for n, _ in target.warehouse.store.list(f"{NAME}/")]
