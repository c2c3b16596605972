"""The campaign's judges themselves: what they are to notice, they notice."""

import importlib
import inspect
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, policy_by_name
from siltstone.errors import Unreachable
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.settings import load_settings
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.maintenance import optimize_sinks
from siltstone.spark.operations.holding import open_region
from siltstone.store.paths import LocalLayout
from siltstone.stream import DEAD_LETTERS
from tests import sums
from tests.fault import promises
from tests.fault.attempts import LostAttempts
from tests.fault.held_stream import HELD
from tests.fault.hosts import ACKNOWLEDGING
from tests.fault.journal import JournaledSink, journal_of
from tests.fault.lines import Within
from tests.fault.outages import CALL
from tests.fault.reference import held, restored, small
from tests.fault.shapes import DELIVERY, TAKE_OVER
from tests.fault.small_stream import SMALL, purchases
from tests.fault.victims import Frame, SinkingSteps
from tests.region_run import RegionRun

STEPS = 4
FUNCTIONS = sorted({*(each for places in TAKE_OVER.values() for each in places), *ACKNOWLEDGING, CALL, DELIVERY})


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse of the small stream with some checkpoints, each of a batch."""
    directory = tmp_path_factory.mktemp("worked")
    with OpenWarehouse.open_writable(str(directory)) as opened:
        work(opened, range(STEPS))
        assert not broken(opened)
    return directory


@pytest.fixture
def place(worked: Path, tmp_path: Path) -> Iterator[OpenWarehouse]:
    """A copy of it."""
    shutil.copytree(worked, tmp_path / "warehouse")
    with OpenWarehouse.open_writable(str(tmp_path / "warehouse")) as opened:
        yield opened


def work(place: OpenWarehouse, batches: range, checkpoint_steps: int = 1, lost: LostAttempts | None = None) -> None:
    """A run."""
    options = RegionOptions(parallelism=2, checkpoint_steps=checkpoint_steps)
    region = ConsistentRegion.open(
        SMALL, place.warehouse, place.catalog, policy_by_name(DEFAULT_POLICY), options, "a test"
    )
    steps = SinkingSteps(region, lost=lost)
    for number in batches:
        steps.step(purchases()[number])
    region.close("done")


def broken(place: OpenWarehouse, **policy_by_name: Any) -> str:
    return "\n".join(promises.broken(small(), place, proven=False, **policy_by_name))


def sink(place: OpenWarehouse) -> Path:
    return place.warehouse.local.sink(SMALL.name) / "accounts"


def deliver(place: OpenWarehouse, id: int, *batches: int) -> None:
    """Hand the sink the rows of these batches."""
    rows: Any = Frame(pa.concat_tables([small().written[batch - 1] for batch in batches]))
    JournaledSink(sink(place)).deliver(rows, id)


def forget(place: OpenWarehouse, id: int) -> None:
    """Let the sink not have been handed an id."""
    for file in (sink(place) / "_journal").iterdir():
        if json.loads(file.read_text())["id"] == id:
            file.unlink()
    JournaledSink(sink(place)).published_path(id).rename(sink(place) / f"gone-{id}")


@pytest.mark.parametrize(
    ("wrong", "noticed"),
    [
        (lambda place: deliver(place, 2, 2, 3), "id 2 was delivered with 300 rows, and then with other 600"),
        (lambda place: deliver(place, 5, 5), "rows of checkpoint 5, which never completed"),
        (lambda place: forget(place, 4), r"lacks the rows of checkpoints \[4\]"),
        (lambda place: forget(place, 2), r"batches \(1, 1\) under id 1 and \(3, 3\) under id 3"),
        (lambda place: (forget(place, 1), deliver(place, 1, 1)), r"in the order \[2, 3, 4, 1\]"),
        (lambda place: (forget(place, 4), deliver(place, 4, 3)), r"\(3, 3\) under id 3 and \(3, 3\) under id 4"),
        (lambda place: (forget(place, 4), deliver(place, 4, 4, 5)), r"batches \(4, 5\) of checkpoint 4"),
    ],
)
def test_a_sink_that_got_something_else_is_noticed(
    place: OpenWarehouse, wrong: Callable[[OpenWarehouse], object], noticed: str
) -> None:
    wrong(place)
    found = broken(place)
    with pytest.raises(AssertionError, match=noticed):
        raise AssertionError(found)


@pytest.fixture
def with_three_sinks(tmp_path: Path) -> Iterator[OpenWarehouse]:
    """A warehouse of the held stream with two checkpoints, whose table was merged into one file."""
    with OpenWarehouse.open_writable(str(tmp_path / "held")) as opened:
        settings = load_settings(warehouse=str(tmp_path / "held"))
        region = open_region(settings, HELD, opened, {}, 2)
        steps = SinkingSteps(region)
        for number in range(2):
            steps.step(purchases()[number])
        region.close("done")
        (done,) = optimize_sinks(opened, HELD.name).tables
        assert done.merged > done.written == 1
        assert not promises.broken(held(), opened)
        yield opened


def table(place: OpenWarehouse) -> Any:
    return SinkTable(place.warehouse.store, HELD.name, "late").open()


def test_a_row_that_a_table_has_once_more_is_noticed(with_three_sinks: OpenWarehouse) -> None:
    opened = table(with_three_sinks)
    write_deltalake(opened, opened.to_pyarrow_table().slice(0, 1), mode="append")
    assert "sink late: its newest version has" in "\n".join(promises.broken(held(), with_three_sinks))


def test_a_row_that_a_table_lost_is_noticed(with_three_sinks: OpenWarehouse) -> None:
    table(with_three_sinks).delete("sequence = 7")
    assert "sink late: its newest version has" in "\n".join(promises.broken(held(), with_three_sinks))


def test_dead_letters_that_are_lost_are_noticed(with_three_sinks: OpenWarehouse) -> None:
    sink = with_three_sinks.warehouse.local.sink(HELD.name) / DEAD_LETTERS
    newest = sorted((sink / "_journal").iterdir())[-1]
    newest.unlink()
    JournaledSink(sink).published_path(2).rename(sink / "gone")
    assert "sink dead_letters: a consumer that skips ids it has lacks the rows of checkpoints [2]" in "\n".join(
        promises.broken(held(), with_three_sinks)
    )


def test_what_is_delivered_once_more_is_no_fault(place: OpenWarehouse) -> None:
    deliver(place, 3, 3)
    assert len(journal_of(sink(place))) == STEPS + 1
    assert not broken(place)


def test_the_newest_rows_may_be_outstanding_while_a_run_has_not_ended_well(place: OpenWarehouse) -> None:
    forget(place, 4)
    assert "lacks" in broken(place)
    assert not broken(place, unpublished=[SMALL.name])


@pytest.mark.parametrize("within", FUNCTIONS, ids=str)
def test_a_function_in_which_processes_are_hurt_is_one_of_the_engine(within: Within) -> None:
    found: Any = importlib.import_module(f"siltstone.{within.file.removesuffix('.py').replace('/', '.')}")
    for name in within.function.split("."):
        found = getattr(found, name)
    assert within.is_(inspect.unwrap(found).__code__)


@pytest.mark.parametrize("checkpoint_steps", [1, 3])
def test_hosts_that_lose_acknowledgements_break_nothing(tmp_path: Path, checkpoint_steps: int) -> None:
    """Of the same rows and of others, on the host that does the task then and on the other one."""
    with OpenWarehouse.open_writable(str(tmp_path / "warehouse")) as place:
        other = replace(place.warehouse, local=LocalLayout(tmp_path / "other"))
        lost = LostAttempts([place.warehouse, other], lost=0.6, seed=checkpoint_steps)
        work(place, range(3), checkpoint_steps, lost)
        work(place, range(3, 6), checkpoint_steps, lost)
        assert lost.attempts > 5
        assert not promises.broken(small(), place)


def prune(place: OpenWarehouse, sql: str) -> None:
    with closing(sqlite3.connect(place.warehouse.local.catalog)) as connection:
        connection.execute(sql)
        connection.commit()


def test_a_log_that_is_pruned_as_far_as_may_be_is_no_fault_and_one_pruned_further_is(place: OpenWarehouse) -> None:
    catalog = place.catalog
    catalog.deletions.mark(SMALL.name, 1, iter([1, 2]))
    assert catalog.input_log.prune(SMALL.name, 1, at_least=1) == 1
    assert not broken(place)
    prune(place, "DELETE FROM step WHERE step = 2")
    assert "steps were pruned that a replay from checkpoint 3 needs" in broken(place)


def test_a_hole_in_the_log_is_noticed(place: OpenWarehouse) -> None:
    prune(place, "DELETE FROM step WHERE step = 3")
    assert "are not the batches in order" in broken(place)


def test_a_stream_that_began_anew_delivers_all_once_more_under_higher_ids(place: OpenWarehouse) -> None:
    catalog = place.catalog
    catalog.deletions.mark(SMALL.name, 1, iter([1, 2]))
    catalog.input_log.prune(SMALL.name, 1, at_least=1)
    epoch = catalog.runs.begin(SMALL.name, "a test")
    catalog.rollbacks.roll_back(SMALL.name, epoch, 0, "a test", "a test")
    catalog.runs.end(SMALL.name, epoch, "done")
    work(place, range(2))
    assert not broken(place)
    assert [each.id for each in journal_of(sink(place))] == [1, 2, 3, 4, 5, 6]
    forget(place, 6)
    assert r"lacks the rows of checkpoints [2]" in broken(place)


def test_a_run_that_dies_between_a_delivery_and_its_mark_delivers_once_more(place: OpenWarehouse) -> None:
    with (
        patch.object(type(place.catalog.outbox), "mark_delivered", side_effect=Unreachable("gone")),
        pytest.raises(Unreachable),
    ):
        work(place, range(STEPS, STEPS + 1))
    work(place, range(0))
    assert [each.id for each in journal_of(sink(place))] == [1, 2, 3, 4, 5, 5]
    assert not broken(place)


def test_a_state_that_the_newest_checkpoint_did_not_change_is_restored(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path)) as opened:
        run = RegionRun(opened, sums.STREAM, sums.POLICY)
        run.step(sums.rows(1))
        assert run.step_without_rows()
        run.region.close("done")
        state = restored(opened, sums.STREAM, 2)["by_key"]
        assert state.tables["totals"].rows == 100
