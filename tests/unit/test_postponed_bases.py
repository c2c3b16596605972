"""Bases that end chains are left to materializations: no step stops for one, and the bounds hold as before."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.due import chain_facts
from siltstone.chains.materialization_rules import MaterializationOptions
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.export_savepoint import export_savepoint
from siltstone.change.import_savepoint import prove_export
from siltstone.change.recover import recover
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import CorruptObject
from siltstone.format.manifests import read_manifest
from siltstone.model import Form
from siltstone.operator import Operator
from siltstone.retention.savepoints import set_savepoint
from siltstone.run.manifests import RunManifests
from siltstone.run.region import ConsistentRegion
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import is_materialization_manifest
from tests.proofs import check_restores, in_order
from tests.region_run import RegionRun
from tests.sums import NAME, Sums, rows, stream_of
from tests.unit.test_table_forms import Busy, Data, Static

pytestmark = pytest.mark.slow

OPTIONS = PolicyOptions(restore_weight=2.0)
POLICY = policy_by_name("marginal-cost", OPTIONS)
STEPS = 30


def run_of(place: OpenWarehouse, operator: Operator, policy=POLICY, *, postpones: bool = True, **given) -> RegionRun:
    return RegionRun(place, stream_of(operator, max_parallelism=16), policy, postpones_bases=postpones, **given)


def background(place: OpenWarehouse, run: RegionRun) -> Background:
    options = BackgroundOptions(MaterializationOptions(interval_s=0), OPTIONS)
    hooks = {"postponed": run.region.chains.find_postponed, "made": run.region.manifests.add}
    return Background(place, NAME, run.region.epoch, options, in_order, **hooks)


def bases(place: OpenWarehouse) -> list[int]:
    """The checkpoints in which a step has written a base."""
    return [c.id for c in place.catalog.checkpoints.list(NAME) if Form.BASE in c.forms.values()]


def check(place: OpenWarehouse) -> None:
    check_restores(place, NAME, (3,))


@pytest.mark.parametrize("max_pending", [0, 2])
def test_no_step_writes_a_base_after_the_first(tmp_path: Path, max_pending: int) -> None:
    with OpenWarehouse.open_writable(str(tmp_path / "steps")) as place:
        run = run_of(place, Busy(), postpones=False)
        for n in range(1, STEPS):
            run.step(rows(n, keys=5000, changed=200))
        expected, often = run.region.digest, bases(place)
    assert len(often) > 3
    with OpenWarehouse.open_writable(str(tmp_path / "beside")) as place:
        run = run_of(place, Busy(), max_pending=max_pending)
        worker = background(place, run)
        for n in range(1, STEPS):
            run.step(rows(n, keys=5000, changed=200))
            while len(run.region.protocol.pending) > max(0, max_pending - 1):
                run.complete_oldest()
            if run.region.completed and n % 2:
                assert worker.look()
        run.complete_pending()
        made = [m.checkpoint for m in place.catalog.materializations.list(NAME)]
        assert bases(place) == [1] and len(often) - 2 <= len(made) <= len(often) + 1
        assert run.region.digest == expected
        check(place)


@pytest.mark.parametrize("max_pending", [0, 2])
def test_between_two_steps_nothing_waits_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_pending: int
) -> None:
    """Neither to begin a step, nor to commit, nor to take over the bases that the background has made.

    On the thread of the steps: a hedged upload of an earlier one may still be on its way on another.
    """
    asked, between = list[str](), set[int]()

    def watch(store: type, name: str) -> None:
        method = getattr(store, name)

        def watched(*arguments: Any, **given: Any) -> Any:
            asked.extend([name] * (threading.get_ident() in between))
            return method(*arguments, **given)

        monkeypatch.setattr(store, name, watched)

    def mark(name: str) -> None:
        method = getattr(ConsistentRegion, name)

        def marked(*arguments: Any, **given: Any) -> Any:
            between.add(threading.get_ident())
            try:
                return method(*arguments, **given)
            finally:
                between.clear()

        monkeypatch.setattr(ConsistentRegion, name, marked)

    for name in ("read", "read_range", "put", "create", "delete", "list", "modified_at"):
        watch(FilesystemStore, name)
    for name in ("begin_step", "commit"):
        mark(name)
    taken_over = set[str]()
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        run = run_of(place, Busy(), max_pending=max_pending, upload=UploadOptions(inline_bytes=0))
        worker = background(place, run)
        for n in range(1, STEPS):
            run.step(rows(n, keys=5000, changed=200))
            if run.region.completed and n % 3 == 0:
                assert worker.look()
            manifests = [stored.name for stored in run.region.chains.manifests]
            taken_over |= set(filter(is_materialization_manifest, manifests))
        run.complete_pending()
        assert len(taken_over) > 1 and not asked
        check(place)


def test_of_manifests_that_are_never_taken_over_few_are_kept(place: OpenWarehouse) -> None:
    """A base that a step writes may overtake a materialization, which then begins no chain."""
    run = run_of(place, Busy())
    for n in range(1, 4):
        run.step(rows(n, keys=500, changed=200))
    consolidate(place, 2, "m")
    [made] = place.catalog.materializations.list(NAME)
    assert made.manifest is not None
    read = RunManifests(NAME, place.warehouse.store)
    manifest = read.read(made.manifest)
    for n in range(100):
        read.add(replace(made.manifest, name=f"{made.manifest.name}.{n}"), manifest)
    place.warehouse.store.delete([made.manifest.name])
    with pytest.raises(CorruptObject):
        read.read(replace(made.manifest, name=f"{made.manifest.name}.0"))
    assert read.read(replace(made.manifest, name=f"{made.manifest.name}.99")) is manifest
    read.take_over([replace(made.manifest, name=f"{made.manifest.name}.99")])
    with pytest.raises(CorruptObject):
        read.read(replace(made.manifest, name=f"{made.manifest.name}.99"))


def test_a_chain_without_room_gets_its_base_from_the_step(place: OpenWarehouse) -> None:
    policy = policy_by_name("marginal-cost", PolicyOptions(restore_weight=2.0, d_max=12, size_ratio_max=0.3))
    run = run_of(place, Busy(), policy)
    for n in range(1, STEPS):
        run.step(rows(n, keys=5000, changed=200))
        for state in run.region.chains.policies["data"].values():
            assert state.deltas <= 12 and state.deltas_bytes <= 0.3 * state.base_bytes
    assert len(bases(place)) > 1 and "a base is made beside" not in str(run.region.chains.reasons)
    check(place)


def test_the_background_waits_until_the_run_has_noticed_its_last_base(place: OpenWarehouse) -> None:
    run = run_of(place, Busy())
    worker, n = background(place, run), 1
    while run.region.chains.find_postponed("data", None) is None:
        run.step(rows(n, keys=5000, changed=200))
        n += 1
    assert "a base is made beside the stream" in run.region.chains.reasons["data"]
    assert worker.look() and worker.look()
    [made] = place.catalog.materializations.list(NAME)
    assert made.manifest is not None and run.region.chains.find_postponed("data", made.manifest.name) is None
    run.step(rows(n, keys=5000, changed=200))
    assert run.region.chains.find_postponed("data", None) is None and worker.look()
    assert len(place.catalog.materializations.list(NAME)) == 1
    check(place)


def test_a_run_that_notices_a_base_within_an_interval_wants_no_second_one(place: OpenWarehouse) -> None:
    """A checkpoint was completed while the base was made, so the chain has a delta again."""
    run = run_of(place, Busy())
    worker, n = background(place, run), 1
    while run.region.chains.find_postponed("data", None) is None:
        run.step(rows(n, keys=5000, changed=200))
        n += 1
    run.step(rows(n, keys=5000, changed=200))
    consolidate(place, run.region.completed - 1, "m")
    run.step(rows(n + 1, keys=5000, changed=200), ends=False)
    assert worker.look() and [m.id for m in place.catalog.materializations.list(NAME)] == ["m"]
    run.step(rows(n + 2, keys=5000, changed=200), ends=True)
    check(place)


def consolidate(place: OpenWarehouse, checkpoint: int, id: str) -> set[str]:
    """Materialize the operator; the tables whose bases that made."""
    materialize(place, NAME, "data", checkpoint, id=id, parallelism=2, run=in_order)
    [made] = [m for m in place.catalog.materializations.list(NAME) if m.id == id]
    assert made.manifest is not None
    return {handle.variable for handle in read_manifest(place.warehouse.store, made.manifest).handles}


def test_a_materialization_leaves_out_tables_that_are_bases_already(place: OpenWarehouse) -> None:
    run = run_of(place, Static(), postpones=False)
    for n in range(1, 8):
        run.step(rows(n, keys=500, changed=20))
    assert consolidate(place, 4, "m4") == consolidate(place, 6, "m6") == {"busy"}
    check(place)
    # The one at the same checkpoint takes its place, with all that it holds.
    assert consolidate(place, 6, "again") == {"busy"}
    assert consolidate(place, 1, "first") == {"busy", "static"}, "who asks for it where nothing changed gets all"
    assert all(m.outcome == "done" for m in place.catalog.materializations.list(NAME))
    for n in range(8, 11):
        run.step(rows(n, keys=500, changed=20))
    check(place)


def test_a_table_that_is_a_base_at_the_checkpoint_goes_along(place: OpenWarehouse) -> None:
    """Its base would be hidden by those of the materialization, which stand for all tables of the checkpoint."""
    policy = policy_by_name("marginal-cost", PolicyOptions(size_ratio_max=1.5))
    run = run_of(place, Data(), policy, postpones=False)
    for n in range(1, 9):
        run.step(rows(n, changed=100))
    assert "data3" in consolidate(place, 5, "m5") and consolidate(place, 7, "m7") == {"data3", "data4"}
    check(place)
    for n in range(9, 12):
        run.step(rows(n, changed=100))
    check(place)


@pytest.mark.parametrize("damaged", ["m4", "m6"])
def test_of_two_materializations_in_a_chain_the_damaged_one_is_made_again(place: OpenWarehouse, damaged: str) -> None:
    """The later one left out what did not change any more; a chain then begins with both."""
    run = run_of(place, Turns(), policy_by_name("adjust-d", PolicyOptions(d0=50)), postpones=False)
    for n in range(1, 5):
        run.step(rows(n, keys=500, changed=20))
    held = {"m4": consolidate(place, 4, "m4")}
    for n in range(5, 8):
        run.step(rows(n, keys=500, changed=20))
    held["m6"] = consolidate(place, 6, "m6")
    assert held == {"m4": {"busy", "static"}, "m6": {"busy"}}
    assert {m.id for m in place.catalog.materializations.list_in_chain(NAME, 7)} == {"m4", "m6"}
    check(place)
    table = "static" if damaged == "m4" else "busy"
    [*names] = [o.name for o in place.catalog.objects.list(NAME) if f".{damaged}." in o.name and f".{table}." in o.name]
    place.warehouse.store.delete(names)
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.rebuilt) == (7, ("data",))
    check(place)


def test_a_chain_without_deltas_is_not_due_though_others_have_checkpoints(place: OpenWarehouse) -> None:
    """The operator no longer changes; the table that its materialization left out has an older base."""
    stream = stream_of(Still(), Sums(name="by_key"), max_parallelism=16)
    run = RegionRun(place, stream, policy_by_name("adjust-d", PolicyOptions(d0=50)))
    for n in range(1, 5):
        run.step(rows(n, keys=500, changed=20))
    assert consolidate(place, 4, "m4") == {"busy"}
    for n in range(5, 18):
        run.step(rows(n, keys=500, changed=20))
    facts = {each.operator: each for each in chain_facts(place.catalog, NAME)}
    assert facts["data"].deltas == 0 and facts["by_key"].deltas > 0
    run.step(rows(100, keys=500, changed=20))
    [data] = [each for each in chain_facts(place.catalog, NAME) if each.operator == "data"]
    assert data.deltas == 1 and 1 < (data.amplification or 0) < 1.5


class Still(Static):
    """Changes in the first four steps, and in the large table alone in step 100."""

    def process(self, rows, state) -> None:
        """Write the step."""
        n = rows.table.column("n")[0].as_py()
        if n < 5:
            super().process(rows, state)
        if n == 100:
            state.static.put(rows.keys, {"noise": [b"x" * 40] * len(rows.keys)})


class Turns(Static):
    """The large table changes in the first four steps."""

    def process(self, rows, state) -> None:
        """Write the step, in the large table, too."""
        Busy.process(self, rows, state)
        if rows.table.column("n")[0].as_py() < 5:
            state.static.put(rows.keys, {"noise": [b"x" * 40] * len(rows.keys)})


def test_a_full_savepoint_of_several_materializations_and_a_base_is_exported(place: OpenWarehouse) -> None:
    run = run_of(place, Turns(), policy_by_name("adjust-d", PolicyOptions(d0=50)), postpones=False)
    for n in range(1, 8):
        run.step(rows(n, keys=500, changed=20))
    assert [consolidate(place, at, f"m{at}") for at in (4, 7)] == [{"busy", "static"}, {"busy"}]
    set_savepoint(place.catalog, NAME, "full", at="7")
    to = str(Path(place.warehouse.store_url.removeprefix("file://")).parent / "exported")
    done = export_savepoint(place, NAME, "full", to)
    assert done.objects == 4 and prove_export(to).exported.digest == run.region.digest


def test_what_a_later_materialization_at_an_earlier_checkpoint_has_is_made_again_too(place: OpenWarehouse) -> None:
    run = run_of(place, Turns(), policy_by_name("adjust-d", PolicyOptions(d0=50)), postpones=False)
    for n in range(1, 8):
        run.step(rows(n, keys=500, changed=20))
    assert consolidate(place, 6, "m6") == consolidate(place, 4, "m4") == {"busy", "static"}
    [*names] = [o.name for o in place.catalog.objects.list(NAME) if ".m6." in o.name and ".busy." in o.name]
    place.warehouse.store.delete(names)
    done = recover(place, NAME, run=in_order)
    assert (done.checkpoint, done.rebuilt) == (7, ("data",))
    check(place)
