"""Laws of the plan of a proof: each checkpoint is judged as by a restore of it, whatever is proven with it.

The histories are those of `test_live_laws`. Then the catalog is made to say of some objects that fewer checkpoints need
them, and manifests lose what they have of some variables.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from siltstone.catalog.database import tables as t
from siltstone.catalog.records.chains import Chain
from siltstone.errors import StateError
from siltstone.model import Form, Handle, KeyGroupRange, StoredObject
from siltstone.restore.live_rules import replaces, writer_of
from siltstone.restore.plan_rules import Read, VerifyChain, plan_restore
from siltstone.restore.proof import plan_chains
from siltstone.store.paths import CheckpointPath
from tests.examples import few_examples
from tests.property.test_live_laws import GROUPS, STREAM, VARIABLES, History, manifest_of, merged, new_history

Reads = dict[tuple[str, str, int], set[tuple[int, Handle]]]
"""operator, variable and key group -> what is read for it, and of which checkpoint"""


def reads_alone(history: History, checkpoint: int) -> Reads | None:
    """What a restore of a checkpoint alone reads; None if the catalog does not list all of it."""
    listed = {stored.name for stored in history.catalog.chains.list_objects(STREAM, checkpoint)}
    chain = history.chain(checkpoint)
    if checkpoint not in {m.checkpoint for _, m in chain if not m.materialization}:
        return None
    try:
        manifests = {at: manifest.handles for at, manifest in merged(chain)}
        plan = plan_restore(manifests, checkpoint, GROUPS, 1, variables=VARIABLES)
    except StateError:
        return None
    reads = [read for unit in plan.units for read in unit.reads]
    writers = {path.manifest() for read in reads if (path := writer_of(read.handle))}
    return of_groups(reads) if {read.handle.object for read in reads} | writers <= listed else None


def of_groups(reads: Iterable[Read]) -> Reads:
    found: Reads = {}
    for read in reads:
        for group in (group for part in read.key_groups for group in range(part.start, part.end)):
            of = read.handle.operator, read.handle.variable, group
            found.setdefault(of, set()).add((read.checkpoint, read.handle))
    return found


def reads_of_walks(chains: Iterable[VerifyChain]) -> dict[int, Reads]:
    """Checkpoint -> what the walks that prove it have applied to each key group since its newest base.

    Just this is live then, of which a proof counts the bytes.
    """
    found: dict[int, Reads] = {}
    for chain in chains:
        state: dict[tuple[str, str, int], dict[tuple[int, Handle], None]] = {}
        live: set[Handle] = set()
        for step in chain.steps:
            for handle in step.handles:
                for group in range(handle.key_groups.start, handle.key_groups.end):
                    applied = state.setdefault((handle.operator, handle.variable, group), {})
                    last = next(reversed(applied), None)
                    files = last and last[0] == step.checkpoint and last[1].form is handle.form is Form.FILES
                    if replaces(handle) and not files:
                        applied.clear()
                    applied[step.checkpoint, handle] = None
            live |= {*step.handles}
            if step.proves:
                found.setdefault(step.checkpoint, {}).update({of: {*applied} for of, applied in state.items()})
                assert live == {handle for applied in state.values() for _, handle in applied}
            live -= {*step.ends}
        assert not live
    return found


def draw_history(draw: Any, history: History) -> None:
    history.commit(draw)
    for what in draw(st.lists(st.sampled_from(["commit", "commit", "commit", "materialize", "late"]), max_size=9)):
        if what == "commit":
            history.commit(draw)
        else:
            at, operator = draw(st.integers(1, history.newest)), draw(st.sampled_from(["a", "b"]))
            history.materialize(at, operator, what == "materialize", whole=draw(st.booleans()))


def shorten(draw: Any, history: History) -> None:
    """Make the catalog say of one object that no checkpoint after some one needs it."""
    stored = draw(st.sampled_from(history.catalog.objects.list(STREAM)))
    until = draw(st.integers(stored.checkpoint - 1, history.newest))
    o = t.object_.c
    with history.catalog.transactions.begin_write("a wrong interval") as connection:
        connection.execute(update(t.object_).where(o.name == stored.name, o.until > until).values(until=until))


def forget(draw: Any, history: History) -> None:
    """Take all handles of a variable, or of an operator, out of one manifest or of all."""
    operator, variable = draw(st.sampled_from([*VARIABLES, ("b", None)]))
    some = draw(st.sampled_from([[*history.manifests], *([name] for name in history.manifests)]))
    for name in some:
        manifest = history.manifests[name]
        kept = [h for h in manifest.handles if h.operator != operator or variable not in (None, h.variable)]
        history.manifests[name] = replace(manifest, handles=kept)


@settings(max_examples=few_examples(200))
@given(st.data())
def test_each_checkpoint_is_judged_as_a_restore_of_it_alone_would_be(data) -> None:
    with new_history() as history:
        draw_history(data.draw, history)
        for _ in range(data.draw(st.integers(0, 3))):
            shorten(data.draw, history)
        for _ in range(data.draw(st.integers(0, 1))):
            forget(data.draw, history)
        wanted = data.draw(st.sets(st.integers(1, history.newest), min_size=1))
        alone = {c: reads_alone(history, c) for c in sorted(wanted)}
        plan = plan_chains(history.catalog.chains.list_many(STREAM, sorted(wanted)), history.manifests)
        assert [f.checkpoint for f in plan.failures] == [c for c, reads in alone.items() if reads is None]
        proven = {c: reads for c, reads in alone.items() if reads is not None}
        assert reads_of_walks(task.chain for task in plan.tasks) == proven


@settings(max_examples=few_examples(100))
@given(st.data())
def test_where_the_catalog_is_right_nothing_is_read_twice(data) -> None:
    with new_history() as history:
        draw_history(data.draw, history)
        plan = plan_chains(history.catalog.chains.list_many(STREAM, range(1, history.newest + 1)), history.manifests)
        read = [(s.checkpoint, h) for task in plan.tasks for s in task.chain.steps for h in s.handles]
        assert not plan.failures and len(read) == len(set(read))


@pytest.mark.parametrize("first", [GROUPS // 2, 2 * GROUPS])
def test_manifests_of_other_key_groups_prove_nothing(first) -> None:
    """The key groups that only one of them has would be in no walk, so that nobody compares their digests."""
    name = [CheckpointPath(STREAM, 1, checkpoint).manifest() for checkpoint in (1, 2)]

    def handles(checkpoint: int, form: Form, part: KeyGroupRange) -> list[Handle]:
        path = CheckpointPath(STREAM, 1, checkpoint).segment("packed")
        previous = checkpoint - 1
        return [Handle(*v, kind, form, path, 0, 1, "", part, 1, previous, 1) for v, kind in VARIABLES.items()]

    base = manifest_of(1, 1, handles(1, Form.BASE, KeyGroupRange(0, first)))
    delta = manifest_of(1, 2, handles(2, Form.DELTA, KeyGroupRange(0, GROUPS)))
    read = {name[0]: replace(base, max_parallelism=first), name[1]: delta}
    objects = frozenset([*name, *(stored.name for manifest in read.values() for stored in manifest.objects)])
    plan = plan_chains({2: Chain([StoredObject(each, 1, "") for each in name], objects)}, read)
    assert [failure.checkpoint for failure in plan.failures] == [2] and not plan.tasks
