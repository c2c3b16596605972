"""The stream that tests damage and recover, and the ways in which they damage it."""

from pathlib import Path

from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.recover import Recovery
from siltstone.retention.sweep import sweep
from tests.fault.small_stream import SMALL, purchases
from tests.proofs import failures
from tests.region_run import RegionRun

NAME = SMALL.name
CHECKPOINTS = 9
POLICY = policy_by_name("adjust-d", PolicyOptions(d0=3, d_max=3, size_ratio_max=None, space_amplification_max=None))
"""bases at 1, 5 and 9"""


def new_run(place: OpenWarehouse, parallelism: int = 2) -> RegionRun:
    """Take the stream over."""
    return RegionRun(place, SMALL, POLICY, parallelism=parallelism)


def write_checkpoints(root: Path) -> Path:
    """A warehouse with nine checkpoints, by two runs."""
    rows = purchases()
    with OpenWarehouse.open_writable(str(root)) as place:
        first = new_run(place)
        for n in range(4):
            first.step(rows[n])
        second = new_run(place)
        for n in range(4, CHECKPOINTS):
            second.step(rows[n])
        second.region.close("done")
        assert [place.catalog.chains.list_checkpoints(NAME, c)[0] for c in (4, 8, 9)] == [1, 5, 9]
    return root


def digests(place: OpenWarehouse) -> dict[int, str]:
    """Checkpoint -> digest."""
    return {c.id: c.digest for c in place.catalog.checkpoints.list(NAME)}


def objects(place: OpenWarehouse, checkpoint: int, kind: ObjectKind) -> list[str]:
    """The names of a checkpoint's objects of one kind."""
    return [o.name for o in place.catalog.objects.list(NAME, [checkpoint]) if o.kind is kind]


def delete(place: OpenWarehouse, *names: str) -> None:
    """Remove objects behind the store."""
    for name in names:
        (place.warehouse.local.objects / name).unlink()


def alter(place: OpenWarehouse, *names: str) -> None:
    """Flip a bit in the middle of objects."""
    for name in names:
        path = place.warehouse.local.objects / name
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def cut(place: OpenWarehouse, *names: str) -> None:
    """Take the last byte off objects."""
    for name in names:
        path = place.warehouse.local.objects / name
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1])


def check_goes_on(place: OpenWarehouse, done: Recovery, before: dict[int, str]) -> None:
    """The rest of the input makes the same checkpoints again, and those that come after."""
    assert not [f for f in failures(place, NAME) if f.checkpoint == done.checkpoint]
    assert place.catalog.checkpoints.last_id(NAME) == done.checkpoint
    assert [s.step for s in place.catalog.input_log.list_logged(NAME)] == list(
        range(done.checkpoint + 1, CHECKPOINTS + 1)
    )
    assert sweep(place, NAME).deleted == 0
    run, rows = new_run(place, parallelism=3), purchases()
    for n in range(done.checkpoint, CHECKPOINTS + 1):
        run.step(rows[n])
    again = digests(place)
    assert before.items() <= again.items() and set(again) - set(before) == {CHECKPOINTS + 1}
    assert run.region.logged_steps() == []
    assert [s.step for s in place.catalog.input_log.list(NAME, 99)] == list(range(1, CHECKPOINTS + 2))
    run.region.close("done")
