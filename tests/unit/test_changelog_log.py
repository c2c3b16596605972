"""The log of a run, as the driver keeps it: what was logged reads back, small or stored; what is replaced goes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from siltstone.changelog import log as changelog_log
from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.changelog.changes import Change, OpaqueChange
from siltstone.changelog.log import LoggedInterval
from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.changelog.uploader import Uploader
from siltstone.changelog.writer import ChangelogWriter
from siltstone.errors import CorruptObject, Unreachable
from siltstone.format.segment import Segment, SegmentBuilder
from siltstone.model import Form, KeyGroupRange, Kind
from siltstone.store.base import Store
from siltstone.store.paths import StepPath
from tests.changes import Said, base, delta, names, opaque, read, value_of
from tests.examples import examples
from tests.hooked_store import Failing, HookedStore

WHOLE = KeyGroupRange(0, 8)
SUBTASKS = 2


class Run:
    """A log whose small segments go to a store of the test, and the tasks whose changes it gets."""

    def __init__(self, store: HookedStore) -> None:
        self.store = store
        self.uploader = Uploader(store, UploadOptions(persist_delay_s=0))
        self.log = LoggedInterval("", UploadOptions())

    def path(self, step: int) -> StepPath:
        return StepPath("s", 1, 2, step)

    def small(self, step: int, subtask: int, *changes: Change | OpaqueChange, operator: str = "o") -> Acknowledgement:
        """What a subtask says whose changes are small: they come with it."""
        groups = WHOLE.split(SUBTASKS)[subtask]
        builder = SegmentBuilder(operator, 2, groups)
        for change in changes:
            if isinstance(change, OpaqueChange):
                builder.add_opaque(change.variable, change.values)
            else:
                builder.add_delta(change.variable, change.block, 1, 0, digest=change.digest, sqn=step)
        inline = [builder.build().pack()] if changes else []
        return Acknowledgement(operator, subtask, groups, inline=inline)

    def stored(
        self, step: int, subtask: int, *changes: Change | OpaqueChange, bases: Collection[str] = ()
    ) -> Acknowledgement:
        """What a subtask says that has stored its changes itself, and some tables whole."""
        groups = WHOLE.split(SUBTASKS)[subtask]
        objects = []
        with ChangelogWriter(self.uploader, "o", groups, self.path(step)) as writer:
            for change in changes:
                if change.variable in bases and isinstance(change, Change):
                    name = self.path(step).base("o", change.variable, subtask, "t")
                    objects.append(self.store.put(name, b"rows"))
                    writer.append(base(change.variable, name))
                else:
                    writer.append(change)
            written = writer.persist().result(10)
        return Acknowledgement("o", subtask, groups, written.handles, [*objects, *written.objects])

    def answer(
        self, step: int, subtask: int, variables: set[str], small: bool, whole: bool, *, ends: bool
    ) -> Acknowledgement:
        """What a subtask says of a step; of a checkpoint, every variable; those in `variables` perhaps whole."""
        groups = WHOLE.split(SUBTASKS)[subtask]
        changes = [
            (opaque if name == "calls" else delta)(name, 10 * step + subtask, groups=groups)
            for name in sorted({"x", "y", "calls"} if ends else variables)
        ]
        if small and not (ends and whole):
            return self.small(step, subtask, *changes)
        return self.stored(step, subtask, *changes, bases=variables if ends and whole else ())

    def persist(
        self, step: int, last: Mapping[str, Sequence[Acknowledgement]]
    ) -> tuple[dict[str, list[Acknowledgement]], UploadStatistics]:
        """What a checkpoint that ends with a step names."""
        self.log.send(self.path(step))
        uploads = self.log.persist()
        return self.log.merge(last), uploads

    def append(self, step: int, *received: Acknowledgement) -> None:
        self.log.append(self.path(step), received[0].operator, received)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(HookedStore(tmp_path))
    monkeypatch.setattr(changelog_log, "uploader_of", lambda *_: made.uploader)
    yield made
    made.uploader.close()


def say(store: Store, of: Acknowledgement, step: int = 0) -> list[Said]:
    """What an acknowledgement's changes say, stored or small, of this step where they do not tell."""
    found = read(store, of.handles, of.objects)
    for packed in of.inline:
        segment, data = Segment.unpack(packed), pa.py_buffer(packed)
        for handle in segment.handles(segment.places("small")):
            if handle.kind is not Kind.INDEX:
                block = data.slice(handle.offset, handle.length)
                found.append((handle.sqn or step, handle.variable, value_of(handle, block)))
    return sorted(found, key=str)


def both(run: Run, step: int, *changes: Change | OpaqueChange, operator: str = "o") -> list[Acknowledgement]:
    """The same small changes in the first subtask, none in the other, which is the first to answer."""
    return [run.small(step, 1, operator=operator), run.small(step, 0, *changes, operator=operator)]


GROUPS = WHOLE.split(SUBTASKS)[0]


def x(value: int, rows: int = 1) -> Change:
    return delta("x", value, rows, GROUPS)


def test_small_segments_are_stored_together_and_have_the_numbers_of_their_steps(run: Run) -> None:
    last = {}
    for step in 3, 4, 5:
        for operator in "o", "p":
            last[operator] = both(run, step, x(step), opaque("calls", step, GROUPS), operator=operator)
            run.append(step, *last[operator])
    assert run.store.puts == []
    merged, uploads = run.persist(5, last)
    assert len(run.store.puts) == 1 and uploads.objects == 1
    assert run.store.names[0].startswith(f"{run.path(5).prefix}s000000000005-")
    for operator in "o", "p":
        [other, first] = merged[operator]
        assert (other.subtask, list(other.handles), list(other.objects)) == (1, [], [])
        assert say(run.store, first) == [(3, "x", 3), (4, "x", 4), (5, "calls", 5), (5, "x", 5)]
        assert sorted(h.sqn for h in first.handles if h.kind is Kind.INDEX) == [3, 4, 5]
        assert {h.operator for h in first.handles} == {operator}
        assert names(first.objects) == run.store.names and not first.inline
    stored = run.store.names
    assert run.log.list_replaced(stored) == [] and run.log.list_replaced(()) == stored


def test_small_segments_that_wait_are_bounded_in_total(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(run.small(1, 0, x(1)).inline[0])
    monkeypatch.setattr(changelog_log, "INLINE_BYTES", 3 * size)
    last: Sequence[Acknowledgement] = ()
    for step in range(1, 21):
        last = both(run, step, x(step))
        run.append(step, *last)
        small = sum(len(segment) for logged in run.log.list_steps("o") for segment in logged.part(0).inline)
        assert small <= (2 * 3 + 2) * size
        assert [say(run.store, logged.part(0)) for logged in run.log.list_steps("o")] == [
            [(n, "x", n)] for n in range(1, step + 1)
        ]
    assert len(run.store.puts) >= 4  # before any checkpoint asks
    merged, _ = run.persist(20, {"o": last})
    assert say(run.store, merged["o"][1]) == sorted([(n, "x", n) for n in range(1, 21)], key=str)
    assert len(run.store.puts) <= 6


@pytest.mark.parametrize("then", ["append", "persist"])
def test_a_background_upload_that_failed_is_said_next(run: Run, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """At the next step already, however small: the steps until the checkpoint would be in vain."""
    run.store.before = Failing(1)
    monkeypatch.setattr(changelog_log, "INLINE_BYTES", 0)
    run.append(1, *both(run, 1, x(1)))
    monkeypatch.setattr(changelog_log, "INLINE_BYTES", 1 << 20)
    run.uploader.close()  # what was sent has been answered
    for _ in range(2):  # the run can do nothing but end
        with pytest.raises(Unreachable, match="the test says so"):
            if then == "append":
                run.append(2, *both(run, 2, x(2)))
            else:
                run.persist(1, {})
    assert run.store.names == []
    assert say(run.store, run.log.list_steps("o")[0].part(0)) == [(1, "x", 1)]  # it has not gone from here


def test_a_segment_that_was_damaged_on_its_way_is_never_stored(run: Run) -> None:
    received = run.small(1, 0, x(1))
    [packed] = received.inline
    damaged = Acknowledgement("o", 0, GROUPS, inline=[packed[:-30] + bytes(30)])
    run.append(1, damaged, run.small(1, 1))
    with pytest.raises(CorruptObject, match="not a segment"):
        run.persist(1, {"o": [damaged, run.small(1, 1)]})
    assert run.store.puts == []


def test_a_step_that_one_subtask_did_not_log_cannot_be_rolled_forward(run: Run) -> None:
    run.append(1, *both(run, 1, x(1)))
    run.append(2, Acknowledgement("o", 0, GROUPS, unlogged=["y"]), run.small(2, 1))
    run.append(3, *both(run, 3, x(3)))
    run.append(3, *both(run, 3, x(3), operator="p"))
    assert [(step.step, step.unlogged) for step in run.log.list_steps("o")] == [(1, ()), (2, ({"y"}, set())), (3, ())]
    assert run.log.list_unlogged("o") == {"y"} and not run.log.list_unlogged("p")
    assert [step.step for step in run.log.list_steps("p")] == [3]
    assert run.log.list_steps("q") == []


def test_a_limit_holds_for_the_deltas_of_all_steps_of_a_subtask(run: Run) -> None:
    def lengths(received: Acknowledgement) -> int:
        of_handles = sum(h.length for h in received.handles if h.variable == "x")
        return of_handles + sum(len(Segment.unpack(segment).incr) for segment in received.inline)

    assert run.log.limits_bytes("o", {"x": 4000, "y": 50}, SUBTASKS) == {"x": [2000, 2000], "y": [25, 25]}
    small, stored = run.small(1, 0, x(1), opaque("calls", 1, GROUPS)), run.stored(2, 0, x(2, rows=9))
    run.append(1, small, run.small(1, 1))
    run.append(2, run.small(2, 1), stored)
    run.append(2, *both(run, 2, x(7), operator="p"))
    left = 2000 - lengths(small) - lengths(stored)
    assert lengths(small) > 0 and lengths(stored) > 0
    assert run.log.limits_bytes("o", {"x": 4000, "y": 50}, SUBTASKS) == {"x": [left, 2000], "y": [25, 25]}
    assert run.log.limits_bytes("o", {"x": 2 * lengths(small), "y": 50}, SUBTASKS) == {
        "x": [-lengths(stored), lengths(small)],
        "y": [25, 25],
    }
    assert run.log.limits_bytes("o", {}, SUBTASKS) == {}


def test_a_checkpoint_counts_the_uploads_and_seconds_of_all_its_steps(run: Run) -> None:
    def answer(step: int, **more: object) -> Acknowledgement:
        seconds = {"delta": 0.25, "persist": 0.5 * step, "process": 8.0 * step}
        uploads = UploadStatistics(requests=step, objects=step).to_json()
        plain = {"handles": run.stored(step, 0, x(step)).handles, "uploads": uploads, "seconds": seconds}
        return Acknowledgement("o", 0, GROUPS, **plain, **more)  # pyright: ignore[reportArgumentType]

    answers = [answer(1), answer(2), answer(3, tracked_bytes={"x": 1000}, rows_in=5)]
    for step, received in enumerate(answers, 1):
        run.append(step, received)
    merged, _ = run.persist(3, {"o": answers[-1:]})
    [found] = merged["o"]
    assert found.seconds == {"delta": 0.75, "persist": 3.0, "process": 24.0}
    assert UploadStatistics.from_json(found.uploads).requests == 6
    before = sum(h.length for a in answers[:-1] for h in a.handles if h.kind is Kind.INCREMENTAL)
    assert before > 0 and found.tracked_bytes == {"x": 1000 + before} and found.rows_in == 5


PARTS = st.tuples(st.sets(st.sampled_from(["x", "y", "calls"])), st.booleans(), st.booleans())
"""what changed, whether it is small, and, in the last step, whether the tables among them are written whole"""
STEPS = st.lists(st.lists(PARTS, min_size=SUBTASKS, max_size=SUBTASKS), min_size=1, max_size=6)


@settings(max_examples=examples(30), phases=[Phase.explicit, Phase.generate])  # an example takes too long to shrink
@given(steps=STEPS, waiting_bytes=st.sampled_from([0, 600, 1 << 18]), ranged=st.booleans())
@pytest.mark.slow
def test_a_checkpoint_names_what_a_restore_needs_and_the_rest_can_go(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[list[tuple[set[str], bool, bool]]],
    waiting_bytes: int,
    ranged: bool,
) -> None:
    """Whatever changed in which step, however it came to the driver: bases and opaque values replace what was logged
    before them, and everything that no handle of the checkpoint leads to is in `list_replaced`."""
    run = Run(HookedStore(tmp_path_factory.mktemp("store"), ranged=ranged))
    said: list[list[list[Said]]] = []
    last: list[Acknowledgement] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changelog_log, "uploader_of", lambda *_: run.uploader)
        patch.setattr(changelog_log, "INLINE_BYTES", waiting_bytes)
        for step, parts in enumerate(steps, 1):
            ends = step == len(steps)
            last = [run.answer(step, i, *part, ends=ends) for i, part in enumerate(parts)]
            run.append(step, *last)
            said.append([say(run.store, a, step) for a in last])
            logged = run.log.list_steps("o")
            assert [[say(run.store, each.part(i), each.step) for i in range(SUBTASKS)] for each in logged] == said
        merged, _ = run.persist(len(steps), {"o": last})
        objects = [o for a in merged["o"] for o in a.objects]
        for subtask, a in enumerate(merged["o"]):
            *earlier, newest = (of[subtask] for of in said)
            whole = {h.variable for h in a.handles if h.kind is Kind.INCREMENTAL and h.form is Form.BASE}
            expected = [each for of in earlier for each in of if each[1] not in {"calls", *whole}] + newest
            assert say(run.store, a) == sorted(expected, key=str)
        assert {h.object for a in merged["o"] for h in a.handles} == set(names(objects))
        run.store.delete(run.log.list_replaced(names(objects)))
        assert run.store.names == sorted(set(names(objects)))
    run.uploader.close()


def test_a_step_is_handed_to_tasks_though_another_thread_forgets_how_meanwhile(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that makes the interval durable forgets the packed step once its segments are stored."""

    def forgetting(step: object, name: str, value: object) -> None:
        object.__setattr__(step, name, None if name == "packed" else value)

    monkeypatch.setattr("siltstone.changelog.log._Step.__setattr__", forgetting)
    run.log.append(run.path(3), "o", [run.small(3, subtask) for subtask in range(SUBTASKS)])
    assert [step.step for step in run.log.list_steps("o")] == [3]
