"""Take-overs of a stream that meet a lost epoch, or a checkpoint whose commit was refused."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from siltstone.catalog import epochs
from siltstone.catalog.epochs import Tenure
from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commits import Commits
from siltstone.catalog.records.extracts import Extract
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.change.rebuild import rebuild_catalog
from siltstone.change.recover import recover
from siltstone.errors import Fenced, StateError, Unreachable, WrongWarehouse
from siltstone.model import StoredObject
from siltstone.retention.sweep import sweep
from siltstone.run import pending
from siltstone.run.references import RunReferences
from siltstone.run.take_over import take_over
from siltstone.store.filesystem import FilesystemStore
from tests.failover import AT_ONCE, Standby, go_on, losing_what_follows
from tests.outbox_run import NAME, Heard, Outboxed, batch, follow_log, write
from tests.proofs import in_order


@pytest.mark.parametrize("after", ["the beginning", "the mark"])
def test_an_epoch_that_is_lost_before_its_extract_is_begun_anew(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Seen: it was granted all the same, and then each further take-over by the same process was refused."""
    tenure, stored, extracts = Tenure(), FilesystemStore.put, epochs.write_extract
    write(place, heard, 2).region.close("done")
    with closing(Standby(place)) as standby, monkeypatch.context() as patch:

        def put(self: FilesystemStore, name: str, data: Any) -> StoredObject:
            if after == "the mark":
                return stored(self, name, data)
            standby.promote()
            raise Unreachable("the store is away")

        def extract(*given: Any) -> Extract:
            standby.promote()
            return extracts(*given)

        patch.setattr(FilesystemStore, "put", put)
        patch.setattr(epochs, "write_extract", extract)
        with pytest.raises(Unreachable):
            take_over(place, NAME, "a run", tenure)
    assert (tenure.epoch, place.catalog.streams.get(NAME).epoch) == (2, 1)
    assert take_over(place, NAME, "a run", tenure) == tenure.epoch == place.catalog.streams.get(NAME).epoch == 3
    assert take_over(place, NAME, "another run") == 4
    with pytest.raises(Fenced):
        take_over(place, NAME, "a run", tenure)
    go_on(place, heard, 2)


@pytest.mark.parametrize("put", [FilesystemStore.put, None])
def test_of_two_that_begin_one_epoch_the_second_does_not_end_the_first(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, put: Any
) -> None:
    """A database fails over between an epoch and its mark. Seen: the run that was refused its mark ended the run that
    has this epoch since, so that a sweep deleted what that was writing, and what it lost did not come back."""
    write(place, heard, 2).region.close("done")
    stored, others = FilesystemStore.put, list[Outboxed]()
    with closing(Standby(place)) as standby, monkeypatch.context() as patch:

        def second(self: FilesystemStore, name: str, data: Any) -> StoredObject:
            patch.setattr(FilesystemStore, "put", stored)
            standby.promote()
            others.append(Outboxed(place, heard))
            if put is None:
                raise Unreachable("the store is away")
            return put(self, name, data)

        patch.setattr(FilesystemStore, "put", second)
        with pytest.raises(Unreachable if put is None else WrongWarehouse):
            take_over(place, NAME, "the second")
    [first] = others
    assert first.region.epoch == 2 and place.catalog.runs.list(NAME)[-1].outcome is None
    first.step(batch(3))
    with losing_what_follows(place):
        first.step(batch(4))
    go_on(place, heard, 4)


REFUSED: dict[str, tuple[str, type, str]] = {
    "commit": ("the store", Commits, "add"),
    "references": ("the store", RunReferences, "advance"),
    "commit, and an extract": ("an extract", Commits, "add"),
    "commit, and a rebuild": ("a new catalog", Commits, "add"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_that_is_refused_again_stops_no_run(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    """Its run was killed before it ended. Seen: each run of the stream stopped there."""
    to, part, name = REFUSED[case]
    run, accept = write(place, heard, 3), getattr(part, name)

    def refuse(*given: Any, **named: Any) -> Any:
        if any(4 in (getattr(each, "id", 0), getattr(each, "checkpoint", 0)) for each in given):
            raise StateError("refused")
        return accept(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(part, name, refuse)
        with losing_what_follows(place):
            if to == "an extract":
                place.catalog.savepoints.add(NAME, 1, "release", 3)
                write_extract(place, NAME)
            with pytest.raises(StateError, match="refused"):
                run.step(batch(4))
        if to == "a new catalog":
            url = f"sqlite:///{tmp_path / 'rebuilt.db'}"
            assert rebuild_catalog(place.warehouse, url).streams[0].newest == 3
        take_over(place, NAME, "a test")
    go_on(place, heard, 3)


@pytest.mark.parametrize(
    ("to", "known"),
    [("the store", True), ("the store", False), ("an extract", True), ("an extract", False), ("a new catalog", False)],
)
def test_a_checkpoint_that_a_sweep_had_deleted_comes_again_with_its_output(
    place: OpenWarehouse, heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to: str, known: bool
) -> None:
    """It took longer than the age guard, so its commit was refused. Seen: its output, which was deleted with it,
    counted as delivered where no tombstone says that it was refused."""
    run, store = write(place, heard, 2), pending.store_manifest
    with closing(Standby(place)) as standby, monkeypatch.context() as patch:

        def too_late(*given: Any) -> Any:
            assert sweep(place, NAME, AT_ONCE).deleted > 0
            if known:
                standby.replicate()
            if to == "an extract":
                place.catalog.savepoints.add(NAME, 1, "release", 2)
                write_extract(place, NAME)
            return store(*given)

        patch.setattr(pending, "store_manifest", too_late)
        with pytest.raises(StateError, match="was deleted by"):
            run.step(batch(3))
        standby.promote()
    if to == "a new catalog":
        url = f"sqlite:///{tmp_path / 'rebuilt.db'}"
        rebuild_catalog(place.warehouse, url)
        place = OpenWarehouse(place.warehouse, open_catalog(url, create=False))
    else:
        take_over(place, NAME, "a test")
    if not (known and to == "the store"):
        assert recover(place, NAME, run=in_order).given_up == (3,)
        again = Outboxed(place, heard)
        follow_log(again)
        again.region.close("done")
    go_on(place, heard, 2 if known and to == "the store" else 3)
    place.catalog.close()
