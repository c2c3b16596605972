"""Deploys that change what a stream is made of: taken back, rolled back, forked, and state given up by saying so."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.inspect import list_checkpoints
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.errors import SchemaConflict, UsageError
from siltstone.model import Form
from siltstone.operator import OpaqueState, Operator, Rows, State, ValueState
from siltstone.retention.deletion import delete_checkpoints
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.stream import Stream
from tests.proofs import failures, in_order, restored_digest
from tests.region_run import RegionSteps

NAME = "deploys"
POLICY = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))


class Counts(Operator):
    """How often each key came."""

    name = "counts"
    key = {"k": pa.int64()}  # noqa: RUF012
    rows = ValueState(value={"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        had = state.rows.get(rows.keys).column("n").fill_null(0)
        state.rows.put(rows.keys, {"n": [n.as_py() + 1 for n in had]})


class More(Counts):
    """And some more of each."""

    marks = ValueState(value={"m": pa.string()})
    noted = OpaqueState(dict, lambda noted: str(noted).encode(), lambda _: {})

    def process(self, rows: Rows, state: State) -> None:
        super().process(rows, state)
        state.marks.put(rows.keys, {"m": ["seen"] * len(rows.keys)})
        state.noted[int(rows.key_groups[0])] = {"noted": 1}


class Others(Counts):
    name = "others"


def _no_source(*_: Any) -> Any:
    raise AssertionError("no query runs here")


def stream(*operators: Operator) -> Stream:
    return Stream(NAME, _no_source, list(operators), max_parallelism=4)


OLD, NEW = stream(Counts()), stream(More(), Others())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


def opened(place: OpenWarehouse, of: Stream, drop: Sequence[str] = ()) -> RegionSteps:
    options = RegionOptions(parallelism=2, drop=drop)
    return RegionSteps(ConsistentRegion.open(of, place.warehouse, place.catalog, POLICY, options, "a test"))


def run(place: OpenWarehouse, of: Stream, steps: int = 1, drop: Sequence[str] = ()) -> list[Any]:
    """Some checkpoints of a run of its own; everything is proven after it."""
    steps_of = opened(place, of, drop)
    made = [steps_of.step(pa.table({"k": range(step, step + 5)})) for step in range(steps)]
    steps_of.region.close("done")
    proven(place)
    return made


def proven(place: OpenWarehouse) -> None:
    assert not failures(place, NAME)
    for checkpoint in place.catalog.checkpoints.list(NAME):
        assert restored_digest(place, NAME, checkpoint.id, 3) == checkpoint.digest


def test_a_bad_deploy_that_completes_no_checkpoint_leaves_nothing(place: OpenWarehouse) -> None:
    run(place, OLD)
    recorded = place.catalog.streams.get(NAME).definition
    bad = opened(place, NEW)
    bad.step(pa.table({"k": [1]}), ends=False)
    bad.region.close("failed")
    assert place.catalog.streams.get(NAME).definition == recorded
    [made] = run(place, OLD)
    assert made.id == 2
    assert [one.checkpoint for one in place.catalog.definitions.list(NAME)] == [1]


def test_so_does_a_first_one(place: OpenWarehouse) -> None:
    opened(place, NEW).region.close("failed")
    run(place, OLD)
    assert place.catalog.streams.get(NAME).definition["operators"].keys() == {"counts"}


def test_old_code_after_new_code_completed_a_checkpoint_is_refused_and_told_what_to_do(place: OpenWarehouse) -> None:
    run(place, OLD)
    run(place, NEW)
    epoch = place.catalog.streams.get(NAME).epoch
    with pytest.raises(SchemaConflict, match=r"counts.marks changed.*deploys --drop counts.marks.*fork deploys NEW"):
        opened(place, OLD)
    with pytest.raises(SchemaConflict, match=r"lost operator others: recorded .*--drop others"):
        opened(place, stream(More()))
    assert place.catalog.streams.get(NAME).epoch == epoch, "nothing was fenced"


def test_what_was_dropped_may_have_been_materialized(place: OpenWarehouse) -> None:
    run(place, NEW, 3)
    materialize(place, NAME, "counts", 3, id="m", parallelism=1, run=in_order)
    [made] = run(place, OLD, drop=("counts.marks", "counts.noted", "others"))
    assert made.id == 4
    assert run(place, NEW)[0].id == 5


@pytest.mark.slow
def test_a_rollback_brings_back_the_definition_of_its_checkpoint(place: OpenWarehouse) -> None:
    run(place, OLD, 2)
    run(place, NEW, 2)
    place.catalog.rollbacks.roll_back(NAME, place.catalog.runs.begin(NAME, "a test"), 2, "damaged", "a test")
    [made] = run(place, OLD)
    assert made.id == 3 and len(place.catalog.definitions.list(NAME)) == 1


@pytest.mark.slow
def test_a_fork_at_an_id_takes_the_definition_of_that_id(place: OpenWarehouse) -> None:
    run(place, OLD, 2)
    run(place, NEW)
    place.catalog.forks.create(NAME, "fork", 2)
    fork = replace(OLD, name="fork", origin=NAME)
    steps = RegionSteps(ConsistentRegion.open(fork, place.warehouse, place.catalog, POLICY, RegionOptions(), "a test"))
    assert steps.step(pa.table({"k": [1]})) is not None
    steps.region.close("done")
    assert not failures(place, "fork")


@pytest.mark.slow
def test_variables_and_operators_are_dropped_by_saying_so_and_come_again_empty(place: OpenWarehouse) -> None:
    run(place, NEW, 2)
    dropped = ("counts.marks", "counts.noted", "others")
    with pytest.raises(SchemaConflict, match="--drop others"):
        opened(place, OLD, dropped[:2])
    first, second = run(place, OLD, 2, dropped)
    assert first.forms == {"counts": Form.BASE} and second.forms == {"counts": Form.DELTA}
    assert first.state_rows == 6, "counts went on from what they were"
    listed = {one["id"]: one["dropped"] for one in list_checkpoints(place.catalog, NAME)}
    assert listed == {1: [], 2: [], 3: list(dropped), 4: []}
    run(place, OLD, 1, dropped)  # to say it again is harmless
    assert [one.checkpoint for one in place.catalog.definitions.list(NAME)] == [1, 3]
    [again] = run(place, NEW)
    assert again.state_rows == 6 + 5 + 5, "marks and others begin empty"


@pytest.mark.slow
def test_what_was_dropped_is_deleted_with_the_checkpoints_that_hold_it(place: OpenWarehouse) -> None:
    run(place, NEW, 2)
    run(place, OLD, 2, ["counts.marks", "counts.noted", "others"])
    assert any("others" in o.name or "marks" in o.name for o in place.catalog.objects.list(NAME))
    result = delete_checkpoints(place, NAME, [1, 2])
    assert result.deleted == (1, 2)
    assert not any("others" in o.name or "marks" in o.name for o in place.catalog.objects.list(NAME))
    proven(place)


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (["counts"], "still has counts in its code"),
        (["counts.rows"], "still has counts.rows in its code"),
        (["nosuch"], "has no nosuch to drop: it has counts, others, counts.rows"),
        (["counts.nosuch"], "has no counts.nosuch to drop"),
        (["counts."], "still has counts. in its code"),
    ],
)
def test_to_drop_what_is_not_there_or_not_missing_is_an_error_of_usage(
    place: OpenWarehouse, drop: list[str], said: str
) -> None:
    run(place, NEW)
    with pytest.raises(UsageError, match=said):
        opened(place, OLD, drop)


@pytest.mark.slow
def test_a_killed_run_that_was_to_drop_has_dropped_nothing(place: OpenWarehouse) -> None:
    run(place, NEW)
    killed = opened(place, OLD, ["counts.marks", "counts.noted", "others"])
    killed.step(pa.table({"k": [1]}), ends=False)
    [made] = run(place, NEW)
    assert made.state_rows == 15 and len(place.catalog.definitions.list(NAME)) == 1
