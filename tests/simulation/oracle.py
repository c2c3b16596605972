"""What must hold at any time, of all streams, from what the catalog and the store hold and nobody says."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from siltstone.catalog.database.packing import unpack
from siltstone.catalog.records.steps import Step, StepKind
from siltstone.catalog.repository import Catalog
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest, with_materializations
from siltstone.operator import SOURCE
from siltstone.restore.export import unit_tasks
from siltstone.run.stream_clock import clock_of
from siltstone.store.paths import CheckpointPath
from siltstone.time.clock_rules import SourceClock, StepClock, decode_clock, is_repeated
from tests.simulation.processes import MemoryStore, SimulatedStore
from tests.simulation.writer import GROWN, OPERATORS, TABLE, Contents, advance, digests_of, restored


@dataclass(frozen=True)
class _Seen:
    """A checkpoint as it was first seen."""

    epoch: int
    contents: Contents
    last_step: int
    clock: StepClock | None = None
    """of its last step"""


_NOTHING = _Seen(0, {}, 0)


@dataclass
class _Followed:
    """What is known of one stream."""

    checkpoints: dict[int, _Seen] = field(default_factory=lambda: {0: _NOTHING})
    rollbacks: int = 0
    epoch: int = 0
    """the newest writer's, when it was last looked at; who takes the stream over may complete a checkpoint of its"""
    visible: frozenset[int] = frozenset()
    """checkpoints that could be restored, when it was last looked at"""
    clocks: dict[str, StepClock] = field(default_factory=dict)
    """a micro-batch -> the clock that was recorded with it"""


class Oracle:
    """Follows the catalog's rows; replays the input log, and knows nothing of chains.

    Args:
        raw: the catalog's database.
        memory: the store. Names in `damaged` hold wrong bytes.
    """

    def __init__(self, catalog: Catalog, raw: Any, memory: MemoryStore) -> None:
        self.damaged: set[str] = set()
        self._catalog, self._raw, self._memory = catalog, raw, memory
        self._store = SimulatedStore(memory)
        self._streams: dict[str, _Followed] = {}
        self._needed: dict[Any, frozenset[str]] = {}
        """a checkpoint and what its chain is made of -> the objects that a restore reads"""
        self._manifests: dict[str, Manifest] = {}
        self._lost: set[str] = set()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What the database says, whoever is in the middle of what."""
        return self._raw.execute(query, values).fetchall()

    def streams(self) -> list[str]:
        """All there are, the oldest first."""
        return [name for (name,) in self.rows("SELECT name FROM stream ORDER BY created_at, name")]

    def contents(self, stream: str, id: int) -> Contents:
        """What a checkpoint is."""
        return self._streams[stream].checkpoints[id].contents

    def epoch(self, stream: str) -> int:
        """The newest writer's."""
        return self.rows("SELECT epoch FROM stream WHERE name = ?", stream)[0][0]

    def lost(self, lease: str) -> bool:
        """Whether a lease has, at any time, not been there any more."""
        return lease in self._lost or not self.rows("SELECT 1 FROM lease WHERE id = ?", lease)

    def is_written_down(self, name: str) -> bool:
        """Whether an object may be deleted: its deletion is recorded, no stream has it (a mark, an extract), or it was
        logged for a checkpoint that does not refer to it."""
        return (
            name.startswith(("_epochs/", "_catalog/"))
            or self._is_truncated(name)
            or bool(self.rows("SELECT 1 FROM deletion WHERE name = ?", name))
        )

    def _is_truncated(self, name: str) -> bool:
        """Whether it is of a step whose checkpoint is complete, or fenced, and that nothing names."""
        path = CheckpointPath.of(name)
        if path is None or not name.removeprefix(path.prefix).startswith("s0"):
            return False
        if self.rows("SELECT 1 FROM object WHERE name = ?", name):
            return False
        of_epoch = "SELECT 1 FROM checkpoint WHERE stream = ? AND id >= ? AND epoch = ?"
        done = bool(self.rows(of_epoch, path.stream, path.checkpoint, path.epoch))
        return done or path.epoch < self.epoch(path.stream)

    def visible(self, stream: str) -> list[int]:
        """Checkpoints that are there to be seen."""
        query = "SELECT id FROM checkpoint WHERE stream = ? AND deleted_at IS NULL ORDER BY id"
        return [id for (id,) in self.rows(query, stream)]

    def written_by(self, stream: str) -> dict[int, int]:
        """Visible checkpoint -> the writer epoch that made it."""
        return dict(self.rows("SELECT id, epoch FROM checkpoint WHERE stream = ? AND deleted_at IS NULL", stream))

    def rollbacks(self, stream: str) -> int:
        """How often checkpoints were given up."""
        return self.rows("SELECT count(*) FROM rollback WHERE stream = ?", stream)[0][0]

    def whole(self, stream: str, id: int) -> bool:
        """Whether nothing that a restore of a checkpoint reads is damaged."""
        return not (self.damaged and self._objects_of(stream, id) & self.damaged)

    def check(self, now: datetime) -> None:
        """Everything that must hold."""
        for stream in self.streams():
            self._follow(stream)
        text = now.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")
        self._lost |= {id for (id,) in self.rows("SELECT id FROM lease WHERE expires_at <= ?", text)}
        stored = self._memory.objects.keys()
        for stream in self.streams():
            for id in self.visible(stream):
                if self.whole(stream, id):
                    needed = self._objects_of(stream, id)
                    assert needed <= stored, f"checkpoint {id} of {stream} lacks {sorted(needed - stored)}"
        visible = self.rows(
            "SELECT o.name FROM object o JOIN checkpoint c ON c.stream = o.stream AND c.id = o.checkpoint "
            "WHERE c.deleted_at IS NULL"
        )
        gone = {name for (name,) in visible} - stored
        assert not gone, f"rows of visible checkpoints refer to {sorted(gone)}"
        dangling = {name for (name,) in self.rows("SELECT name FROM object")} - stored
        assert all(map(self.is_written_down, dangling)), dangling
        pinned = self.rows(
            "SELECT p.name FROM savepoint p LEFT JOIN checkpoint c ON c.stream = p.stream AND c.id = p.checkpoint "
            "WHERE (p.expires_at IS NULL OR p.expires_at > ?) AND (c.id IS NULL OR c.deleted_at IS NOT NULL)",
            text,
        )
        assert not pinned, pinned

    def continue_with_rebuilt(self) -> None:
        """The catalog is another one, rebuilt from the store: it has every checkpoint that there was.

        It may also have some whose rollback was not acknowledged, and may lack a fork that was not.
        """
        streams = self.streams()
        self._streams = {stream: known for stream, known in self._streams.items() if stream in streams}
        for stream, known in self._streams.items():
            known.rollbacks, known.epoch = self.rollbacks(stream), self.epoch(stream)
            epochs = dict(self.rows("SELECT id, epoch FROM checkpoint WHERE stream = ?", stream))
            assert known.visible <= epochs.keys(), f"{stream} had {known.visible}, and has {epochs.keys()}"
            for id in range(1, max(epochs, default=0) + 1):
                seen = known.checkpoints.get(id)
                if seen is None or epochs.get(id, seen.epoch) != seen.epoch:
                    known.checkpoints[id] = self._replayed(stream, id, epochs.get(id, 0), known.checkpoints[id - 1])

    def _follow(self, stream: str) -> None:
        """What came to be since, of this stream: committed by its newest writer, or given up, or forked."""
        if stream not in self._streams:
            self._streams[stream] = self._forked(stream)
        known = self._streams[stream]
        back = self.rows("SELECT checkpoint FROM rollback WHERE stream = ? ORDER BY epoch", stream)
        for (checkpoint,) in back[known.rollbacks :]:
            known.checkpoints = {id: seen for id, seen in known.checkpoints.items() if id <= checkpoint}
        known.rollbacks = len(back)
        last = max(known.checkpoints)
        found = "SELECT id, epoch FROM checkpoint WHERE stream = ? AND id > ? ORDER BY id"
        for id, epoch in self.rows(found, stream, last):
            assert id == last + 1 and known.epoch <= epoch, f"checkpoint {id} of epoch {epoch} of {stream}"
            known.checkpoints[id] = self._replayed(stream, id, epoch, known.checkpoints[last])
            last = id
        known.visible, known.epoch = frozenset(self.visible(stream)), self.epoch(stream)
        for id, epoch in self.rows("SELECT id, epoch FROM checkpoint WHERE stream = ?", stream):
            assert known.checkpoints[id].epoch == epoch, f"checkpoint {id} of {stream} is another one now"

    def _replayed(self, stream: str, id: int, epoch: int, before: _Seen) -> _Seen:
        """What a checkpoint is: its steps, taken by the operators that it has. The last of them drains."""
        contents = {name: dict(before.contents.get(name, {})) for name in self._operators(stream, id)}
        last_step, clock = before.last_step, before.clock
        query = (
            "SELECT step, batch_id, offsets, kind, clock FROM step WHERE stream = ? AND checkpoint = ? ORDER BY step"
        )
        found = self.rows(query, stream, id)
        for step, batch, packed, kind, text in found:
            assert step == last_step + 1, f"step {step} of {stream} follows {last_step}"
            last_step = step
            drains = step == found[-1][0] and kind != StepKind.CHANGE
            taken = Step(step, batch, unpack(packed), kind=StepKind(kind), clock=text)
            clock = self._clock(stream, taken, clock)
            fires = None if kind == StepKind.CHANGE else clock
            clocks = {operator.name: clock_of(GROWN, operator, fires) for operator in GROWN.operators}
            advance(contents, taken, drains, clocks)
        return _Seen(epoch, contents, last_step, clock)

    def _clock(self, stream: str, step: Step, before: StepClock | None) -> StepClock | None:
        """A step's clock: it never goes back, follows that of the step before, and is decided once."""
        clock = decode_clock(step.clock)
        if clock is None or before is None:
            assert clock is not None or step.kind is StepKind.CHANGE, f"step {step.step} of {stream} has no clock"
        else:
            old, new = before.sources.get(SOURCE, SourceClock()), clock.sources.get(SOURCE, SourceClock())
            assert clock.now >= before.now, f"the clock of step {step.step} of {stream} goes back"
            assert old.watermark is None or (new.watermark or 0) >= old.watermark, f"the watermark of step {step.step}"
            assert step.kind is StepKind.CHANGE or new.before == old.watermark, f"late in step {step.step} of {stream}"
        if step.batch_id is not None and clock is not None:
            decided = self._streams[stream].clocks.setdefault(step.offsets, clock)
            assert is_repeated(decided, clock), f"the clock of step {step.step} of {stream} was decided anew"
        return clock

    def _operators(self, stream: str, id: int) -> list[str]:
        """Those of the definition under which a checkpoint was made. One that comes back begins empty."""
        query = (
            "SELECT definition FROM definition WHERE stream = ? AND checkpoint <= ? ORDER BY checkpoint DESC LIMIT 1"
        )
        [(definition,)] = self.rows(query, stream, id)
        there = json.loads(definition)["operators"]
        return [name for name in OPERATORS if name in there]

    def _forked(self, stream: str) -> _Followed:
        """A fork begins as what its parent was."""
        [(parent, at)] = self.rows("SELECT forked_from, forked_at FROM stream WHERE name = ?", stream)
        if parent is None:
            return _Followed()
        known = self._streams[parent].checkpoints
        clocks = dict(self._streams[parent].clocks)
        return _Followed({id: seen for id, seen in known.items() if id <= at}, self.rollbacks(stream), clocks=clocks)

    def restore(self, stream: str, id: int) -> None:
        """A checkpoint is what it was when it was made."""
        found = restored(self._store, self._catalog.chains.list_manifests(stream, id))
        assert found == self.contents(stream, id), f"checkpoint {id} of {stream} is not what it was"

    def _objects_of(self, stream: str, id: int) -> frozenset[str]:
        """All that a restore of a checkpoint alone reads. Its rows are compared each time that this becomes another."""
        query = (
            "SELECT name FROM object WHERE stream = ? AND checkpoint <= ? AND until >= ? "
            "AND name LIKE '%.arrow' AND kind <> 'snapshot' ORDER BY name"
        )
        described = tuple(name for (name,) in self.rows(query, stream, id, id))
        key = (stream, id, self._streams[stream].checkpoints[id].epoch, described)
        if key not in self._needed:
            chained = self._catalog.chains.list_manifests(stream, id)
            names = [stored.name for stored in chained]
            assert sorted(names) == list(described), f"checkpoint {id} of {stream}"
            for stored in chained:
                if stored.name not in self._manifests:
                    self._manifests[stored.name] = read_manifest(self._store, stored)
            manifests = with_materializations([self._manifests[name] for name in names])
            recorded = {op: digests[TABLE].tolist() for op, digests in manifests[id].digests.items()}
            assert digests_of(self.contents(stream, id)) == recorded, f"checkpoint {id} of {stream}"
            reads = [read for task in unit_tasks(manifests, id, 1, None)[0] for read in task.unit.reads]
            self._needed[key] = frozenset([*names, *(read.handle.object for read in reads)])
            if not self.damaged:
                self.restore(stream, id)
        return self._needed[key]
