"""The consistent region without Spark: what one run leaves behind for the next, and what subtasks say of a step."""

import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.costs import costs_of, recorded_states
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.chains.policy_rules import CheckpointCost
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.upload_options import UploadOptions
from siltstone.errors import CorruptObject, Fenced, NoLiveState, UnknownCheckpoint, UsageError
from siltstone.format.base import read_snapshot_values
from siltstone.format.manifests import read_manifest, read_manifests
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.operator import Rows, State
from siltstone.restore.compare import compare, compare_tasks
from siltstone.restore.export import (
    opaque_rows,
    recorded_digest,
    restore_unit,
    select_tables,
    unit_tasks,
    whole_digest,
)
from siltstone.restore.proof import plan_checkpoints
from siltstone.restore.verify import check_indexes
from siltstone.run import persist
from siltstone.run.snapshot import pin_states, snapshot_tasks, take_snapshot
from siltstone.run.working_state import lock_directory
from siltstone.state.backends.named import BACKENDS
from siltstone.state.schema import OPAQUE_SCHEMA
from siltstone.stream import Stream
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun
from tests.sums import Counted, Sums, stream_of


def stream(*names: str) -> Stream:
    return stream_of(*(Sums(name=name) for name in names), max_parallelism=8)


def rows(n: int, keys: int = 100) -> pa.Table:
    return pa.table({"k": np.arange(keys), "n": np.full(keys, n)})


POLICY = policy_by_name("marginal-cost", PolicyOptions())


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_new_operator_begins_empty_beside_one_that_goes_on(place: OpenWarehouse, parallelism: int) -> None:
    first = RegionRun(place, stream("old"), POLICY, parallelism=2)
    before = [first.step(rows(n)) for n in (1, 2)]
    run = RegionRun(place, stream("old", "new"), POLICY, parallelism=parallelism)
    after = [run.step(rows(n)) for n in (3, 4)]
    assert [dict(c.forms) for c in (*before, *after) if c] == [
        {"old": Form.BASE},
        {"old": Form.DELTA},
        {"old": Form.DELTA, "new": Form.BASE},
        {"old": Form.DELTA, "new": Form.DELTA},
    ]
    assert not failures(place, "sums")
    assert [c.state_rows for c in after if c] == [200, 200]
    for completed in (*before, *after):
        assert completed and restored_digest(place, "sums", completed.id) == completed.digest


def test_steps_that_only_an_earlier_epoch_made_are_never_used(place: OpenWarehouse) -> None:
    """Its steps may have had other rows: what it made of them is no part of this run."""
    name = "sums"
    older = RegionRun(place, stream(name), POLICY, checkpoint_steps=9)
    older.step(rows(1), last=True)
    for n in (100, 200):
        older.step(rows(n))
    newer = RegionRun(place, stream(name), POLICY, checkpoint_steps=9)
    local = place.warehouse.local
    with lock_directory(local.state(name, 1, name, 0), 0):
        # The older writer is at work on its directory still, so the newer one restores the checkpoint.
        newer.step(rows(3))
    shutil.rmtree(local.state(name, 2, name, 0))  # so the older one's is taken over, at step 3
    completed = newer.step(rows(4), last=True)
    assert completed is not None and not local.state(name, 1, name, 0).exists()
    with OpenWarehouse.open_writable(str(local.root.parent / "undisturbed")) as other:
        run = RegionRun(other, stream(name), POLICY, checkpoint_steps=3)
        for n in (1, 3, 4):
            undisturbed = run.step(rows(n))
    assert undisturbed is not None and completed.digest == undisturbed.digest


def test_a_run_learns_from_restores_that_other_processes_measured(place: OpenWarehouse) -> None:
    """After ten, the bound lies within twice of what is measured; one over the budget is said, and counts in full."""
    policy = policy_by_name("marginal-cost", PolicyOptions(restore_budget_s=100))
    run, checkpoints = RegionRun(place, stream("sums"), policy), place.catalog.checkpoints

    def measure(factor: float, extra: int = 0) -> float:
        record = checkpoints.get_latest("sums")
        [chain] = recorded_states(record, "sums")
        took, size = factor * (chain.base_s + chain.deltas_s), chain.base_bytes + chain.deltas_bytes
        checkpoints.record_restore("sums", record.id, epoch=record.epoch, restore_s=took, restore_bytes=size + extra)
        return took

    for n in range(10):
        run.step(rows(n))
        measure(0.01)
    run.step(rows(10))
    newest = checkpoints.get_latest("sums").statistics["operators"]["sums"]
    [chain] = recorded_states(checkpoints.get_latest("sums"), "sums")
    predicted = chain.base_factor * chain.base_s + chain.delta_factor * chain.deltas_s
    assert predicted <= 2 * 0.01 * (chain.base_s + chain.deltas_s)
    assert newest["restore_bound_s"] >= predicted * (1 - 1e-6)
    assert measure(1e5) > 100
    run.step(rows(11))  # decided before it was measured
    # A restore of another chain, as after a materialization, does not take that back.
    measure(1e-9, extra=1 << 20)
    completed = run.step(rows(12))
    assert completed is not None and completed.forms == {"sums": Form.BASE}
    [chain] = recorded_states(checkpoints.get_latest("sums"), "sums")
    assert chain.base_factor > 1e3 and chain.delta_factor > 1e3


def test_a_snapshot_is_what_a_restore_rebuilds(place: OpenWarehouse) -> None:
    run = RegionRun(place, replace(stream("sums"), operators=[Counted()]), POLICY, parallelism=2)
    for n in (1, 2):
        completed = run.step(rows(n))
        assert completed and restored_digest(place, "sums", completed.id, parallelism=3) == completed.digest
    store, catalog = place.warehouse.store, place.catalog
    manifests = read_manifests(store, catalog.chains.list_manifests("sums", 2))
    parts = [take_snapshot(task) for task in snapshot_tasks(place.warehouse, manifests[2], "heap", "test")]
    assert sum(part.rows for part in parts) == 100
    tasks, _ = unit_tasks(manifests, 2, 3, None)
    objects = [stored for part in parts for stored in part.objects]
    compared = [table for task in compare_tasks(tasks, objects) for table in compare(store, task)]
    assert compared and all(table.same for table in compared)
    assert sum(table.live_rows.sum() for table in compared) == 100 + 8  # and an opaque value for each key group


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_snapshot_of_the_newest_checkpoint_is_taken_while_the_stream_goes_on(
    place: OpenWarehouse, backend: str
) -> None:
    counted = replace(stream("sums"), operators=[Counted()])
    run = RegionRun(place, counted, POLICY, parallelism=2, checkpoint_steps=3, backend=backend)
    completed = [run.step(rows(n)) for n in range(1, 6)]
    assert [each is not None for each in completed] == [False, False, True, False, False]
    store, catalog = place.warehouse.store, place.catalog
    manifests = read_manifests(store, catalog.chains.list_manifests("sums", 1))
    with pin_states(snapshot_tasks(place.warehouse, manifests[1], backend, "test")) as tasks:
        for n in range(6, 13):  # two more checkpoints; what the steps need no more goes
            run.step(rows(n))
        parts = [take_snapshot(task) for task in tasks]
    units, _ = unit_tasks(manifests, 1, 3, None)
    objects = [stored for part in parts for stored in part.objects]
    compared = [table for task in compare_tasks(units, objects) for table in compare(store, task)]
    assert compared and all(table.same for table in compared)
    with pytest.raises(NoLiveState, match="no live state of sums/sums subtask 0 at checkpoint 1 "):
        take_snapshot(replace(tasks[0], pin=None))


def test_a_snapshot_of_opaque_values_is_read_in_whatever_order_the_state_kept_them() -> None:
    values, written = {9: b"first", 3: b"then", 4: b""}, pa.BufferOutputStream()
    pq.write_table(opaque_rows(values), written)
    assert read_snapshot_values(written.getvalue(), OPAQUE_SCHEMA, name="a snapshot") == values


class Talkative(Sums):
    """Returns rows that it never declared."""

    def process(self, rows: Rows, state: State) -> pa.Table:
        return rows.table


def test_rows_that_were_never_declared_are_refused(place: OpenWarehouse) -> None:
    run = RegionRun(place, replace(stream("sums"), operators=[Talkative()]), POLICY)
    with pytest.raises(UsageError, match="operator sums returns rows but declares no output"):
        run.step(rows(1))


def _said(subtask: int, form: Form, size: int, tracked: int, **seconds: float) -> Acknowledgement:
    groups = KeyGroupRange(4 * subtask, 4 * subtask + 4)
    place = ("some/object", 0, size, "", groups)
    handle = Handle("sums", "totals", Kind.INCREMENTAL, form, *place, rows=1, previous=int(form is Form.DELTA))
    gave_way = {"totals": tracked} if tracked else {}
    return Acknowledgement(
        "sums", subtask, groups, [handle], seconds=seconds, table_rows={"totals": 10}, tracked_bytes=gave_way
    )


def test_a_delta_in_which_a_subtask_gave_way_to_a_base_says_how_large_it_would_have_been() -> None:
    delta = _said(0, Form.DELTA, 30, 0, delta=1.0, persist=0.5)
    instead = _said(1, Form.BASE, 100, 70, delta=1.0, base=2.0, persist=0.25)
    assert costs_of([delta, instead])["totals"] == CheckpointCost(
        form=Form.DELTA, bytes=130, seconds=3.25, rows=20, tracked_bytes=100
    )
    assert costs_of([delta])["totals"].tracked_bytes is None
    all_gave_way = costs_of([instead])["totals"]
    assert (all_gave_way.form, all_gave_way.seconds, all_gave_way.tracked_bytes) == (Form.BASE, 2.25, 70)


def test_one_that_is_fenced_while_it_begins_says_so(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: a run was frozen there, a newer one truncated, and it said that there is no such checkpoint."""
    RegionRun(place, stream("old"), POLICY).step(rows(1))
    catalog = place.catalog

    def meanwhile(*_: object) -> None:
        catalog.runs.begin("sums", "another one")
        raise UnknownCheckpoint("no checkpoint 1")

    monkeypatch.setattr(type(catalog.chains), "list_manifests", meanwhile)
    with pytest.raises(Fenced):
        RegionRun(place, stream("old"), POLICY)


def test_a_run_that_cannot_resume_is_noted_as_failed(place: OpenWarehouse) -> None:
    RegionRun(place, stream("old"), POLICY, parallelism=2).step(rows(1))
    manifest = place.warehouse.local.objects / place.catalog.checkpoints.get_latest("sums").manifest.name
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(CorruptObject, match=r"manifest\.arrow"):
        RegionRun(place, stream("old"), POLICY, parallelism=2)
    assert place.catalog.runs.list("sums")[-1].outcome == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("upload", "segments"),
    [
        (UploadOptions(), 1),
        (UploadOptions(inline_bytes=0), 6),
        (UploadOptions(inline_bytes=0, preemptive_persist_bytes=1, size_threshold_bytes=1), 12),
    ],
    ids=["together", "apart", "preemptive"],
)
def test_however_segments_travel_the_state_is_the_same(
    place: OpenWarehouse, upload: UploadOptions, segments: int
) -> None:
    """Two operators of three subtasks; preemptively, a subtask's opaque variable follows its table."""
    operators = [Counted(name="one"), Counted(name="other")]
    together = Stream("sums", source=lambda spark, options: spark.sql(""), operators=operators, max_parallelism=8)
    run = RegionRun(place, together, POLICY, parallelism=3, upload=upload)
    done = [run.step(rows(n)) for n in (1, 2, 3)]
    written = [
        [o for o in place.catalog.objects.list("sums", [c.id]) if o.kind is ObjectKind.SEGMENT] for c in done if c
    ]
    assert [len(objects) for objects in written[1:]] == [segments] * 2
    with OpenWarehouse.open_writable(str(place.warehouse.local.root.parent / "other")) as plain:
        expected = [RegionRun(plain, together, POLICY, parallelism=1)]
        digests = [expected[0].step(rows(n)) for n in (1, 2, 3)]
    assert [c.digest for c in done if c] == [c.digest for c in digests if c]
    assert not failures(place, "sums")
    for c in done:  # segments, bases and manifest, all of them are counted
        assert c is not None
        stored = place.catalog.objects.list("sums", [c.id])
        assert (c.uploads.objects, c.uploads.bytes) == (len(stored), sum(o.bytes for o in stored))
        assert c.uploads.requests == c.uploads.attempts - c.uploads.hedges_sent == len(stored)
    assert done[-1] is not None
    assert restored_digest(place, "sums", 3, parallelism=2) == done[-1].digest
    again = RegionRun(place, together, POLICY, parallelism=2, upload=upload)
    shutil.rmtree(place.warehouse.local.work("sums", 1))
    assert again.step(rows(4)) is not None and not failures(place, "sums")


@pytest.mark.slow
@pytest.mark.parametrize("inline_bytes", [0, 1 << 14])
def test_many_changes_are_written_in_parts_of_some_key_groups_each(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    """Each part a segment with an index of its own, whose links lead to the index of all of it before."""
    monkeypatch.setattr(persist, "DELTA_ROWS", 20)
    upload = UploadOptions(inline_bytes=inline_bytes)
    whole = replace(stream("sums"), operators=[Counted()])
    run = RegionRun(place, whole, POLICY, parallelism=2, upload=upload)
    for n, keys in ((1, 100), (2, 100), (3, 5), (4, 60)):
        run.step(rows(n, keys))
    manifests = {
        c: read_manifest(place.warehouse.store, place.catalog.checkpoints.get("sums", c).manifest) for c in (2, 3)
    }
    ranges = {c: {h.key_groups for h in m.handles if h.kind is Kind.INDEX} for c, m in manifests.items()}
    assert len(ranges[2]) > 2 == len(ranges[3])
    assert all({h.key_groups for h in m.handles} == ranges[c] for c, m in manifests.items())
    assert not failures(place, "sums")
    newest = place.catalog.checkpoints.get_latest("sums")
    assert {restored_digest(place, "sums", 4, parallelism) for parallelism in (1, 3, 8)} == {newest.digest}
    read = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests("sums", 4))
    parts = [take_snapshot(task) for task in snapshot_tasks(place.warehouse, read[4], "heap", "test")]
    tasks = compare_tasks(unit_tasks(read, 4, 3, None)[0], [stored for part in parts for stored in part.objects])
    assert sum(part.rows for part in parts) == 100
    assert all(found.same for task in tasks for found in compare(place.warehouse.store, task))
    again = RegionRun(place, whole, POLICY, parallelism=3, upload=upload).step(rows(5))
    with OpenWarehouse.open_writable(str(place.warehouse.local.root.parent / "other")) as plain:
        monkeypatch.undo()
        other = RegionRun(plain, whole, POLICY)
        undisturbed = [other.step(rows(n, keys)) for n, keys in ((1, 100), (2, 100), (3, 5), (4, 60), (5, 100))][-1]
    assert again is not None and undisturbed is not None and again.digest == undisturbed.digest


def test_one_variable_is_restored_from_its_own_blocks(place: OpenWarehouse) -> None:
    run = RegionRun(place, stream("one", "other"), POLICY, parallelism=2)
    for n in (1, 2, 3):
        completed = run.step(rows(n))
    assert completed is not None
    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests("sums", 3))
    wanted = select_tables(manifests[3], ["one.totals"])
    tasks, size = unit_tasks(manifests, 3, 2, None, wanted)
    results = [restore_unit(place.warehouse.store, task) for task in tasks]
    assert whole_digest(results, 8) == recorded_digest(manifests[3], wanted) != completed.digest
    assert {r.operator for r in results} == {"one"} and sum(r.rows for r in results) == 100
    assert size == sum(
        h.length for m in manifests.values() for h in m.handles if h.variable == "totals" and h.operator == "one"
    )
    with pytest.raises(UsageError, match=r"no 'one\.tot': it has one\.totals, other\.totals"):
        select_tables(manifests[3], ["one.tot"])


def test_an_index_that_says_something_else_than_the_manifest_fails_the_proof(place: OpenWarehouse) -> None:
    run = RegionRun(place, stream("sums"), POLICY)
    for n in (1, 2):
        run.step(rows(n))
    store = place.warehouse.store
    [checks] = plan_checkpoints(place, "sums", [2]).indexes
    assert not check_indexes(store, checks)
    altered = [checks[0], replace(checks[1], data=tuple(replace(h, rows=h.rows + 1) for h in checks[1].data))]
    assert [(f.checkpoint, f.reason) for f in check_indexes(store, altered)] == [
        (2, "the index of checkpoint 2 and its manifest disagree about totals")
    ]
