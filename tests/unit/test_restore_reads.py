"""Report and proofs say what a restore of each checkpoint reads, where tables have their bases at different times."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.format.manifests import read_manifest, read_manifests
from siltstone.model import Form, Kind
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.report import report_data
from siltstone.restore import verify
from siltstone.restore.export import unit_tasks
from siltstone.restore.proof import Proof, prove_checkpoints
from tests.proofs import in_order
from tests.region_run import RegionRun
from tests.sums import NAME, Tally, rows, stream_of

pytestmark = pytest.mark.slow

POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=30, size_ratio_max=1.5))
LAST = 14


class Two(Operator):
    """`busy` changes in every key at every step and `calm` in one; `calls` in all key groups, `once` at the first."""

    name = "two"
    key: ClassVar = {"k": pa.int64()}
    busy = ValueState(value={"noise": pa.binary()})
    calm = ValueState(value={"noise": pa.binary()})
    calls = Tally(create=int, serialize=lambda n: n.to_bytes(40, "big"), deserialize=int.from_bytes)
    once = Tally(create=int, serialize=lambda n: n.to_bytes(30, "big"), deserialize=int.from_bytes)

    def process(self, rows: Rows, state: State) -> None:
        """Write new bytes."""
        n = int(rows.table.column("n")[0].as_py())
        noise = np.random.default_rng(n)
        values = [noise.bytes(50) for _ in range(len(rows.keys))]
        state.busy.put(rows.keys, {"noise": values})
        few = np.flatnonzero((n == 1) | (rows.keys.columns.column("k").to_numpy() == n % 100))
        state.calm.put(rows.keys.take(few), {"noise": [values[i] for i in few]})
        for group in np.unique(rows.key_groups).tolist():
            state.calls[group] += 1
            if n == 1:
                state.once[group] = 1


def _run(place: OpenWarehouse, parallelism: int = 1, backend: str = "heap") -> RegionRun:
    run = RegionRun(place, stream_of(Two()), POLICY, parallelism=parallelism, backend=backend)
    for n in range(1, LAST + 1):
        assert run.step(rows(n, changed=100))
    return run


def _read_by_restores(place: OpenWarehouse) -> dict[int, int]:
    """Checkpoint -> bytes of the blocks that a restore of it reads."""
    found = {}
    for record in place.catalog.checkpoints.list(NAME):
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, record.id), NAME)
        found[record.id] = unit_tasks(manifests, record.id, 2, None)[1]
    return found


def _said_by_report(place: OpenWarehouse) -> dict[int, int]:
    points = report_data(place.catalog, NAME).checkpoints
    return {point.record.id: sum(part.chain_bytes for part in point.operators.values()) for point in points}


def _prove(place: OpenWarehouse) -> Proof:
    proof = prove_checkpoints(place, NAME, [c.id for c in place.catalog.checkpoints.list(NAME)], in_order)
    assert not proof.failures
    return proof


def _bases(place: OpenWarehouse, table: str) -> list[int]:
    """The checkpoints that have a base of a table."""
    catalog, store = place.catalog, place.warehouse.store
    manifests = [read_manifest(store, record.manifest) for record in catalog.checkpoints.list(NAME)]
    return [
        m.checkpoint
        for m in manifests
        if any(h.variable == table and h.form is Form.BASE and h.kind is Kind.INCREMENTAL for h in m.handles)
    ]


def test_tables_have_their_bases_at_different_checkpoints(place: OpenWarehouse) -> None:
    _run(place)
    busy, calm = _bases(place, "busy"), _bases(place, "calm")
    assert (
        calm == [1]
        and len(busy) > 4
        and {r.forms["two"] for r in place.catalog.checkpoints.list(NAME)[1:]} == {Form.DELTA}
    )


def test_the_report_says_what_a_restore_reads(place: OpenWarehouse) -> None:
    run = _run(place)
    assert _said_by_report(place) == _read_by_restores(place)
    points = report_data(place.catalog, NAME).checkpoints
    for point in points:
        manifests = place.catalog.chains.list_manifests(NAME, point.record.id)
        assert point.chain_other_bytes == sum(stored.bytes for stored in manifests)
    assert points[-1].operators["two"].chain_deltas == LAST - 1
    # A materialization counts before the run knows of it, and after.
    materialize(place, NAME, "two", LAST - 3, id="m", parallelism=1, run=in_order)
    for more in (0, 1, 2):
        if more:
            assert run.step(rows(LAST + more, changed=100))
        read, said = _read_by_restores(place), _said_by_report(place)
        assert {c: said[c] for c in said if c <= LAST - 3} == {c: read[c] for c in read if c <= LAST - 3}
        assert said == pytest.approx(read, rel=0.05)


def test_a_report_of_subtasks_that_wrote_different_forms_says_about_what_a_restore_reads(place: OpenWarehouse) -> None:
    _run(place, parallelism=3)
    tables = [record.statistics["operators"]["two"]["tables"] for record in place.catalog.checkpoints.list(NAME)]
    assert any("whole" in of for each in tables for of in each.values()), "some wrote a base, others a delta"
    assert _said_by_report(place) == pytest.approx(_read_by_restores(place), rel=0.12)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_proof_of_all_checkpoints_says_what_a_restore_of_each_reads(place: OpenWarehouse, parallelism: int) -> None:
    _run(place, parallelism)
    assert _prove(place).restore_bytes == _read_by_restores(place)
    materialize(place, NAME, "two", LAST - 3, id="m", parallelism=2, run=in_order)
    assert _prove(place).restore_bytes == _read_by_restores(place)


def test_a_proof_counts_the_seconds_of_what_a_restore_reads_and_of_one_comparison(
    place: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(place)

    class Clock:
        at = 0.0

        @classmethod
        def perf_counter(cls) -> float:
            return cls.at

    def take(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*args: Any) -> Any:
            Clock.at += seconds
            return function(*args)

        return taking

    monkeypatch.setattr(verify, "time", Clock)
    monkeypatch.setattr(verify, "apply_handle", take(1, verify.apply_handle))
    monkeypatch.setattr(verify, "check_digests", take(1000, verify.check_digests))
    found = _prove(place).restore_s
    for record in place.catalog.checkpoints.list(NAME):
        manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests(NAME, record.id), NAME)
        [task] = unit_tasks(manifests, record.id, 1, None)[0]
        assert found[record.id] == 1000 + len(task.unit.reads), record.id


def test_a_run_learns_from_proofs_of_checkpoints_whose_tables_began_at_different_times(place: OpenWarehouse) -> None:
    run = _run(place)
    checkpoints, proof = place.catalog.checkpoints, _prove(place)
    before = run.region.chains.policies["two"]["busy"].restores
    for record in checkpoints.list(NAME):
        checkpoints.record_proof(
            NAME,
            record.id,
            True,
            epoch=record.epoch,
            restore_s=proof.restore_s[record.id],
            restore_bytes=proof.restore_bytes[record.id],
        )
    run.step(rows(LAST + 1, changed=100))
    assert run.region.chains.policies["two"]["busy"].restores == before + 10
