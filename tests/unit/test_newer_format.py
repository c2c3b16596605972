"""What a newer Siltstone wrote is no damage: a run, a proof and a recovery say "upgrade", and nothing is given up."""

from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.recover import recover
from siltstone.errors import CorruptObject, NewerFormat, StateError
from siltstone.format import manifest as manifests
from siltstone.format.coding import seal, unseal
from siltstone.format.segment import MAGIC, Segment
from siltstone.restore.proof import prove_checkpoints
from siltstone.spark.operations.recovering import DAMAGED
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import in_order
from tests.region_run import RegionRun

NAME = SMALL.name
POLICY = policy_by_name("adjust-d", PolicyOptions(d0=3, d_max=3, size_ratio_max=None, space_amplification_max=None))


def test_it_is_told_from_damage() -> None:
    assert not issubclass(NewerFormat, StateError) and not issubclass(NewerFormat, DAMAGED)


@pytest.mark.parametrize("magic", [b"SILTBLK1", b"SILTOPQ1", b"SILTIDX1"])
def test_a_sealed_part(magic: bytes) -> None:
    whole = seal(b"payload", magic[:-1] + b"2")
    with pytest.raises(NewerFormat, match="x has format 2, which a newer Siltstone wrote: upgrade siltstone"):
        unseal(whole, magic, "x")
    for other in (magic[:-1] + b"0", b"SILTXYZ1", magic[:-1] + b"A"):
        with pytest.raises(CorruptObject):
            unseal(seal(b"payload", other), magic, "x")


def test_a_segment() -> None:
    with pytest.raises(NewerFormat, match="upgrade siltstone"):
        Segment.unpack(b"what it holds is not known" + bytes(20) + MAGIC[:-1] + b"3", "a segment")


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenWarehouse:
    """A stream whose newest checkpoint a newer Siltstone wrote."""
    place = OpenWarehouse.open_writable(str(tmp_path / "w"))
    run, rows = RegionRun(place, SMALL, POLICY), purchases()
    run.step(rows[0])
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "FORMAT", manifests.FORMAT + 1)
        run.step(rows[1])
    run.region.close("done")
    return place


def test_a_newest_checkpoint_of_a_newer_siltstone_is_not_given_up(newer: OpenWarehouse) -> None:
    with newer as place:
        before, later = place.catalog.checkpoints.list(NAME), manifests.FORMAT + 1
        error = rf"manifest.arrow.* has format {later}, .*: upgrade siltstone"
        for refused in (
            lambda: RegionRun(place, SMALL, POLICY),
            lambda: prove_checkpoints(place, NAME, [2], in_order),
            lambda: recover(place, NAME, run=in_order),
            lambda: recover(place, NAME, run=in_order, accept_loss=True),
        ):
            with pytest.raises(NewerFormat, match=error):
                refused()
        assert place.catalog.checkpoints.list(NAME) == before and place.catalog.rollbacks.list(NAME) == []
        assert not prove_checkpoints(place, NAME, [1], in_order).failures
