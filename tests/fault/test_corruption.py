"""One byte altered, an object cut, an object gone: restore and verify notice, every time, and name the object."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone import cli
from siltstone.catalog.records.objects import ObjectKind, ObjectRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import CorruptObject
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifests
from siltstone.model import Handle, Kind
from siltstone.restore.compare import compare, compare_tasks
from siltstone.restore.export import unit_tasks
from siltstone.restore.verify import check_objects
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.store.paths import snapshot_of
from tests.examples import examples
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun

POSITIONS = 50
FOOTER_BYTES = 24
"""at the end of an object: the seal of a manifest, the footer of a segment or of a Parquet file"""
CHAIN = [ObjectKind.MANIFEST, ObjectKind.SEGMENT, ObjectKind.BASE]
"""what a restore needs; a snapshot is only compared with"""


@dataclass(frozen=True)
class Stored:
    """A small warehouse in which everything is proven, and what each object's damage must be noticed by."""

    url: str
    place: OpenWarehouse
    objects: dict[ObjectKind, list[ObjectRecord]]
    manifests: dict[int, Manifest]

    def path(self, stored: ObjectRecord) -> Path:
        return self.place.warehouse.local.objects / stored.name

    def dependents(self, stored: ObjectRecord, start: int = 0, end: int = sys.maxsize) -> list[int]:
        """The checkpoints that cannot be restored without the bytes from `start` to `end` of the object."""
        if stored.kind is ObjectKind.MANIFEST:
            return [
                c
                for c in self.manifests
                if stored.checkpoint in self.place.catalog.chains.list_checkpoints(SMALL.name, c)
            ]
        if stored.kind is ObjectKind.REFERENCE_COPY:
            return [stored.checkpoint]
        touched = [
            h
            for h in self.manifests[stored.checkpoint].handles
            if h.object == stored.name and h.offset < end and start < h.offset + h.length
        ]
        return [c for c, m in self.manifests.items() if any(_needs(m, h, stored.checkpoint) for h in touched)]


def _needs(manifest: Manifest, handle: Handle, written_at: int) -> bool:
    """Does a restore of the manifest's checkpoint read a block that was written at another?"""
    if handle.kind is Kind.OPAQUE:
        return manifest.checkpoint == written_at
    first = min(of["first"] for of in manifest.chains[handle.operator].values())
    return first <= written_at <= manifest.checkpoint


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """Five checkpoints by two subtasks an operator: base, delta, delta, base, delta; the last has a snapshot."""
    url = str(tmp_path_factory.mktemp("corruption") / "warehouse")
    with OpenWarehouse.open_writable(url) as place:
        run = RegionRun(place, SMALL, policy_by_name("adjust-d", PolicyOptions(d0=2)), parallelism=2)
        for rows in purchases()[:5]:
            run.step(rows)
        run.region.close("done")
        catalog, name = place.catalog, SMALL.name
        manifests = read_manifests(place.warehouse.store, [c.manifest for c in catalog.checkpoints.list(name)])
        newest = manifests[max(manifests)]
        parts = [take_snapshot(task) for task in snapshot_tasks(place.warehouse, newest, "heap", "test")]
        written = [stored for part in parts for stored in part.objects]
        catalog.reference_copies.add(name, newest.epoch, newest.checkpoint, written, sum(part.rows for part in parts))
        by_kind: dict[ObjectKind, list[ObjectRecord]] = {}
        for record in catalog.objects.list(name):
            by_kind.setdefault(record.kind, []).append(record)
        assert set(by_kind) == set(ObjectKind) - {ObjectKind.MATERIALIZATION}
        assert not failures(place, name)
        for checkpoint in manifests:
            restored_digest(place, name, checkpoint)
        yield Stored(url, place, by_kind, manifests)


@contextmanager
def damaged(path: Path, change: Callable[[bytes], bytes | None]) -> Iterator[None]:
    """The object with other bytes, or none, for a while."""
    whole = path.read_bytes()
    other = change(whole)
    assert other != whole
    path.unlink()
    if other is not None:
        path.write_bytes(other)
    try:
        yield
    finally:
        path.write_bytes(whole)


def flip(position: int, mask: int) -> Callable[[bytes], bytes]:
    """Alter the bits of `mask` in one byte."""

    def change(data: bytes) -> bytes:
        altered = bytearray(data)
        altered[position] ^= mask
        return bytes(altered)

    return change


def positions(chance: random.Random, objects: list[ObjectRecord]) -> Iterator[tuple[ObjectRecord, int]]:
    """First byte, last byte and footer of some objects, and with each a byte of any of them; then any byte of any."""
    for record in chance.sample(objects, min(20, len(objects))):
        yield from ((record, at) for at in (0, record.bytes - 1, record.bytes - chance.randint(2, FOOTER_BYTES)))
        other = chance.choice(objects)
        yield other, chance.randrange(other.bytes)
    while True:
        record = chance.choice(objects)
        yield record, chance.randrange(record.bytes)


def noticed(stored: Stored, record: ObjectRecord, checkpoint: int) -> None:
    """Both verify and restore of the checkpoint fail and name the object."""
    found = failures(stored.place, SMALL.name, [checkpoint])
    assert {f.checkpoint for f in found} >= {checkpoint}, "verify noticed nothing"
    assert record.name in {f.object for f in found} and any(record.name in f.reason for f in found)
    with pytest.raises(CorruptObject, match=record.name):
        restored_digest(stored.place, SMALL.name, checkpoint)


@pytest.mark.parametrize("kind", CHAIN)
def test_an_altered_byte_is_noticed(stored: Stored, kind: ObjectKind) -> None:
    chance = random.Random(f"altered {kind}")
    cases = positions(chance, stored.objects[kind])
    for _ in range(examples(POSITIONS)):
        record, at = next(cases)
        checkpoint = chance.choice(stored.dependents(record, at, at + 1))
        mask = chance.choice([1, 0x80, 0xFF, chance.randrange(1, 256)])
        with damaged(stored.path(record), flip(at, mask)):
            noticed(stored, record, checkpoint)


@pytest.mark.parametrize("kind", CHAIN)
def test_every_object_cut_grown_swapped_or_gone_is_noticed(stored: Stored, kind: ObjectKind) -> None:
    chance = random.Random(f"cut {kind}")
    for record in stored.objects[kind]:
        other = stored.path(chance.choice([o for o in stored.objects[kind] if o.name != record.name])).read_bytes()
        cut = chance.randrange(1, record.bytes)
        changes: list[tuple[Callable[[bytes], bytes | None], int]] = [
            (lambda data: data[:cut], cut),  # noqa: B023
            (lambda data: b"", 0),
            (lambda data: other, 0),  # noqa: B023
            (lambda data: None, 0),
        ]
        if kind is not ObjectKind.SEGMENT:  # of a segment nobody reads more than the blocks that handles point to
            changes.append((lambda data: data + b"\0", 0))
        change, start = chance.choice(changes)
        with damaged(stored.path(record), change):
            noticed(stored, record, chance.choice(stored.dependents(record, start)))


@pytest.mark.parametrize("kind", CHAIN)
def test_exactly_the_checkpoints_that_need_an_object_are_unproven(stored: Stored, kind: ObjectKind) -> None:
    chance = random.Random(f"exactly {kind}")
    for record in chance.sample(stored.objects[kind], min(5, len(stored.objects[kind]))):
        at = chance.randrange(record.bytes)
        with damaged(stored.path(record), flip(at, 1)):
            unproven = {f.checkpoint for f in failures(stored.place, SMALL.name)}
            assert unproven == set(stored.dependents(record, at, at + 1))
            for checkpoint in stored.manifests.keys() - unproven:
                restored_digest(stored.place, SMALL.name, checkpoint)
    assert not failures(stored.place, SMALL.name)


def test_an_altered_or_cut_snapshot_is_noticed_and_no_restore_needs_it(stored: Stored) -> None:
    chance = random.Random("snapshot")
    store, name = stored.place.warehouse.store, SMALL.name
    newest = max(stored.manifests)
    manifests = read_manifests(store, stored.place.catalog.chains.list_manifests(name, newest))
    [snapshot] = stored.place.catalog.reference_copies.list(name)
    units, _ = unit_tasks(manifests, newest, 1, None)
    tasks = {task.unit.unit.operator: task for task in compare_tasks(units, snapshot.objects)}
    assert all(table.same for task in tasks.values() for table in compare(store, task))
    cases = positions(chance, stored.objects[ObjectKind.REFERENCE_COPY])
    for case in range(examples(POSITIONS)):
        record, at = next(cases)
        change = flip(at, chance.randrange(1, 256)) if case % 10 else chance.choice([lambda _: None, lambda d: d[:-9]])
        with damaged(stored.path(record), change):
            assert [f.object for f in check_objects(store, [(record.stored, [newest])])] == [record.name]
            with pytest.raises(CorruptObject, match=record.name):
                compare(store, tasks[snapshot_of(record.name)[0]])
    with damaged(stored.path(record), lambda _: None):
        restored_digest(stored.place, name, newest)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["siltstone", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code if isinstance(end.value.code, int) else int(bool(end.value.code))


@pytest.mark.parametrize("kind", [*CHAIN, ObjectKind.REFERENCE_COPY])
def test_the_command_line_names_the_object_and_ends_with_1(
    spark: SparkSession,
    stored: Stored,
    kind: ObjectKind,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance = random.Random(f"command {kind}")
    # A base's segment that holds nothing but the index is what a restore would not have to read.
    record = min(stored.objects[kind], key=lambda o: (o.checkpoint != 4, o.bytes))
    at = chance.randrange(record.bytes)
    checkpoint = str(max(stored.dependents(record, at, at + 1)))
    where = ["--at", checkpoint, "--warehouse", stored.url]
    with damaged(stored.path(record), flip(at, 4)):
        for deep in [[], ["--deep"]] if kind in (ObjectKind.BASE, ObjectKind.REFERENCE_COPY) else [[]]:
            assert command(monkeypatch, "verify", SMALL.name, *where, *deep) == 1
            said = capsys.readouterr()
            assert record.name in said.out and "0 checkpoints proven, 1 not" in said.out
        if kind is not ObjectKind.REFERENCE_COPY:
            assert command(monkeypatch, "restore", SMALL.name, *where, "--to", str(tmp_path / "out")) == 1
            assert record.name in capsys.readouterr().err
            assert os.listdir(tmp_path) == []
    if kind is ObjectKind.REFERENCE_COPY:  # the last of them
        assert command(monkeypatch, "verify", SMALL.name, *where, "--deep") == 0
        assert "1 checkpoints proven, 0 not" in capsys.readouterr().out
