"""The worked example of FLIP-158, in its order of events: a list, three checkpoints, a materialization between them.

list.add(a), CP1, list.add(b), materialization at T2, CP2, it completes, list.add(c), CP3
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from siltstone.changelog.changes import Change, ChangelogHandle, read_changes
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.changelog.writer import ChangelogWriter
from siltstone.format.base import read_base, write_base
from siltstone.format.block import encode_block
from siltstone.model import KeyGroupRange, Kind, StoredObject
from siltstone.state.schema import DELETED, TableSchema
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import CheckpointPath

GROUPS = KeyGroupRange(0, 1)
LIST = TableSchema(
    pa.schema([("key", pa.int64())]), pa.schema([("position", pa.int64())]), pa.schema([("value", pa.string())])
)


@dataclass(frozen=True)
class Checkpoint:
    """What the coordinator keeps of one: what was materialized, and the changes since."""

    materialized: StoredObject | None
    changes: ChangelogHandle

    @property
    def objects(self) -> set[str]:
        base = set() if self.materialized is None else {self.materialized.name}
        return base | {stored.name for stored in self.changes.objects}


class ListState:
    """A list of one key, its changes logged, with the part of a coordinator that the example needs."""

    def __init__(self, root: Path) -> None:
        self.store = FilesystemStore(root)
        self.uploader = Uploader(self.store, UploadOptions())
        self.values: list[str] = []
        self.writer = ChangelogWriter(self.uploader, "numbers", GROUPS, CheckpointPath("s", 1, 1))
        self.checkpoints: dict[int, Checkpoint] = {}
        self.materialized: StoredObject | None = None
        self.materialized_sqn = 0

    def add(self, value: str) -> None:
        row = pa.table({"key": [0], "position": [len(self.values)], "value": [value], DELETED: [False]})
        self.values.append(value)
        block = encode_block(row, np.zeros(1, np.uint16))
        self.writer.append(GROUPS, Change("items", block, self.writer.path.checkpoint - 1, 0, digest=0))

    def checkpoint(self) -> Checkpoint:
        number = self.writer.path.checkpoint
        changes = self.writer.persist(after=self.materialized_sqn).result(10)
        self.checkpoints[number] = Checkpoint(self.materialized, changes)
        self.writer.path = CheckpointPath("s", 1, number + 1)
        return self.checkpoints[number]

    def materialize(self) -> tuple[StoredObject, int]:
        """Write the whole list as a base; the sequence number says which changes are in it."""
        sqn = self.writer.last_appended_sqn()
        positions = range(len(self.values))
        rows = pa.table({"key": [0] * len(self.values), "position": positions, "value": self.values})
        with self.store.create(self.writer.path.base("numbers", "items", 0, "t2")) as writer:
            write_base(writer, LIST, [(rows.cast(LIST.rows), np.zeros(len(rows), np.uint16))])
        assert writer.stored is not None
        return writer.stored, sqn

    def materialization_completed(self, stored: StoredObject, sqn: int) -> None:
        self.materialized, self.materialized_sqn = stored, sqn
        self.writer.truncate(before=sqn + 1)

    def subsume(self, number: int) -> None:
        """Drop a checkpoint, and the objects that were referred to by no other."""
        unreferenced = self.checkpoints.pop(number).objects.difference(*(c.objects for c in self.checkpoints.values()))
        self.store.delete(unreferenced)

    def recover(self, number: int) -> list[str]:
        checkpoint = self.checkpoints[number]
        values: dict[int, str] = {}
        tables = []
        if checkpoint.materialized is not None:
            tables += [table for table, _ in read_base(self.store.read(checkpoint.materialized), LIST)]
        tables += [table for _, _, table, _ in read_changes(self.store, checkpoint.changes)]
        for table in tables:
            values |= zip(table["position"].to_pylist(), table["value"].to_pylist(), strict=True)
        return [values[position] for position in sorted(values)]

    def names(self) -> set[str]:
        return {name for name, _ in self.store.list("")}


@pytest.fixture
def list_state(tmp_path: Path) -> Iterator[ListState]:
    state = ListState(tmp_path / "objects")
    yield state
    state.writer.close()
    state.uploader.close()


def changes_of(checkpoint: Checkpoint) -> dict[int, str]:
    """Sequence number -> object, of each change that the checkpoint refers to."""
    return {h.sqn: h.object for h in checkpoint.changes.handles if h.kind is Kind.INCREMENTAL}


def test_the_worked_example(list_state: ListState) -> None:
    list_state.add("a")
    cp1 = list_state.checkpoint()
    with_a = changes_of(cp1)[1]
    assert changes_of(cp1) == {1: with_a}
    assert list_state.recover(1) == ["a"]

    list_state.add("b")
    base, t2 = list_state.materialize()  # begins; it is not complete when the next checkpoint comes
    assert t2 == 2

    cp2 = list_state.checkpoint()  # builds on the previous materialization, that is, on none: a and b
    with_b = changes_of(cp2)[2]
    assert changes_of(cp2) == {1: with_a, 2: with_b}  # a is not sent again
    assert with_b != with_a
    assert list_state.recover(2) == ["a", "b"]

    list_state.materialization_completed(base, t2)
    list_state.add("c")
    cp3 = list_state.checkpoint()  # what was materialized, and what came after: only c
    with_c = changes_of(cp3)[3]
    assert changes_of(cp3) == {3: with_c}
    assert cp3.objects == {base.name, with_c}
    assert list_state.recover(3) == ["a", "b", "c"]

    assert list_state.names() == {with_a, with_b, with_c, base.name}
    list_state.subsume(1)
    assert with_a in list_state.names()  # CP2 refers to it
    list_state.subsume(2)
    assert list_state.names() == {with_c, base.name}
    assert list_state.recover(3) == ["a", "b", "c"]


def test_where_b_and_c_went_up_together_recovery_leaves_b_out(list_state: ListState) -> None:
    list_state.add("a")
    cp1 = list_state.checkpoint()
    with_a = changes_of(cp1)[1]

    list_state.add("b")
    base, t2 = list_state.materialize()
    list_state.add("c")
    cp2 = list_state.checkpoint()
    with_c = changes_of(cp2)[3]
    assert changes_of(cp2) == {1: with_a, 2: with_c, 3: with_c}  # b and c in one object
    assert with_c != with_a
    assert list_state.recover(2) == ["a", "b", "c"]

    list_state.materialization_completed(base, t2)
    cp3 = list_state.checkpoint()
    assert changes_of(cp3) == {3: with_c}  # the object holds b too, whose sequence number is not above T2's
    applied = [table["value"].to_pylist() for _, _, table, _ in read_changes(list_state.store, cp3.changes)]
    assert applied == [["c"]]
    assert list_state.recover(3) == ["a", "b", "c"]

    list_state.subsume(1)
    list_state.subsume(2)
    assert list_state.names() == {with_c, base.name}  # a's object is free, b's is still needed for c
    assert list_state.recover(3) == ["a", "b", "c"]
