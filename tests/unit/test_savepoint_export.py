"""Exports and imports of savepoints: killed at any moment, refused for good reasons, moved to other names."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from siltstone.catalog.extract_coding import seal_values, unseal
from siltstone.catalog.extract_writer import read_newest_extract
from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commit_details import pack_parts, unpack_parts
from siltstone.catalog.records.outbox import OutboxRecords
from siltstone.catalog.records.steps import with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.export_savepoint import export_savepoint
from siltstone.change.exported import encode_exported
from siltstone.change.import_savepoint import IMPORTED, _sources_below, import_savepoint, prove_export
from siltstone.change.rebuild import rebuild_catalog
from siltstone.errors import CorruptObject, Fenced, Unreachable, UsageError, WrongWarehouse
from siltstone.format.manifest import Manifest, encode_manifest
from siltstone.format.manifests import read_manifests
from siltstone.retention.savepoints import set_savepoint
from siltstone.retention.sweep import sweep
from siltstone.run.take_over import take_over
from siltstone.state.hashing import key_groups, xxhash64
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.open import Warehouse, open_store
from siltstone.store.paths import EXPORT, extract_prefix, is_base
from tests.examples import few_examples
from tests.failover import losing_what_follows
from tests.killed_child import killed_at
from tests.orphans import check_whole, filesystem
from tests.proofs import failures, in_order, restored_digest
from tests.region_run import RegionRun, clock_of
from tests.savepoint_cases import AT, SAVED, write_saved
from tests.sums import NAME, POLICY, STREAM, Counted, rows, stream_of

Changed = Callable[[dict[str, Any]], dict[str, Any]]
FEW = settings(
    max_examples=few_examples(30),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with a full savepoint, and its export."""
    root = tmp_path_factory.mktemp("saved")
    with filesystem(root) as place:
        write_saved(place)
        export_savepoint(place, NAME, SAVED, str(root / "export"))
    return root


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    """An empty warehouse."""
    with filesystem(tmp_path) as place:
        yield place


def export_again(root: Path, to: Path) -> None:
    with OpenWarehouse.open_existing(str(root / "w")) as source:
        export_savepoint(source, NAME, SAVED, str(to))


def objects_in(url: Path) -> dict[str, bytes]:
    store = open_store(str(url))
    return {name: store.read_range(name, 0, size).to_pybytes() for name, size in store.list("")}


@pytest.fixture(scope="module")
def moments(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int]:
    """How many moments an export and an import have."""
    root = tmp_path_factory.mktemp("moments")
    exports = killed_at(lambda: export_again(saved, root / "export"), 0)
    filesystem(root).catalog.close()
    return exports, killed_at(lambda: import_again(saved, root), 0)


def import_again(saved: Path, root: Path) -> None:
    with OpenWarehouse.open_existing(str(root / "w")) as target:
        import_savepoint(target, prove_export(str(saved / "export")))


@pytest.mark.slow
@FEW
@given(data=st.data())
def test_an_export_that_was_killed_is_none_and_is_repeated(
    saved: Path, moments: tuple[int, int], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    to = tmp_path_factory.mktemp("export") / "x"
    # Threads share the work, so another run may have a moment less.
    assume(killed_at(lambda: export_again(saved, to), data.draw(st.integers(1, moments[0]))) < 0)
    there, whole = objects_in(to), objects_in(saved / "export")
    assert there.items() <= whole.items(), "what it has copied is whole"
    if EXPORT not in there:
        with pytest.raises(UsageError, match="repeat an export that did not finish"):
            prove_export(str(to))
    export_again(saved, to)
    assert objects_in(to) == whole and prove_export(str(to)).rows == 100


@pytest.mark.slow
@FEW
@given(data=st.data())
def test_an_import_that_was_killed_has_no_checkpoint_and_is_repeated(
    saved: Path, moments: tuple[int, int], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("import")
    filesystem(root).catalog.close()
    assume(killed_at(lambda: import_again(saved, root), data.draw(st.integers(1, moments[1]))) < 0)
    with filesystem(root) as place:
        extract = read_newest_extract(place.warehouse.store, NAME)
        if extract is None or not extract.newest:
            import_again(saved, root)
        else:
            with pytest.raises(UsageError, match="exists here already"):
                import_again(saved, root)
        assert place.catalog.checkpoints.get(NAME, 1).digest == restored_digest(place, NAME, 1)
        assert [(s.name, s.checkpoint) for s in place.catalog.savepoints.list(NAME)] == [(SAVED, 1)]
        run = RegionRun(place, STREAM, POLICY)
        assert run.step(rows(5)) and not failures(place, NAME)
        sweep(place, NAME)
        check_whole(place)


@pytest.mark.parametrize("committed", [True, False])
def test_nobody_follows_the_manifest_of_an_import_that_was_killed(
    saved: Path, place: OpenWarehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """Seen: a run, or a rebuild of the catalog, went on from it without its beginning, sink ids and savepoint."""
    from siltstone.catalog.records.imports import Imports
    from siltstone.catalog.records.runs import Runs

    add = Imports.add

    def killed(*given: Any, **named: Any) -> None:
        if committed and named == {} and isinstance(given[0], Imports):
            add(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Imports, "add", killed)
        patch.setattr(Runs, "end", killed)
        import_savepoint(place, prove_export(str(saved / "export")))
    if committed:
        url = f"sqlite:///{tmp_path / 'rebuilt.db'}"
        rebuild_catalog(place.warehouse, url)
        place = OpenWarehouse(place.warehouse, open_catalog(url, create=False))
    else:
        take_over(place, NAME, "a run")
    assert place.catalog.checkpoints.last_id(NAME) == 0
    assert import_savepoint(place, prove_export(str(saved / "export"))).checkpoint == 1
    assert [s.name for s in place.catalog.savepoints.list(NAME)] == [SAVED] and not failures(place, NAME)
    place.catalog.close()


def test_an_import_succeeds_only_with_its_extract(
    saved: Path, place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: it succeeded although the store had failed, and was lost whole when the database then failed over."""
    proven, put = prove_export(str(saved / "export")), FilesystemStore.put

    def away(self: FilesystemStore, name: str, data: Any) -> Any:
        if name.startswith(extract_prefix(NAME)) and place.catalog.checkpoints.last_id(NAME):
            raise Unreachable("the store is away")
        return put(self, name, data)

    with losing_what_follows(place):
        with monkeypatch.context() as patch, pytest.raises(Unreachable, match="the store is away"):
            patch.setattr(FilesystemStore, "put", away)
            import_savepoint(place, proven)
        begun = [run.epoch for run in place.catalog.runs.list(NAME)]
        made = import_savepoint(place, proven)
        assert (made.checkpoint, made.bytes) == (1, place.catalog.checkpoints.get(NAME, 1).bytes)
        assert [run.epoch for run in place.catalog.runs.list(NAME)] == begun, "only the extract was missing"
        with pytest.raises(UsageError, match="exists here already"):
            import_savepoint(place, proven)
    assert place.catalog.streams.list() == []
    run = RegionRun(place, STREAM, POLICY)
    assert run.region.completed == 1 and [s.name for s in place.catalog.savepoints.list(NAME)] == [SAVED]
    assert run.step(rows(5)) and not failures(place, NAME)


def test_an_import_whose_database_fails_over_does_not_succeed(
    saved: Path, place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    from siltstone.catalog.records.imports import Imports

    proven, add = prove_export(str(saved / "export")), Imports.add

    def fails_over(*given: Any) -> None:
        with losing_what_follows(place):
            add(*given)

    with monkeypatch.context() as patch, pytest.raises(Unreachable, match="has lost the import"):
        patch.setattr(Imports, "add", fails_over)
        import_savepoint(place, proven)
    assert import_savepoint(place, proven).checkpoint == 1 and not failures(place, NAME)


def test_an_import_that_wakes_up_late_commits_nothing(
    saved: Path, place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another import has taken the stream over when the first is about to commit."""
    from siltstone.catalog.records.imports import Imports

    proven, add = prove_export(str(saved / "export")), Imports.add

    def wake_up_late(*args: object) -> None:
        monkeypatch.setattr(Imports, "add", add)
        import_savepoint(place, proven)
        add(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Imports, "add", wake_up_late)
    with pytest.raises(Fenced):
        import_savepoint(place, proven)
    assert [run.outcome for run in place.catalog.runs.list(NAME)] == ["superseded by epoch 2", IMPORTED]
    assert restored_digest(place, NAME, 1) == proven.manifest.digest
    sweep(place, NAME)
    check_whole(place)


def test_an_imported_stream_survives_the_loss_of_its_catalog(saved: Path, tmp_path: Path) -> None:
    with filesystem(tmp_path) as place:
        import_savepoint(place, prove_export(str(saved / "export")))
        record = place.catalog.streams.get(NAME)
    (tmp_path / "w" / "catalog.db").unlink()
    warehouse = Warehouse.at(str(tmp_path / "w"))
    rebuild_catalog(warehouse, warehouse.catalog_url)
    with filesystem(tmp_path) as place:
        again = place.catalog.streams.get(NAME)
        assert (again.sink_offset, again.definition) == (record.sink_offset, record.definition)
        assert [s.name for s in place.catalog.savepoints.list(NAME)] == [SAVED]
        run = RegionRun(place, STREAM, POLICY)
        assert run.region.input_position().next_batch == AT
        assert place.catalog.input_log.get_clock(NAME, 1) == clock_of(AT)
        assert run.step(rows(5)) and not failures(place, NAME)


def test_a_savepoint_is_imported_under_another_name(saved: Path) -> None:
    """Also beside the stream that it is of; what is there is never touched."""
    proven = prove_export(str(saved / "export"))
    with OpenWarehouse.open_existing(str(saved / "w")) as place:
        before = place.catalog.checkpoints.list(NAME)
        with pytest.raises(UsageError, match="exists here already: import the savepoint under another name"):
            import_savepoint(place, proven)
        for bad in ("../x", "Sums", ""):
            with pytest.raises(UsageError, match="is not a stream name"):
                import_savepoint(place, proven, bad)
        made = import_savepoint(place, proven, "moved")
        run = RegionRun(place, replace(STREAM, name="moved"), POLICY)
        done = run.step(rows(5))
        assert done and done.digest == place.catalog.checkpoints.get(NAME, 5).digest
        assert (made.stream, made.exported_stream) == ("moved", NAME)
        assert not failures(place, NAME) and not failures(place, "moved")
        assert place.catalog.checkpoints.list(NAME) == before


def test_an_unknown_stream_in_the_store_is_not_taken_over(saved: Path, place: OpenWarehouse) -> None:
    place.warehouse.store.put(f"{NAME}/00000001/000000000001/manifest.arrow", b"of a lost catalog")
    with pytest.raises(WrongWarehouse, match="does not know"):
        import_savepoint(place, prove_export(str(saved / "export")))
    assert not place.catalog.streams.list()


def test_what_cannot_be_exported_is_refused(place: OpenWarehouse, tmp_path: Path) -> None:
    write_saved(place)
    to = str(tmp_path / "export")
    for name in ("nosuch", "../x"):
        with pytest.raises(UsageError, match=name):
            export_savepoint(place, NAME, name, to)
    set_savepoint(place.catalog, NAME, "thin", at="3")
    with pytest.raises(UsageError, match=r"still reads deltas of by_key: .*siltstone materialize sums --at 3"):
        export_savepoint(place, NAME, "thin", to)
    assert not Path(to).exists(), "nothing was written"
    with pytest.raises(UsageError, match=r"holds something else than this savepoint: it holds .*; name an empty place"):
        export_savepoint(place, NAME, SAVED, place.warehouse.store_url)
    export_savepoint(place, NAME, SAVED, to)
    materialize(place, NAME, "by_key", 5, id="m5", parallelism=2, run=in_order)
    set_savepoint(place.catalog, NAME, "later", at="5")
    with pytest.raises(UsageError, match="holds something else than this savepoint"):
        export_savepoint(place, NAME, "later", to)


def test_outputs_that_sinks_lack_are_delivered_first(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting:
        checkpoint, name = AT, "by_key"

    monkeypatch.setattr(OutboxRecords, "list", lambda *_, **__: [Waiting()])
    refused = pytest.raises(UsageError, match=f"output by_key of checkpoint {AT} has not reached its sink; run")
    with OpenWarehouse.open_existing(str(saved / "w")) as place, refused:
        export_savepoint(place, NAME, SAVED, str(tmp_path / "x"))


@pytest.mark.parametrize("opaque_at", [2, 5])
def test_opaque_variables_and_several_operators_travel(tmp_path: Path, opaque_at: int) -> None:
    """Values that earlier checkpoints hold whole are taken along as they are."""
    stream = stream_of(Counted(name="by_key"), Counted(name="others"), max_parallelism=8)
    shutil.rmtree(tmp_path, ignore_errors=True)
    tmp_path.mkdir()
    with filesystem(tmp_path) as place:
        run = RegionRun(place, stream, POLICY, parallelism=2)
        for n in range(1, opaque_at + 1):
            run.step(rows(n, keys=40, changed=3))
        for name in ("by_key", "others"):
            materialize(place, NAME, name, opaque_at, id=f"m-{name}", parallelism=3, run=in_order)
        set_savepoint(place.catalog, NAME, SAVED)
        export_savepoint(place, NAME, SAVED, str(tmp_path / "export"))
        import_savepoint(place, prove_export(str(tmp_path / "export")), "copy")
        digest = place.catalog.checkpoints.get(NAME, opaque_at).digest
        assert restored_digest(place, "copy", 1) == digest
        there = RegionRun(place, replace(stream, name="copy"), POLICY, parallelism=3)
        ours, theirs = (each.step(rows(9, keys=40)) for each in (run, there))
        assert ours and theirs and ours.digest == theirs.digest and not failures(place, "copy")


def test_bases_of_several_checkpoints_whose_names_are_alike_travel(tmp_path: Path) -> None:
    """Seen by reading: a subtask of each wrote one, of other key groups, since the parallelism changed between them."""
    whole = policy_by_name("adjust-d", PolicyOptions(d0=0))
    key_group = key_groups(xxhash64([pa.array(range(100))]), STREAM.max_parallelism)
    second = np.flatnonzero(key_group == 1)  # with a subtask per key group that of subtask 1, which had 2 and 3 before
    with filesystem(tmp_path) as place:
        RegionRun(place, STREAM, whole, parallelism=2).step(rows(1))
        run = RegionRun(place, STREAM, whole, parallelism=4)
        run.step(pa.table({"k": second, "n": np.full(len(second), 2)}))
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, 2))
        files = [o.name.rpartition("/")[2] for manifest in manifests.values() for o in manifest.objects]
        assert len({file for file in files if is_base(file)}) < sum(map(is_base, files))
        set_savepoint(place.catalog, NAME, SAVED)
        export_savepoint(place, NAME, SAVED, str(tmp_path / "export"))
        export_savepoint(place, NAME, SAVED, str(tmp_path / "export"))
        import_savepoint(place, prove_export(str(tmp_path / "export")), "copy")
        assert restored_digest(place, "copy", 1) == place.catalog.checkpoints.get(NAME, 2).digest
        there = RegionRun(place, replace(STREAM, name="copy"), POLICY, parallelism=3)
        ours, theirs = (each.step(rows(9)) for each in (run, there))
        assert ours and theirs and ours.digest == theirs.digest and not failures(place, "copy")


def test_files_below_the_old_streams_directory_are_those_below_the_new_ones() -> None:
    entry = 'v1\\n{\\"path\\":\\"file://{warehouse}/source/flights/a.parquet\\",\\"timestamp\\":1,\\"batchId\\":0}'
    outside = entry.replace("{warehouse}/", "/data/")
    for text, moved in ((entry, entry.replace("/flights/", "/copy/")), (outside, outside)):
        assert _sources_below(f'{{"0": {{"0": "{text}"}}}}', "flights", "copy") == f'{{"0": {{"0": "{moved}"}}}}'


@pytest.mark.parametrize(
    "name", ["sums/00000001/000000000002/x.segment", "other/00000001/000000000001/x.segment", "_warehouse/identity"]
)
def test_a_manifest_that_names_other_objects_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    """Whoever can write to an export can give it any checksums."""
    proven = prove_export(str(saved / "export"))
    [first, *others] = proven.manifest.objects
    handles = [replace(each, object=name) if each.object == first.name else each for each in proven.manifest.handles]
    forged = encode_manifest(replace(proven.manifest, objects=[replace(first, name=name), *others], handles=handles))
    store, stored = open_store(str(tmp_path / "forged")), proven.exported.manifest
    manifest = store.put(stored.name, forged)
    store.put(EXPORT, encode_exported(replace(proven.exported, manifest=manifest)))
    with pytest.raises(CorruptObject, match="it names an object"):
        prove_export(str(tmp_path / "forged"))


def forge(
    saved: Path, to: Path, details: Changed = dict, manifest: Callable[[Manifest], Any] = vars, last: Changed = dict
) -> str:
    """An export, altered and given the checksums that it needs, as anyone can make it; return its URL."""
    shutil.copytree(saved / "export", to)
    store, proven = open_store(str(to)), prove_export(str(saved / "export"))
    store.delete([proven.exported.manifest.name, EXPORT])
    said = json.loads(unpack_parts(proven.manifest.commit))
    whole = replace(proven.manifest, commit=pack_parts(json.dumps(details(said))))
    forged = Manifest(**{**vars(whole), **manifest(whole)})
    stored = store.put(proven.exported.manifest.name, encode_manifest(forged))
    exported = replace(proven.exported, manifest=stored, digest=forged.digest)
    store.put(EXPORT, seal_values(last(dict(unseal(encode_exported(exported), "it")))))
    return str(to)


def _step(number: int, sources: str = "{}") -> dict[str, Any]:
    return {"steps": [[number, 1, "", 0, "", sources]], "options": [""]}


def _other(said: dict[str, Any], key: object) -> dict[str, Any]:
    """The definition, with another key of the operator."""
    [(name, operator)] = said["definition"]["operators"].items()
    return {**said["definition"], "operators": {name: {**operator, "key": key}}}


DETAILS: dict[str, Changed] = {
    "a definition of no operators": lambda said: said | {"definition": {"operators": 7, "options": {}}},
    "a definition without options": lambda said: said | {"definition": {"operators": {}}},
    "no definition": lambda said: said | {"definition": None},
    "a definition of other operators": lambda said: said | {"definition": {"operators": {}, "options": {}}},
    "a definition with another key": lambda said: said | {"definition": _other(said, [["k", "string"]])},
    "a definition without a key": lambda said: said | {"definition": _other(said, None)},
    "a missing field": lambda said: {key: value for key, value in said.items() if key != "repeats"},
    "a step as high as numbers go": lambda said: said | _step(2**63 - 1),
    "a step above the newest": lambda said: said | _step(AT + 1),
    "the beginning among the steps": lambda said: said | _step(0),
    "a damaged log of a source": lambda said: said | _step(AT, '{"0": 7}'),
    "a file without a path": lambda said: said | _step(AT, r'{"0": {"0": "v1\\n{\\"batchId\\":0}"}}'),
}
MANIFEST: dict[str, Callable[[Manifest], dict[str, Any]]] = {
    "a step as high as numbers go": lambda m: {"step": 2**63 - 1},
    "statistics without rows": lambda m: {"statistics": {}},
    "a policy that counts by halves": lambda m: {"chains": {"by_key": {"totals": {"first": 1, "deltas": 0.5}}}},
    "an object that it does not list": lambda m: {"objects": m.objects[1:]},
    "another checksum of a whole object": lambda m: {
        "objects": [replace(m.objects[0], checksum="sha-256:" + "0" * 64), *m.objects[1:]]
    },
}
LAST: dict[str, Changed] = {
    "a checkpoint as high as numbers go": lambda said: said | {"checkpoint": 2**63 - 1},
    "an offset as high as numbers go": lambda said: said | {"sink_offset": 2**63 - 1},
    "another kind of sink": lambda said: said | {"default_sink": "elsewhere"},
    "a beginning that is a step": lambda said: said | {"beginning": _step(1)},
    "a missing field": lambda said: {key: value for key, value in said.items() if key != "savepoint"},
}
FORGED = [
    *(pytest.param({"details": change}, id=f"details: {what}") for what, change in DETAILS.items()),
    *(pytest.param({"manifest": change}, id=f"manifest: {what}") for what, change in MANIFEST.items()),
    *(pytest.param({"last": change}, id=f"last: {what}") for what, change in LAST.items()),
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_export_is_refused_and_leaves_no_stream(
    saved: Path, place: OpenWarehouse, tmp_path: Path, forged: dict[str, Any]
) -> None:
    with pytest.raises(CorruptObject, match=r"(manifest\.arrow|_savepoint/export|sums/0)"):
        import_savepoint(place, prove_export(forge(saved, tmp_path / "forged", **forged)))
    assert place.catalog.streams.list() == [] and list(place.warehouse.store.list(NAME)) == []


def test_an_export_brings_no_outputs_edits_or_parallelism(saved: Path, place: OpenWarehouse, tmp_path: Path) -> None:
    """A delivered output's objects are deleted, so a forged one could name any object of the warehouse."""
    output = ["by_key", "", 1, [["other/00000001/000000000001/x.base.parquet", 9, "xxh3-128:" + "0" * 32]]]
    url = forge(
        saved, tmp_path / "forged", lambda said: said | {"outputs": [output], "parallelism": 7, "dropped": ["x"]}
    )
    import_savepoint(place, prove_export(url))
    catalog = place.catalog
    assert catalog.outbox.list(NAME) == [] and catalog.streams.get(NAME).parallelism is None
    assert [record.dropped for record in catalog.definitions.list(NAME)] == [()]
    assert RegionRun(place, STREAM, POLICY).step(rows(5)) and not failures(place, NAME)


def test_a_stream_that_has_read_nothing_takes_its_clock_along(tmp_path: Path) -> None:
    with filesystem(tmp_path) as place:
        run = RegionRun(place, STREAM, POLICY)
        for _ in range(2):
            run.step_without_rows()
        run.region.close("done")
        materialize(place, NAME, "by_key", 2, id="all", parallelism=1, run=in_order)
        set_savepoint(place.catalog, NAME, SAVED, at="2")
        export_savepoint(place, NAME, SAVED, str(tmp_path / "export"))
        import_savepoint(place, prove_export(str(tmp_path / "export")), "copy")
        assert place.catalog.input_log.get_clock("copy", 1) == clock_of(2)
        there = RegionRun(place, replace(STREAM, name="copy"), POLICY)
        assert there.region.input_position().next_batch == 0
        assert there.step(rows(1)) and not failures(place, "copy")


def test_an_import_that_is_rolled_back_to_nothing_takes_its_steps_again(tmp_path: Path) -> None:
    """Steps without rows between the two newest batches are among them: numbers have no gaps."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with filesystem(tmp_path / "one") as source:
        run = RegionRun(source, STREAM, POLICY)
        for n in (1, 2):
            run.step(rows(n), ends=False)
            run.step_without_rows()
        digest = run.region.digest
        run.region.close("done")
        materialize(source, NAME, "by_key", 2, id="all", parallelism=1, run=in_order)
        set_savepoint(source.catalog, NAME, SAVED, at="2")
        export_savepoint(source, NAME, SAVED, str(tmp_path / "export"))
    with filesystem(tmp_path / "two") as place:
        import_savepoint(place, prove_export(str(tmp_path / "export")))
        epoch = place.catalog.runs.begin(NAME, "a test")
        place.catalog.rollbacks.roll_back(NAME, epoch, 0, "a test", "a test")
        again = RegionRun(place, STREAM, POLICY)
        for step, ends in with_ends(again.region.logged_steps()):
            if step.batch_id is None:
                again.step_without_rows(step.kind, ends=ends)
            else:
                again.step(rows(step.batch + 1), ends=ends)
        assert again.region.digest == digest
