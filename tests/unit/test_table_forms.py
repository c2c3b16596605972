"""Base or delta is decided for each table: the patent's example, and what a subtask gives up."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.chain_rules import share_budget
from siltstone.chains.inspect import show_checkpoint
from siltstone.chains.policies import PolicyOptions, PolicyState, policy_by_name
from siltstone.format.manifests import read_manifest
from siltstone.model import Form, Kind
from siltstone.operator import Operator, Rows, State, ValueState
from tests.examples import long_form
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun
from tests.sums import NAME, rows, stream_of

UNBOUND = PolicyOptions(d_max=30, size_ratio_max=None, space_amplification_max=None)


class Data(Operator):
    """`data3` changes wholly at each step, `data4` in one key of a hundred."""

    name = "data"
    key: ClassVar = {"k": pa.int64()}
    data3 = ValueState(value={"noise": pa.binary()})
    data4 = ValueState(value={"noise": pa.binary()})

    def process(self, rows: Rows, state: State) -> None:
        """Write new bytes."""
        noise = np.random.default_rng(int(rows.table.column("n")[0].as_py()))
        values = [noise.bytes(50) for _ in range(len(rows.keys))]
        state.data3.put(rows.keys, {"noise": values})
        first = rows.table.column("n")[0].as_py() == 1
        few = np.flatnonzero(first | (rows.keys.columns.column("k").to_numpy() == 0))
        state.data4.put(rows.keys.take(few), {"noise": [values[i] for i in few]})


def _forms(place: OpenWarehouse, checkpoint: int, operator: str) -> dict[str, Form]:
    manifest = read_manifest(place.warehouse.store, place.catalog.checkpoints.get(NAME, checkpoint).manifest)
    handles = [h for h in manifest.handles if h.operator == operator and h.kind is Kind.INCREMENTAL]
    return {h.variable: h.form for h in handles}


@pytest.mark.parametrize("checkpoint_steps", [1, 2])
def test_the_patents_data3_is_a_base_and_data4_a_delta_in_one_checkpoint(
    place: OpenWarehouse, checkpoint_steps: int
) -> None:
    """US 9471438: whether a structure is checkpointed as a base or a delta is decided for each of them."""
    policy = policy_by_name("marginal-cost", PolicyOptions(size_ratio_max=1.5))
    run = RegionRun(place, stream_of(Data()), policy, checkpoint_steps=checkpoint_steps)
    made = [run.step(rows(n, changed=100)) for n in range(1, 8 * checkpoint_steps + 1)]
    completed = [each for each in made if each]
    forms = [_forms(place, each.id, "data") for each in completed]
    assert forms[0] == {"data3": Form.BASE, "data4": Form.BASE}
    assert {"data3": Form.BASE, "data4": Form.DELTA} in forms[1:]
    assert all(each["data4"] is Form.DELTA for each in forms[1:])
    assert not failures(place, NAME)
    for each in completed:
        assert restored_digest(place, NAME, each.id) == each.digest
    record = place.catalog.checkpoints.get(NAME, completed[-1].id)
    said = record.statistics["operators"]["data"]
    bounds = [of["restore_bound_bytes"] for of in said["tables"].values()]
    assert said["restore_bound_bytes"] == pytest.approx(sum(bounds), abs=len(bounds))
    first = {table: of["chain"]["first"] for table, of in said["tables"].items()}
    assert first["data4"] == 1 and first["data3"] > 1
    # A run that takes over goes on with each chain.
    states = run.region.chains.policies
    again = RegionRun(place, stream_of(Data()), policy)
    assert again.region.chains.policies == states
    assert again.step(rows(99, changed=100)) and not failures(place, NAME)


def test_tables_share_the_seconds_of_a_restore() -> None:
    slow = PolicyState(seen=1, base_s=4.0, base_factor=1.0, mean_s=3.0)
    fast = PolicyState(seen=1, base_s=1.0, base_factor=1.0, mean_s=1.0)
    shares = share_budget({"slow": slow, "fast": fast}, PolicyOptions(restore_budget_s=9))
    assert {table: of.restore_budget_s for table, of in shares.items()} == {"slow": 7.0, "fast": 2.0}
    tight = share_budget({"slow": slow, "fast": fast}, PolicyOptions(restore_budget_s=2.5))
    assert {table: of.restore_budget_s for table, of in tight.items()} == {"slow": 2.0, "fast": 0.5}
    alone = PolicyOptions(restore_budget_s=9)
    assert share_budget({"slow": slow}, alone) == {"slow": alone}


class Busy(Operator):
    """A small table that changes all the time."""

    name = "data"
    key: ClassVar = {"k": pa.int64()}
    busy = ValueState(value={"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        """Write the step."""
        state.busy.put(rows.keys, {"n": np.full(len(rows.keys), rows.table.column("n")[0].as_py())})


class Static(Busy):
    """A large table beside it, which only the first step writes."""

    static = ValueState(value={"noise": pa.binary()})

    def process(self, rows: Rows, state: State) -> None:
        """Write the step; at first, noise too."""
        super().process(rows, state)
        if rows.table.column("n")[0].as_py() == 1:
            random = np.random.default_rng(0)
            state.static.put(rows.keys, {"noise": [random.bytes(200) for _ in range(len(rows.keys))]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adjust-d", PolicyOptions()),
        ("adjust-d", PolicyOptions(d0=0)),
        ("adjust-d", PolicyOptions(d_max=0)),
        ("marginal-cost", PolicyOptions()),
        long_form("marginal-cost", PolicyOptions(d0=0)),
        long_form("marginal-cost", PolicyOptions(d_max=0)),
    ],
)
def test_a_large_static_table_costs_nothing_beside_a_small_busy_one(
    tmp_path: Path, name: str, options: PolicyOptions
) -> None:
    written = []
    for operator in (Static(), Busy()):
        with OpenWarehouse.open_writable(str(tmp_path / type(operator).__name__)) as place:
            run = RegionRun(
                place, stream_of(operator, max_parallelism=16), policy_by_name(name, options), parallelism=2
            )
            made = [run.step(rows(n, keys=10_000, changed=1000)) for n in range(1, 21)]
            written.append(sum(each.bytes for each in made[1:] if each))
            assert not failures(place, NAME)
    assert written[0] <= 1.1 * written[1], "of which manifests, that name another table, are most"


def test_a_checkpoint_is_shown_with_what_did_not_change(place: OpenWarehouse) -> None:
    run = RegionRun(place, stream_of(Static()), policy_by_name("adjust-d", UNBOUND))
    for n in (1, 2, 3):
        run.step(rows(n))
    shown = [show_checkpoint(place.catalog, place.warehouse.store, NAME, str(at))["unchanged"] for at in (1, 2, 3)]
    assert shown == [{}, {"data.static": 1}, {"data.static": 1}]
