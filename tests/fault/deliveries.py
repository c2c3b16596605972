"""Promise 2 at the sinks: what a sink was handed is each row of the undisturbed run once, by ids that mean one thing.

A sink that skips ids it has is the judge (`journal`). Ids are checkpoints plus the stream's offset, which goes up where
a stream begins anew since all that it had was given up and its oldest input was pruned: then all rows come once more,
under higher ids (ADR 28).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pyarrow as pa

from siltstone.catalog.records.streams import StreamRecord
from siltstone.catalog.warehouse import OpenWarehouse
from tests.fault.journal import Delivered
from tests.fault.reference import SinkRows


@dataclass(frozen=True)
class Birth:
    """With what a stream began, none of which its sinks are to have: batches, and the offset of its sinks' ids."""

    batches: int
    offset: int


@dataclass
class Memory:
    """What one check of a warehouse leaves to the next.

    Attributes:
        proven: what names the objects of checkpoints that were proven.
        births: stream -> with what it began, as long as that could still be told.
        commits: (table, version) -> the rows that this version added.
    """

    proven: set[object] = field(default_factory=set)
    births: dict[str, Birth] = field(default_factory=dict)
    commits: dict[tuple[str, int], pa.Table] = field(default_factory=dict)


def birth_of(
    place: OpenWarehouse, stream: StreamRecord, held: Mapping[int, Sequence[int]], memory: Memory
) -> Birth | None:
    """With what a stream began; None for a fork that was met too late to tell, since its log was pruned."""
    if stream.forked_at is None:
        return Birth(0, 0)
    if stream.name not in memory.births:
        if stream.sink_offset and any(
            not given_up.checkpoint for given_up in place.catalog.rollbacks.list(stream.name)
        ):
            # It began anew before it was met: its checkpoints are not those that it was forked with.
            memory.births[stream.name] = Birth(0, stream.sink_offset - 1)
            return memory.births[stream.name]
        before = [max(batches) for checkpoint, batches in held.items() if checkpoint <= stream.forked_at]
        if before:
            memory.births[stream.name] = Birth(max(before), stream.sink_offset)
    return memory.births.get(stream.name)


@dataclass(frozen=True)
class Deliveries:
    """What is known of a stream where the deliveries to one of its sinks are judged.

    Attributes:
        rows: what an undisturbed run gives the sink.
        held: checkpoint -> the batches it holds, from 1 on, of those that exist and whose steps are still logged.
        logged: as `held`, of those that were given up and are to come again.
        ended: the newest run ended well, so that nothing is outstanding.
    """

    rows: SinkRows
    place: OpenWarehouse
    stream: StreamRecord
    birth: Birth | None
    held: Mapping[int, Sequence[int]]
    logged: Mapping[int, Sequence[int]]
    ended: bool

    def broken(self, calls: Sequence[Delivered], in_sight: Sequence[Delivered], *, journaled: bool) -> Iterable[str]:
        """All that is broken, in lines: of the `calls` that a sink with a journal had, and of what its readers see."""
        first: dict[int, Delivered] = {}
        for call in calls:
            if first.setdefault(call.id, call) != call:
                yield f"id {call.id} was delivered with {first[call.id].rows} rows, and then with other {call.rows}"
        ids = [*first]
        if ids != sorted(ids):
            yield f"ids were delivered for the first time in the order {ids}"
        if journaled:
            for each in in_sight:
                if first.get(each.id) != each:
                    yield f"the rows in sight of id {each.id} are not those delivered under it"
            yield from self._each_row_once("a consumer that skips ids it has", list(first.values()))
        yield from self._each_row_once("a reader of the files", in_sight)

    @property
    def _anew(self) -> bool:
        """Whether the stream began anew since it was made."""
        return self.birth is not None and self.stream.sink_offset > self.birth.offset

    def _each_row_once(self, who: str, found: Sequence[Delivered]) -> Iterable[str]:
        """Whether these deliveries, one an id, are the rows of all completed checkpoints, and of nothing else."""
        offset = self.stream.sink_offset
        bounds: dict[int, tuple[int, int]] = {}
        for each in sorted(found, key=lambda each: each.id):
            batches = self._batches(each)
            if batches is None:
                yield f"{who} has {each.rows} rows under id {each.id} that are no batches of the undisturbed run"
                return
            bounds[each.id] = batches
        # What came before the stream began anew, it began with batch 1, once or more often.
        before = [bounds[id] for id in bounds if self._anew and id <= offset]
        now = {id: at for id, at in bounds.items() if not (self._anew and id <= offset)}
        anew = [rollback for rollback in self.place.catalog.rollbacks.list(self.stream.name) if not rollback.checkpoint]
        gaps = [(one, next_) for one, next_ in pairwise(before) if next_[0] != one[1] + 1]
        begins = {1, self.birth.batches + 1} if self.birth is not None else {1}
        wrong = any(next_[0] != 1 for _, next_ in gaps) or (before and before[0][0] not in begins)
        if wrong or len(gaps) >= max(1, len(anew)):
            yield f"{who} had batches {before} in this order, before the stream began anew {len(anew)} times"
        yield from self._from_the_beginning(who, now)
        yield from self._as_logged(who, {id - offset: at for id, at in now.items()})

    def _from_the_beginning(self, who: str, now: Mapping[int, tuple[int, int]]) -> Iterable[str]:
        spans = list(now.values())
        begins = 0 if self._anew else None if self.birth is None else self.birth.batches
        if spans and begins is not None and spans[0][0] != begins + 1:
            yield f"{who} has batches from {spans[0][0]} on, not from {begins + 1}"
        for (id, one), (other, next_) in pairwise(now.items()):
            if next_[0] != one[1] + 1:
                yield f"{who} has batches {one} under id {id} and {next_} under id {other}"

    def _as_logged(self, who: str, now: Mapping[int, tuple[int, int]]) -> Iterable[str]:
        """Checkpoint by checkpoint, as far as it is still known what they hold."""
        since = 0 if self._anew else self.stream.forked_at or 0
        own = {checkpoint: held for checkpoint, held in self.held.items() if checkpoint > since}
        known = {**{c: h for c, h in self.logged.items() if c > since}, **own}
        wanted = own.keys() - (set() if self.ended or not own else {max(own)})
        if missing := sorted(wanted - now.keys()):
            yield f"{who} lacks the rows of checkpoints {missing}"
        for checkpoint, at in now.items():
            held = known.get(checkpoint)
            if held is None and checkpoint >= min(known, default=0):
                yield f"{who} has rows of checkpoint {checkpoint}, which never completed, or holds none"
            elif held is not None and at != (at[0] if checkpoint == self._cut else min(held), max(held)):
                yield f"{who} has batches {at} of checkpoint {checkpoint}, which holds {held}"

    @property
    def _cut(self) -> int | None:
        """The checkpoint of which the log holds the end only, if it was pruned within one."""
        held = {**self.logged, **self.held}
        first = min(held, default=None)
        return first if first is not None and min(held[first]) > 1 else None

    def _batches(self, found: Delivered) -> tuple[int, int] | None:
        """The first and last batch, from 1 on, that these rows are all rows of; None if they are not."""
        span = self.rows.spans.get((found.first, found.last))
        return span if span is not None and replace(found, id=0) == self.rows.delivery(*span) else None
