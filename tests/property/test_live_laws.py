"""Laws of what a restore needs, over any history of checkpoints, materializations, deletions, rollbacks and forks.

Each variable has a chain of its own in each key group; a checkpoint may leave any of them as it is, write a delta per
step, or begin anew; of an opaque variable a delta has the values of some key groups. A table may also be in files, each
written now or by an earlier checkpoint, of which tables of one operator may share some. The catalog records the
intervals that a run's references give, which may have followed all, or have begun in the middle. A brute force that
follows each key group by itself says what is really needed.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.repository import Catalog
from siltstone.chains.materialize import find_consolidated, find_replaced
from siltstone.errors import StateError
from siltstone.format.manifest import Manifest
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.restore.live_rules import LiveHandles, replaces, writer_of
from siltstone.restore.plan_rules import plan_restore
from siltstone.retention.deletion_rules import plan_deletion
from siltstone.run.manifests import RunManifests
from siltstone.run.references import RunReferences
from siltstone.store.base import Store
from siltstone.store.paths import CheckpointPath, is_row_file
from tests.examples import few_examples
from tests.memory_rebuild import rebuild_from_memory
from tests.stored import bare_statistics

GROUPS = 8
VARIABLES = {
    ("a", "x"): Kind.INCREMENTAL,
    ("a", "z"): Kind.INCREMENTAL,
    ("a", "note"): Kind.OPAQUE,
    ("b", "y"): Kind.INCREMENTAL,
}
TABLE = {"key": [["k", "int64"]], "subkey": [], "value": []}
STREAM = "s"
PARTS = st.sampled_from([1, 2, 3])


@cache
def empty_catalog() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "catalog.db"
        open_catalog(f"sqlite:///{path}").close()
        return path.read_bytes()


@contextmanager
def new_catalog() -> Iterator[Catalog]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "catalog.db"
        path.write_bytes(empty_catalog())
        with open_catalog(f"sqlite:///{path}") as catalog:
            yield catalog


def manifest_of(epoch, checkpoint, handles, materialization="") -> Manifest:
    operators = {handle.operator for handle in handles} if materialization else {"a", "b"}
    digests = {o: {v: np.zeros(GROUPS, np.uint64) for of, v in VARIABLES if of == o} for o in operators}
    own = CheckpointPath(STREAM, epoch, checkpoint).prefix
    names = {handle.object for handle in handles if handle.object.startswith(own)}
    objects = [StoredObject(name, 1, "xxh3-128:" + "0" * 32) for name in sorted(names)]
    of = {operator: {"variables": {}} for operator in operators}
    for (operator, name), kind in VARIABLES.items():
        if operator in of:
            of[operator]["variables"][name] = {"tables": {name: TABLE} if kind is Kind.INCREMENTAL else {}}
    return Manifest(
        STREAM,
        checkpoint,
        epoch,
        checkpoint,
        GROUPS,
        of,
        handles,
        objects,
        digests,
        dict.fromkeys(operators, Form.DELTA),
        statistics=bare_statistics(*operators),
        materialization=materialization,
    )


class References(RunReferences):
    """A run's references, which finds manifests in memory."""

    def __init__(self, catalog: Catalog, manifests: Mapping[str, Manifest]) -> None:
        super().__init__(STREAM, catalog, RunManifests(STREAM, cast(Store, None)))
        self._in_memory = manifests

    def _read(self, stored: StoredObject) -> Manifest | None:
        return self._in_memory[stored.name]


@dataclass
class History:
    """What a stream has written, as its run and its materializer know it, and the catalog that records it."""

    catalog: Catalog
    epoch: int = 1
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """name -> manifest of every checkpoint and materialization that was not given up, in order"""
    newest: int = 0
    materialized: int = 0
    last: dict[tuple[str, str], list[int]] = field(default_factory=lambda: {v: [0] * GROUPS for v in VARIABLES})
    """variable -> per key group, the checkpoint that wrote it last"""

    def __post_init__(self) -> None:
        self.references = References(self.catalog, self.manifests)

    def path(self) -> CheckpointPath:
        return CheckpointPath(STREAM, self.epoch, self.newest)

    def commit(self, draw, *, begins: bool = False, changes: bool = False) -> None:
        """Commit a checkpoint; with `begins` it has a base, and with `changes` it has deltas only."""
        shared = {operator: self._open_files(operator) for operator, _ in VARIABLES}
        self.newest += 1
        handles = []
        for variable, kind in VARIABLES.items():
            for part in KeyGroupRange(0, GROUPS).split(GROUPS if changes else draw(PARTS)):
                groups, previous = range(part.start, part.end), {self.last[variable][g] for g in range(*_ends(part))}
                begun = 0 not in previous and len(previous) == 1
                forms = ["base"] if kind is Kind.OPAQUE else ["base", "files"]
                forms = ["none", "delta", "two deltas"] if changes else forms + ["none", "delta", "two deltas"] * begun
                form = "base" if begins and kind is Kind.OPAQUE else draw(st.sampled_from(forms))
                label = f"{'-'.join(variable)}-{part.start}" if draw(st.booleans()) else "packed"
                name = self.path().segment(label)
                if form == "base":
                    handles.append(self._handle(variable, kind, Form.BASE, name, part, 0, 0))
                if form == "files":
                    again = shared[variable[0]]
                    new = self.path().row_file(variable[0], 0, label, 0)
                    files = {new, *(draw(st.sets(st.sampled_from(again))) if again else ())}
                    handles += [self._handle(variable, kind, Form.FILES, file, part, 0, 1) for file in sorted(files)]
                for sqn in {"delta": (1,), "two deltas": (1, 2)}.get(form, ()):
                    handles.append(self._handle(variable, kind, Form.DELTA, name, part, max(previous), sqn))
                if form != "none":
                    for group in groups:
                        self.last[variable][group] = self.newest
        self.commit_handles(handles)

    def commit_files(self, files) -> None:
        """Commit a checkpoint that refers to files, which all tables share."""
        self.newest += 1
        whole, packed = KeyGroupRange(0, GROUPS), self.path().segment("packed")
        tables = [variable for variable, kind in VARIABLES.items() if kind is Kind.INCREMENTAL]
        self.commit_handles(
            [self._handle(v, Kind.INCREMENTAL, Form.FILES, file, whole, 0, 1) for v in tables for file in files]
            + [self._handle(("a", "note"), Kind.OPAQUE, Form.BASE, packed, whole, 0, 1)]
        )

    def commit_handles(self, handles) -> None:
        manifest, name = manifest_of(self.epoch, self.newest, handles), self.path().manifest()
        oldest_needed, replaced = self.references.advance(manifest, name)
        stored, objects = StoredObject(name, 1, "xxh3-128:" + "0" * 32), manifest.objects
        commit = CheckpointCommit(
            self.newest, stored, "0" * 32, 0, 0, {"a": Form.DELTA, "b": Form.DELTA}, segments=objects,
            oldest_needed=oldest_needed, replaced=replaced,
        )  # fmt: skip
        committed = self.catalog.commits.add(STREAM, self.epoch, commit)
        self.manifests[name] = manifest
        self.references.follow(committed.manifests)

    def _open_files(self, operator) -> list[str]:
        """The files of an operator that the newest checkpoint needs: those that the next one may refer to."""
        handles = [h for m in self.manifests.values() for h in m.handles if h.form is Form.FILES]
        mine = {h.object for h in handles if h.operator == operator}
        if not mine:
            return []
        return sorted(mine & {stored.name for stored in self.catalog.chains.list_objects(STREAM, self.newest)})

    def _handle(self, variable, kind, form, name, part, previous, sqn) -> Handle:
        return Handle(*variable, kind, form, name, 0, 1, "xxh3-128:" + "0" * 32, part, 1, previous, sqn)

    def chain(self, checkpoint) -> list[tuple[str, Manifest]]:
        """Name and manifest of all that the catalog says a restore of the checkpoint reads."""
        names = [stored.name for stored in self.catalog.chains.list_manifests(STREAM, checkpoint)]
        return sorted(((name, self.manifests[name]) for name in names), key=lambda each: each[1].checkpoint)

    def materialize(self, checkpoint, operator, followed: bool, whole: bool = False) -> None:
        """Let the chain of one operator begin at a checkpoint; the run may notice it only later.

        It has the variables that a materialization of the product consolidates; all, with `whole`, as of one that was
        damaged.
        """
        path = CheckpointPath(STREAM, self.epoch, checkpoint)
        kinds = {variable: kind for variable, kind in VARIABLES.items() if variable[0] == operator}
        manifests = {at: manifest.handles for at, manifest in merged(self.chain(checkpoint))}
        units = plan_restore(manifests, checkpoint, GROUPS, 1, variables=kinds).units
        variables = kinds if whole else find_consolidated(units, kinds, path)
        self.materialized += 1
        id = f"m{self.materialized}"
        chain = self.chain(checkpoint)
        handles = [
            self._handle(v, VARIABLES[v], Form.BASE, path.materialized_base(*v, n, id), part, 0, 0)
            for v in variables
            for n, part in enumerate(KeyGroupRange(0, GROUPS).split(2))
        ]  # fmt: skip
        manifest, name = manifest_of(self.epoch, checkpoint, handles, id), path.materialization(operator, id)
        open_ = {stored.name for stored in self.catalog.chains.list_objects(STREAM, checkpoint)}
        replaced, needed = find_replaced(manifest, name, chain)
        self.catalog.leases.take(STREAM, [checkpoint], id=id, who="t", lasts=timedelta(hours=1))
        self.catalog.materializations.begin(STREAM, operator, checkpoint, id=id, who="t")
        self.catalog.materializations.complete(
            STREAM, id, StoredObject(name, 1, "xxh3-128:" + "0" * 32), manifest.objects, replaced, open_ - needed,
            rows_=0, bytes_=0, seconds=0.0,
        )  # fmt: skip
        self.catalog.leases.release(id)
        self.manifests[name] = manifest
        if followed:
            self.references.follow(self.catalog.chains.list_manifests(STREAM, self.newest))

    def roll_back(self, checkpoint) -> None:
        self.epoch = self.catalog.runs.begin(STREAM, "t")
        self.catalog.rollbacks.roll_back(STREAM, self.epoch, checkpoint, "a test", "t")
        for name in [name for name, manifest in self.manifests.items() if manifest.checkpoint > checkpoint]:
            del self.manifests[name]
        self.newest = checkpoint
        self.reopen()

    def reopen(self) -> None:
        """Begin as a new run does, from what the catalog says the newest checkpoint needs."""
        self.references = References(self.catalog, self.manifests)
        [name] = [n for n, m in self.manifests.items() if m.checkpoint == self.newest and not m.materialization]
        self.references.resume(self.manifests[name], name)
        self.last = {v: [0] * GROUPS for v in VARIABLES}
        for manifest in self.manifests.values():
            for handle in manifest.handles if not manifest.materialization else ():
                for group in range(*_ends(handle.key_groups)):
                    self.last[handle.operator, handle.variable][group] = manifest.checkpoint


def _ends(part) -> tuple[int, int]:
    return part.start, part.end


def really_needed(history, checkpoint) -> set[str]:
    """The objects that a restore of a checkpoint cannot do without, each key group of each variable by itself.

    It begins with the newest base or materialization that it can, and reads what was written after that.
    """
    found = set()
    written = sorted(
        ((m.checkpoint, bool(m.materialization), n, name) for n, (name, m) in enumerate(history.manifests.items())),
        reverse=True,
    )
    for variable in VARIABLES:
        for group in range(GROUPS):
            for at, _, _, name in written:
                if at > checkpoint:
                    continue
                manifest = history.manifests[name]
                mine = [
                    handle
                    for handle in manifest.handles
                    if (handle.operator, handle.variable) == variable and group in handle.key_groups
                ]
                found |= {handle.object for handle in mine} | ({name} if mine else set())
                found |= {path.manifest() for handle in mine if (path := writer_of(handle))}
                if any(map(replaces, mine)):
                    break
    return found


def check(history, since=1) -> None:
    """Nothing needed may go, everything else may: at least once the run has noticed what was materialized."""
    recorded = {stored.name: stored for stored in history.catalog.objects.list(STREAM)}
    for id in range(max(1, since), history.newest + 1):
        needed = really_needed(history, id)
        says = {name for name, stored in recorded.items() if stored.is_needed_by(id)}
        assert needed <= says, f"checkpoint {id} needs {needed - says}"
        plan_restore(
            {m.checkpoint: m.handles for _, m in merged(history.chain(id))}, id, GROUPS, 2, variables=VARIABLES
        )


@contextmanager
def new_history() -> Iterator[History]:
    """One that has nothing yet, in a catalog of its own."""
    with new_catalog() as catalog:
        catalog.streams.register(STREAM, GROUPS, {})
        yield History(catalog, catalog.runs.begin(STREAM, "t"))


def merged(chain):
    """By checkpoint, with materializations in place of what they replaced."""
    out: dict[int, Manifest] = {}
    for _, manifest in chain:
        at = manifest.checkpoint
        out[at] = out[at].with_bases(manifest) if manifest.materialization and at in out else manifest
    return [(at, manifest) for at, manifest in sorted(out.items())]


def check_rebuilt(history) -> None:
    """A rebuilt catalog has what each checkpoint needs."""
    with new_catalog() as catalog:
        rebuild_from_memory(history.catalog, STREAM, history.manifests, catalog)
        kept = [each.id for each in history.catalog.checkpoints.list_retained(STREAM) if not each.deleted]
        check(replace(history, catalog=catalog), since=min(kept))


@settings(max_examples=few_examples(100))
@given(st.data())
def test_nothing_needed_may_ever_go_and_everything_else_does(data) -> None:
    with new_history() as history:
        history.commit(data.draw)
        for _ in range(data.draw(st.integers(1, 12))):
            match data.draw(
                st.sampled_from(["commit", "commit", "commit", "materialize", "late", "roll back", "reopen"])
            ):
                case "commit":
                    history.commit(data.draw)
                case "materialize" | "late" as when:
                    at, operator = data.draw(st.integers(1, history.newest)), data.draw(st.sampled_from(["a", "b"]))
                    history.materialize(at, operator, when == "materialize", whole=data.draw(st.booleans()))
                case "roll back":
                    history.roll_back(data.draw(st.integers(1, history.newest)))
                case "reopen":
                    history.reopen()
            check(history)
        history.reopen()
        history.commit(data.draw, changes=True)
        check(history)
        kept = {o.name for o in history.catalog.chains.list_objects(STREAM, history.newest) if is_row_file(o.name)}
        assert kept <= really_needed(history, history.newest), "a new run keeps no file that nothing needs"
        history.reopen()
        history.commit(data.draw, begins=True)
        check(history)
        newest = history.manifests[history.path().manifest()]
        own = {history.path().manifest(), *(stored.name for stored in newest.objects)}
        tight = really_needed(history, history.newest) | own
        says = {stored.name for stored in history.catalog.chains.list_objects(STREAM, history.newest)}
        assert says == tight, "once the run has noticed everything, what the newest needs is exact"
        assert {s.kind for s in history.catalog.objects.list(STREAM)} <= set(ObjectKind)
        check_rebuilt(history)


@settings(max_examples=few_examples(100))
@given(st.data())
def test_a_materialization_that_comes_late_leads_to_the_same_chains(data) -> None:
    """A run follows materializations as they come, and a new one begins with what is there, by checkpoint."""
    with new_history() as history:
        history.commit(data.draw)
        for what in data.draw(st.lists(st.sampled_from(["commit", "commit", "late"]), max_size=9)):
            if what == "commit":
                history.commit(data.draw)
            else:
                at, operator = data.draw(st.integers(1, history.newest)), data.draw(st.sampled_from(["a", "b"]))
                history.materialize(at, operator, followed=False, whole=data.draw(st.booleans()))
        came, ordered = LiveHandles(), LiveHandles()
        for name, manifest in history.manifests.items():
            came.apply(manifest, name)
        for name, manifest in sorted(history.manifests.items(), key=lambda each: each[1].checkpoint):
            ordered.apply(manifest, name)
        assert came.needed == ordered.needed and came.complete_from == ordered.complete_from
        assert chains_of(came) == chains_of(ordered)


def chains_of(live) -> dict[tuple[tuple[str, str], int], list[tuple[int, Handle]]]:
    """Variable and key group -> what a restore reads, which is live, and nothing else."""
    found = {
        (variable, group): [(each.checkpoint, each.handle) for each in chain.links]
        for variable in VARIABLES
        for part, chain in live.chains(variable, KeyGroupRange(0, GROUPS))
        for group in range(*_ends(part))
    }
    assert {(each.checkpoint, each.handle) for each in live.handles} == {e for chain in found.values() for e in chain}
    return found


def test_two_latest_retained() -> None:
    """Flink's example of incremental checkpoints, two of which are retained: a file goes with the last that needs it.

    Before checkpoint 3 files 1 to 3 are compacted into one, and before checkpoint 4 files 4 to 6.
    """
    written = {1: ["1", "2"], 2: ["3", "4"], 3: ["123", "5"], 4: ["456"]}
    refers = {1: ["1", "2"], 2: ["1", "2", "3", "4"], 3: ["123", "4", "5"], 4: ["123", "456"]}
    left = {
        1: {"1", "2"},
        2: {"1", "2", "3", "4"},
        3: {"1", "2", "3", "4", "123", "5"},
        4: {"4", "123", "5", "456"},
    }
    path = {file: CheckpointPath(STREAM, 1, id).segment(file) for id, files in written.items() for file in files}
    with new_history() as history:
        catalog = history.catalog
        for id, files in refers.items():
            history.commit_files([path[file] for file in files])
            check(history, since=id - 1)
            delete_except(catalog, id, 2)
            there = {stored.name for stored in catalog.objects.list(STREAM)}
            assert {file for file in path if path[file] in there} == left[id]
            check(history, since=id - 1)
            check_rebuilt(history)
        with pytest.raises(StateError, match=r"refers to .*/1\.segment, which may be deleted already"):
            history.commit_files([path["1"], path["456"]])


def delete_except(catalog: Catalog, newest: int, count: int) -> None:
    """Delete all checkpoints but the newest `count`, as a truncation does."""
    marked = range(1, max(1, newest - count + 1))
    catalog.deletions.mark(STREAM, 1, {each.id for each in catalog.checkpoints.list_retained(STREAM)} & {*marked})
    plan = plan_deletion(catalog.objects.list(STREAM, marked), range(max(1, newest - count + 1), newest + 1), marked)
    catalog.deletions.forget(STREAM, 1, plan.goes, [stored.name for stored in plan.objects])
