"""The log of a run: where the changes of each step are, one interval per checkpoint. The driver keeps it (FLIP-158).

    interval.append(path, operator, received)    a step's changes, as its subtasks handed them over
    interval.list_steps(operator)                the steps so far, for a subtask whose state is of an older one
    interval.send(path)                          a checkpoint of these steps is prepared
    interval.persist()                           all of them are durable
    interval.list_replaced(kept)                 what the checkpoint does not refer to, once it is complete

The sequence number of a change is the number of its step. Small segments come with the acknowledgements. They wait
here and are stored together: by the checkpoint, or before it in the background once they exceed `INLINE_BYTES`. One
such batch is under way at a time. `carried_rules` bounds what tasks carry of it.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from siltstone.changelog.acknowledgement import Acknowledgement, merge_uploads
from siltstone.changelog.carried_rules import ends_interval, waits_for_upload
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Placed, Sharers, uploader_of
from siltstone.format.segment import Segment
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.store.paths import StepPath

INLINE_BYTES = 256 << 10
"""bytes of small segments above which those that wait are sent to the store"""
NOWHERE = "a segment of the log"
"""stands for the object of what is not stored yet"""
_SEPARATOR = b"\n"
"""between acknowledgements, whose JSON has none"""
_LEAST_BYTES = 32
"""that a step, and what a subtask has not logged of it, take in a task, about"""
_LOGGING = ("delta", "persist", "track")
"""phases of a subtask that make its changes durable"""


@dataclass(frozen=True)
class LoggedStep:
    """One operator's changes in one step.

    Every later task of the interval carries them, so they are compressed: acknowledgements, one for each subtask. A
    task decodes them only to roll forward, or to know what changed.

    Attributes:
        packed: empty if nothing was logged.
        unlogged: per subtask, the tables and opaque variables that it changed and did not log; empty if all logged all.
    """

    step: int
    packed: bytes
    unlogged: tuple[frozenset[str], ...] = ()

    def part(self, subtask: int) -> Acknowledgement:
        """Return an acknowledgement with `handles`, `objects` and `inline` of one subtask's changes."""
        if not self.packed:
            return Acknowledgement("", subtask, KeyGroupRange(0, 0))
        return Acknowledgement.from_bytes(zlib.decompress(self.packed).split(_SEPARATOR)[subtask])


@dataclass
class _Step:
    """One operator's step: what is left of its acknowledgements, by subtask, and how tasks get them."""

    number: int
    received: list[Acknowledgement]
    packed: LoggedStep | None = None
    handle_bytes: int = 0
    """of `packed`, without segments that are not stored yet"""

    @cached_property
    def change_bytes(self) -> list[Counter[str]]:
        """Per subtask, table or opaque variable -> bytes of its logged changes."""
        return [_change_bytes(a) for a in self.received]

    @property
    def unlogged(self) -> tuple[frozenset[str], ...]:
        names = tuple(frozenset(a.unlogged) for a in self.received)
        return names if any(names) else ()


@dataclass
class _Sent:
    """Small segments of one acknowledgement on their way to the store."""

    step: _Step
    at: int
    futures: "list[Future[Placed]]"


@dataclass
class LoggedInterval:
    """The steps of one checkpoint. One thread adds them; once it is prepared, one thread makes them durable.

    Attributes:
        store_url: where small segments are stored.
    """

    store_url: str = field(repr=False)
    options: UploadOptions
    steps: dict[str, dict[int, _Step]] = field(default_factory=dict)
    """operator -> step -> what its subtasks logged"""
    _counted: dict[str, tuple[int, Counter[str]]] = field(default_factory=dict)
    """operator -> how many of its steps are counted, and the bytes of their changes"""
    _waiting_bytes: int = 0
    _sent: list[_Sent] = field(default_factory=list)
    _uploads: UploadStatistics = field(default_factory=UploadStatistics)

    def append(self, path: StepPath, operator: str, received: Sequence[Acknowledgement]) -> None:
        """Add one operator's acknowledgements of step `path.step`.

        Raises:
            Unreachable: the store failed on small segments of an earlier step.
            CorruptObject: a segment was damaged on its way.
        """
        if self._sent and all(future.done() for sent in self._sent for future in sent.futures):
            self._settle()
        kept = [_changes_of(a) for a in sorted(received, key=lambda a: a.subtask)]
        self.steps.setdefault(operator, {})[path.step] = _Step(path.step, kept)
        self._waiting_bytes += sum(len(segment) for a in kept for segment in a.inline)
        if self._waiting_bytes > INLINE_BYTES:
            self._settle()
            waits = waits_for_upload(self._waiting_bytes)
            self.send(path)
            if waits:
                self._settle()

    def list_steps(self, operator: str) -> list[LoggedStep]:
        """Return the steps, with what was logged of an operator's changes, ascending."""
        return [_pack_step(step) for step in self.steps.get(operator, {}).values()]

    def list_unlogged(self, operator: str) -> frozenset[str]:
        """Return the variables of which changes are missing in it."""
        return frozenset[str]().union(*(of for step in self.steps.get(operator, {}).values() for of in step.unlogged))

    @property
    def is_full(self) -> bool:
        """Whether tasks carry so much of it that it is to end."""
        by_operator = (sum(map(_handle_bytes, steps.values())) for steps in self.steps.values())
        return ends_interval(max(by_operator, default=0))

    def change_bytes(self, operator: str) -> Mapping[str, int]:
        """Return table or opaque variable -> bytes of an operator's changes so far."""
        counted, total = self._counted.get(operator, (0, Counter[str]()))
        steps = self.steps.get(operator, {})
        for step in islice(steps.values(), counted, None):
            for sizes in step.change_bytes:
                total.update(sizes)
        self._counted[operator] = len(steps), total
        return total

    def limits_bytes(self, operator: str, limits: Mapping[str, int | None], parallelism: int) -> dict[str, list[int]]:
        """Return how many more bytes of each table's deltas each subtask may write; below 0 if it has written too many.

        Args:
            limits: table or opaque variable -> bytes of its deltas that all subtasks together may write; None, or left
                out, for no limit.
        """
        left = {t: [limit // parallelism] * parallelism for t, limit in limits.items() if limit is not None}
        for step in self.steps.get(operator, {}).values() if left else ():
            for subtask, sizes in enumerate(step.change_bytes):
                for table, size in sizes.items():
                    if table in left:
                        left[table][subtask] -= size
        return left

    def send(self, path: StepPath) -> None:
        """Begin to store the small segments that wait, together; `path` names their object."""
        sent = [
            (step, at, [Segment.unpack(segment) for segment in a.inline])
            for steps in self.steps.values()
            for step in steps.values()
            for at, a in enumerate(step.received)
            if a.inline and not any(each.step is step for each in self._sent)
        ]
        if not sent:
            return
        uploader = uploader_of(self.store_url, self.options)
        futures = iter(uploader.submit_all(path, [segment for _, _, segments in sent for segment in segments]))
        uploader.flush()
        self._sent += [_Sent(step, at, [next(futures) for _ in segments]) for step, at, segments in sent]
        self._waiting_bytes = 0

    def merge(self, last: Mapping[str, Sequence[Acknowledgement]]) -> dict[str, list[Acknowledgement]]:
        """Return `last` (operator -> the acknowledgements of the newest step) with the changes of all steps that a
        restore needs. Until the interval is durable, handles of small segments name no object."""
        return {
            operator: [
                _merge_steps(a, [_with_handles(s.received[a.subtask], s.number) for s in self.steps[operator].values()])
                for a in of
            ]
            for operator, of in last.items()
        }

    def persist(self) -> UploadStatistics:
        """Wait until all of it is durable; return statistics of the driver's uploads.

        Raises:
            Unreachable: the store failed.
            CorruptObject: a segment was damaged on its way.
        """
        self._settle()
        uploads, self._uploads = self._uploads, UploadStatistics()
        return uploads

    def list_replaced(self, kept: Collection[str]) -> list[str]:
        """Return the names of stored objects that are not `kept`: bases replace them."""
        stored = {
            o.name for steps in self.steps.values() for s in steps.values() for a in s.received for o in a.objects
        }
        return sorted(stored - set(kept))

    def _settle(self) -> None:
        """Wait until what was sent is stored; if some of it failed, all of it stays here."""
        placed = [[future.result() for future in sent.futures] for sent in self._sent]
        for sent, of in zip(self._sent, placed, strict=True):
            sent.step.received[sent.at] = _with_placed(sent.step.received[sent.at], sent.step.number, of)
            sent.step.packed = None
        if self._sent:
            self._uploads = self._uploads.merge(uploader_of(self.store_url, self.options).metrics.take())
        self._sent = []


def _pack_step(step: _Step) -> LoggedStep:
    packed = step.packed  # read once: the thread that makes the interval durable may forget it
    if packed is None:
        plain = [replace(a, uploads={}, seconds={}, unlogged=()) for a in step.received]
        has_any = any(a.handles or a.inline for a in plain)
        data = zlib.compress(_SEPARATOR.join(a.to_bytes() for a in plain)) if has_any else b""
        packed = LoggedStep(step.number, data, step.unlogged)
        handles = len(packed.packed) - sum(len(each) for a in step.received for each in a.inline)
        step.handle_bytes = max(0, handles) + _LEAST_BYTES * (1 + len(packed.unlogged))
        step.packed = packed
    return packed


def _handle_bytes(step: _Step) -> int:
    if step.packed is None:
        _pack_step(step)
    return step.handle_bytes


def _changes_of(a: Acknowledgement) -> Acknowledgement:
    """What the log keeps of an acknowledgement."""
    return Acknowledgement(
        a.operator,
        a.subtask,
        a.key_groups,
        a.handles,
        a.objects,
        a.inline,
        a.unlogged,
        a.uploads,
        seconds={phase: a.seconds[phase] for phase in _LOGGING if phase in a.seconds},
    )


def _change_bytes(a: Acknowledgement) -> Counter[str]:
    """Table or opaque variable -> bytes of its logged changes."""
    sizes = Counter[str]()
    for handle in a.handles:
        if handle.kind is not Kind.INDEX:
            sizes[handle.variable] += handle.length
    for segment in map(Segment.unpack, a.inline):
        for variable, length in segment.opaque:
            sizes[variable] += length
        for entry in segment.entries():
            sizes[entry.variable] += entry.length
    return sizes


def _with_handles(a: Acknowledgement, step: int) -> Acknowledgement:
    """What was logged, with handles of the segments that are not stored yet."""
    if not a.inline:
        return a
    waiting = [Placed((), tuple(s.handles(s.places(NOWHERE))), ((), Sharers(1))) for s in map(Segment.unpack, a.inline)]
    return _with_placed(a, step, waiting)


def _with_placed(a: Acknowledgement, step: int, placed: Sequence[Placed]) -> Acknowledgement:
    return replace(
        a,
        inline=(),
        handles=[*a.handles, *(replace(handle, sqn=step) for part in placed for handle in part.handles)],
        objects=[*a.objects, *(stored for part in placed for stored in part.objects)],
    )


def _merge_steps(last: Acknowledgement, steps: Sequence[Acknowledgement]) -> Acknowledgement:
    """The acknowledgement of a subtask's newest step with the changes of all `steps`, of which it is the last.

    Bases and files are whole: what was logged of the same variable before them is not needed.
    """
    *earlier, newest = steps
    whole = {h.variable for h in newest.handles if h.kind is not Kind.INDEX and h.form is not Form.DELTA}
    seconds: dict[str, float] = {}
    for a in earlier:
        for phase in _LOGGING:
            # Bases replace what was logged of their tables: if no other table had changes, logging them is not a cost
            # of this checkpoint.
            as_phase = phase if phase == "track" or not whole.issuperset(_change_bytes(a)) else "log"
            seconds[as_phase] = seconds.get(as_phase, 0.0) + a.seconds.get(phase, 0.0)
    handles = [h for a in earlier for h in _select_needed(a.handles, whole)] + [*newest.handles]
    named = {handle.object for handle in handles}
    objects = {o.name: o for a in steps for o in a.objects if o.name in named}
    logged = sum((_change_bytes(a) for a in earlier), Counter[str]()) if last.tracked_bytes else Counter[str]()
    return replace(
        last,
        handles=handles,
        objects=list(objects.values()),
        inline=(),
        uploads=merge_uploads(steps).to_json(),
        seconds={**last.seconds, **{p: s + last.seconds.get(p, 0.0) for p, s in seconds.items() if s}},
        tracked_bytes={table: size + logged[table] for table, size in last.tracked_bytes.items()},
    )


def _select_needed(handles: Sequence[Handle], whole: Collection[str]) -> list[Handle]:
    """The changes of variables that are not written whole later, and the indexes if there are any of tables."""
    kept = [h for h in handles if h.variable not in whole]
    tables = any(h.kind is Kind.INCREMENTAL for h in kept)
    return [h for h in kept if tables or h.kind is not Kind.INDEX]
