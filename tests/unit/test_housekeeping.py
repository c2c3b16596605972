"""What a run deletes by itself: what no rule keeps, as checkpoints complete, and what its killed runs left."""

import logging
import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from siltstone.catalog.records.checkpoints import Checkpoints
from siltstone.catalog.records.deletions import Deletions
from siltstone.catalog.records.leases import Leases
from siltstone.catalog.records.savepoints import Savepoints
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.background import Background, BackgroundOptions
from siltstone.chains.materialization_rules import MaterializationOptions
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import Fenced, Unreachable
from siltstone.retention.deletion import SUBSUMED
from siltstone.retention.housekeeping import Housekeeper
from siltstone.retention.retention_rules import NEW_STREAM, RetentionOptions
from siltstone.retention.truncate import truncate
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath, stream_prefix
from tests.catalog_cases import beginnings
from tests.clock import Clock
from tests.places import place_at
from tests.proofs import failures
from tests.region_run import RegionRun, run_tasks, shuffled
from tests.sums import NAME, STREAM, rows

pytestmark = pytest.mark.slow

OFTEN = policy_by_name("adjust-d", PolicyOptions(d0=14, d_max=14, size_ratio_max=None, space_amplification_max=None))
NEVER = policy_by_name(
    "adjust-d", PolicyOptions(d0=10_000, d_max=10_000, size_ratio_max=None, space_amplification_max=None)
)
NONE_GIVEN = RetentionOptions()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def place(tmp_path: Path, clock: Clock) -> Iterator[OpenWarehouse]:
    with place_at(tmp_path / "w", clock) as opened:
        yield opened


def in_order(function, tasks):
    return [function(task) for task in tasks]


def checkpoints(place: OpenWarehouse) -> list[int]:
    return [c.id for c in place.catalog.checkpoints.list(NAME)]


def stored(place: OpenWarehouse) -> int:
    return len(list(place.warehouse.store.list("")))


def test_a_checkpoint_per_second_leaves_the_store_bounded_whatever_materialization_does(
    place: OpenWarehouse, clock: Clock
) -> None:
    """Seen: keep_last = 50, bases every 45 steps, so no materialization due: after eight minutes 506 of 506 were kept.

    Here with 10 and 8."""
    each_8th = policy_by_name(
        "adjust-d", PolicyOptions(d0=7, d_max=7, size_ratio_max=None, space_amplification_max=None)
    )
    run = RegionRun(place, STREAM, each_8th)
    keeper = Housekeeper(place, NAME, run.region.epoch, RetentionOptions(keep_last=10))
    most, objects = 0, []
    for n in range(1, 91):
        clock.move(seconds=1)
        run.step(rows(n))
        keeper.work(n)
        if n > 30:
            most = max(most, len(place.catalog.checkpoints.list_retained(NAME)))
            objects.append(stored(place))
    assert len(checkpoints(place)) <= 10 + (10 + 8) // 20 + 1
    assert most <= 10 + 8 + 3, "what is kept, and the chain that the oldest of it builds on"
    assert max(objects[-30:]) <= max(objects[:30]), "and it does not grow"
    assert not failures(place, NAME)


def test_a_chain_that_the_policy_never_ends_is_let_go_of_after_a_materialization(
    place: OpenWarehouse, clock: Clock
) -> None:
    run = RegionRun(place, STREAM, NEVER)
    options = BackgroundOptions(
        MaterializationOptions(interval_s=15), PolicyOptions(size_ratio_max=None), RetentionOptions(keep_last=5)
    )
    background = Background(place, NAME, run.region.epoch, options, in_order)
    most = 0
    for n in range(1, 51):
        clock.move(seconds=1)
        run.step(rows(n))
        background.note_checkpoint()
        assert background.look()
        most = max(most, len(place.catalog.checkpoints.list_retained(NAME)))
    assert most <= 2 * 15 + 5 + 5
    assert not failures(place, NAME)


def test_the_default_keeps_the_newest_and_hours_and_days(place: OpenWarehouse, clock: Clock) -> None:
    run = RegionRun(place, STREAM, OFTEN)
    assert place.catalog.streams.get(NAME).retention == NEW_STREAM.to_record()
    keeper = Housekeeper(place, NAME, run.region.epoch, NONE_GIVEN)
    for n in range(1, 161):
        clock.move(minutes=45)
        run.step(rows(n))
        keeper.work(n, ended=n == 160)
    *_, newest = records = place.catalog.checkpoints.list(NAME)
    assert {r.id for r in records} >= set(range(61, 161))
    assert len({r.committed_at.strftime("%d%H") for r in records}) >= 48
    days = {r.committed_at.date() for r in records}
    assert days == {newest.committed_at.date() - timedelta(days=n) for n in range(len(days))} and len(days) >= 4
    assert len(records) <= 100 + 48 + 30
    assert not failures(place, NAME)


def test_a_stream_of_before_keeps_everything_until_it_is_told(place: OpenWarehouse) -> None:
    run = RegionRun(place, STREAM, OFTEN)
    place.catalog.streams.set_retention(NAME, None)
    keeper = Housekeeper(place, NAME, run.region.epoch, NONE_GIVEN)
    for n in range(1, 120):
        run.step(rows(n))
        keeper.work(n)
    assert len(checkpoints(place)) == 119
    place.catalog.streams.set_retention(NAME, {"keep_last": 3})
    run.step(rows(120))
    keeper.work(120)
    assert checkpoints(place) == [118, 119, 120]


def keeping_two(place: OpenWarehouse, count: int) -> Iterator[tuple[int, Housekeeper]]:
    """A run with housekeeping after each checkpoint, which keeps the newest two; yields after each."""
    run = RegionRun(place, STREAM, policy_by_name("adjust-d", PolicyOptions(d_max=0)))
    keeper = Housekeeper(place, NAME, run.region.epoch, RetentionOptions(keep_last=2))
    for n in range(1, count + 1):
        run.step(rows(n))
        keeper.work(n)
        yield n, keeper


def test_it_is_told_once_where_people_see_it_and_recorded(
    place: OpenWarehouse, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siltstone.retention.housekeeping.LOG_S", 0)
    caplog.set_level(logging.INFO)
    for _ in keeping_two(place, 5):
        pass
    told = [(r.levelname, r.getMessage()) for r in caplog.records if "retention deleted" in r.getMessage()]
    assert [level for level, _ in told] == ["WARNING", "INFO", "INFO"]
    assert f"stream={NAME} " in told[0][1] and 'rules="keep_last 2" checkpoints=1 ' in told[0][1]
    assert f"siltstone retention {NAME}" in told[0][1]
    assert {d.reason for d in place.catalog.tombstones.list(NAME)} == {SUBSUMED}
    passes = place.catalog.passes.list(NAME)
    assert [(p.what, p.checkpoints) for p in passes] == [(SUBSUMED, 1)] * 3, "a row for each time"
    assert sum(p.objects for p in passes) == len(place.catalog.tombstones.list(NAME)) and all(p.bytes for p in passes)
    assert all(any(f" objects={p.objects} bytes={p.bytes}" in message for _, message in told) for p in passes)


def test_a_following_run_logs_a_line_a_minute_that_counts(
    place: OpenWarehouse, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    for n, keeper in keeping_two(place, 8):
        if n == 6:
            later = SimpleNamespace(monotonic=lambda: time.monotonic() + 61)
            monkeypatch.setattr("siltstone.retention.housekeeping.time", later)
        if n == 8:
            keeper.work(n, ended=True)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("siltstone")]
    counts = [m.split("checkpoints=")[1].split()[0] for m in messages]
    assert counts == ["1", "4", "1"], "the first, those of the minute, and what was left at the end"


def test_the_hour_long_first_deletion_is_done_in_parts(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RegionRun(place, STREAM, OFTEN)
    for n in range(1, 31):
        run.step(rows(n))
    monkeypatch.setattr("siltstone.retention.housekeeping._AT_ONCE", 10)
    keeper = Housekeeper(place, NAME, run.region.epoch, RetentionOptions(keep_last=1))
    left = []
    for _ in range(4):
        keeper.work(1)
        left.append(len(checkpoints(place)))
    assert left == [20, 10, 1, 1]
    assert not failures(place, NAME)


def test_a_step_that_has_begun_finds_the_chain_it_was_told_of(place: OpenWarehouse) -> None:
    """Another process materializes: what the chain began with before goes when the step has its checkpoint."""
    run = RegionRun(place, STREAM, NEVER)
    keeper = Housekeeper(place, NAME, run.region.epoch, RetentionOptions(keep_last=1))
    for n in range(1, 5):
        run.step(rows(n))
        keeper.work(n)
    (operator,) = STREAM.operators
    materialize(place, NAME, operator.name, 4, id="0" * 32, parallelism=1, run=in_order)
    before = stored(place)
    keeper.work(4)
    assert stored(place) == before, "a step that began before may restore from it"
    run.step(rows(5))
    keeper.work(5)
    assert [c.id for c in place.catalog.checkpoints.list_retained(NAME)] == [4, 5]
    assert not failures(place, NAME)


@pytest.mark.parametrize(
    ("part", "call"),
    [(Checkpoints, "list_retained"), (Savepoints, "list"), (Deletions, "mark"), (Leases, "list_live")],
)
def test_a_materialization_that_completes_while_retention_decides_takes_nothing_from_a_step(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, part: type, call: str
) -> None:
    """It comes between any two calls of the catalog, and the step under way has lost its working state."""
    run = RegionRun(place, STREAM, NEVER)
    keeper = Housekeeper(place, NAME, run.region.epoch, RetentionOptions(keep_last=1))
    (operator,) = STREAM.operators
    for n in range(1, 3):
        run.step(rows(n))
        keeper.work(n)
    run.step(rows(3))
    task = run.region.begin_step()[operator.name]
    called = getattr(part, call)

    def materialize_first(asked: object, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(part, call, called)
        materialize(place, NAME, operator.name, 3, id="0" * 32, parallelism=1, run=in_order)
        return called(asked, *args, **options)

    monkeypatch.setattr(part, call, materialize_first)
    keeper.work(3)
    assert beginnings(place.catalog, NAME, 3) == {operator.name: 3}, "it came meanwhile"
    shutil.rmtree(place.warehouse.local.work(NAME, run.region.epoch))
    assert sum(a.restored_bytes for a in run_tasks(task, shuffled(task, rows(4)), "again")[1])


@pytest.mark.parametrize("taken_over", [False, True])
def test_what_another_process_deletes_is_not_what_a_step_restores(place: OpenWarehouse, taken_over: bool) -> None:
    """`materialize` and `truncate` come beside a step that has begun; then its working state is lost."""
    run = RegionRun(place, STREAM, NEVER)
    for n in range(1, 4):
        run.step(rows(n))
    if taken_over:
        run.region.close("done")
        run = RegionRun(place, STREAM, NEVER)
    (operator,) = STREAM.operators
    task = run.region.begin_step()[operator.name]
    materialize(place, NAME, operator.name, 3, id="0" * 32, parallelism=1, run=in_order)
    keeps = RetentionOptions(keep_last=1)
    assert truncate(place, NAME, keeps).objects == 0
    shutil.rmtree(place.warehouse.local.work(NAME, 1))
    restored, received = run_tasks(task, shuffled(task, rows(4)), "again")
    assert sum(each.restored_bytes for each in received) and restored is not None
    run.region.close("done")
    assert truncate(place, NAME, keeps).deleted == (1, 2)
    assert not failures(place, NAME)


def test_what_killed_runs_left_is_swept_by_the_next(place: OpenWarehouse) -> None:
    store, epochs = place.warehouse.store, []
    for n in range(3):  # none of them says how it ended
        run = RegionRun(place, STREAM, OFTEN)
        run.step(rows(n + 1))
        epochs.append(run.region.epoch)
        store.put(f"{CheckpointPath(NAME, run.region.epoch, run.region.checkpoint).prefix}lost.segment", b"lost")
    last = RegionRun(place, STREAM, OFTEN)
    mine = f"{CheckpointPath(NAME, last.region.epoch, last.region.checkpoint).prefix}begun.segment"
    store.put(mine, b"being written")
    Housekeeper(place, NAME, last.region.epoch, NONE_GIVEN).work(0)
    names = {name for name, _ in store.list("")}
    assert not any("lost" in name for name in names) and mine in names
    assert len(place.catalog.tombstones.list(NAME)) == 3
    last.step(rows(4))
    assert not failures(place, NAME)


def test_whoever_is_fenced_sweeps_and_deletes_nothing(place: OpenWarehouse) -> None:
    run = RegionRun(place, STREAM, OFTEN)
    for n in range(1, 5):
        run.step(rows(n))
    lost = f"{CheckpointPath(NAME, run.region.epoch, run.region.checkpoint).prefix}lost.segment"
    place.warehouse.store.put(lost, b"lost")
    fenced = RegionRun(place, STREAM, OFTEN).region.epoch
    RegionRun(place, STREAM, OFTEN)
    before = stored(place)
    with pytest.raises(Fenced):
        Housekeeper(place, NAME, fenced, RetentionOptions(keep_last=1)).work(1)
    assert stored(place) == before and checkpoints(place) == [1, 2, 3, 4]
    assert place.catalog.tombstones.list(NAME) == []


def test_a_store_that_fails_does_not_fail_the_stream_and_the_deletion_is_completed(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RegionRun(place, STREAM, policy_by_name("adjust-d", PolicyOptions(d_max=0)))
    options = BackgroundOptions(MaterializationOptions(enabled=False), retention=RetentionOptions(keep_last=1))
    background = Background(place, NAME, run.region.epoch, options, in_order)

    def away(*_: object) -> None:
        raise Unreachable("cannot reach the store: the test says so")

    for n in range(1, 4):
        run.step(rows(n))
        background.note_checkpoint()
        with monkeypatch.context() as patch:
            patch.setattr(FilesystemStore, "delete", away)
            assert background.look() == (n == 1), "of which nothing goes yet"
    assert (
        "\n".join(caplog.messages).count('retention is not applied for now stream=sums error="cannot reach the store')
        == 1
    ), "not each time"
    assert checkpoints(place) == [3]
    assert background.look() and [c.id for c in place.catalog.checkpoints.list_retained(NAME)] == [3]
    assert {name for name, _ in place.warehouse.store.list(stream_prefix(NAME))} == {
        o.name for o in place.catalog.objects.list(NAME)
    }
