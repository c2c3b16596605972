"""Describe a checkpoint that is made of bases only by one manifest, as if it were the first of its stream.

`siltstone savepoint --full` makes such checkpoints: the chain of every table ends in a base there. What a restore of it
reads may have been written by several checkpoints and materializations. One manifest names all of it, under checkpoint
1 of epoch 1, and needs no other. Whatever a stream does with its first checkpoint then works on it: runs, restores,
proofs, sweeps, and rebuilding the catalog.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from siltstone.catalog.records.commit_details import CommitDetails, encode_details
from siltstone.chains.chain_rules import rebase, restore_s, stored_bytes
from siltstone.chains.costs import table_statistics
from siltstone.chains.policy_rules import CheckpointCost, PolicyState, RestoreBound
from siltstone.errors import StateError, UsageError
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import variables_of
from siltstone.model import Form, Handle, Kind, StoredObject
from siltstone.restore.live_rules import LiveHandles, replaces
from siltstone.store.paths import CheckpointPath, add_writer

FIRST = 1
"""the checkpoint that it becomes"""


def stand_alone(
    chain: Sequence[tuple[str, Manifest]], details: CommitDetails
) -> tuple[Manifest, Mapping[str, StoredObject]]:
    """Return one manifest with all that a restore of a checkpoint reads, as checkpoint 1 of epoch 1.

    Args:
        chain: name and manifest of what a restore reads (`Chains.list_manifests`); the checkpoint's own is the newest.
        details: what its commit adds to a catalog.

    Returns:
        The manifest, and name in it -> the stored object.

    Raises:
        UsageError: the checkpoint still reads deltas.
        StateError: the chain has a gap.
    """
    live = LiveHandles()
    for name, manifest in sorted(chain, key=lambda each: each[1].checkpoint):
        live.apply(manifest, name)
    newest = max((m for _, m in chain if not m.materialization), key=lambda m: m.checkpoint)
    handles = list(dict.fromkeys(each.handle for each in live.handles))
    if open_ := sorted({h.operator for h in handles if not replaces(h)}):
        raise UsageError(
            f"checkpoint {newest.checkpoint} of {newest.stream} still reads deltas of {', '.join(open_)}: make it "
            f"whole with `siltstone materialize {newest.stream} --at {newest.checkpoint}`, and try again"
        )
    if in_files := sorted({h.operator for h in handles if h.form is Form.FILES}):
        # RocksDB would decode files of an export, which nobody vouches for, where it is imported.
        raise UsageError(
            f"checkpoint {newest.checkpoint} of {newest.stream} has {', '.join(in_files)} as files of RocksDB: make it "
            f"bases with `siltstone materialize {newest.stream} --at {newest.checkpoint}`, and try again"
        )
    stored = {each.name: each for _, manifest in chain for each in manifest.objects}
    chains = {operator: _chains(newest, operator, handles) for operator in newest.operators}
    path = CheckpointPath(newest.stream, 1, FIRST)
    alone = replace(
        newest,
        handles=handles,
        objects=[stored[name] for name in dict.fromkeys(h.object for h in handles)],
        forms=dict.fromkeys(newest.operators, Form.BASE),
        chains={op: {table: {**s.to_json(), "first": FIRST} for table, s in of.items()} for op, of in chains.items()},
        statistics=_statistics(newest.statistics, chains),
        versions={op: {name: [(0, FIRST)] for _, name in variables_of(newest, op)} for op in newest.operators},
        commit=encode_details(details),
    )
    moved = move(alone, path)
    return moved, {new.name: old for new, old in zip(moved.objects, alone.objects, strict=True)}


def move(manifest: Manifest, path: CheckpointPath) -> Manifest:
    """Return a manifest whose objects have their names under another stream, epoch and checkpoint.

    Objects of several checkpoints whose names would be the same have in it which checkpoint wrote them.

    Raises:
        StateError, UsageError: two of its objects would have the same name nevertheless.
    """
    files = {each.name: each.name.rpartition("/")[2] for each in manifest.objects}
    shared = {file for file, count in Counter(files.values()).items() if count > 1}
    writers = {name: CheckpointPath.of(name) for name, file in files.items() if file in shared}
    files |= {name: add_writer(files[name], writer) for name, writer in writers.items() if writer}
    names = {name: path.prefix + file for name, file in files.items()}
    if len(set(names.values())) < len(names):
        raise StateError(
            f"two objects of {manifest.stream} would share a name in {path.prefix}", advice="materialize it again"
        )
    return replace(
        manifest,
        stream=path.stream,
        epoch=path.epoch,
        checkpoint=path.checkpoint,
        handles=[replace(handle, object=names[handle.object]) for handle in manifest.handles],
        objects=[replace(each, name=names[each.name]) for each in manifest.objects],
    )


def _chains(manifest: Manifest, operator: str, handles: Sequence[Handle]) -> dict[str, PolicyState]:
    """Return table -> the state of its policy, once its chain is only a base."""
    found = {}
    for table, of in manifest.chains.get(operator, {}).items():
        own = [h for h in handles if (h.operator, h.variable) == (operator, table) and h.kind is not Kind.INDEX]
        base = CheckpointCost(
            form=Form.BASE, bytes=sum(h.length for h in own), seconds=0.0, rows=sum(h.rows for h in own)
        )
        found[table] = rebase(PolicyState.from_json(of), base, [])
    return found


def _statistics(statistics: Mapping[str, Any], chains: Mapping[str, Mapping[str, PolicyState]]) -> dict[str, Any]:
    """Return a checkpoint's statistics with these chains."""
    operators = {}
    for operator, said in statistics.get("operators", {}).items():
        tables = {
            table: table_statistics(
                None, FIRST, state, said.get("tables", {}).get(table, {}).get("D", 0), _bound(state)
            )
            for table, state in chains.get(operator, {}).items()
        }
        operators[operator] = {**said, "tables": tables}
    # What it had for sinks stays behind: they have it, under another id.
    return {**statistics, "operators": operators, "outputs": None}


def _bound(state: PolicyState) -> RestoreBound:
    return RestoreBound(bytes=stored_bytes(state), seconds=restore_s(state))
