"""A table that did not change in an interval is not written again, whatever form is ordered."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.costs import of_all_subtasks
from siltstone.chains.due import chain_facts
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import Policy, PolicyOptions, policy_by_name
from siltstone.chains.policy_rules import CheckpointCost, PolicyState
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.format.manifests import read_manifest
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.operator import Operator, Rows, State, ValueState
from tests.places import place_at
from tests.proofs import check_restores, in_order
from tests.region_run import RegionRun
from tests.sums import NAME, stream_of

POLICIES = [
    policy_by_name("adjust-d", PolicyOptions(d0=0)),
    policy_by_name("adjust-d", PolicyOptions(d_max=0)),
    policy_by_name("adjust-d", PolicyOptions(d_max=2)),
    policy_by_name("marginal-cost", PolicyOptions(d_max=0)),
    policy_by_name("marginal-cost"),
]


def cases(numbers: Sequence[int]) -> Iterator[Any]:
    """Every policy with every number and, in `make test-thorough`, both backends; else RocksDB with one number of each
    policy, in turn."""
    for (nth, policy), number, backend in itertools.product(enumerate(POLICIES), numbers, ("heap", "rocksdb")):
        often = backend == "heap" or number == numbers[nth % len(numbers)]
        marks = [] if backend == "heap" else [pytest.mark.slow if often else pytest.mark.thorough]
        yield pytest.param(policy, number, backend, marks=marks, id=f"policy{nth}-{number}-{backend}")


class Tables(Operator):
    """A table that changes with each row, and one that changes where the rows say so."""

    name = "tables"
    key = pa.schema([("k", pa.int64())])
    busy = ValueState(value={"n": pa.int64()})
    static = ValueState(value={"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        """Set the number in `busy`; a negative one in `static`, too."""
        values = {"n": rows.last("n")}
        state.busy.put(rows.keys, values)
        if len(rows) and rows.table.column("n")[0].as_py() < 0:
            state.static.put(rows.keys, values)


def batch(n: int, keys: Sequence[int]) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.int64()), "n": pa.array([n] * len(keys), pa.int64())})


def forms(place: OpenWarehouse, checkpoint: int, table: str = "static") -> list[Form]:
    """The forms of a table's parts in a checkpoint, of each subtask that wrote it."""
    manifest = read_manifest(place.warehouse.store, place.catalog.checkpoints.get(NAME, checkpoint).manifest)
    return [h.form for h in manifest.handles if h.variable == table]


def check(place: OpenWarehouse) -> None:
    """Every checkpoint proves, and some restore, at other parallelisms, too."""
    check_restores(place, NAME, (3, 1))


@pytest.mark.parametrize(("policy", "steps", "backend"), list(cases((1, 3))))
def test_a_static_table_beside_a_busy_one_is_written_once(
    tmp_path: Path, policy: Policy, steps: int, backend: str
) -> None:
    with place_at(tmp_path / "w") as place:
        run = RegionRun(
            place,
            stream_of(Tables()),
            policy,
            parallelism=2,
            checkpoint_steps=steps,
            backend=backend,
        )
        run.step(batch(-1, range(100)), ends=True)
        for n in range(1, 12 * steps + 1):
            run.step(batch(n, range(3)))
        assert [record.id for record in place.catalog.checkpoints.list(NAME) if forms(place, record.id)] == [1]
        check(place)


@pytest.mark.parametrize(("policy", "at", "backend"), list(cases((1, 2, 3))))
def test_a_change_in_any_step_of_an_interval_is_written(tmp_path: Path, policy: Policy, at: int, backend: str) -> None:
    with place_at(tmp_path / "w") as place:
        run = RegionRun(place, stream_of(Tables()), policy, 2, checkpoint_steps=3, backend=backend)
        run.step(batch(-1, range(100)), ends=True)
        for n in range(1, 16):
            run.step(batch(-n if n % 6 == at else n, range(n, n + 5)))
        assert forms(place, 2) and not forms(place, 3) and forms(place, 4)
        assert Form.DELTA not in forms(place, 5), "it did not change; at most its chain ends"
        check(place)


def test_a_rescale_under_a_policy_of_bases_writes_no_table(tmp_path: Path) -> None:
    with place_at(tmp_path / "w") as place:
        policy = policy_by_name("marginal-cost", PolicyOptions(d_max=0))
        RegionRun(place, stream_of(Tables()), policy, parallelism=2).step(batch(-1, range(100)))
        for parallelism in (3, 1):
            completed = RegionRun(place, stream_of(Tables()), policy, parallelism=parallelism).step_without_rows()
            assert not forms(place, completed.id) and not forms(place, completed.id, "busy")
            check(place)
        run = RegionRun(place, stream_of(Tables()), policy, parallelism=2)
        run.step(batch(-2, range(50)))
        assert set(forms(place, 4)) == {Form.BASE}
        check(place)


def test_a_chain_with_deltas_still_ends_with_a_base(tmp_path: Path) -> None:
    """Unchanged or not: where the policy ends a chain, a restore is to read less."""
    with place_at(tmp_path / "w") as place:
        policy = policy_by_name("adjust-d", PolicyOptions(d0=1, d_max=1, size_ratio_max=None))
        run = RegionRun(place, stream_of(Tables()), policy, parallelism=2)
        run.step(batch(-1, range(100)))
        run.step(batch(-2, range(3)))
        for n in range(3, 10):
            run.step(batch(n, range(3)))
        written = [forms(place, record.id) for record in place.catalog.checkpoints.list(NAME)]
        assert set(written[1]) == {Form.DELTA} and set(written[2]) == {Form.BASE} and not any(written[3:])
        check(place)


def test_where_only_one_subtask_changes_the_size_of_a_base_stays_known(tmp_path: Path) -> None:
    with place_at(tmp_path / "w") as place:
        policy = policy_by_name("adjust-d", PolicyOptions(d_max=0))
        run = RegionRun(place, stream_of(Tables(), max_parallelism=8), policy, parallelism=2)
        run.step(batch(-1, range(20_000)))
        before = run.region.chains.policies["tables"]["busy"].base_bytes
        for n in range(1, 12):
            run.step(batch(n, [1]))
            assert len(forms(place, n + 1, "busy")) == 1
            state = run.region.chains.policies["tables"]["busy"]
            assert 0.7 * before < state.base_bytes < 1.4 * before and not state.deltas
        check(place)


def acknowledged(subtask: int, rows: int, form: Form | None, size: int = 100) -> Acknowledgement:
    """Of a subtask that wrote a table in a form, or nothing of it."""
    groups = KeyGroupRange(subtask, subtask + 1)
    place = (
        "op",
        "table",
        Kind.INCREMENTAL,
        form or Form.BASE,
        "an object",
        0,
        size,
        "xxh3-128:" + "0" * 32,
        groups,
        rows,
        0,
    )
    handles = [] if form is None else [Handle(*place)]
    return Acknowledgement("op", subtask, groups, handles=handles, table_rows={"table": rows})


def test_a_base_of_some_subtasks_counts_as_a_delta_where_the_others_chains_have_deltas() -> None:
    received = [acknowledged(0, 10, Form.BASE), acknowledged(1, 30, None)]
    cost = CheckpointCost(form=Form.BASE, bytes=100, seconds=1.0, rows=40)
    long = PolicyState(checkpoints=5, deltas=3, base_bytes=400.0, base_rows=40)
    assert of_all_subtasks(cost, long, "table", received).form is Form.DELTA
    alone = of_all_subtasks(cost, PolicyState(checkpoints=5, base_bytes=400.0, base_rows=40), "table", received)
    assert alone == CheckpointCost(form=Form.BASE, bytes=400, seconds=3.0, rows=40)
    empty = of_all_subtasks(cost, PolicyState(checkpoints=5, base_bytes=400.0), "table", received)
    assert empty.bytes == 400
    both = [acknowledged(0, 10, Form.BASE), acknowledged(1, 30, Form.BASE)]
    assert of_all_subtasks(cost, long, "table", both) is cost


def test_wide_rows_that_do_not_change_beside_narrow_ones_that_do_stay_counted() -> None:
    cost = CheckpointCost(form=Form.BASE, bytes=10, seconds=0.5, rows=20)
    state = PolicyState(checkpoints=1, base_bytes=2000.0, base_rows=20, base_s=2.0)
    for _ in range(10):
        received = [acknowledged(0, 10, Form.BASE, 10), acknowledged(1, 10, None)]
        seen = of_all_subtasks(cost, state, "table", received)
        state = replace(state, base_bytes=float(seen.bytes), base_s=seen.seconds)
    assert (state.base_bytes, state.base_s) == (2000, 2)


def test_checkpoints_without_changes_beside_a_materialization_are_no_deltas(place: OpenWarehouse) -> None:
    """Until the run notices the materialization, its records still tell of the deltas before it."""
    policy = policy_by_name("adjust-d", PolicyOptions(d0=50, size_ratio_max=None, space_amplification_max=None))
    run = RegionRun(place, stream_of(Tables()), policy)
    for n in range(-1, -5, -1):
        run.step(batch(n, range(40)))

    def beside(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        parts = in_order(function, tasks)
        for _ in range(2):
            run.step_without_rows()
        return parts

    materialize(place, NAME, "tables", 4, id="m1", parallelism=1, run=beside)
    [facts] = chain_facts(place.catalog, NAME)
    assert (facts.checkpoint, facts.deltas, facts.deltas_bytes) == (6, 0, 0)
    run.step(batch(9, range(3)))
    [facts] = chain_facts(place.catalog, NAME)
    assert (facts.checkpoint, facts.deltas) == (7, 1) and facts.deltas_bytes > 0
