"""Streams and their writer epochs, over every database a catalog can be in."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records import runs
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, SchemaConflict, UnknownStream, Unreachable, UsageError
from siltstone.retention.orphan_rules import incomplete_prefixes
from siltstone.store.paths import CheckpointPath
from tests.catalog_cases import NOON, Clock, add, commit_of, stored

# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_registered_once_and_found_again(catalog: Catalog, catalog_url: str) -> None:
    made = catalog.streams.register("flights", 64, {"operators": {"aircraft": {"key": ["tail"]}}})
    assert (made.max_parallelism, made.epoch, made.created_at) == (64, 0, NOON)
    again = catalog.streams.register("flights", 64, {"something": "else"})
    assert again == made == catalog.streams.get("flights")
    catalog.streams.register("bids", 128, {})
    with open_catalog(catalog_url, create=False) as reopened:
        assert [s.name for s in reopened.streams.list()] == ["bids", "flights"]
        assert reopened.streams.get("flights") == made


def test_a_changed_max_parallelism_is_refused_with_both_shown(flights: Catalog) -> None:
    with pytest.raises(SchemaConflict, match=r"stream flights has max_parallelism 128, now 64.*keep 128"):
        flights.streams.register("flights", 64, {})
    assert flights.streams.get("flights").max_parallelism == 128


@pytest.mark.parametrize("name", ["../flights", "/etc", "a/b", "", "Flights", "a" * 65, "f\0"])
def test_a_name_that_is_no_identifier_is_refused(catalog: Catalog, name: str) -> None:
    with pytest.raises(UsageError, match="not a stream name"):
        catalog.streams.register(name, 128, {})
    assert catalog.streams.list() == []


@pytest.mark.parametrize("count", [0, -1, 32769])
def test_a_max_parallelism_out_of_range_is_refused(catalog: Catalog, count: int) -> None:
    with pytest.raises(UsageError, match=f"max_parallelism {count}"):
        catalog.streams.register("flights", count, {})


def test_an_unknown_stream_is_named_with_those_there_are(catalog: Catalog) -> None:
    with pytest.raises(UnknownStream, match="none yet, run a stream first"):
        catalog.streams.get("fligths")
    catalog.streams.register("flights", 128, {})
    catalog.streams.register("bids", 128, {})
    for call in (
        lambda: catalog.streams.get("fligths"),
        lambda: catalog.runs.begin("fligths", "me"),
        lambda: catalog.runs.end("fligths", 1, "done"),
        lambda: catalog.runs.check_epoch("fligths", 1),
        lambda: catalog.runs.list("fligths"),
        lambda: catalog.commits.add("fligths", 1, commit_of(1)),
        lambda: catalog.definitions.list("fligths"),
        lambda: catalog.definitions.get("fligths", 1),
        lambda: catalog.checkpoints.last_id("fligths"),
        lambda: catalog.checkpoints.get_latest("fligths"),
        lambda: catalog.checkpoints.get("fligths", 1),
        lambda: catalog.checkpoints.list("fligths"),
        lambda: catalog.checkpoints.resolve("fligths", "latest"),
        lambda: catalog.checkpoints.resolve("fligths", "what"),
        lambda: catalog.checkpoints.as_of("fligths", NOON),
        lambda: catalog.chains.list_checkpoints("fligths", 1),
        lambda: catalog.objects.list("fligths"),
        lambda: catalog.input_log.list("fligths", 1),
        lambda: catalog.checkpoints.record_proof("fligths", 1, True),
        lambda: catalog.reference_copies.add("fligths", 1, 1, [], 0),
        lambda: catalog.reference_copies.list("fligths"),
        lambda: catalog.checkpoints.list_retained("fligths"),
        lambda: catalog.deletions.mark("fligths", 1, [1]),
        lambda: catalog.deletions.forget("fligths", 1, [1], []),
        lambda: catalog.savepoints.add("fligths", 1, "stable", 1),
        lambda: catalog.savepoints.drop("fligths", 1, "stable"),
        lambda: catalog.savepoints.list("fligths"),
    ):
        with pytest.raises(UnknownStream, match=r"'fligths'.*it has bids, flights"):
            call()


def test_a_stream_may_be_registered_by_many_at_once(catalog_url: str) -> None:
    open_catalog(catalog_url).close()
    start = Barrier(4, timeout=60)

    def register() -> int:
        with open_catalog(catalog_url) as catalog:
            start.wait()
            return catalog.streams.register("flights", 128, {}).max_parallelism

    with ThreadPoolExecutor(4) as pool:
        assert [f.result() for f in [pool.submit(register) for _ in range(4)]] == [128] * 4


# --- writer epochs ---------------------------------------------------------------------------------------------------


def test_a_newer_epoch_fences_the_older_one(flights: Catalog) -> None:
    add(flights, 1)
    flights.runs.check_epoch("flights", 1)
    assert [flights.runs.begin("flights", f"host:{n}") for n in (2, 3, 4)] == [2, 3, 4]
    flights.runs.check_epoch("flights", 4)
    message = "writer epoch 3 of stream flights was fenced by epoch 4: another run has taken over; stop this one"
    for call in (
        lambda: flights.runs.check_epoch("flights", 3),
        lambda: flights.commits.add("flights", 3, commit_of(2)),
        lambda: flights.reference_copies.add("flights", 3, 1, [stored(1, "full.snapshot.parquet")], 1),
    ):
        with pytest.raises(Fenced, match=f"^{message}$"):
            call()
    assert flights.checkpoints.last_id("flights") == 1 and flights.reference_copies.list("flights") == []
    flights.commits.add("flights", 4, commit_of(2))


@pytest.mark.parametrize("epoch", [0, -1, 2, 2**40])
def test_an_epoch_that_was_never_begun_writes_nothing(flights: Catalog, epoch: int) -> None:
    with pytest.raises(Fenced if epoch < 1 else Unreachable, match="no writer epoch" if epoch < 1 else "has lost"):
        flights.commits.add("flights", epoch, commit_of(1))
    assert flights.checkpoints.last_id("flights") == 0


def test_a_stream_without_a_run_has_no_writer(catalog: Catalog) -> None:
    catalog.streams.register("flights", 128, {})
    with pytest.raises(Fenced, match="has no writer epoch 0"):
        catalog.commits.add("flights", 0, commit_of(1))


def test_runs_tell_who_wrote_and_how_it_ended(flights: Catalog, clock: Clock) -> None:
    clock.move(1)
    flights.runs.begin("flights", "host:2")
    flights.runs.end("flights", 1, "too late to matter")
    clock.move(1)
    flights.runs.end("flights", 2, "done")
    first, second = flights.runs.list("flights")
    assert (first.who, first.started_at, first.outcome) == ("host:1", NOON, "superseded by epoch 2")
    assert first.ended_at == second.started_at == NOON + timedelta(minutes=1)
    assert (second.outcome, second.ended_at) == ("done", NOON + timedelta(minutes=2))


def test_epochs_of_one_stream_leave_others_alone(flights: Catalog) -> None:
    flights.streams.register("bids", 128, {})
    flights.runs.begin("bids", "host")
    flights.runs.begin("bids", "host")
    flights.runs.check_epoch("flights", 1)
    assert flights.runs.list("flights")[0].ended_at is None


def test_runs_of_long_ago_are_forgotten_but_for_those_that_checkpoints_are_of(
    flights: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUNS_KEPT", 3)
    flights.commits.add("flights", 1, commit_of(1))
    for epoch in range(2, 11):
        assert flights.runs.begin("flights", f"host:{epoch}") == epoch
    flights.commits.add("flights", 10, commit_of(2, first={"aircraft": 1}))
    for epoch in range(11, 16):
        assert flights.runs.begin("flights", f"host:{epoch}") == epoch
    kept = flights.runs.list("flights")
    # 1 and 10 completed checkpoints; 2 and 11 say where these ended; 13 and later are the newest.
    assert [run.epoch for run in kept] == [1, 2, 10, 11, 13, 14, 15]
    found = incomplete_prefixes(kept, flights.references.view("flights"))
    for epoch, checkpoint in ((1, 2), (10, 3)):
        assert CheckpointPath("flights", epoch, checkpoint).prefix in found
    for fenced in (9, 14):
        with pytest.raises(Fenced):
            flights.commits.add("flights", fenced, commit_of(3))
    flights.commits.add("flights", 15, commit_of(3))


def test_a_stream_has_the_retention_that_it_was_registered_with_until_it_is_told(catalog: Catalog) -> None:
    rules = {"keep_last": 100}
    assert catalog.streams.register("flights", 128, {}).retention is None
    assert catalog.streams.register("flights", 128, {}, rules).retention is None, "it is not new"
    assert catalog.streams.register("others", 128, {}, rules).retention == rules
    catalog.commits.add("flights", catalog.runs.begin("flights", "host:1"), commit_of(1))
    assert catalog.forks.create("flights", "branch", 1).retention is None
    assert catalog.streams.set_retention("flights", rules).retention == rules
    assert catalog.streams.get("flights").retention == rules
    assert catalog.forks.create("flights", "later", 1).retention == rules, "a fork keeps what its parent does"
    assert catalog.streams.set_retention("others", None).retention is None
    with pytest.raises(UnknownStream):
        catalog.streams.set_retention("nosuch", rules)
