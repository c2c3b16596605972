"""A lost catalog is rebuilt from the store, and knows what the lost one knew."""

from collections.abc import Collection
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest

from siltstone.catalog.epochs import check_new_name
from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.rebuild import rebuild_catalog
from siltstone.errors import CorruptObject, Fenced, StateError, Unreachable, UsageError, WrongWarehouse
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.run.take_over import take_over
from siltstone.store.base import Store
from siltstone.store.open import Warehouse
from siltstone.store.paths import CheckpointPath, epoch_mark, is_built_here
from tests.outbox_run import NAME, SINK, STREAM, Heard, Outboxed, batch, follow_log, inputs, write
from tests.proofs import failures, in_order
from tests.rebuild_cases import FORK, catalog_url, check_same, plant, rebuilt, what_it_knows, write_history
from tests.region_run import RegionRun


@pytest.mark.slow
@pytest.mark.parametrize("end", ["done", "killed"])
def test_a_long_history_comes_back(place: OpenWarehouse, heard: Heard, tmp_path: Path, end: str) -> None:
    run = write_history(place, heard)
    if end == "done":
        run.region.close(end)
    plant(place, 2, 18, like=11)  # a fenced writer's
    plant(place, 2, 15, like=11)
    known = what_it_knows(place.catalog)
    done, found = rebuilt(place, catalog_url(tmp_path))
    if end == "killed":  # before the next manifest said that the sink has it
        assert [output.sink_id for output in found[NAME].pop("outputs")] == [17]
        assert known[NAME].pop("outputs") == []
    assert found.keys() == known.keys() == {NAME, FORK}
    with OpenWarehouse.open_existing(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        assert not failures(again, NAME) and not failures(again, FORK)
    check_same(found, known)
    assert [(s.stream, s.newest) for s in done.streams] == [(NAME, 17), (FORK, 10)]


def _fails(*_: object) -> None:
    raise StateError("refused")


@pytest.mark.slow
def test_a_manifest_whose_commit_was_refused_does_not_come_back(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Outboxed(place, heard)
    run.step(batch(1))
    with monkeypatch.context() as patch, pytest.raises(StateError):
        patch.setattr(type(place.catalog.commits), "add", _fails)
        run.step(batch(2))
    # The store does not list it for the sweep at the end of the run.
    with monkeypatch.context() as patch:
        patch.setattr("siltstone.run.region.sweep_ended", lambda *_: None)
        run.region.close("failed")
    assert _is_stored(place, CheckpointPath(NAME, 1, 2).manifest())
    done, _ = rebuilt(place, catalog_url(tmp_path))
    assert (done.streams[0].newest, done.streams[0].adopted) == (1, 0)


@pytest.mark.slow
def test_killed_between_the_manifest_and_its_commit_the_checkpoint_is_there_and_arrives_once(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Outboxed(place, heard)
    run.step(batch(1))
    with monkeypatch.context() as patch, pytest.raises(StateError):
        patch.setattr(type(place.catalog.commits), "add", _fails)
        run.step(batch(2))
    done, found = rebuilt(place, catalog_url(tmp_path))
    assert (done.streams[0].newest, done.streams[0].adopted) == (2, 2)
    assert [output.checkpoint for output in found[NAME]["outputs"]] == [2]
    with OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        assert not failures(again, NAME)
        later = Outboxed(again, heard)
        assert later.batches == 2, "its input is not read again"
        later.step(batch(3))
        assert heard.ids == [1, 2, 3] and heard.inputs == inputs([1, 2, 3])


@pytest.mark.slow
def test_what_a_fenced_writer_wrote_later_does_not_come_back(
    place: OpenWarehouse, heard: Heard, tmp_path: Path
) -> None:
    """It was frozen, and stored its manifest after another run had begun; or it had the higher checkpoint."""
    fenced = Outboxed(place, heard)
    fenced.step(batch(1))
    later = Outboxed(place, heard)
    with pytest.raises(Fenced):
        fenced.step(batch(2))
    plant(place, 1, 3, like=1)
    assert _is_stored(place, CheckpointPath(NAME, 1, 2).manifest())
    assert rebuilt(place, catalog_url(tmp_path))[0].streams[0].newest == 1
    later.region.close("done")


@pytest.mark.slow
def test_a_rollback_that_is_not_followed_by_a_run_stays(place: OpenWarehouse, heard: Heard, tmp_path: Path) -> None:
    write(place, heard, 5).region.close("done")
    epoch = take_over(place, NAME, "a test")
    place.catalog.rollbacks.roll_back(NAME, epoch, 3, "a test", "a test")
    write_extract(place, NAME)
    known = what_it_knows(place.catalog)
    done, found = rebuilt(place, catalog_url(tmp_path))
    check_same(found, known)
    assert done.streams[0].newest == 3 and [step.checkpoint for step in found[NAME]["logged"]] == [4, 5]
    with OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        run = Outboxed(again, heard)
        follow_log(run)
        run.step(batch(6))
    assert heard.ids == [1, 2, 3, 4, 5, 6], "what was given up had been delivered"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_sweep_does_not_delete_what_the_newest_extract_lists(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """The process that rolled back was killed before it wrote an extract; and so may be the sweep."""
    write(place, heard, 5).region.close("done")
    epoch = take_over(place, NAME, "a test")
    place.catalog.rollbacks.roll_back(NAME, epoch, 3, "a test", "a test")
    known, store = what_it_knows(place.catalog), place.warehouse.store
    delete = type(store).delete

    def delete_manifests(own: Store, names: Collection[str]) -> None:
        given_up = [name for name in names if is_built_here(name)]
        delete(own, [name for name in given_up if name.endswith("manifest.arrow")] or names)
        if given_up:
            raise Unreachable("killed")

    with monkeypatch.context() as patch, pytest.raises(Unreachable) if killed else nullcontext():
        if killed:
            patch.setattr(type(store), "delete", delete_manifests)
        assert sweep(place, NAME, SweepOptions(age_guard=timedelta(0))).deleted
    assert not any(_is_stored(place, CheckpointPath(NAME, 1, id).manifest()) for id in (4, 5))
    check_same(rebuilt(place, catalog_url(tmp_path))[1], known)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_rebuilt_stream_runs_on_and_no_output_of_yesterday_comes_again(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, ends: bool
) -> None:
    run = write(place, heard, 4)
    if ends:
        run.region.close("done")
    rebuilt(place, catalog_url(tmp_path))
    with OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        later = Outboxed(again, heard)
        assert later.region.epoch == 3 and later.batches == 4
        later.step(batch(5))
        later.region.close("done")
        assert not failures(again, NAME)
        assert sweep(again, NAME).deleted == 0
    assert heard.ids == ([1, 2, 3, 4, 5] if ends else [1, 2, 3, 4, 4, 5])
    assert heard.inputs == inputs([1, 2, 3, 4, 5])


@pytest.mark.slow
def test_the_lost_catalog_is_older_when_it_comes_back(place: OpenWarehouse, heard: Heard, tmp_path: Path) -> None:
    write(place, heard, 2).region.close("done")
    rebuilt(place, catalog_url(tmp_path))
    with pytest.raises(WrongWarehouse, match="is older than the store"):
        sweep(place, NAME)
    later = Outboxed(place, heard)
    assert (later.region.epoch, later.region.completed) == (3, 2), "above that of the rebuild"


@pytest.mark.slow
@pytest.mark.parametrize("at", ["siltstone.change.rebuild.bring_back", "siltstone.catalog.epochs._mark"])
def test_a_rebuild_that_is_killed_is_run_again(
    place: OpenWarehouse, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    write_history(place, heard).region.close("done")
    known = what_it_knows(place.catalog)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(at, killed)
            rebuild_catalog(place.warehouse, catalog_url(tmp_path))
        assert not (tmp_path / "rebuilt.db").exists()
    check_same(rebuilt(place, catalog_url(tmp_path))[1], known)


def test_where_there_is_a_catalog_nothing_is_changed(place: OpenWarehouse, heard: Heard, tmp_path: Path) -> None:
    write(place, heard, 1).region.close("done")
    before = sorted(place.warehouse.store.list(""))
    with pytest.raises(UsageError, match=r"there is a catalog at .* already"):
        rebuild_catalog(place.warehouse, place.warehouse.catalog_url)
    assert sorted(place.warehouse.store.list("")) == before


def test_a_store_without_an_identity_is_refused(tmp_path: Path) -> None:
    warehouse = Warehouse.at(str(tmp_path))
    warehouse.prepare()
    with pytest.raises(WrongWarehouse, match="no identity"):
        rebuild_catalog(warehouse, catalog_url(tmp_path))


def test_a_stream_that_an_older_version_ran_last_is_left_out_and_stays_safe(
    place: OpenWarehouse, heard: Heard, tmp_path: Path
) -> None:
    write(place, heard, 1).region.close("done")
    place.warehouse.store.put(epoch_mark("old", 3), b"me\n")
    place.warehouse.store.put(CheckpointPath("old", 3, 1).manifest(), b"x")
    done, found = rebuilt(place, catalog_url(tmp_path))
    assert [each.stream for each in done.left_out] == ["old"] and found.keys() == {NAME}
    with (
        OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url(tmp_path)) as again,
        pytest.raises(WrongWarehouse),
    ):
        check_new_name(again, "old")


def test_a_stream_whose_first_run_was_killed_before_it_wrote_anything_can_begin_again(
    place: OpenWarehouse, heard: Heard, tmp_path: Path
) -> None:
    write(place, heard, 1).region.close("done")
    place.warehouse.store.put(epoch_mark("new", 1), b"me\n")
    assert not rebuilt(place, catalog_url(tmp_path))[0].left_out
    with OpenWarehouse.open_writable(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        check_new_name(again, "new")


@pytest.mark.slow
def test_a_materialization_at_a_deleted_checkpoint_without_manifest_comes_back(
    place: OpenWarehouse, heard: Heard, tmp_path: Path
) -> None:
    """Seen: it was left out with its checkpoint, and a later one could not be restored."""
    run = write(place, heard, 6)
    materialize(place, NAME, SINK, 6, id="m1", parallelism=2, run=in_order)
    run.step(batch(7))
    run.region.close("done")
    run = Outboxed(place, heard)
    run.step(batch(8))
    delete_checkpoints(place, NAME, [1, 2, 3, 4, 5, 6])
    known = what_it_knows(place.catalog)
    run.region.close("done")
    _, found = rebuilt(place, catalog_url(tmp_path))
    assert found[NAME]["marked"] == known[NAME]["marked"] and 7 in found[NAME]["manifests"]
    with OpenWarehouse.open_existing(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        assert not failures(again, NAME)


@pytest.mark.slow
def test_what_a_deleted_materialization_replaced_is_kept_no_longer(place: OpenWarehouse, tmp_path: Path) -> None:
    """Its interval may end later, but only among deleted checkpoints: the store no longer says what ended it."""
    policy = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
    run = RegionRun(place, STREAM, policy)
    for n in range(1, 6):
        run.step(batch(n))
        if n in (3, 4):
            materialize(place, NAME, SINK, n - 1, id=f"m{n}", parallelism=1, run=in_order)
    run.region.close("done")
    delete_checkpoints(place, NAME, [2])
    known = what_it_knows(place.catalog)
    _, found = rebuilt(place, catalog_url(tmp_path))
    first = [[o.until for o in of[NAME]["objects"] if o.checkpoint == 1] for of in (known, found)]
    assert set(first[0]) == {1} and set(first[1]) == {2}
    check_same(found, known)
    with OpenWarehouse.open_existing(str(tmp_path / "w"), catalog_url(tmp_path)) as again:
        assert not failures(again, NAME)


def test_the_manifest_of_a_checkpoint_that_changed_nothing_is_needed_by_none_after_it(
    place: OpenWarehouse, tmp_path: Path
) -> None:
    """Such is a rescale's. Seen in a campaign: the rebuilt catalog kept it as long as the stream."""
    run = RegionRun(place, STREAM, policy_by_name("adjust-d"))
    run.step(batch(1))
    run.step_without_rows()
    run.step(batch(2))
    run.region.close("done")
    known = what_it_knows(place.catalog)
    _, found = rebuilt(place, catalog_url(tmp_path))
    assert [o.until for o in found[NAME]["objects"] if o.checkpoint == 2] == [2]
    check_same(found, known)


def test_a_missing_manifest_is_named(place: OpenWarehouse, heard: Heard, tmp_path: Path) -> None:
    write(place, heard, 3).region.close("done")
    place.warehouse.store.delete([CheckpointPath(NAME, 1, 2).manifest()])
    with pytest.raises(CorruptObject, match=r"000000000002/manifest.arrow, the manifest of checkpoint 2 .* is missing"):
        rebuild_catalog(place.warehouse, catalog_url(tmp_path))
    assert not (tmp_path / "rebuilt.db").exists()


def _is_stored(place: OpenWarehouse, name: str) -> bool:
    return name in dict(place.warehouse.store.list(name))
