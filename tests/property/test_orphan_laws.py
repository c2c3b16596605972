"""Laws of what is an orphan, over any history of runs, checkpoints, rollbacks, attempts that lose, and work beside."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from siltstone.catalog.records.leases import LeaseRecord
from siltstone.catalog.records.references import CatalogView
from siltstone.catalog.records.rollbacks import RollbackRecord
from siltstone.catalog.records.runs import RunRecord
from siltstone.format.segment import Section
from siltstone.retention.orphan_rules import Reason, incomplete_prefixes, judge, judge_unfinished
from siltstone.store.base import Unfinished
from siltstone.store.paths import CheckpointPath

NOON = datetime(2013, 7, 4, 12, tzinfo=UTC)
DAY = timedelta(days=1)
EVENTS = st.lists(
    st.sampled_from(
        [
            "put",
            "lose",
            "commit",
            "commit",
            "late",
            "zombie",
            "run",
            "end",
            "snapshot",
            "recorded",
            "rewind",
            "rewind to 0",
        ]
    ),
    max_size=40,
)


@dataclass
class History:
    """A stream as it comes to be, event by event."""

    epoch: int = 1
    ended: bool = False
    newest: int = 0
    stored: dict[str, None] = field(default_factory=dict)
    referenced: set[str] = field(default_factory=set)
    put: list[str] = field(default_factory=list)
    """what the next commit will refer to"""
    runs: list[RunRecord] = field(default_factory=lambda: [_run(1, 1)])
    committed_by: dict[int, int] = field(default_factory=dict)
    """checkpoint -> epoch"""
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    leased: dict[int, str] = field(default_factory=dict)
    """checkpoint -> the snapshot being taken of it"""

    def happen(self, event: str) -> None:
        next_ = CheckpointPath("s", self.epoch, self.newest + 1)
        label = f"a{len(self.stored)}"
        if event in {"put", "lose"} and not self.ended:
            self._store(next_.segment(label))
            if event == "put":
                self.put.append(next_.segment(label))
        elif event == "commit" and not self.ended:
            self._store(next_.manifest())
            self.referenced |= {*self.put, next_.manifest()}
            self.newest, self.put = self.newest + 1, []
            self.committed_by[self.newest] = self.epoch
        elif event == "late" and self.newest:
            self._store(CheckpointPath("s", self.epoch, self.newest).segment(label))
        elif event == "zombie" and self.epoch > 1:
            begun = self.runs[-1].first_checkpoint
            self._store(CheckpointPath("s", self.epoch - 1, begun).base("op", "v", 0, label))
        elif event == "run":
            self.epoch, self.ended, self.put = self.epoch + 1, False, []
            self.runs.append(_run(self.epoch, self.newest + 1))
        elif event == "end":
            self.ended, self.put = True, []
        elif event == "snapshot" and self.newest and self.newest not in self.leased:
            # Named after the run that wrote the checkpoint, which may have been fenced since.
            name = CheckpointPath("s", self.committed_by[self.newest], self.newest).snapshot("op", "v", 0, label)
            self.leased[self.newest] = name
            self._store(name)
        elif event == "recorded" and self.leased:
            _, name = self.leased.popitem()
            self.referenced.add(name)
        elif event in {"rewind", "rewind to 0"} and self.newest:
            self._rewind(0 if event == "rewind to 0" else self.newest // 2)

    def _rewind(self, checkpoint: int) -> None:
        """Under an epoch of its own, which commits nothing."""
        self.epoch, self.ended, self.put = self.epoch + 1, True, []
        self.runs.append(_run(self.epoch, self.newest + 1))
        self.rollbacks.append(RollbackRecord("s", self.epoch, checkpoint, self.newest, "damaged", "a test", NOON))
        self.newest = checkpoint
        self.referenced = {name for name in self.referenced if _checkpoint(name) <= checkpoint}
        self.committed_by = {c: epoch for c, epoch in self.committed_by.items() if c <= checkpoint}
        self.leased = {c: name for c, name in self.leased.items() if c <= checkpoint}

    def _store(self, name: str) -> None:
        self.stored[name] = None

    def standing(self) -> CatalogView:
        leases = tuple(LeaseRecord(str(c), "s", c, c, "a test", NOON, NOON + DAY) for c in self.leased)
        return CatalogView(
            "s",
            self.epoch,
            self.ended,
            self.newest,
            frozenset(self.committed_by.values()),
            leases,
            frozenset(self.referenced),
            NOON,
            tuple(self.rollbacks),
        )

    def later(self) -> CatalogView:
        """What was given up was so long ago."""
        return replace(self.standing(), at=NOON + 1000 * DAY)


def _checkpoint(name: str) -> int:
    place = CheckpointPath.of(name)
    assert place is not None
    return place.checkpoint


def _run(epoch: int, first: int) -> RunRecord:
    return RunRecord("s", epoch, first, "a test", NOON, None, None)


def orphans(standing: CatalogView, names, guard=DAY, ages=None) -> set[str]:
    reasons = {name: judge(name, standing, guard, (ages or {}).get(name)) for name in names}
    return {name for name, reason in reasons.items() if reason is not None and reason.deletes}


@given(EVENTS, EVENTS)
def test_what_is_deleted_is_not_referred_to_now_or_ever(before, after):
    history = History()
    for event in before:
        history.happen(event)
    deleted = orphans(history.standing(), history.stored)
    assert not deleted & history.referenced
    assert not deleted & set(history.put), "these may be committed next"
    for event in after:
        history.happen(event)
    assert not deleted & history.referenced
    # And it is seen alike by whoever judges later, but for a lease that covers it meanwhile, or a rollback.
    assert deleted <= orphans(replace(history.later(), leases=()), deleted)


@given(EVENTS)
def test_of_runs_that_commit_nothing_more_nothing_is_left_but_what_is_referred_to_or_leased(events):
    history = History()
    for event in [*events, "run"]:
        history.happen(event)
    left = set(history.stored) - orphans(history.later(), history.stored)
    leased = {name for name in left if _checkpoint(name) in history.leased}
    assert left - leased <= history.referenced
    assert not orphans(history.later(), left), "a second sweep finds nothing"


@given(EVENTS)
def test_a_run_that_has_ended_leaves_nothing_either(events):
    history = History()
    for event in [*events, "end"]:
        history.happen(event)
    history.leased.clear()
    left = set(history.stored) - orphans(history.later(), history.stored)
    assert left <= history.referenced


@given(EVENTS, EVENTS)
def test_what_was_given_up_stays_for_the_age_guard_and_goes_after_it(before, after):
    history = History()
    for event in before:
        history.happen(event)
    given_up = set(history.referenced)
    history.happen("rewind")
    given_up -= history.referenced
    for event in [*after, "run"]:
        history.happen(event)
    history.leased.clear()
    reasons = {name: judge(name, history.standing(), DAY) for name in history.stored}
    assert all(reasons[name] is Reason.LEFT_OVER for name in given_up)
    assert Reason.AHEAD not in reasons.values(), "what is of any run so far is waited for by none"
    later = {name: judge(name, history.later(), DAY) for name in history.stored}
    assert all(later[name] is Reason.GIVEN_UP for name in given_up)
    # Made again under the same id, it is another's.
    assert all(name not in history.referenced for name in given_up)
    assert {name for name, reason in later.items() if reason is None} == history.referenced


@given(EVENTS, st.data())
def test_the_longer_the_age_guard_the_less_is_deleted(events, data):
    history = History()
    for event in events:
        history.happen(event)
    hours = st.none() | st.integers(-5, 200).map(lambda h: NOON - timedelta(hours=h))
    ages = {name: data.draw(hours) for name in history.stored}
    guards = sorted(data.draw(st.lists(st.timedeltas(timedelta(0), 9 * DAY), min_size=2, max_size=4)))
    swept = [orphans(history.standing(), history.stored, guard, ages) for guard in guards]
    assert all(more >= less for more, less in pairwise(swept))
    for guard, deleted in zip(guards, swept, strict=True):
        assert not deleted & history.referenced
        # Without an age, and with one within the guard, what a run may be writing is kept.
        young = {name for name in history.put if ages[name] is None or NOON - ages[name] <= guard}
        assert not deleted & young
    assert orphans(history.standing(), history.stored) <= swept[-1], "what needs no age is deleted whatever the guard"


@given(EVENTS)
def test_the_prefixes_of_the_incomplete_hold_all_their_objects_and_none_of_the_completed(events):
    history = History()
    for event in events:
        history.happen(event)
    prefixes = tuple(incomplete_prefixes(history.runs, history.standing()))
    assert len(prefixes) == len(history.runs)
    completed = {f"{p.epoch}/{p.checkpoint}" for p in map(CheckpointPath.of, history.referenced) if p}
    begun = {(r.epoch, later.first_checkpoint) for r, later in pairwise(history.runs)}
    begun.add((history.epoch, history.newest + 1))
    for name in history.stored:
        place = CheckpointPath.of(name)
        assert place is not None
        if (place.epoch, place.checkpoint) in begun:
            assert name.startswith(prefixes)
        if name.endswith("manifest.arrow") and f"{place.epoch}/{place.checkpoint}" in completed:
            assert not name.startswith(prefixes)


PLACES = st.builds(CheckpointPath, st.just("s"), st.integers(0, 6), st.integers(0, 6))
STANDINGS = st.builds(
    CatalogView,
    stream=st.just("s"),
    epoch=st.integers(0, 5),
    ended=st.booleans(),
    newest=st.integers(0, 5),
    epochs=st.just(frozenset()),
    leases=st.lists(
        st.builds(
            lambda a, b: LeaseRecord("x", "s", min(a, b), max(a, b), "a test", NOON, NOON + DAY),
            st.integers(0, 6),
            st.integers(0, 6),
        ),
        max_size=2,
    ).map(tuple),
    referenced=st.frozensets(PLACES.map(CheckpointPath.manifest), max_size=3),
    at=st.just(NOON),
)
LONG_AGO = NOON - 1000 * DAY


@given(PLACES, STANDINGS)
def test_the_future_the_leased_and_the_referred_to_are_kept_however_old(place, standing):
    name = place.manifest()
    reason = judge(name, standing, timedelta(0), LONG_AGO)
    if name in standing.referenced:
        assert reason is None
    elif (place.epoch, place.checkpoint) > (standing.epoch, standing.newest + 1):
        assert reason is Reason.AHEAD
    elif any(lease.first <= place.checkpoint <= lease.last for lease in standing.leases):
        assert reason is Reason.LEASED
    else:
        assert reason is not None and reason.deletes
        assert judge(name, standing, DAY) is (Reason.WRITING if reason is Reason.ABANDONED else reason)


IDENTIFIERS = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
LABELS = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
VARIABLES = st.one_of(IDENTIFIERS, IDENTIFIERS.map(lambda name: f"{name}.bounds"))


@given(STANDINGS, PLACES, IDENTIFIERS, VARIABLES, st.integers(0, 99_999), LABELS)
def test_whatever_siltstone_names_it_knows(standing, place, operator, variable, number, label):
    sections = [place.segment(label, section) for section in ("segment", *Section)]
    kinds = ("base", "snapshot", "materialized_base")
    files = [getattr(place, kind)(operator, variable, number, label) for kind in kinds]
    for name in [place.manifest(), place.materialization(operator, label), *sections, *files]:
        assert judge(name, standing, DAY) is not Reason.STRANGE


@given(
    STANDINGS,
    st.sampled_from(
        [
            "s/notes.txt",
            "s/00000001/000000000001/README",
            "s/00000001/000000000001/manifest.arrow.bak",
            "s/1/1/manifest.arrow",
            "s/00000001/000000000001/sub/manifest.arrow",
            "s/00000001/manifest.arrow",
            "s/00000001/000000000001/op.v.0.a.base.parquet",
        ]
    ),
)
def test_what_siltstone_did_not_name_is_kept(standing, name):
    assert judge(name, standing, timedelta(0), LONG_AGO) is Reason.STRANGE
    assert judge_unfinished(Unfinished("t", name, LONG_AGO), standing, timedelta(0)) is Reason.STRANGE


@given(PLACES, STANDINGS, st.timedeltas(timedelta(0), 9 * DAY), st.timedeltas(timedelta(0), 9 * DAY))
def test_an_unfinished_write_goes_by_its_age_or_with_its_run(place, standing, age, guard):
    began = NOON - age
    unknown = judge_unfinished(Unfinished("t", None, began), standing, guard)
    assert unknown is (Reason.ABANDONED if age > guard else Reason.WRITING)
    standing = replace(standing, referenced=frozenset())
    of_object = judge(place.manifest(), standing, guard, began)
    known = judge_unfinished(Unfinished("t", place.manifest(), began), standing, guard)
    assert known is (unknown if of_object is Reason.LATE else of_object)
