"""The worked example of FLIP-158, in its order of events: a list, three checkpoints, a materialization between them.

list.add(a), CP1, list.add(b), materialization at T2, CP2, it completes, list.add(c), CP3

It is told with the engine: a chain begins with a base, here that of an empty list, and a materialization is one of a
checkpoint, so T2 is a checkpoint, too.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import CorruptObject
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest, read_manifests
from siltstone.model import Form, Handle
from siltstone.operator import ListState, Operator, Rows, State
from siltstone.restore.export import rebuild, unit_tasks
from siltstone.retention.deletion import delete_checkpoints
from siltstone.run.task import StepTask
from siltstone.store.paths import LocalLayout
from siltstone.stream import Stream
from tests.proofs import failures, in_order
from tests.region_run import RegionRun
from tests.stored import stream_objects

NAME, OPERATOR, VARIABLE = "flip", "numbers", "items"
DELTAS = policy_by_name("adjust-d", PolicyOptions(d0=50, d_max=50, size_ratio_max=None, space_amplification_max=None))
"""one base, then deltas"""


class Numbers(Operator):
    """Adds values to a list."""

    name = OPERATOR
    key = {"k": pa.int64()}  # noqa: RUF012
    items = ListState(value={"value": pa.string()})

    def process(self, rows: Rows, state: State) -> None:
        state.items.append(rows.keys, rows.key_index, rows.table.select(["value"]))


class ListRun(RegionRun):
    """A run of the list's stream, on hosts that share nothing but the store."""

    def __init__(self, place: OpenWarehouse, checkpoint_steps: int = 1) -> None:
        stream = Stream(NAME, lambda spark, _: spark.sql(""), [Numbers()], max_parallelism=1)
        super().__init__(place, stream, DELTAS, checkpoint_steps=checkpoint_steps)
        self.place = place
        self.host = "one"
        self.ways: set[str] = set()
        """how the newest step found its state, if not by having it"""

    def attempt(self, task: StepTask, rows: Mapping[int, pa.Table]) -> tuple[pa.Table, Sequence[Acknowledgement]]:
        local = LocalLayout(task.warehouse.local.root / "hosts" / self.host)
        found = super().attempt(replace(task, warehouse=replace(task.warehouse, local=local)), rows)
        self.ways = {"restore", "forward"} & found[1][0].seconds.keys()
        return found

    def add(self, value: str, *, ends: bool = True) -> int:
        """list.add(value), in a step of its own; the number of the step."""
        self.step(pa.table({"k": [0], "value": [value]}), ends=ends)
        return self.region.step

    def manifest(self, checkpoint: int) -> Manifest:
        return read_manifest(self.place.warehouse.store, self.place.catalog.checkpoints.get(NAME, checkpoint).manifest)

    def changes(self, checkpoint: int) -> dict[int, Handle]:
        """Step -> where its change of the list is, of those of one checkpoint."""
        handles = [h for h in self.manifest(checkpoint).handles if h.variable == VARIABLE and h.form is Form.DELTA]
        return {h.sqn: h for h in handles if h.rows}

    def chain(self, checkpoint: int) -> list[int]:
        """The checkpoints that a restore of it reads."""
        return self.place.catalog.chains.list_checkpoints(NAME, checkpoint)

    def recover(self, checkpoint: int) -> list[str]:
        """The list that a restore of the checkpoint gives, proven."""
        store = self.place.warehouse.store
        manifests = read_manifests(store, self.place.catalog.chains.list_manifests(NAME, checkpoint))
        [task], _ = unit_tasks(manifests, checkpoint, 1, None)
        state = rebuild(store, task)
        rows = pa.concat_tables([rows for rows, _ in state.tables[VARIABLE].scan(state.groups)] or [_NOTHING])
        return [value for _, value in sorted(zip(*(rows.column(n).to_pylist() for n in _COLUMNS), strict=True))]

    def materialize(self, checkpoint: int, meanwhile: Callable[[], Any]) -> set[str]:
        """Materialize the list at a checkpoint; something happens before it completes. The names of the new bases."""

        def run(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
            parts = in_order(function, tasks)
            meanwhile()
            return parts

        before = self.stored()
        materialize(self.place, NAME, OPERATOR, checkpoint, id="t2", parallelism=1, run=run)
        return {name for name in self.stored() - before if name.endswith(".t2.materialized.parquet")}

    def stored(self) -> set[str]:
        return {name for name, _ in stream_objects(self.place.warehouse.store)}


_COLUMNS = ("position", "value")
_NOTHING = pa.table({name: pa.nulls(0) for name in _COLUMNS})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as opened:
        yield opened


def test_the_worked_example(place: OpenWarehouse) -> None:
    run = ListRun(place)
    empty = run.step_without_rows().id
    a = run.add("a")
    cp1 = run.region.completed
    with_a = run.changes(cp1)[a].object
    assert run.changes(cp1).keys() == {a} and run.recover(cp1) == ["a"]

    b = run.add("b")
    t2 = run.region.completed
    with_b = run.changes(t2)[b].object
    completed = []

    def checkpoint_two() -> None:
        """It is not complete when this checkpoint comes, which builds on the previous one: the empty list, a and b."""
        completed.append(run.step_without_rows().id)
        assert run.chain(completed[0]) == [empty, cp1, t2, completed[0]]
        assert run.recover(completed[0]) == ["a", "b"]

    bases = run.materialize(t2, checkpoint_two)
    [cp2] = completed
    assert run.changes(t2).keys() == {b} and with_b != with_a  # a is not sent again
    assert not run.changes(cp2)
    assert len(bases) == 2  # the list's rows, and its bounds

    c = run.add("c")  # what was materialized, and what came after
    cp3 = run.region.completed
    with_c = run.changes(cp3)[c].object
    assert run.changes(cp3).keys() == {c}
    assert run.chain(cp3) == [t2, cp3]  # at CP2 nothing had changed
    assert [run.recover(each) for each in (cp1, t2, cp2, cp3)] == [["a"], ["a", "b"], ["a", "b"], ["a", "b", "c"]]
    assert {with_a, with_b, with_c, *bases} <= run.stored()

    delete_checkpoints(place, NAME, [empty])
    assert with_a in run.stored() and run.recover(cp1) == ["a"]  # CP1 refers to it
    delete_checkpoints(place, NAME, [cp1, t2, cp2])
    assert not {with_a, with_b} & run.stored() and {with_c, *bases} <= run.stored()
    assert run.recover(cp3) == ["a", "b", "c"] and not failures(place, NAME, [cp3])
    assert run.stored() == {stored.name for stored in place.catalog.objects.list(NAME)}
    again = ListRun(place)
    again.add("d")
    assert run.recover(again.region.completed) == ["a", "b", "c", "d"]


def test_where_b_and_c_went_up_together_recovery_leaves_b_out(place: OpenWarehouse) -> None:
    """A host that has the version after b needs only c of the object that holds both: b's bytes are not read."""
    run = ListRun(place, checkpoint_steps=2)
    run.step_without_rows()
    run.add("a")
    b = run.add("b", ends=False)
    run.host = "two"
    c = run.add("c")
    cp2 = run.region.completed
    assert run.ways == {"restore", "forward"}  # the checkpoint with a, and b from the task
    changes = run.changes(cp2)
    assert changes.keys() == {b, c} and (changes[b].sqn, changes[c].sqn) == (b, c)
    assert changes[b].object == changes[c].object

    path = place.warehouse.local.objects / changes[b].object
    whole = path.read_bytes()
    os.chmod(path, 0o644)
    damaged = changes[b].offset, changes[b].offset + changes[b].length
    path.write_bytes(whole[: damaged[0]] + bytes(changes[b].length) + whole[damaged[1] :])
    with pytest.raises(CorruptObject, match=path.name):
        run.recover(cp2)
    run.host = "one"
    run.add("d", ends=False)
    assert run.ways == {"forward"}
    path.write_bytes(whole)
    run.add("e")
    assert run.recover(run.region.completed) == ["a", "b", "c", "d", "e"]
    assert not failures(place, NAME)


def test_where_b_and_c_went_up_together_a_materialization_replaces_both(place: OpenWarehouse) -> None:
    run = ListRun(place, checkpoint_steps=2)
    empty = run.step_without_rows().id
    run.add("a")
    b, c = run.add("b", ends=False), run.add("c")
    cp2 = run.region.completed
    together = {handle.object for handle in run.changes(cp2).values()}
    assert run.changes(cp2).keys() == {b, c} and len(together) == 1
    bases = run.materialize(cp2, lambda: None)
    run.step_without_rows()
    delete_checkpoints(place, NAME, [empty, empty + 1, cp2])
    assert not together & run.stored() and bases <= run.stored()
    assert run.recover(run.region.completed) == ["a", "b", "c"]
