"""Issue 11, item 5: whoever can write to the store, but not to the catalog, changes nothing unnoticed.

Each object is replaced by another valid one, and every reader that reads it refuses it by name, before its rows are
compared with any digest of the state: those can be forged.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.recover import recover
from siltstone.change.replay import restore_points
from siltstone.errors import CorruptObject
from siltstone.format.manifest_decoding import decode_manifest
from siltstone.format.manifests import read_manifest, schemas_of
from siltstone.format.output import read_output
from siltstone.format.segment import Section, Segment
from siltstone.model import Form, Kind, StoredObject
from siltstone.run.outbox import check_output
from siltstone.store import ranged
from siltstone.store.base import Store
from siltstone.store.checksums import checksum_of
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import snapshot_of
from tests.fault.small_stream import SMALL, purchases
from tests.forgery import (
    forged_base,
    forged_manifest,
    forged_opaque,
    forged_output,
    forged_segment,
    parts_of_base,
    replace_object,
)
from tests.proofs import failures, in_order
from tests.region_run import RegionRun
from tests.servers import marked
from tests.store_cases import FACTORIES
from tests.store_reads import counted_reads
from tests.tiny_stream import LAST, NAME, STREAM, Stored, readers, written

POLICY = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
KINDS = ("filesystem", "s3-moto", "redis")


@pytest.fixture(scope="module", params=marked(KINDS))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """The tiny stream on a store of each kind; its catalog is a file of this machine."""
    root = tmp_path_factory.mktemp("forged")
    url = f"{FACTORIES[request.param](root).url}&local={root}/local" if request.param != "filesystem" else f"{root}/w"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged, "RANGE_BYTES", 512)  # so that a base's pages and its footer are ranges of their own
        with written(url) as found:
            yield found


@dataclass(frozen=True)
class Forgery:
    """What stands in the place of some objects."""

    what: str
    objects: dict[str, bytes]


def _bytes(store: Store, stored: StoredObject) -> bytes:
    return store.read(stored).to_pybytes()


def forgeries(stored: Stored, at: int) -> Iterator[Forgery]:
    """Of everything that readers of a checkpoint read, but for manifests."""
    store, manifests = stored.place.warehouse.store, stored.manifests(at)
    for manifest in manifests.values():
        of = {o.name: o for o in manifest.objects}
        schema = schemas_of(manifest, "tiny")["row"]
        handles = [h for h in manifest.handles if h.kind is Kind.INCREMENTAL]
        for handle in (h for h in handles if h.form is Form.BASE):
            original = _bytes(store, of[handle.object])
            forged = forged_base(original, schema, "n")
            yield from (Forgery(f"{what} of a base", {handle.object: d}) for what, d in parts_of_base(original, forged))
        apart = {h.object for h in manifest.handles if h.object.endswith(".opaque")}
        yield from (Forgery("opaque values", {name: forged_opaque(_bytes(store, of[name]))}) for name in sorted(apart))
        in_base = {h.object for h in handles if h.form is Form.BASE} | apart
        if any(h.kind is Kind.INDEX for h in manifest.handles):  # else it has given way to a materialization
            yield _forged_segment(store, [of[name] for name in {h.object for h in manifest.handles} - in_base])
    if at == LAST:
        for copy in stored.snapshot:
            if snapshot_of(copy.name)[1] == "row":
                yield Forgery("a reference copy", {copy.name: forged_base(_bytes(store, copy), schema, "n")})


def _forged_segment(store: Store, objects: list[StoredObject]) -> Forgery:
    """The segment of a checkpoint, which lies in one object, or in three."""
    by_name = {o.name: _bytes(store, o) for o in objects}
    if len(by_name) == 1:
        [(name, data)] = by_name.items()
        return Forgery("a packed segment", {name: forged_segment(data, "n")})
    names = {section: name for section in Section for name in by_name if name.endswith(f".{section}")}
    forged = Segment.unpack(forged_segment(b"".join(by_name[n] for n in names.values()), "n"))
    return Forgery("a segment's sections", {name: bytes(forged.sections[s]) for s, name in names.items()})


@contextmanager
def in_place(store: Store, forged: dict[str, bytes], sizes: dict[str, int]) -> Iterator[None]:
    """Forged objects are there, for a while."""
    before = {name: store.read_range(name, 0, sizes[name]).to_pybytes() for name in forged}
    for name, data in forged.items():
        replace_object(store, name, data)
    yield
    for name, data in before.items():
        replace_object(store, name, data)


def test_every_checksum_that_leads_from_the_catalog_to_a_byte_is_cryptographic(stored: Stored) -> None:
    catalog, store = stored.place.catalog, stored.place.warehouse.store
    found = [o.checksum for o in catalog.objects.list(NAME)] + [o.checksum for o in stored.snapshot]
    for manifest in [read_manifest(store, m) for m in stored.place.catalog.chains.list_manifests(NAME, LAST)]:
        found += [part.checksum for part in (*manifest.objects, *manifest.handles)]
        ranges = {o.name: o.ranges for o in manifest.objects if o.ranges is not None}
        assert ranges.keys() == {
            h.object for h in manifest.handles if h.form is Form.BASE and h.object.endswith("parquet")
        }
        for of in ranges.values():
            assert of.algorithm == "sha-256" and len(of.checksums) % 64 == 0 < len(of.checksums)
    assert found and all(checksum.startswith("sha-256:") and len(checksum) == 72 for checksum in found)


@pytest.mark.parametrize("at", [1, LAST])
def test_every_reader_refuses_what_it_reads_of_forged_objects(stored: Stored, at: int, tmp_path: Path) -> None:
    store, refused = stored.place.warehouse.store, set()
    planned = readers(stored, at, tmp_path / "out")
    expected, reads_of = {}, {}
    for what, reader in planned.items():
        with counted_reads() as reads:
            expected[what] = reader()
        reads_of[what] = reads.names
    for forgery in list(forgeries(stored, at)):
        for name, data in forgery.objects.items():
            with in_place(store, {name: data}, {name: len(data)}):
                for what, reader in planned.items():
                    try:
                        assert reader() == expected[what], f"{what} believes {forgery.what}"
                    except CorruptObject as error:
                        assert name in str(error) and "was altered" in str(error), error
                        refused.add(what)
                    else:
                        whole = forgery.what in ("all of a base", "opaque values", "a reference copy")
                        assert not (whole and name in reads_of[what]), f"{what} read {name} and did not refuse it"
    assert refused == set(planned)


def test_a_materialization_takes_no_forged_input(stored: Stored) -> None:
    place, store = stored.place, stored.place.warehouse.store
    for n, forgery in enumerate(forgeries(stored, LAST)):
        if forgery.what == "a reference copy":
            continue
        sizes = {name: len(data) for name, data in forgery.objects.items()}
        with in_place(store, forgery.objects, sizes), pytest.raises(CorruptObject, match="was altered"):
            materialize(place, NAME, "tiny", LAST, id=f"forged-{n}", parallelism=1, run=in_order)
    assert [m.id for m in place.catalog.materializations.list(NAME) if m.manifest] == ["m"]


@pytest.mark.slow
def test_no_forged_and_no_older_manifest_is_believed(stored: Stored) -> None:
    """The older ones are genuine, and of the same stream."""
    place, store = stored.place, stored.place.warehouse.store
    catalog = place.catalog
    manifests = {c.id: c.manifest for c in catalog.checkpoints.list(NAME)}
    manifests[0] = next(m.manifest for m in catalog.materializations.list(NAME) if m.manifest)
    whole = {id: _bytes(store, found) for id, found in manifests.items()}
    for id, found in manifests.items():
        forged = forged_manifest(whole[id], decode_manifest(whole[id]))
        assert decode_manifest(forged).digest != decode_manifest(whole[id]).digest
        for data in (forged, *(other for n, other in whole.items() if n != id)):
            with in_place(store, {found.name: data}, {found.name: found.bytes}):
                with pytest.raises(CorruptObject, match=found.name):
                    read_manifest(store, found)
                with pytest.raises(CorruptObject, match=found.name):
                    stored.manifests(LAST if id in (0, LAST) else id)
                at = LAST if id == 0 else id
                [failure] = failures(place, NAME, [at])
                assert failure.object == found.name
                if id:
                    with pytest.raises(CorruptObject, match=found.name):
                        restore_points(place, STREAM, id)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[OpenWarehouse]:
    """A warehouse with four checkpoints, whose outputs no sink has taken yet."""
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = RegionRun(place, SMALL, POLICY)
        for rows in purchases()[:4]:
            run.step(rows)
        run.region.close("done")
        yield place


@pytest.mark.slow
def test_forged_staged_rows_reach_no_sink(small: OpenWarehouse) -> None:
    store, taken = small.warehouse.store, []
    outputs = small.catalog.outbox.list(SMALL.name, outstanding=True)
    [stored] = outputs[-1].objects
    forged = forged_output(_bytes(store, stored), "sequence")
    replace_object(store, stored.name, forged)
    with pytest.raises(CorruptObject, match=stored.name):
        check_output(store, outputs[-1])
    run = RegionRun(small, SMALL, POLICY)

    def give(output: OutputRecord) -> None:
        for staged in output.objects:
            list(read_output(store, staged))
            taken.append(staged)

    for checked in (False, True):
        with pytest.raises(CorruptObject, match=stored.name):
            run.region.outbox.deliver(run.region.completed, dict.fromkeys(SMALL.sinks, give), checked=checked)
    assert stored not in taken


@pytest.mark.slow
def test_recovery_takes_a_forged_manifest_for_damage(small: OpenWarehouse) -> None:
    store, catalog = small.warehouse.store, small.catalog
    records = {c.id: c for c in catalog.checkpoints.list(SMALL.name)}
    newest = records[4].manifest
    data = _bytes(store, newest)
    replace_object(store, newest.name, forged_manifest(data, decode_manifest(data)))
    assert [failure.checkpoint for failure in failures(small, SMALL.name)] == [4]
    done = recover(small, SMALL.name, run=in_order)
    assert done.checkpoint == 3 and catalog.checkpoints.last_id(SMALL.name) == 3
    run = RegionRun(small, SMALL, POLICY)
    for rows in purchases()[3:5]:
        run.step(rows)
    assert {c.id: c.digest for c in catalog.checkpoints.list(SMALL.name)}[4] == records[4].digest
    assert not failures(small, SMALL.name)


def test_a_manifest_is_not_believed_against_the_catalog_even_where_its_checksum_can_be_forged(
    small: OpenWarehouse,
) -> None:
    """Of xxh3-128, which a warehouse may choose, anybody finds a second preimage."""
    store, catalog = small.warehouse.store, small.catalog
    older, newest = (catalog.checkpoints.get(SMALL.name, id).manifest for id in (3, 4))
    whole = _bytes(store, newest)
    digests = forged_manifest(whole, decode_manifest(whole))
    for data, why in ((_bytes(store, older), "it is the manifest of checkpoint 3"), (digests, "its digest is")):
        replace_object(store, newest.name, data)
        weak = replace(newest, bytes=len(data), checksum=checksum_of(data, "xxh3-128"))
        store.read(weak)
        with pytest.raises(CorruptObject, match=f"{newest.name} was altered: {why}"):
            read_manifest(store, weak)


@pytest.mark.slow
def test_what_has_weaker_checksums_is_continued_with_stronger_ones(tmp_path: Path) -> None:
    url = str(tmp_path / "w")
    with OpenWarehouse.open_writable(f"{url}?checksums=xxh3-128") as place:
        run = RegionRun(place, SMALL, POLICY)
        for rows in purchases()[:3]:
            run.step(rows)
        run.region.close("done")
        recorded = {o.name: o.checksum for o in place.catalog.objects.list(SMALL.name)}
    assert recorded and all(checksum.startswith("xxh3-128:") for checksum in recorded.values())
    with OpenWarehouse.open_writable(url) as place:
        assert not failures(place, SMALL.name)
        run = RegionRun(place, SMALL, POLICY)
        run.step(purchases()[3])
        materialize(place, SMALL.name, "accounts", 4, id="m", parallelism=1, run=in_order)
        assert not failures(place, SMALL.name)
        added = {o.name: o.checksum for o in place.catalog.objects.list(SMALL.name) if o.name not in recorded}
        assert added and all(checksum.startswith("sha-256:") for checksum in added.values())


@pytest.mark.parametrize("whole", [True, False])
def test_bytes_that_were_verified_do_not_change_with_their_file(tmp_path: Path, whole: bool) -> None:
    """They were mapped: what was altered once verified was decoded, and a file that was cut killed the process."""
    store = FilesystemStore(tmp_path)
    stored = store.put("s/1/a", bytes(1 << 20))
    data = store.read(stored) if whole else store.read_range(stored.name, 0, stored.bytes)
    with open(tmp_path / stored.name, "r+b") as file:
        file.write(b"forged")
        file.flush()
        assert data.slice(0, 6).to_pybytes() == bytes(6)
        file.truncate(0)
    assert data.to_pybytes() == bytes(1 << 20)


def test_a_pipe_in_the_place_of_an_object_is_not_waited_for(tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path)
    stored = store.put("s/1/a", b"data")
    (tmp_path / stored.name).unlink()
    os.mkfifo(tmp_path / stored.name)
    with pytest.raises(CorruptObject, match="s/1/a"):
        store.read(stored)
