"""Pruning never shows: after any history, a query finds laid out what the whole log would have laid out."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.steps import BEFORE_FIRST, InputPosition, Step
from siltstone.catalog.repository import Catalog
from siltstone.spark.source_log import SourceLog
from tests.catalog_cases import commit_of
from tests.contract.catalog.test_input_log import files
from tests.examples import examples

NAME, HEADER = "flights", 'v1\n{"batchWatermarkMs":0}'
BEGINNING = Step(0, BEFORE_FIRST, f'{HEADER}\n-\n{{"n": 5}}', '{"1": {"0": "v1\\n17"}}')


def laid_out(position: InputPosition) -> Mapping[str, str]:
    """What a query finds, by file."""
    with tempfile.TemporaryDirectory() as directory:
        log = SourceLog(Path(directory) / "spark")
        log.prepare(position)
        found = [p for p in log.location.rglob("*") if p.is_file() and p.name != "metadata"]
        return {str(p.relative_to(log.location)): p.read_text() for p in found}


class Log:
    """A stream as it would be if nothing was ever pruned: the steps of each checkpoint there was."""

    def __init__(self, name: str, steps: dict[int, list[Step]], kept: set[int]) -> None:
        self.name, self.steps, self.kept = name, steps, kept

    @property
    def newest(self) -> int:
        return max(self.steps, default=0)

    def upto(self, checkpoint: int) -> list[Step]:
        return [step for id in sorted(self.steps) if id <= checkpoint for step in self.steps[id]]

    def position(self, checkpoint: int) -> InputPosition:
        steps = self.upto(checkpoint)
        with_batch = [step for step in steps if step.batch_id is not None]
        return InputPosition(BEGINNING, [step for step in steps if step.sources != "{}"], with_batch[-2:])


class Histories(RuleBasedStateMachine):
    """Commits, deletions, rollbacks, forks and prunings, beside logs that keep everything."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.catalog: Catalog = open_catalog(f"sqlite:///{self.directory.name}/catalog.db")
        self.logs: list[Log] = []

    @initialize()
    def begin(self) -> None:
        self.catalog.streams.register(NAME, 8, {})
        self.objects = 0
        self.catalog.runs.begin(NAME, "a test")
        self.catalog.input_log.record_beginning(NAME, 1, BEGINNING)
        self.logs = [Log(NAME, {}, set())]

    def teardown(self) -> None:
        self.catalog.close()
        self.directory.cleanup()

    @rule(which=st.integers(0, 3), steps=st.lists(st.none() | st.integers(0, 3), max_size=4))
    def commit(self, which: int, steps: list[int | None]) -> None:
        """A checkpoint of some steps, each of which has no batch or reads some files."""
        log = self.logs[which % len(self.logs)]
        before, id = log.upto(log.newest), log.newest + 1
        batch, entry = sum(step.batch_id is not None for step in before), sum(step.sources != "{}" for step in before)
        made = []
        for number, count in enumerate(steps, len(before) + 1):
            if count is None:
                made.append(replace(Step.without_rows(number), clock=f"{number}"))
                continue
            self.objects += 1
            sources = files(entry, *(f"{self.objects}-{n}.parquet" for n in range(count))) if count else "{}"
            offsets = f'{HEADER}\n{{"logOffset":{batch}}}'
            made.append(Step(number, batch, offsets, sources, clock=f"{number}"))
            batch, entry = batch + 1, entry + bool(count)
        self.objects += 1
        epoch = self.catalog.streams.get(log.name).epoch
        commit = commit_of(id, tag=f"x{self.objects}", steps=made, first={"aircraft": id})
        self.catalog.commits.add(log.name, epoch, commit)
        log.steps[id] = made
        log.kept.add(id)

    @rule(which=st.integers(0, 3), share=st.floats(0, 1), data=st.data())
    def delete(self, which: int, share: float, data: st.DataObject) -> None:
        """Checkpoints other than the newest, oldest first as retention does, or any."""
        log = self.logs[which % len(self.logs)]
        older = sorted(log.kept - {log.newest})
        ids = (
            older[: int(share * len(older))]
            if data.draw(st.booleans())
            else [id for id in older if data.draw(st.booleans())]
        )
        self.catalog.deletions.mark(log.name, self.catalog.streams.get(log.name).epoch, ids)
        log.kept -= set(ids)

    @rule(which=st.integers(0, 3), at_least=st.integers(1, 4))
    def prune(self, which: int, at_least: int) -> None:
        """What a deletion does last."""
        log = self.logs[which % len(self.logs)]
        self.catalog.input_log.prune(log.name, self.catalog.streams.get(log.name).epoch, at_least=at_least)

    @rule(which=st.integers(0, 3), data=st.data())
    def roll_back(self, which: int, data: st.DataObject) -> None:
        """To a checkpoint that is kept; what comes next is another way than the logged one, or the same."""
        log = self.logs[which % len(self.logs)]
        to = data.draw(st.sampled_from([0, *sorted(log.kept)]))
        whole = self.catalog.input_log.replayable_from(log.name) == 0
        given_up = [step for id in sorted(log.steps) if id > to for step in log.steps[id]]
        self.catalog.rollbacks.roll_back(log.name, self.catalog.runs.begin(log.name, "a test"), to, "a test", "a test")
        if to or whole:
            found = [(s.step, s.sources) for s in self.catalog.input_log.list_logged(log.name)]
            assert found[: len(given_up)] == [(s.step, s.sources) for s in given_up], "all of it can come again"
        else:
            assert self.catalog.input_log.list_logged(log.name) == []
        log.steps = {id: steps for id, steps in log.steps.items() if id <= to}
        log.kept = {id for id in log.kept if id <= to}

    @precondition(lambda self: len(self.logs) < 4)
    @rule(which=st.integers(0, 3), data=st.data())
    def fork(self, which: int, data: st.DataObject) -> None:
        """A new stream from a checkpoint that is kept."""
        log = self.logs[which % len(self.logs)]
        if log.kept:
            at = data.draw(st.sampled_from(sorted(log.kept)))
            name = f"fork{len(self.logs)}"
            self.catalog.forks.create(log.name, name, at)
            self.catalog.runs.begin(name, "a test")
            self.logs.append(Log(name, {id: s for id, s in log.steps.items() if id <= at}, {at}))

    @invariant()
    def every_kept_checkpoint_is_gone_on_from_as_with_the_whole_log(self) -> None:
        for log in self.logs:
            for checkpoint in {0, *sorted(log.kept)[:2], *sorted(log.kept)[-1:]}:
                clock = self.catalog.input_log.get_clock(log.name, checkpoint)
                assert clock == next((step.clock for step in log.upto(checkpoint)[::-1]), "")
                if checkpoint == 0 and self.catalog.input_log.replayable_from(log.name):
                    continue
                found = self.catalog.input_log.get_position(log.name, checkpoint)
                assert laid_out(found) == laid_out(log.position(checkpoint)), (log.name, checkpoint)
                after = [(s.step, s.offsets) for s in self.catalog.input_log.list(log.name, log.newest, checkpoint)]
                assert after == [(s.step, s.offsets) for s in log.upto(log.newest)[len(log.upto(checkpoint)) :]]


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(15), stateful_step_count=20, deadline=None)
