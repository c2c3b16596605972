"""Sweeping: what nothing refers to goes, everything else stays, and every deletion is written down."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UnknownCheckpoint, UnknownStream, Unreachable
from siltstone.model import Form, StoredObject
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.leases import hold_lease
from siltstone.retention.orphan_rules import Reason
from siltstone.retention.sweep import ORPHANS, SweepOptions, SweepResult, sweep
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath, epoch_marks, extract_prefix
from tests.command_line import plain, siltstone
from tests.orphans import PLACES, Injected, check_whole, inject, new_run, referenced, stored, write
from tests.servers import marked
from tests.sums import NAME, rows

NO_GUARD = SweepOptions(age_guard=timedelta(0))
DRY = SweepOptions(dry_run=True)


@pytest.fixture(params=marked(PLACES))
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenWarehouse]:
    with PLACES[request.param](tmp_path) as opened:
        yield opened


def by_reason(result: SweepResult) -> dict[str, int]:
    return {finding.reason: finding.objects for finding in result.reasons}


def counts(injected: Injected) -> dict[str, int]:
    return {
        Reason.FENCED: len(injected.fenced),
        Reason.LATE: len(injected.late),
        Reason.WRITING: len(injected.writing),
        Reason.AHEAD: len(injected.ahead),
        Reason.STRANGE: len(injected.strange),
    }


# What goes and what stays


@pytest.mark.slow
def test_orphans_of_every_class_on_every_store(any_place: OpenWarehouse) -> None:
    place = any_place
    run = write(place)
    injected = inject(place)
    before = _besides_extracts(place)
    foreseen = sweep(place, NAME, DRY)
    assert _besides_extracts(place) == before and place.catalog.tombstones.list(NAME) == []
    assert by_reason(foreseen) == counts(injected)
    total = len(injected.orphans | injected.kept)
    assert (foreseen.found, foreseen.deleted, foreseen.kept) == (total, 0, total)

    done = sweep(place, NAME, who="a test")
    size = sum(map(len, injected.orphans))
    assert (done.found, done.deleted, done.kept) == (total, len(injected.orphans), len(injected.kept))
    assert done.bytes == foreseen.bytes == size
    assert by_reason(done) == by_reason(foreseen)
    assert _besides_extracts(place) == before - injected.orphans
    recorded = place.catalog.tombstones.list(NAME)
    assert {d.name: (d.bytes, d.who) for d in recorded} == {n: (len(n), "a test") for n in injected.orphans}
    assert {d.name for d in recorded if d.reason == Reason.FENCED} == set(injected.fenced)
    knows_times = place.warehouse.store.url.startswith(("file", "s3"))
    assert {d.modified_at is not None for d in recorded} == {knows_times}
    check_whole(place, *injected.kept)

    again = sweep(place, NAME)
    assert (again.found, again.deleted) == (len(injected.kept), 0)
    assert run.step(rows(6)) and run.step(rows(7))
    # The next checkpoints did without what might have been theirs.
    assert by_reason(sweep(place, NAME))[Reason.LATE] == len(injected.writing)
    check_whole(place, *injected.ahead, *injected.strange)


def _besides_extracts(place: OpenWarehouse) -> set[str]:
    return stored(place, "") - stored(place, extract_prefix(NAME))


def test_where_checkpoints_did_not_complete_nothing_else_is_listed(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    write(place)
    injected = inject(place)
    kind = type(place.warehouse.store)
    list_ = kind.list

    def noted(self: object, prefix: str) -> Iterator[tuple[str, int]]:
        listed.append(prefix)
        return list_(self, prefix)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "list", noted)
    done = sweep(place, NAME, SweepOptions(incomplete=True))
    looked_for = [CheckpointPath(NAME, 2, 7).manifest(), epoch_marks(NAME), extract_prefix(NAME)]
    listed = [prefix for prefix in listed if prefix not in looked_for]
    assert listed == [CheckpointPath(NAME, 1, 3).prefix, CheckpointPath(NAME, 2, 6).prefix]
    assert by_reason(done) == {Reason.FENCED: 3, Reason.WRITING: 2}
    gone = {name for name in injected.fenced if name.startswith(listed[0])}
    check_whole(place, *injected.kept, *(injected.orphans - gone))


def test_of_runs_without_a_checkpoint_all_is_incomplete(place: OpenWarehouse) -> None:
    run = write(place)
    lost = [place.warehouse.store.put(CheckpointPath(NAME, e, 6).segment("x"), b"x").name for e in (3, 4)]
    for _ in lost:
        run = new_run(place)
    run.step(rows(6))
    assert sweep(place, NAME, SweepOptions(incomplete=True)).deleted == 1
    check_whole(place, lost[1])


@pytest.mark.parametrize("hours", [1, 71, 73])
def test_what_a_run_may_be_writing_goes_beyond_the_age_guard(place: OpenWarehouse, hours: int) -> None:
    write(place)
    injected = inject(place)
    then = time.time() - 3600 * hours
    for name in injected.writing:
        os.utime(place.warehouse.local.objects / name, (then, then))
    done = sweep(place, NAME)
    assert by_reason(done).get(Reason.ABANDONED, 0) == (2 if hours > 72 else 0)
    assert stored(place).isdisjoint(injected.writing) == (hours > 72)
    assert sweep(place, NAME, SweepOptions(age_guard=timedelta(minutes=59))).deleted == (2 if hours < 72 else 0)
    check_whole(place, *({*injected.kept} - {*injected.writing}))


@pytest.mark.server
def test_a_store_without_times_keeps_it_until_its_run_is_over(tmp_path: Path) -> None:
    with PLACES["redis"](tmp_path) as place:
        run = write(place)
        injected = inject(place)
        sweep(place, NAME, NO_GUARD)
        assert set(injected.writing) <= stored(place)
        place.catalog.runs.end(NAME, run.region.epoch, "killed")
        assert by_reason(sweep(place, NAME))[Reason.ENDED] == len(injected.writing)
        check_whole(place, *injected.ahead, *injected.strange)


def test_what_a_new_run_fences_goes_at_once(place: OpenWarehouse) -> None:
    write(place)
    injected = inject(place)
    new_run(place)
    done = sweep(place, NAME)
    newer, pending = injected.ahead
    assert by_reason(done)[Reason.FENCED] == len([*injected.orphans, *injected.writing, pending])
    check_whole(place, *injected.strange, newer)


@pytest.mark.slow
def test_marked_checkpoints_are_referred_to(place: OpenWarehouse) -> None:
    write(place)
    marked = delete_checkpoints(place, NAME, [1, 2]).marked
    assert marked
    assert sweep(place, NAME, NO_GUARD).found == 0
    check_whole(place)


def test_what_a_fork_refers_to_stays(place: OpenWarehouse) -> None:
    write(place)
    injected = inject(place)
    shared = injected.fenced[0]
    place.catalog.streams.register("fork", 4, {})
    manifest = StoredObject("fork/00000001/000000000001/manifest.arrow", 1, "xxh3-128:" + "0" * 32)
    segments = [StoredObject(shared, 1, "xxh3-128:" + "0" * 32)]
    commit = CheckpointCommit(1, manifest, "", 0, 0, {"by_key": Form.BASE}, segments=segments)
    place.catalog.commits.add("fork", place.catalog.runs.begin("fork", "a test"), commit)
    sweep(place, NAME)
    check_whole(place, shared, *injected.kept)


def test_a_limit_is_kept_and_the_rest_is_left_to_later(place: OpenWarehouse) -> None:
    write(place)
    injected = inject(place)
    total, left = len(injected.orphans), len(injected.orphans)
    while left:
        done = sweep(place, NAME, SweepOptions(limit=4))
        assert done.deleted == min(4, left)
        left -= done.deleted
        assert by_reason(done).get(Reason.BEYOND_LIMIT, 0) == left
        assert len(place.catalog.tombstones.list(NAME)) == total - left
    check_whole(place, *injected.kept)


# Unfinished writes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "epoch"), [*marked(PLACES, 1), *marked(["filesystem", "redis"], 2)]
)  # moto says of each upload that it began long ago
def test_unfinished_writes_go_with_their_run_or_by_age(tmp_path: Path, kind: str, epoch: int) -> None:
    with PLACES[kind](tmp_path) as place:
        write(place)
        store, name = place.warehouse.store, CheckpointPath(NAME, epoch, 6 if epoch == 2 else 3).segment("slow")
        with pytest.raises(Unreachable), store.create(name) as writer:
            writer.write(os.urandom(20_000_000))  # so large that every store has begun to write
            [write_] = store.list_unfinished()
            # Of a file system's it is not known of which object they are.
            at_once = epoch == 1 and kind != "filesystem"
            assert (write_.name is None) == (kind == "filesystem")
            foreseen = sweep(place, NAME, DRY)
            assert by_reason(foreseen) == {Reason.FENCED if at_once else Reason.WRITING: 1}
            assert sweep(place, NAME).deleted == at_once
            if not at_once:
                assert by_reason(sweep(place, NAME, NO_GUARD)) == {Reason.ABANDONED: 1}
            assert list(store.list_unfinished()) == []
        [recorded] = place.catalog.tombstones.list(NAME)
        assert (recorded.name, recorded.modified_at) == (f"unfinished {write_.token}", write_.began_at)
        check_whole(place)


# Leases


def test_nothing_under_a_lease_is_swept_until_it_ends(place: OpenWarehouse) -> None:
    """As a snapshot writes it: named after a run that may be fenced, and not referred to yet."""
    run = write(place)
    path = CheckpointPath(NAME, 1, 2)
    new_run(place)
    with hold_lease(place.catalog, NAME, [2], what="takes a snapshot"):
        written = place.warehouse.store.put(path.snapshot("by_key", "totals", 0, "s1"), b"rows")
        done = sweep(place, NAME, NO_GUARD)
        assert by_reason(done) == {Reason.LEASED: 1}
        place.catalog.reference_copies.add(NAME, run.region.epoch + 1, 2, [written], 1)
    assert sweep(place, NAME).found == 0
    lost = place.warehouse.store.put(path.snapshot("by_key", "totals", 0, "s2"), b"rows")
    assert sweep(place, NAME).deleted == 1
    check_whole(place)
    assert lost.name not in stored(place)


# The end of a run


def test_a_run_that_ends_clears_the_checkpoint_it_did_not_complete(
    place: OpenWarehouse, caplog: pytest.LogCaptureFixture
) -> None:
    run = write(place)
    caplog.set_level("INFO")
    injected = inject(place)
    listed_only = injected.writing
    run.region.close("failed")
    assert {d.name for d in place.catalog.tombstones.list(NAME)} == set(listed_only)
    assert {d.reason for d in place.catalog.tombstones.list(NAME)} == {Reason.ENDED}
    [swept] = place.catalog.passes.list(NAME)
    assert (swept.what, swept.objects) == (ORPHANS, len(listed_only))
    assert f"objects={swept.objects} bytes={swept.bytes}" in "\n".join(caplog.messages), "people see it, too"
    check_whole(place, *injected.orphans, *injected.ahead, *injected.strange)


def test_a_run_that_was_fenced_deletes_nothing_when_it_ends(place: OpenWarehouse) -> None:
    run = write(place)
    injected = inject(place)
    before = stored(place)
    new_run(place)
    run.region.close("fenced")
    assert stored(place) == before and place.catalog.tombstones.list(NAME) == []
    assert injected.orphans < before


def test_a_store_that_is_away_does_not_keep_a_run_from_ending(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise Unreachable("the disk is gone")

    run = write(place)
    monkeypatch.setattr(FilesystemStore, "list", away)
    run.region.close("done")
    assert place.catalog.runs.list(NAME)[-1].outcome == "done"
    told = "\n".join(caplog.messages)  # others may have given the text another form
    assert "the run's incomplete checkpoint is not swept" in told and 'error="the disk is gone"' in told


# Bad input


def test_with_nothing_to_sweep_nothing_is_changed(place: OpenWarehouse, tmp_path: Path) -> None:
    with pytest.raises(UnknownStream, match="it has none yet"):
        sweep(place, NAME)
    place.catalog.streams.register(NAME, 4, {})
    place.warehouse.store.put(CheckpointPath(NAME, 1, 1).segment("x"), b"x")
    for options in (None, NO_GUARD, SweepOptions(incomplete=True)):
        with pytest.raises(UnknownCheckpoint, match="it has none yet, run it first"):
            sweep(place, NAME, options)
    assert len(stored(place)) == 1
    warehouse = tmp_path / "w"
    siltstone("sweep", "some", "--warehouse", warehouse).failed(2, "no stream 'some'", "it has sums")
    siltstone("sweep", NAME, "--warehouse", warehouse).failed(2, "run it first")
    siltstone("sweep", NAME, "--warehouse", tmp_path / "absent").failed(2, "no warehouse at")
    for wrong in ("--limit=0", "--limit=x", "--age-guard=soon", "--age-guard=-1d"):
        said = "--limit" if "limit" in wrong else "is not a length of time: write it like"
        siltstone("sweep", NAME, "--warehouse", warehouse, wrong).failed(2, said)


def test_a_store_that_fails_is_told_of_and_what_was_deleted_is_recorded(
    place: OpenWarehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place)
    injected = inject(place)
    with monkeypatch.context() as patch:
        delete = FilesystemStore.delete

        def fail(self: FilesystemStore, names: list[str]) -> None:
            delete(self, sorted(names)[:3])
            if names[0].startswith(extract_prefix(NAME)):
                return
            raise Unreachable("cannot delete: the disk is gone")

        patch.setattr(FilesystemStore, "delete", fail)
        siltstone("sweep", NAME, "--warehouse", tmp_path / "w").failed(3, "the disk is gone")
    gone = injected.orphans - stored(place)
    assert gone and gone <= {d.name for d in place.catalog.tombstones.list(NAME)}
    assert sweep(place, NAME).deleted == len(injected.orphans - gone)
    assert len(place.catalog.tombstones.list(NAME)) == len(injected.orphans)
    check_whole(place, *injected.kept)


# The command line


def test_the_command_says_what_and_why(place: OpenWarehouse, tmp_path: Path) -> None:
    write(place)
    injected = inject(place)
    options = ("--warehouse", tmp_path / "w")
    found, orphans = len(injected.orphans | injected.kept), len(injected.orphans)
    dry = siltstone("sweep", NAME, *options, "--dry-run", "--json").json
    assert (dry["found"], dry["deleted"], dry["kept"], dry["dry_run"]) == (found, 0, found, True)
    lines = plain(siltstone("sweep", NAME, *options, "--dry-run"))
    assert any("would be deleted" in line and Reason.FENCED in line for line in lines)
    assert any(injected.strange[0] in line for line in lines)
    assert f"{NAME}: {found} objects that nothing refers to, {orphans} would be deleted" in lines[-1]
    done = siltstone("sweep", NAME, *options, "--json").json
    assert (done["stream"], done["found"], done["deleted"], done["kept"]) == (NAME, found, orphans, len(injected.kept))
    assert done["bytes"] == dry["bytes"] == sum(map(len, injected.orphans))
    [fenced] = [r for r in done["reasons"] if r["reason"] == Reason.FENCED]
    assert (fenced["deletes"], fenced["objects"]) == (True, len(injected.fenced))
    assert len(fenced["names"]) == 5 and set(fenced["names"]) <= set(injected.fenced), "some of them"
    assert siltstone("sweep", NAME, *options, "--incomplete", "--limit", "3", "--json").json["deleted"] == 0
    lines = plain(siltstone("sweep", NAME, *options, "--age-guard", "0s"))
    assert f"{len(injected.writing)} deleted" in lines[-1]
    check_whole(place, *injected.ahead, *injected.strange)


# Many


@pytest.mark.slow
def test_many_objects_are_listed_once_and_take_few_statements(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch, objects, count, lists = 1, place.warehouse.local.objects, 4000, []
    place.catalog.streams.register(NAME, 4, {})
    place.catalog.runs.begin(NAME, "a test")
    orphans = set()
    for id in range(1, 5):
        path = CheckpointPath(NAME, epoch, id)
        (objects / path.prefix).mkdir(parents=True)
        names = [path.segment(f"n{i}") for i in range(count // 4 - 1)] + [path.manifest()]
        for name in names:
            (objects / name).write_bytes(b"x")
        orphans |= set(names[:300])
        segments = [StoredObject(name, 1, "xxh3-128:" + "0" * 32) for name in names[300:-1]]
        manifest = StoredObject(names[-1], 1, "xxh3-128:" + "0" * 32)
        place.catalog.commits.add(NAME, epoch, CheckpointCommit(id, manifest, "", 0, 0, {}, segments=segments))
    list_, statements = FilesystemStore.list, []
    monkeypatch.setattr(FilesystemStore, "list", lambda self, prefix: lists.append(prefix) or list_(self, prefix))
    event.listen(place.catalog.transactions.engine, "before_cursor_execute", lambda *said: statements.append(said[2]))
    done = sweep(place, NAME)
    newer = [epoch_marks(NAME), extract_prefix(NAME), CheckpointPath(NAME, epoch, 6).manifest()]
    assert lists == [*newer, f"{NAME}/", extract_prefix(NAME)]
    assert len(statements) < 100, "those of an extract, and some for each 500 orphans"
    assert (done.found, done.deleted, done.bytes) == (1200, 1200, 1200)
    assert stored(place) == referenced(place)
    assert {d.name for d in place.catalog.tombstones.list(NAME)} == orphans
