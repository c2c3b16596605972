"""Checkpoints before and after a variable was dropped are proven and written together as each is by itself."""

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.format.manifests import read_manifest
from siltstone.operator import OpaqueState, Operator, Rows, State, ValueState
from siltstone.restore.proof import plan_checkpoints
from siltstone.restore.series import digest_of, restore_chain
from siltstone.run.region import ConsistentRegion, RegionOptions
from siltstone.stream import Stream
from tests.places import place_at
from tests.proofs import failures, restored_digest
from tests.region_run import RegionSteps
from tests.sums import NAME

POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=6, size_ratio_max=None))


class Text(OpaqueState[str]):
    """A text for each key group."""


def process(self: Operator, rows: Rows, state: State) -> None:
    """Write a number to the named variables."""
    if not len(rows):
        return
    number, names = rows.table.column("n")[0].as_py(), rows.table.column("names")[0].as_py().split()
    for name in ("busy", "idle"):
        if name in names:
            getattr(state, name).put(rows.keys, {"n": pa.array([number] * len(rows.keys), pa.int64())})
    for group in set(rows.key_groups.tolist()):
        if "notes" in names:
            state.notes[group] = f"{number} " * 60


def stream_with(names: Collection[str]) -> Stream:
    """Make a stream whose operator has these variables."""
    body = {"name": "mixed", "key": {"k": pa.int64()}, "process": process}
    body |= {name: ValueState(value={"n": pa.int64()}) for name in ("busy", "idle") if name in names}
    if "notes" in names:
        body["notes"] = Text(create=str, serialize=str.encode, deserialize=bytes.decode)
    return Stream(NAME, lambda spark, _: spark.sql(""), [type("Mixed", (Operator,), body)()], max_parallelism=8)


def run(place: OpenWarehouse, names: Collection[str], *steps: tuple[Collection[int], str], drop: str = "") -> None:
    """Run steps of (keys, variables that change), each of which ends in a checkpoint."""
    options = RegionOptions(parallelism=2, drop=(drop,) if drop else ())
    region = ConsistentRegion.open(stream_with(names), place.warehouse, place.catalog, POLICY, options, "e")
    steps_of = RegionSteps(region)
    for number, (keys, changed) in enumerate(steps):
        columns = {"k": pa.array(keys, pa.int64()), "n": [number] * len(keys), "names": [changed] * len(keys)}
        steps_of.step(pa.table(columns))
    region.close("done")


def test_checkpoints_are_proven_together_across_a_table_that_was_dropped(tmp_path: Path) -> None:
    """The opaque variable, which is not written again, keeps all of them in one chain."""
    with place_at(tmp_path / "w") as place:
        run(place, ("busy", "idle", "notes"), (range(20), "busy idle notes"), (range(20), "idle"), (range(20), "idle"))
        run(place, ("busy", "notes"), ([3, 4], "busy"), ([3, 4], "busy"), drop="mixed.idle")
        assert not failures(place, NAME)
        run(place, ("busy", "idle", "notes"), ([5], "idle"), ([6], "idle"))
        assert not failures(place, NAME)


def test_a_series_has_no_value_of_a_variable_after_it_was_dropped(tmp_path: Path) -> None:
    with place_at(tmp_path / "w") as place:
        run(place, ("busy", "notes"), (range(20), "busy notes"), ([1], "busy notes"))
        run(place, ("busy",), ([3], "busy"), ([3], "busy"), drop="mixed.notes")
        plan = plan_checkpoints(place, NAME, [1, 2, 3, 4])
        parts = [restore_chain(place.warehouse.store, task, tmp_path / "series") for task in plan.tasks]
        for checkpoint in place.catalog.checkpoints.list(NAME):
            manifest = read_manifest(place.warehouse.store, checkpoint.manifest)
            assert digest_of(parts, manifest)[0] == checkpoint.digest == restored_digest(place, NAME, checkpoint.id)
