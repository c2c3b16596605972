"""Decide what a restore of a checkpoint needs: the one place that answers this, per variable and key group.

`LiveHandles` follows the manifests of a stream in order. Per variable and range of key groups it keeps the chain: the
newest base, and the deltas after it. Each variable has a chain of its own, and a checkpoint that did not change it adds
nothing. A handle is live while a chain has it. An object is needed while a live handle lies in it, and a manifest while
it describes one: so each object is needed by consecutive checkpoints, from the one that wrote it to the one before it
is replaced. The catalog records that interval (`catalog.objects`), and everything else goes by it.

Files may be shared: those of one step replace together what is older, and a checkpoint may refer again to files that
the newest one before it needs. Such a file is needed as long as any checkpoint in a row refers to it, and so is the
manifest of the checkpoint that wrote it, which has its checksum.

US 9471438 keeps such dependencies per data structure, and deletes a checkpoint with the last that depends on it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from siltstone.format.manifest import Manifest
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.restore.plan_rules import replaces, state_handles
from siltstone.store.paths import CheckpointPath


@dataclass(frozen=True, slots=True, eq=False)
class LiveHandle:
    """A handle of one checkpoint, and the names of the objects that its reader needs: the object that it lies in, the
    manifest that describes it, for a change the index of its segment, and for a file the manifest of its writer."""

    checkpoint: int
    handle: Handle
    names: tuple[str, ...]

    @property
    def writer(self) -> int:
        """The checkpoint that wrote its object."""
        path = writer_of(self.handle)
        return path.checkpoint if path else self.checkpoint

    def shares_step(self, other: "LiveHandle") -> bool:
        """Whether both are files of one step, which hold their key groups together."""
        return (
            self.handle.form is other.handle.form is Form.FILES
            and (self.checkpoint, self.handle.sqn) == (other.checkpoint, other.handle.sqn)
        )  # fmt: skip


def writer_of(handle: Handle) -> CheckpointPath | None:
    """Return the checkpoint that wrote a file, which several may share; None for what the handle's own wrote."""
    return CheckpointPath.of(handle.object) if handle.form is Form.FILES else None


def shared_names(manifest: Manifest) -> frozenset[str]:
    """Return the names of a checkpoint's files and of their writers' manifests, to which later ones may refer again.

    They do so whatever materializations replace, so only a run knows that no checkpoint needs them any more.
    """
    files = [(handle.object, path) for handle in manifest.handles if (path := writer_of(handle))]
    return frozenset(name for file, path in files for name in (file, path.manifest()))


Parts = dict[KeyGroupRange, list[LiveHandle]]
"""key groups with the same chain -> the chain, oldest first"""


class LiveHandles:
    """What a restore of the newest checkpoint needs, given the manifests up to it.

    Manifests that it does not need may be left out; those of materializations follow that of their checkpoint, or come
    later, when they are completed.
    """

    def __init__(self) -> None:
        self._variables: dict[tuple[str, str], Parts] = {}
        self._uses: Counter[str] = Counter()
        self.own: frozenset[str] = frozenset()
        """names of the objects that the newest checkpoint wrote, which stay as long as it does"""

    @property
    def needed(self) -> frozenset[str]:
        """Names of the objects that a restore of the newest checkpoint reads."""
        return frozenset(self._uses)

    @property
    def variables(self) -> frozenset[tuple[str, str]]:
        """(operator, variable) of everything that has a chain."""
        return frozenset(self._variables)

    @property
    def complete_from(self) -> int:
        """The oldest checkpoint that wrote what a chain begins with; 0 if one has no base or files to begin with."""
        return min(
            (
                min((live.writer for live in takewhile(lambda live: replaces(live.handle), chain)), default=0)
                for parts in self._variables.values()
                for chain in parts.values()
            ),
            default=0,
        )

    def handles(self) -> Iterator[LiveHandle]:
        """Yield the live handles, some more than once."""
        for parts in self._variables.values():
            for chain in parts.values():
                yield from chain

    def apply(self, manifest: Manifest, name: str) -> frozenset[str]:
        """Go on to a checkpoint, or let chains begin with a materialization's bases.

        Args:
            name: the manifest's object name.

        Returns:
            The names of the objects with handles that a base has replaced, at least for some key groups.
        """
        late = bool(manifest.materialization)
        if not late:
            self._begin(manifest, name)
        indexes: dict[tuple[str, KeyGroupRange], list[str]] = {}
        for handle in manifest.handles:
            if handle.kind is Kind.INDEX:
                indexes.setdefault((handle.operator, handle.key_groups), []).append(handle.object)
        replaced: set[str] = set()
        for handle in sorted(state_handles(manifest.handles), key=lambda h: h.sqn):
            index = indexes.get((handle.operator, handle.key_groups), ()) if handle.kind is Kind.INCREMENTAL else ()
            writer = writer_of(handle)
            described = (name, writer.manifest()) if writer else (name,)
            live = LiveHandle(manifest.checkpoint, handle, (handle.object, *described, *index))
            variable = (handle.operator, handle.variable)
            parts = self._variables.setdefault(variable, {KeyGroupRange(0, manifest.max_parallelism): []})
            self._cut(parts, handle.key_groups)
            if replaces(handle):
                replaced.update(self._replace(parts, live, late=late))
            else:
                self._append(parts, live)
        return frozenset(replaced)

    def _begin(self, manifest: Manifest, name: str) -> None:
        """Let a new checkpoint be the newest, without the variables that it no longer has."""
        self.own = frozenset([name, *(stored.name for stored in manifest.objects)])
        kept = {(operator, variable) for operator, of in manifest.variables.items() for variable in of}
        for gone in self._variables.keys() - kept:
            for chain in self._variables.pop(gone).values():
                self._release([name for live in chain for name in live.names])

    def _cut(self, parts: Parts, groups: KeyGroupRange) -> None:
        """Cut the parts at the edges of `groups`, so that none is partly inside."""
        if groups in parts:
            return
        for part in [part for part in parts if part.intersect(groups)]:
            inside = part.intersect(groups)
            chain = parts.pop(part)
            pieces = [KeyGroupRange(part.start, inside.start), inside, KeyGroupRange(inside.end, part.end)]
            pieces = [piece for piece in pieces if piece]
            parts |= {piece: list(chain) for piece in pieces}
            for live in chain:
                self._uses.update(live.names * (len(pieces) - 1))

    def _append(self, parts: Parts, live: LiveHandle) -> None:
        for part in _inside(parts, live.handle.key_groups):
            parts[part].append(live)
            self._uses.update(live.names)

    def _replace(self, parts: Parts, live: LiveHandle, *, late: bool) -> list[str]:
        """Let chains begin with a base, or with a further file. Returns the names of the objects of what it replaced.

        A late base, of a materialization, replaces what is not newer; a chain that begins after it does not need it.
        """
        groups, objects, alone = live.handle.key_groups, list[str](), not late
        for part in _inside(parts, groups):
            chain = parts[part]
            if chain and live.shares_step(chain[-1]):
                chain.append(live)
                self._uses.update(live.names)
                alone = False
                continue
            older = [each for each in chain if not late or each.checkpoint <= live.checkpoint]
            if late and chain and not older:
                continue
            parts[part] = [live, *chain[len(older) :]]
            self._uses.update(live.names)
            objects += [each.handle.object for each in older]
            self._release([name for each in older for name in each.names])
        if alone and groups not in parts:  # one chain again
            self._release([name for part in _inside(parts, groups) if parts.pop(part) for name in live.names])
            parts[groups] = [live]
            self._uses.update(live.names)
        return objects

    def _release(self, names: Sequence[str]) -> None:
        self._uses.subtract(names)
        for name in names:
            if self._uses[name] <= 0:
                del self._uses[name]


def _inside(parts: Parts, groups: KeyGroupRange) -> list[KeyGroupRange]:
    return [groups] if groups in parts else [part for part in parts if part.intersect(groups)]
