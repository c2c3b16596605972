"""Forks: they share objects, go their own way, and whatever is deleted on either side, the other proves."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog import forks
from siltstone.catalog.checkpoints import Checkpoints
from siltstone.catalog.deletions import Deletions
from siltstone.catalog.leases import Leases
from siltstone.catalog.tombstones import Tombstones
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.change.fork import find_definition, fork
from siltstone.errors import StateError, UnknownCheckpoint, UnknownStream, UsageError
from siltstone.restore.restore import read_manifests
from siltstone.retention.deletion import delete_checkpoints, foresee
from siltstone.retention.sweep import sweep
from siltstone.run.definition import check_recorded
from siltstone.run.snapshot import snapshot_tasks, take_snapshot
from siltstone.settings import Settings
from siltstone.sinks.parquet import ParquetSink
from siltstone.store.filesystem import FilesystemStore
from siltstone.stream import Stream
from tests.command_line import plain, siltstone
from tests.orphans import filesystem, new_run, write
from tests.proofs import failures, in_order, restored_digest
from tests.region_run import RegionRun
from tests.stored import stream_objects
from tests.sums import NAME, POLICY, STREAM, rows

NEW = "what-if"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 1 to 5 of a stream, by two runs, bases at 1 and 5."""
    root = tmp_path_factory.mktemp("forks")
    with filesystem(root) as place:
        write(place)
        assert [c.first for c in place.catalog.checkpoints.list_retained(NAME)] == [1, 1, 1, 1, 5]
    return root / "w"


def run_of(place: OpenWarehouse, name: str, parallelism: int = 2) -> RegionRun:
    return RegionRun(place, replace(STREAM, name=name), POLICY, parallelism=parallelism)


def stored(place: OpenWarehouse) -> dict[str, int]:
    """Every object there is, and its bytes."""
    return dict(stream_objects(place.warehouse.store))


def names_of(place: OpenWarehouse, *streams: str) -> set[str]:
    """What these streams refer to."""
    return {o.name for stream in streams for o in place.catalog.objects.list(stream)}


def check_whole(place: OpenWarehouse, *streams: str, orphans: set[str] | None = None) -> None:
    """All that is to be seen restores and proves; the store holds what these streams refer to, and the orphans."""
    for stream in streams:
        assert not failures(place, stream)
        for checkpoint in place.catalog.checkpoints.list(stream):
            assert restored_digest(place, stream, checkpoint.id) == checkpoint.digest
    assert set(stored(place)) == names_of(place, *streams) | (orphans or set())


def consolidate(place: OpenWarehouse, stream: str, checkpoint: int, id: str) -> None:
    options: dict[str, Any] = {"parallelism": 2, "run": in_order}
    materialize(place, stream, "by_key", checkpoint, id=id, **options)


@pytest.mark.slow
def test_a_fork_copies_no_object_and_restores_to_the_same(place: OpenWarehouse) -> None:
    before, parent = stored(place), place.catalog.streams.get(NAME)
    made = fork(place, NAME, NEW, "3")
    at = place.catalog.checkpoints.get(NAME, 3)
    assert (made.stream, made.forked_from, made.forked_at, made.digest) == (NEW, NAME, 3, at.digest)
    assert stored(place) == before
    shared = names_of(place, NEW)
    assert shared == {o.name for o in place.catalog.objects.list(NAME, [1, 2, 3])}
    assert (made.objects, made.bytes) == (len(shared), sum(before[name] for name in shared))
    assert [c.id for c in place.catalog.checkpoints.list(NEW)] == [3]
    assert place.catalog.chains.list_checkpoints(NEW, 3) == [1, 2, 3]
    assert place.catalog.checkpoints.get(NEW, 3) == replace(at, stream=NEW)
    assert place.catalog.input_log.list(NEW, 99) == place.catalog.input_log.list(NAME, 3)
    record = place.catalog.streams.get(NEW)
    assert (record.epoch, record.definition, record.forked_from) == (parent.epoch, parent.definition, NAME)
    assert place.catalog.streams.get(NAME) == parent
    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NEW, 3), NEW)
    assert {m.stream for m in manifests.values()} == {NEW}
    check_whole(place, NAME, NEW)


@pytest.mark.slow
def test_a_fork_goes_its_own_way(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "3")
    ours, theirs = run_of(place, NEW, parallelism=1), new_run(place)
    assert list(ours.region.input_position().newest) == place.catalog.input_log.list(NAME, 3)[-2:]
    again = [ours.step(rows(n)) for n in (4, 5)]
    digests = [place.catalog.checkpoints.get(NAME, id).digest for id in (4, 5)]
    assert [c and (c.id, c.digest) for c in again] == list(zip((4, 5), digests, strict=True)), "the same input"
    other, further = ours.step(rows(60)), theirs.step(rows(6))
    assert other and further and (other.id, further.id) == (6, 6) and other.digest != further.digest
    own = names_of(place, NEW) - names_of(place, NAME)
    assert own and all(name.startswith(f"{NEW}/00000003/") for name in own)
    check_whole(place, NAME, NEW)


def test_a_fork_that_is_taken_back_behind_its_beginning_says_nothing_twice(place: OpenWarehouse) -> None:
    """It does again what its parent did, whose sinks have that; its own begin where it began."""
    fork(place, NAME, NEW, "3")
    epoch = place.catalog.runs.begin(NEW, "a test")
    place.catalog.rollbacks.roll_back(NEW, epoch, 0, "a test", "a test")
    ours, theirs = run_of(place, NEW), new_run(place)
    assert (ours.region.completed, theirs.region.completed) == (0, 5)
    assert [s.checkpoint for s in ours.region.logged_steps()] == [1, 2, 3]


def test_what_the_parent_deletes_stays_for_the_fork(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "3")
    kept, before = names_of(place, NEW), stored(place)
    _, ahead = foresee(place.catalog, NAME, [1, 2, 3, 4])
    done = delete_checkpoints(place, NAME, [1, 2, 3, 4])
    gone = before.keys() - stored(place).keys()
    assert (done.deleted, done.objects, done.bytes) == ((1, 2, 3, 4), len(gone), sum(before[n] for n in gone))
    assert {o.name for o in ahead} == gone and not gone & kept
    assert {d.name for d in place.catalog.tombstones.list(NAME)} == gone
    assert sweep(place, NAME).found == 0
    assert [c.id for c in place.catalog.checkpoints.list_retained(NAME)] == [5]
    check_whole(place, NAME, NEW)
    assert run_of(place, NEW).step(rows(4)), "it resumes from there"
    check_whole(place, NAME, NEW)


def test_a_fork_becomes_independent_and_the_last_one_deletes(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "4")
    delete_checkpoints(place, NAME, [1, 2, 3, 4])
    run = run_of(place, NEW)
    shared = {name for name in names_of(place, NEW) if name.startswith(f"{NAME}/")}
    if place.catalog.chains.get_firsts(NEW, 4)["by_key"] < 4:
        consolidate(place, NEW, 4, "m1")
    made = {o.name for o in place.catalog.objects.list(NEW, [4])} - shared
    assert made and all(name.startswith(f"{NEW}/") for name in made), "named after the fork"
    assert run.step(rows(5))
    consolidate(place, NEW, 5, "m2")
    before = stored(place)
    done = delete_checkpoints(place, NEW, [4])
    gone = before.keys() - stored(place).keys()
    assert shared <= gone and (done.objects, done.bytes) == (len(gone), sum(before[n] for n in gone))
    assert all(name.startswith(f"{NEW}/") for name in names_of(place, NEW))
    assert sweep(place, NAME).found == sweep(place, NEW).found == 0
    check_whole(place, NAME, NEW)
    assert run.step(rows(6))


def test_a_fork_that_lets_go_leaves_the_parent_whole(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "4")
    run = run_of(place, NEW)
    run.step(rows(5))
    consolidate(place, NEW, 5, "m1")
    done = delete_checkpoints(place, NEW, [4])
    assert (done.deleted, done.objects) == ((1, 2, 3, 4), 0)
    check_whole(place, NAME, NEW)


@pytest.mark.slow
def test_a_fork_begins_with_materialized_bases(place: OpenWarehouse) -> None:
    consolidate(place, NAME, 3, "m1")
    consolidate(place, NAME, 4, "m2")
    fork(place, NAME, NEW, "3")
    fork(place, NAME, "later", "4")
    assert place.catalog.chains.list_checkpoints(NEW, 3) == [3] and place.catalog.chains.list_checkpoints(
        "later", 4
    ) == [4]
    assert not any(".m2." in name for name in names_of(place, NEW))
    assert {m.id for m in place.catalog.materializations.list(NEW)} == {"m1"}
    delete_checkpoints(place, NAME, [1, 2, 3, 4])
    check_whole(place, NAME, NEW, "later")
    assert run_of(place, NEW).step(rows(4)) and run_of(place, "later").step(rows(5))
    check_whole(place, NAME, NEW, "later")


@pytest.mark.slow
def test_a_fork_of_a_fork(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW, "3")
    run_of(place, NEW).step(rows(4))
    fork(place, NEW, "again")
    assert place.catalog.forks.get_lineage("again") == ["again", NEW, NAME]
    assert [c.id for c in place.catalog.checkpoints.list("again")] == [4]
    run_of(place, NEW).step(rows(5))
    delete_checkpoints(place, NAME, [1, 2, 3, 4])
    delete_checkpoints(place, NEW, [3, 4])
    for stream in (NAME, NEW, "again"):
        assert sweep(place, stream).found == 0
    check_whole(place, NAME, NEW, "again")
    assert run_of(place, "again").step(rows(50))
    check_whole(place, NAME, NEW, "again")


def test_two_that_let_go_at_once_leave_an_orphan_which_a_sweep_finds(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees that the other still refers to it; the second is whole while the first is between its transactions."""
    fork(place, NAME, NEW, "4")
    run = run_of(place, NEW)
    run.step(rows(5))
    consolidate(place, NEW, 5, "m1")
    shared, forget = names_of(place, NAME) & names_of(place, NEW), Deletions.forget

    def after_the_other(deletions: Deletions, *arguments: Any) -> None:
        monkeypatch.setattr(Deletions, "forget", forget)
        assert delete_checkpoints(place, NAME, [1, 2, 3, 4]).objects == 0
        forget(deletions, *arguments)

    monkeypatch.setattr(Deletions, "forget", after_the_other)
    assert delete_checkpoints(place, NEW, [4]).objects == 0
    check_whole(place, NAME, NEW, orphans=shared)
    assert sweep(place, NEW).found == 0
    assert sweep(place, NAME).deleted == len(shared)
    check_whole(place, NAME, NEW)


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 4, 5])
def test_a_fork_at_any_moment_of_a_deletion_is_whole_or_refused(written: Path, tmp_path: Path, at: int) -> None:
    """Checkpoints 1 to 4 go; 5 stays, and so do those that a fork is quicker to begin with."""
    outcomes = []
    for moment in range(20):
        root = tmp_path / f"{moment}"
        shutil.copytree(written, root / "w")
        with filesystem(root) as place, pytest.MonkeyPatch.context() as patch:
            reached: list[bool] = []
            left = [moment]

            def forking(place: OpenWarehouse = place, left: list[int] = left, reached: list[bool] = reached) -> None:
                left[0] -= 1
                if left[0] == -1:
                    try:
                        fork(place, NAME, NEW, str(at))
                        reached.append(True)
                    except UnknownCheckpoint:
                        reached.append(False)

            around(patch, forking)
            delete_checkpoints(place, NAME, [1, 2, 3, 4])
            sweep(place, NAME)
            patch.undo()
            if not reached:
                break
            outcomes += reached
            delete_checkpoints(place, NAME, [])
            sweep(place, NAME)
            check_whole(place, NAME, *([NEW] if reached[0] else []))
            if not reached[0]:
                assert NEW not in {s.name for s in place.catalog.streams.list()}
        shutil.rmtree(root)
    assert len(outcomes) > 6 and outcomes[0]
    assert all(outcomes) == (at == 5), "a checkpoint that is marked begins no fork"


def around(patch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Call `action` before and after each call of the catalog and the store that a deletion or sweep makes."""
    for kind, names in (
        (Deletions, ("mark", "forget")),
        (Leases, ("list_live",)),
        (Checkpoints, ("list_retained",)),
        (Tombstones, ("record_deletion", "record_orphans")),
        (FilesystemStore, ("delete",)),
    ):
        for name in names:
            patch.setattr(kind, name, _around(getattr(kind, name), action))


def _around(method: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        action()
        answer = method(*arguments, **named)
        action()
        return answer

    return called


def test_stopped_anywhere_there_is_no_fork_at_all(place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        """Stands for the end of the process."""

    def stop(*_: object) -> None:
        raise Stop

    for method in ("insert_objects", "read_objects", "read_chain"):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(forks, method, stop)
            fork(place, NAME, NEW, "4")
        assert [s.name for s in place.catalog.streams.list()] == [NAME]
    fork(place, NAME, NEW, "4")
    check_whole(place, NAME, NEW)


def test_what_a_fork_has_no_live_state_of_is_not_copied_from_the_parent(place: OpenWarehouse) -> None:
    fork(place, NAME, NEW)
    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NEW, 5), NEW)
    task = snapshot_tasks(place.warehouse, manifests[5], "heap", "a")[0]
    with pytest.raises(StateError, match=rf"no live state of {NEW}/by_key"):
        take_snapshot(task)
    assert not any("snapshot" in name for name in stored(place))


# Definitions

MODULE = """
from siltstone.stream import Stream
from tests.orphans import STREAM
"""


def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, more: str = "") -> Settings:
    (tmp_path / f"{module}.py").write_text(MODULE + more)
    monkeypatch.syspath_prepend(tmp_path)
    return Settings(warehouse=str(tmp_path / "w"), streams=[module])


def test_a_fork_is_run_by_the_definition_of_the_stream_it_goes_back_to(
    place: OpenWarehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = project(tmp_path, monkeypatch, "defines_parent")
    fork(place, NAME, NEW, "3")
    fork(place, NEW, "again")
    for name in (NEW, "again"):
        found = find_definition(settings, name)
        assert (found.name, found.origin, found.operators) == (name, NAME, STREAM.operators)
        check_recorded(place.catalog, found, {})
    assert find_definition(settings, NAME) == STREAM
    with pytest.raises(UnknownStream, match="no stream 'nosuch' is defined"):
        find_definition(settings, "nosuch")
    with pytest.raises(UsageError, match=r"'\.\./x' is not a stream name"):
        find_definition(settings, "../x")
    elsewhere = settings.model_copy(update={"warehouse": str(tmp_path / "none")})
    with pytest.raises(UnknownStream, match=f"no stream '{NEW}' is defined"):
        find_definition(elsewhere, NEW)
    with pytest.raises(UsageError, match=rf"stream {NEW} is a fork, originally of {NAME}: give its definition"):
        check_recorded(place.catalog, replace(STREAM, name=NEW), {})


def test_a_fork_may_have_a_definition_of_its_own(
    place: OpenWarehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = f"OWN = Stream({NEW!r}, source=None, operators=STREAM.operators, max_parallelism=4)"
    settings = project(tmp_path, monkeypatch, "defines_both", more)
    assert find_definition(settings, NEW).origin is None
    fork(place, NAME, NEW, "3")
    found = find_definition(settings, NEW)
    assert (found.name, found.origin, found.source) == (NEW, NAME, None)


@pytest.mark.parametrize("sink", [ParquetSink("/elsewhere"), lambda rows, checkpoint: None])
def test_a_fork_never_writes_to_the_sinks_of_the_other(sink: Any) -> None:
    operator = replace_output(STREAM)
    stream = replace(STREAM, operators=[operator], sinks={"by_key": sink})
    with pytest.raises(UsageError, match=rf"{NEW} is a fork of {NAME} and would write to its sink of by_key: define"):
        stream.as_fork(NEW, NAME)
    assert replace(stream, name=NEW).as_fork(NEW, NAME).sinks == {"by_key": sink}
    assert replace(stream, sinks={"by_key": ParquetSink()}).as_fork(NEW, NAME).origin == NAME


def replace_output(stream: Stream) -> Any:
    import pyarrow as pa

    [operator] = stream.operators
    return type("WithOutput", (type(operator),), {"output": pa.schema([("k", pa.int64())])})(name="by_key")


# The command line


def test_the_commands_say_where_a_fork_comes_from(place: OpenWarehouse, tmp_path: Path) -> None:
    options = ("--warehouse", tmp_path / "w")
    before = stored(place)
    digest = place.catalog.checkpoints.get(NAME, 3).digest
    made = siltstone("fork", NAME, NEW, "--at", 3, *options, "--json").json
    assert list(made) == ["stream", "forked_from", "forked_at", "digest", "objects", "bytes"]
    assert (made["stream"], made["forked_from"], made["forked_at"], made["digest"]) == (NEW, NAME, 3, digest)
    assert siltstone("savepoint", NAME, "stable", "--at", 2, *options).code == 0
    [line] = plain(siltstone("fork", NAME, "stable-too", "--at", "stable", *options))
    assert line.startswith(
        f"stable-too: forked from {NAME} at checkpoint 2, shares {len(names_of(place, 'stable-too'))} objects, "
    )
    assert stored(place) == before
    listed = siltstone("checkpoints", NEW, *options, "--json").json
    assert (listed["forked_from"], listed["forked_at"]) == (NAME, 3)
    assert [c["id"] for c in listed["checkpoints"]] == [3]
    shown = siltstone("show", NEW, "latest", *options, "--json").json
    assert (shown["stream"], shown["forked_from"], shown["forked_at"], shown["chain"]) == (NEW, NAME, 3, [1, 2, 3])
    for command in (("checkpoints", NEW), ("show", NEW, "3")):
        assert plain(siltstone(*command, *options))[0] == f"{NEW} was forked from {NAME} at checkpoint 3"
    assert siltstone("checkpoints", NAME, *options, "--json").json["forked_from"] is None
    assert "forked" not in siltstone("checkpoints", NAME, *options).out


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    (f"fork {NAME}", ("Missing argument 'NEW'",)),
    (f"fork nosuch {NEW}", ("no stream 'nosuch' in this catalog: it has idle, sums, taken",)),
    (f"fork ../x {NEW}", ("'../x' is not a stream name",)),
    (f"fork idle {NEW}", ("stream idle: it has none yet, run it first",)),
    (f"fork {NAME} taken", ("stream taken exists already: give the fork another name",)),
    (f"fork {NAME} idle", ("stream idle exists already",)),
    (f"fork {NAME} {NAME}", (f"stream {NAME} exists already",)),
    (f"fork {NAME} ../x", ("'../x' is not a stream name",)),
    (f"fork {NAME} What-If", ("'What-If' is not a stream name",)),
    (f"fork {NAME} {'n' * 65}", ("is not a stream name", "at most 64")),
    (f"fork {NAME} {NEW} --at 9", (f"no checkpoint 9 of stream {NAME}: it has 4, 2 to 5",)),
    (f"fork {NAME} {NEW} --at 1", ("no checkpoint 1",)),
    (f"fork {NAME} {NEW} --at 0", ("no checkpoint 0",)),
    (f"fork {NAME} {NEW} --at 99999999999999999999999", ("no checkpoint",)),
    (f"fork {NAME} {NEW} --at nightly", ("'nightly' is not a checkpoint: use latest, an id, a savepoint",)),
    (f"fork {NAME} {NEW} --at 2001-01-01", ("no checkpoint as old as 2001-01-01",)),
    (f"fork {NAME} {NEW} --warehouse missing", ("no warehouse at", "missing")),
]


@pytest.mark.slow
def test_a_mistake_is_one_line_and_changes_nothing(place: OpenWarehouse, tmp_path: Path) -> None:
    place.catalog.streams.register("idle", 4, {})
    fork(place, NAME, "taken", "2")
    delete_checkpoints(place, NAME, [1])

    def contents() -> tuple[Any, ...]:
        catalog = place.catalog
        names = [s.name for s in catalog.streams.list()]
        each = [
            (catalog.checkpoints.list_retained(n), catalog.objects.list(n), catalog.input_log.list(n, 99))
            for n in names
        ]
        return catalog.streams.list(), each, stored(place)

    before = contents()
    for line, said in MISTAKES:
        options = () if "--warehouse" in line else ("--warehouse", tmp_path / "w")
        siltstone(*line.split(), *options).failed(2, *said)
        assert contents() == before, line
