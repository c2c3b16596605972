"""Several at once, over every database a catalog can be in."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier
from time import sleep

import pytest
from sqlalchemy import event

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commits import Committed
from siltstone.catalog.repository import Catalog
from siltstone.errors import Fenced, UsageError
from tests.catalog_cases import add, commit_of


def outcomes(count: int, work: Callable[[int], object]) -> list[object]:
    """Run `work(0..count-1)` at once; what each returned or raised."""
    start = Barrier(count, timeout=60)

    def one(n: int) -> object:
        start.wait()
        try:
            return work(n)
        except (Fenced, UsageError) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_of_two_epochs_racing_for_one_id_the_newer_wins(flights: Catalog, catalog_url: str) -> None:
    for id in range(1, 11):
        old = flights.runs.begin("flights", "old")
        new = flights.runs.begin("flights", "new")
        with open_catalog(catalog_url) as other:
            pairs = [(flights, old), (other, new)][:: 1 if id % 2 else -1]

            def work(n: int, id: int = id, pairs: list = pairs) -> int:
                catalog, epoch = pairs[n]
                catalog.commits.add("flights", epoch, commit_of(id, tag=f"e{epoch}"))
                return epoch

            results = outcomes(2, work)
        assert new in results
        assert sum(isinstance(r, Fenced) for r in results) == 1
        assert flights.checkpoints.get_latest("flights").epoch == new
        assert len(flights.objects.list("flights", [id])) == 1


def test_of_two_threads_of_one_epoch_racing_for_one_id_one_wins(flights: Catalog) -> None:
    for id in range(1, 6):
        results = outcomes(3, lambda n, id=id: flights.commits.add("flights", 1, commit_of(id, tag=f"t{n}")))
        assert sum(type(r) is Committed for r in results) == 1
        assert sum(type(r) is UsageError for r in results) == 2
    assert flights.checkpoints.last_id("flights") == 5


def test_of_a_savepoint_and_a_deletion_racing_one_wins(flights: Catalog, catalog_url: str) -> None:
    add(flights, 9)
    with open_catalog(catalog_url) as other:
        for id in range(1, 9):

            def work(n: int, id: int = id) -> str:
                if n == id % 2:
                    flights.savepoints.add("flights", 1, f"s{id}", id)
                    return "kept"
                other.deletions.mark("flights", 1, [id])
                return "deleted"

            [won] = [result for result in outcomes(2, work) if isinstance(result, str)]
            there = id in {c.id for c in flights.checkpoints.list("flights")}
            assert there == (won == "kept") == any(s.checkpoint == id for s in flights.savepoints.list("flights"))


def test_after_a_take_over_the_older_run_commits_nothing_more(flights: Catalog, catalog_url: str) -> None:
    def old_run() -> int:
        """Commit until fenced; how many commits were acknowledged."""
        for id in range(1, 100_000):
            try:
                flights.commits.add("flights", 1, commit_of(id))
            except Fenced:
                return id - 1
        raise AssertionError("never fenced")

    with ThreadPoolExecutor(1) as pool, open_catalog(catalog_url) as other:
        running = pool.submit(old_run)
        while other.checkpoints.last_id("flights") < 10:
            sleep(0.002)
        epoch = other.runs.begin("flights", "new")
        seen = other.checkpoints.last_id("flights")
        other.commits.add("flights", epoch, commit_of(seen + 1, tag="new"))
        acknowledged = running.result()
    assert acknowledged == seen
    assert [c.epoch for c in flights.checkpoints.list("flights")] == [1] * seen + [2]


def test_a_take_over_waits_for_a_commit_that_has_begun(flights: Catalog, catalog_url: str) -> None:
    taking: list[Future[int]] = []
    waited: list[bool] = []
    with ThreadPoolExecutor(1) as pool, open_catalog(catalog_url) as other:

        def take_over(_c: object, _cursor: object, statement: str, *_: object) -> None:
            if statement.startswith("INSERT INTO checkpoint"):  # the epoch was found to be the newest
                taking.append(pool.submit(other.runs.begin, "flights", "new"))
                waited.append(not wait(taking, timeout=0.3).done)

        event.listen(flights.transactions.engine, "before_cursor_execute", take_over)
        flights.commits.add("flights", 1, commit_of(1))
        assert waited == [True]
        assert taking[0].result() == 2
        assert other.checkpoints.last_id("flights") == 1
    with pytest.raises(Fenced):
        flights.commits.add("flights", 1, commit_of(2))


def test_epochs_begun_at_once_are_all_different(flights: Catalog) -> None:
    assert sorted(outcomes(6, lambda n: flights.runs.begin("flights", f"host:{n}"))) == [2, 3, 4, 5, 6, 7]  # type: ignore[type-var]
    assert [r.ended_at is None for r in flights.runs.list("flights")] == [False] * 6 + [True]
