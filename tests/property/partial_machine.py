"""Random histories of streams whose chains begin with several materializations, each of some variables.

Operators read one another, combine rows, drain, have null keys and nested values, and come and go with the definition.
Each checkpoint is restored alone and compared with what its input log makes of it (`partial_operators`). Real
catalog, store, region, state, materialization, retention, sweep, forks, recovery and rebuild, without Spark.

    python -m tests.property.partial_machine --histories 100 --seed 1
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

from siltstone.catalog.extract_writer import write_extract
from siltstone.catalog.records.steps import StepKind, with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.materialize import HeldWhole, materialize
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.fork import fork
from siltstone.change.rebuild import rebuild_catalog
from siltstone.change.recover import recover
from siltstone.retention.deletion import delete_checkpoints
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.savepoints import drop_savepoint, set_savepoint
from siltstone.retention.sweep import SweepOptions, sweep
from siltstone.retention.truncate import truncate
from siltstone.run.take_over import take_over
from siltstone.state.schema import DELETED
from siltstone.state_handler import PREPARED
from siltstone.store.open import Warehouse
from siltstone.store.paths import materialization_of
from tests.places import place_at
from tests.proofs import failures, in_order, restored_digest
from tests.property.partial_operators import (
    CALLS,
    DROPPED,
    GROWN,
    STREAM,
    TABLES,
    Model,
    advance,
    restored_rows,
    rows_of,
)
from tests.region_run import RegionRun
from tests.sums import NAME

POLICIES = [
    policy_by_name("adjust-d", PolicyOptions(d0=50, d_max=60, size_ratio_max=None, space_amplification_max=None)),
    policy_by_name("adjust-d", PolicyOptions(d0=3, d_max=4)),
    policy_by_name("marginal-cost", PolicyOptions(size_ratio_max=1.5)),
    policy_by_name("marginal-cost", PolicyOptions(restore_weight=2.0, size_ratio_max=None)),
]
ACTIONS = (
    *("steps", "steps", "steps", "steps", "materialize", "materialize", "materialize", "again", "truncate", "delete"),
    *("savepoint", "drop", "fork", "sweep", "damage", "rebuild", "restart", "restart", "crash", "change", "change"),
    "rewind",
)


class History:
    """One history, and what each checkpoint of each stream has to restore to."""

    def __init__(self, seed: int, root: Path) -> None:
        self.chance, self.root = random.Random(seed), root
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.place = place_at(root / "w", lambda: self.now).with_identity(create=True)
        self.expected: dict[str, dict[int, str]] = {NAME: {}}
        self.models: dict[str, dict[int, Model]] = {NAME: {0: {}}}
        """what the input log makes of each checkpoint"""
        self.edits: dict[tuple[str, int], tuple[str, str, pa.Table]] = {}
        """stream and checkpoint -> the change by hand that it has"""
        self.runs: dict[str, RegionRun] = {}
        self.policy = self.chance.choice(POLICIES)
        self.counts: Counter[str] = Counter()
        self._number = 0
        self.steps(NAME, 15)

    def perform(self, count: int) -> None:
        """Do so many random actions; after each, everything must hold."""
        for _ in range(count):
            action = self.chance.choice(ACTIONS)
            stream = self.chance.choice([*self.expected])
            self.now += timedelta(seconds=self.chance.choice([1, 1, 60, 3600, 5 * 86400]))
            if self.ids(stream) or action == "steps":
                getattr(self, action)(stream)
                self.counts[action] += 1
                self.check()
        self.end()

    def ids(self, stream: str) -> list[int]:
        return [c.id for c in self.place.catalog.checkpoints.list(stream)]

    # Actions

    def run_of(self, stream: str) -> RegionRun:
        if stream not in self.runs:
            grows, grown = self.chance.random() < 0.6, self.is_grown(stream)
            if grows is not grown:
                self.counts["definition grew" if grows else "definition shrank"] += 1
            self.runs[stream] = run = RegionRun(
                self.place,
                replace(GROWN if grows else STREAM, name=stream),
                self.policy,
                parallelism=self.chance.choice([1, 2, 3]),
                checkpoint_steps=self.chance.choice([1, 2, 3]),
                max_pending=self.chance.choice([0, 2]),
                postpones_bases=self.chance.random() < 0.5,
                log_steps=self.chance.random() < 0.6,
                drop=DROPPED if grown and not grows else (),
            )
            if run.region.logged_steps():
                run.follow(rows_of)
                run.complete_pending()
                self.note(stream)
                self.counts["followed"] += 1
        return self.runs[stream]

    def steps(self, stream: str, changed: int | None = None) -> None:
        run, chance = self.run_of(stream), self.chance
        for _ in range(chance.randint(1, 3)):
            self._number += 1
            bits = chance.choice([1, 1, 1, 3, 3, 5, 8, 9, 15]) if changed is None else changed
            keys = range(30) if changed or chance.random() < 0.1 else chance.sample(range(30), chance.choice([1, 2, 5]))
            offsets = json.dumps({"keys": list(keys), "n": self._number, "changed": bits})
            run.step(rows_of(offsets), ends=True if changed else None, offsets=offsets)
            if run.region.has_steps and chance.random() < 0.6:
                run.step_without_rows()
                self.counts["steps without input"] += 1
            if chance.random() < 0.6:
                run.complete_pending()
        if chance.random() < 0.7:
            run.complete_pending()
        self.note(stream)

    def change(self, stream: str) -> None:
        """Edit a table of one operator, or rescale, as another process does: a run in progress is fenced."""
        self.restart(stream)
        run = self.run_of(stream)
        if self.chance.random() < 0.7:
            self._number += 1
            keys = self.chance.sample(range(40), 3)
            changes = pa.table({"k": keys, "n": [self._number] * 3, DELETED: [True, False, False]})
            what = self.chance.choice(["several", "beside"]), self.chance.choice(TABLES), changes
            self.edits[stream, run.edit(*what).id] = what
        else:
            run.step_without_rows(StepKind.CHANGE)
        self.restart(stream)

    def is_grown(self, stream: str) -> bool:
        """Whether the newest checkpoint has what only the grown definition has."""
        known = {record.name: record.definition for record in self.place.catalog.streams.list()}
        return bool(self.ids(stream)) and "combined" in known[stream]["operators"] if stream in known else False

    def note(self, stream: str) -> None:
        """Remember new checkpoints, as the run that made them knew them; compare each with its input log."""
        models = self.models[stream]
        for record in self.place.catalog.checkpoints.list(stream):
            self.expected[stream].setdefault(record.id, record.digest)
            if record.id not in models:
                models[record.id] = self.computed(stream, record.id)
                self.compare(stream, record.id)

    def computed(self, stream: str, id: int) -> Model:
        """What a checkpoint is: what the one before it was, and the steps of the log; the last of them drains."""
        operators = self.place.catalog.definitions.get(stream, id)["operators"]
        before = self.models[stream][id - 1]
        model = {
            operator: {name: deepcopy(before.get(operator, {}).get(name, {})) for name in of["variables"]}
            for operator, of in operators.items()
        }
        steps = self.place.catalog.input_log.list(stream, id, after=id - 1)
        for step, ends in with_ends(steps):
            advance(model, step.offsets, ends and step.kind is not StepKind.CHANGE)
        if edit := self.edits.get((stream, id)):
            operator, variable, changes = edit
            for row in changes.to_pylist():
                if row[DELETED]:
                    model[operator][variable].pop(row["k"], None)
                else:
                    model[operator][variable][row["k"]] = {"n": row["n"]}
        return model

    def compare(self, stream: str, id: int) -> None:
        """A checkpoint restores, alone, to what its input log makes of it."""
        manifests = self.place.catalog.chains.list_manifests(stream, id)
        found = restored_rows(self.place.warehouse.store, manifests, id, stream)
        for operator, variables in self.models[stream][id].items():
            for name in variables.keys() - {CALLS, PREPARED}:
                rows = found[operator][name]
                assert rows == variables[name], f"checkpoint {id} of {stream}: {operator}.{name}"

    def forget(self, stream: str, after: int) -> None:
        """Forget the checkpoints that were given up."""
        for id in [id for id in self.models[stream] if id > after]:
            del self.models[stream][id]
            self.expected[stream].pop(id, None)
            self.edits.pop((stream, id), None)

    def stop(self, stream: str) -> None:
        self.runs.pop(stream, None)

    def restart(self, stream: str) -> None:
        if run := self.runs.get(stream):
            run.complete_pending()
            self.note(stream)
            run.region.close("done")
        self.stop(stream)

    def crash(self, stream: str) -> None:
        self.stop(stream)

    def materialize(self, stream: str, at: int | None = None) -> None:
        checkpoint = at or self.chance.choice([*self.ids(stream), self.ids(stream)[-1]])
        self._number += 1
        operator = self.chance.choice([*self.place.catalog.definitions.get(stream, checkpoint)["operators"]])
        try:
            materialize(self.place, stream, operator, checkpoint, id=f"m{self._number}", parallelism=2, run=in_order)
            self.counts["materialized"] += 1
        except HeldWhole:
            self.counts["held whole"] += 1

    def again(self, stream: str) -> None:
        done = [m.checkpoint for m in self.place.catalog.materializations.list(stream) if m.manifest]
        there = [at for at in done if at in self.ids(stream)]
        if there:
            self.materialize(stream, self.chance.choice(there))

    def truncate(self, stream: str) -> None:
        truncate(self.place, stream, RetentionOptions(keep_last=self.chance.choice([1, 2, 4])))

    def delete(self, stream: str) -> None:
        saved = {s.checkpoint for s in self.place.catalog.savepoints.list(stream)}
        some = [id for id in self.ids(stream)[:-1] if id not in saved]
        if some:
            delete_checkpoints(self.place, stream, self.chance.sample(some, min(len(some), 2)))

    def savepoint(self, stream: str) -> None:
        self._number += 1
        set_savepoint(self.place.catalog, stream, f"p{self._number}", at=str(self.chance.choice(self.ids(stream))))

    def drop(self, stream: str) -> None:
        for saved in self.place.catalog.savepoints.list(stream)[:1]:
            drop_savepoint(self.place.catalog, stream, saved.name)

    def fork(self, stream: str) -> None:
        if len(self.expected) < 3:
            new, at = f"f{len(self.expected)}", self.chance.choice(self.ids(stream))
            fork(self.place, stream, new, str(at))
            self.expected[new] = {at: self.expected[stream][at]}
            self.models[new] = {id: model for id, model in self.models[stream].items() if id <= at}

    def sweep(self, stream: str) -> None:
        guard = SweepOptions().age_guard if self.runs else timedelta(0)
        sweep(self.place, stream, SweepOptions(incomplete=self.chance.random() < 0.3, age_guard=guard))

    def rewind(self, stream: str) -> None:
        """Give up the newest checkpoints, whose steps the next run takes again."""
        self.stop(stream)
        epoch, last = take_over(self.place, stream, "a test"), self.chance.choice(self.ids(stream)[-3:])
        self.place.catalog.rollbacks.roll_back(stream, epoch, last, "the history says so", "a test")
        write_extract(self.place, stream)
        self.forget(stream, last)

    def damage(self, stream: str) -> None:
        """Lose an object of a materialization, and recover every stream."""
        newest = self.ids(stream)[-1]
        objects = [o.name for o in self.place.catalog.chains.list_objects(stream, newest) if materialization_of(o.name)]
        if not objects:
            return
        self.runs.clear()
        self.place.warehouse.store.delete([self.chance.choice(objects)])
        for each in self.expected:
            done = recover(self.place, each, run=in_order, accept_loss=True)
            self.counts["rebuilt"] += len(done.rebuilt)
            self.counts["given up"] += len(done.given_up)
            self.forget(each, done.checkpoint)
            for id in self.ids(each):
                if failures(self.place, each, [id]):
                    delete_checkpoints(self.place, each, [id])

    def rebuild(self, stream: str) -> None:
        """Lose the catalog; the store and what a new one says of it are compared with what was there."""
        copy = self.root / f"copy{self._number}"
        shutil.copytree(self.root / "w", copy)
        for file in copy.glob("catalog.db*"):
            file.unlink()
        warehouse = Warehouse.at(str(copy))
        rebuild_catalog(warehouse, warehouse.catalog_url)
        with OpenWarehouse.open_existing(str(copy)) as place:
            for each in self.expected:
                visible = self.ids(each)
                found = [c.id for c in place.catalog.checkpoints.list(each)]
                assert found == visible, (each, found, visible)
                for id in visible:
                    assert restored_digest(place, each, id) == self.expected[each][id]
        shutil.rmtree(copy)

    # What must hold

    def check(self) -> None:
        """Every visible checkpoint restores to what it held, with what the catalog says that it needs."""
        catalog = self.place.catalog
        stored = {name for name, _ in self.place.warehouse.store.list("")}
        for stream, expected in self.expected.items():
            visible = self.ids(stream)
            for id in visible:
                missing = {o.name for o in catalog.chains.list_objects(stream, id)} - stored
                assert not missing, f"checkpoint {id} of {stream} needs {missing}"
                assert restored_digest(self.place, stream, id, self.chance.choice([1, 3])) == expected[id]
            some = self.chance.choice([visible, visible[-1:], visible[:1]])
            assert not some or not failures(self.place, stream, some)

    def end(self) -> None:
        """All but the newest goes, and nothing else stays."""
        for stream in self.expected:
            self.stop(stream)
            if not self.ids(stream):
                continue
            self.steps(stream)
            self.restart(stream)
            for saved in self.place.catalog.savepoints.list(stream):
                drop_savepoint(self.place.catalog, stream, saved.name)
        self.now += timedelta(days=30)
        for operator in ("several", "beside"):
            for stream in (s for s in self.expected if self.ids(s)):
                newest, id = self.ids(stream)[-1], f"e{operator}"
                with suppress(HeldWhole):
                    materialize(self.place, stream, operator, newest, id=id, parallelism=1, run=in_order)
        for _ in range(2):
            for stream in (s for s in self.expected if self.ids(s)):
                self.steps(stream, 1)
                self.restart(stream)
                truncate(self.place, stream, RetentionOptions(keep_last=1))
            for stream in (s for s in self.expected if self.ids(s)):
                self.now += timedelta(days=30)
                sweep(self.place, stream, SweepOptions(age_guard=timedelta(0)))
        self.check()
        needed, named = set(), set()
        for stream in (s for s in self.expected if self.ids(s)):
            newest = self.ids(stream)[-1]
            record = self.place.catalog.objects.list(stream)
            named |= {o.name for o in record}
            needed |= {o.name for o in record if o.is_needed_by(newest) or o.checkpoint == newest}
        assert named == needed, sorted(named - needed)
        if all(self.ids(s) for s in self.expected):
            stored = {n for n, _ in self.place.warehouse.store.list("") if not n.startswith("_") and "/_" not in n}
            assert stored == named, sorted(stored ^ named)


def perform(seed: int, actions: int) -> Counter[str]:
    """Do one history from beginning to end; what happened in it, counted."""
    with tempfile.TemporaryDirectory() as directory:
        history = History(seed, Path(directory))
        try:
            history.perform(actions)
        finally:
            history.place.catalog.close()
        return history.counts


def main() -> None:
    """Do many histories, as far as there is time; stop at the first that breaks a promise."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--actions", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    start = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.histories):
        if time.monotonic() - start > arguments.seconds:
            break
        try:
            total.update(perform(seed, arguments.actions))
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
        total["histories"] += 1
    for what, count in sorted(total.items()):
        print(f"{what}: {count}")


if __name__ == "__main__":
    main()
