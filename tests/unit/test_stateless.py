"""Operators without variables: they keep nothing, and everything else holds for their streams all the same."""

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import HeldWhole, materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.retention.deletion import delete_checkpoints
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from tests.proofs import check_restores, in_order
from tests.region_run import RegionRun
from tests.stateless import ALONE, BEFORE
from tests.stored import stream_objects


def rows(n: int) -> pa.Table:
    return pa.table({"k": [n % 5, 7, n], "n": [n, -n, 0]})


@pytest.mark.parametrize("stream", [ALONE, BEFORE], ids=["alone", "before sums"])
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_they_pass_on_rows_through_restarts_losses_and_rescales(stream: Stream, backend: str) -> None:
    with StreamTester(stream, parallelism=2, backend=backend, checkpoint_every=2) as tester:
        for n in range(1, 9):
            tester.step(rows(n))
            if n == 3:
                tester.restart(lost=True)
            if n == 5:
                tester.rescale(3)
            if n == 7:
                tester.crash(lost=True)
        tester.checkpoint()
        assert sorted(tester.delivered("positive")["n"].to_pylist()) == list(range(1, 9))
        assert tester.replay() > 0
        if stream is BEFORE:
            assert sum(tester.state("sums", "totals")["n"].to_pylist()) == sum(range(1, 9))


@pytest.mark.parametrize("stream", [ALONE, BEFORE], ids=["alone", "before sums"])
@pytest.mark.parametrize(
    ("policy", "backend"), [("marginal-cost", "heap"), ("adjust-d", "rocksdb"), ("files", "rocksdb")]
)
@pytest.mark.parametrize("max_pending", [0, 2])
def test_their_checkpoints_are_proven_materialized_and_deleted(
    place: OpenWarehouse, stream: Stream, policy: str, backend: str, max_pending: int
) -> None:
    options = PolicyOptions(restore_budget_s=60)
    for parallelism in (2, 3):
        run = RegionRun(
            place, stream, policy_by_name(policy, options), parallelism, 2, backend=backend, max_pending=max_pending
        )
        for n in range(1, 8):
            run.step(rows(n), last=n == 7)
        run.complete_pending()
        check_restores(place, stream.name, (1, 3))
        run.region.close("done")
    newest = place.catalog.checkpoints.last_id(stream.name)
    with pytest.raises(HeldWhole):
        materialize(place, stream.name, "positive", newest, id="m1", parallelism=2, run=in_order)
    delete_checkpoints(place, stream.name, range(1, newest))
    check_restores(place, stream.name, (2,))
    assert {name for name, _ in stream_objects(place.warehouse.store)} >= {
        o.name for o in place.catalog.objects.list(stream.name)
    }
