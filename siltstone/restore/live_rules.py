"""Decide what a restore of a checkpoint needs: the one place that answers this, per variable and key group.

`LiveHandles` walks forward over what the checkpoints of a stream wrote. Per variable and range of key groups it keeps
the chain: the newest base, and the deltas after it. Each variable has a chain of its own, and a checkpoint that did not
change it adds nothing. A handle is live while a chain has it, so consecutive checkpoints need it: from the one that
wrote it to the one before it is replaced. Everything else is a view of this walk:

    reads         the chains of one checkpoint, cut at the key groups of units (`plan_rules`)
    proofs        the handles that are live at some proven checkpoint, and until which (`plan_rules`)
    costs         bytes and seconds of the handles that are live at each proven checkpoint (`verify`)
    references    the objects in which live handles lie, and the manifests that describe them (`needed`)

The catalog records references as intervals (`catalog.objects`), and everything else goes by them. The indexes of
segments are a second way, which shares nothing with this one: `verify` compares the two (`index_chain`).

Subtasks may have written different forms, variables may have their bases at different checkpoints, and each checkpoint
may have another parallelism. A checkpoint of several steps may have a delta per step. Checkpoints may share files: all
files of one step together replace what is older, and a checkpoint may refer again to files that the one before it
needs. Such a file is needed until a checkpoint does not refer to it, and so is its writer's manifest, which has its
checksum.

US 9471438 keeps such dependencies per data structure, and deletes a checkpoint with the last that depends on it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from siltstone.errors import StateError
from siltstone.format.manifest import Manifest
from siltstone.model import Form, Handle, KeyGroupRange, Kind
from siltstone.store.paths import CheckpointPath

Variable = tuple[str, str]
"""operator and variable"""


def replaces(handle: Handle) -> bool:
    """Whether a handle holds everything of its key groups, so that nothing earlier is needed for them.

    Files do so together with the other files of their step.
    """
    return handle.form is not Form.DELTA


def state_handles(handles: Iterable[Handle]) -> list[Handle]:
    """Return the handles that hold state; those of indexes do not."""
    return [handle for handle in handles if handle.kind is not Kind.INDEX]


def writer_of(handle: Handle) -> CheckpointPath | None:
    """Return the checkpoint that wrote a file, which several may share; None if the handle is not a file's."""
    return CheckpointPath.of(handle.object) if handle.form is Form.FILES else None


def shared_names(manifest: Manifest) -> frozenset[str]:
    """Return the names of a checkpoint's files and of their writers' manifests, to which later ones may refer again.

    Materializations do not change that, so only a run knows when no checkpoint needs them any more.
    """
    files = [(handle.object, path) for handle in manifest.handles if (path := writer_of(handle))]
    return frozenset(name for file, path in files for name in (file, path.manifest()))


@dataclass(frozen=True, slots=True, eq=False)
class LiveHandle:
    """A handle of one checkpoint.

    Attributes:
        names: the objects that its reader needs, if the walk is over manifests: the object that it lies in, the
            manifest that describes it, for a change the index of its segment, and for a file the manifest of its
            writer.
        step: the number of its step in the walk, or of the materialization that wrote it.
    """

    checkpoint: int
    handle: Handle
    names: tuple[str, ...]
    step: int

    @property
    def writer(self) -> int:
        """The checkpoint that wrote its object."""
        path = writer_of(self.handle)
        return path.checkpoint if path else self.checkpoint


@dataclass(slots=True)
class LiveChain:
    """What a restore reads of some key groups of one variable, oldest first; `gap` says why it cannot, if so."""

    links: list[LiveHandle] = field(default_factory=list)
    gap: str = ""

    def append(self, live: LiveHandle) -> None:
        """Add the next handle; a chain begins with a base, or with all files of one step."""
        self.gap = self.gap or _find_gap(self.links[-1] if self.links else None, live)
        self.links.append(live)


def _find_gap(before: LiveHandle | None, live: LiveHandle) -> str:
    """Say why a handle does not continue the chain that ends with `before`; "" if it does.

    A delta builds on the checkpoint that it names, or on an earlier step of its own. A materialization may also have
    made a base at a later checkpoint, which had not changed the variable.
    """
    handle = live.handle
    if before and before.step == live.step:
        files = handle.form is before.handle.form is Form.FILES and handle.key_groups == before.handle.key_groups
        group = max(handle.key_groups.start, before.handle.key_groups.start)
        return "" if files else f"two handles hold key group {group} at checkpoint {live.checkpoint}"
    if replaces(handle) or (before and _builds_on(live, before)):
        return ""
    return f"its chain needs checkpoint {handle.previous}, which does not hold it"


def _builds_on(delta: LiveHandle, before: LiveHandle) -> bool:
    previous = delta.handle.previous
    if before.checkpoint == delta.checkpoint:
        return previous == before.handle.previous and not replaces(before.handle)
    return before.checkpoint == previous or (replaces(before.handle) and before.checkpoint > previous)


_Parts = dict[KeyGroupRange, LiveChain]
"""key groups with the same chain -> the chain"""


class LiveHandles:
    """What a restore of the newest checkpoint needs, given what was written up to it.

    What it does not need may be left out; materializations follow their checkpoint, or come later, when they are
    completed.
    """

    def __init__(self) -> None:
        self._variables: dict[Variable, _Parts] = {}
        self._uses: dict[LiveHandle, int] = {}
        """live handle -> how many chains have it"""
        self._newest = self._steps = 0
        self.own: frozenset[str] = frozenset()
        """names of the objects that the newest checkpoint wrote, which stay as long as it does"""
        self.released: list[LiveHandle] = []
        """what no chain has any more because of the newest checkpoint and its materializations"""

    @property
    def handles(self) -> Collection[LiveHandle]:
        """The live handles, each once."""
        return self._uses.keys()

    @property
    def needed(self) -> frozenset[str]:
        """Names of the objects that a restore of the newest checkpoint reads."""
        return frozenset([name for live in self._uses for name in live.names])

    @property
    def variables(self) -> frozenset[Variable]:
        """(operator, variable) of everything that the newest checkpoint has."""
        return frozenset(self._variables)

    @property
    def complete_from(self) -> int:
        """The oldest checkpoint that wrote what a chain begins with; 0 if one has no base or files to begin with."""
        return min(
            (
                min((live.writer for live in takewhile(lambda live: replaces(live.handle), chain.links)), default=0)
                for parts in self._variables.values()
                for chain in parts.values()
            ),
            default=0,
        )

    def chains(self, variable: Variable, key_groups: KeyGroupRange) -> Iterator[tuple[KeyGroupRange, LiveChain]]:
        """Yield a variable's chains that hold any of `key_groups`, each with the key groups in common.

        Raises:
            StateError: key groups are in no handle or twice in one step, or a delta builds on what is missing; names
                checkpoint, operator and variable.
        """
        for part, chain in self._variables.get(variable, {key_groups: LiveChain()}).items():
            if inside := part.intersect(key_groups):
                if chain.gap or not chain.links:
                    where = f"checkpoint {self._newest}, operator {variable[0]}, variable {variable[1]}"
                    gap = chain.gap or f"no handle holds key group {inside.start}"
                    raise StateError(f"{where}: {gap}", advice="restore another checkpoint")
                yield inside, chain

    def apply(self, manifest: Manifest, name: str) -> frozenset[str]:
        """Advance to a checkpoint, or let chains begin with a materialization's bases.

        Args:
            name: the manifest's object name.

        Returns:
            The names of the objects with handles that a base has replaced, at least for some key groups.
        """
        indexes: dict[tuple[str, KeyGroupRange], list[str]] = {}
        for handle in manifest.handles:
            if handle.kind is Kind.INDEX:
                indexes.setdefault((handle.operator, handle.key_groups), []).append(handle.object)

        def names_of(handle: Handle) -> tuple[str, ...]:
            index = indexes.get((handle.operator, handle.key_groups), ()) if handle.kind is Kind.INCREMENTAL else ()
            writer = writer_of(handle)
            return (handle.object, name, *((writer.manifest(),) if writer else ()), *index)

        late = bool(manifest.materialization)
        variables = None
        if not late:
            self.own = frozenset([name, *(stored.name for stored in manifest.objects)])
            variables = [(operator, variable) for operator, of in manifest.variables.items() for variable in of]
        groups = KeyGroupRange(0, manifest.max_parallelism)
        return self.advance(manifest.checkpoint, manifest.handles, groups, variables, names_of, late=late)

    def advance(
        self,
        checkpoint: int,
        handles: Iterable[Handle],
        whole: KeyGroupRange,
        variables: Collection[Variable] | None = None,
        names_of: Callable[[Handle], tuple[str, ...]] = lambda _: (),
        *,
        late: bool = False,
    ) -> frozenset[str]:
        """Go on by handles of one checkpoint; see `apply`.

        Args:
            whole: all key groups of the stream.
            variables: those that the checkpoint has, if they are known: chains of others end.
            names_of: returns the `names` of a handle.
            late: whether these are bases of a materialization.
        """
        if checkpoint > self._newest:
            self._newest, self.released = checkpoint, []
        if variables is not None:
            for gone in self._variables.keys() - set(variables):
                for chain in self._variables.pop(gone).values():
                    self._release(chain.links)
            for variable in variables:
                self._variables.setdefault(variable, {whole: LiveChain()})
        replaced: set[str] = set()
        sqn: int | None = None
        for handle in sorted(state_handles(handles), key=lambda h: h.sqn):
            if handle.sqn != sqn:
                sqn, self._steps = handle.sqn, self._steps + 1
            parts = self._variables.setdefault((handle.operator, handle.variable), {whole: LiveChain()})
            self._cut(parts, handle.key_groups)
            live = LiveHandle(checkpoint, handle, names_of(handle), self._steps)
            replaced.update(self._add(parts, live, late=late))
        return frozenset(replaced)

    def _cut(self, parts: _Parts, groups: KeyGroupRange) -> None:
        """Cut the parts at the edges of `groups`, so that none is partly inside."""
        if groups in parts:
            return
        for part in _overlapping_parts(parts, groups):
            inside = part.intersect(groups)
            if inside == part:
                continue  # copying its chain at every later checkpoint would be quadratic
            chain = parts.pop(part)
            pieces = [KeyGroupRange(part.start, inside.start), inside, KeyGroupRange(inside.end, part.end)]
            pieces = [piece for piece in pieces if piece]
            parts |= {piece: LiveChain([*chain.links], chain.gap) for piece in pieces}
            for live in chain.links:
                self._uses[live] += len(pieces) - 1

    def _add(self, parts: _Parts, live: LiveHandle, *, late: bool) -> list[str]:
        """Append a delta or a further file to chains, or begin them with a base. Return the replaced objects' names.

        A late base, of a materialization, replaces what is not newer; a chain that begins after it does not need it.
        """
        groups, objects = live.handle.key_groups, list[str]()
        merges = replaces(live.handle) and not late
        for part in _overlapping_parts(parts, groups):
            chain, newer = parts[part], list[LiveHandle]()
            if replaces(live.handle) and not any(each.step == live.step for each in chain.links[-1:]):
                newer = [each for each in chain.links if late and each.checkpoint > live.checkpoint]
                older = chain.links[: len(chain.links) - len(newer)]
                if newer and not older:
                    continue
                objects += [each.handle.object for each in older]
                parts[part] = chain = LiveChain()
                self._release(older)
            elif replaces(live.handle):
                merges = False
            chain.append(live)
            for each in newer:
                chain.append(each)
            self._uses[live] = self._uses.get(live, 0) + 1
        if merges and groups and groups not in parts:  # one chain again
            for part in _overlapping_parts(parts, groups):
                del parts[part]
            parts[groups], self._uses[live] = LiveChain([live]), 1
        return objects

    def _release(self, links: Sequence[LiveHandle]) -> None:
        for live in links:
            self._uses[live] -= 1
            if not self._uses[live]:
                del self._uses[live]
                self.released.append(live)


def _overlapping_parts(parts: Mapping[KeyGroupRange, LiveChain], groups: KeyGroupRange) -> list[KeyGroupRange]:
    if groups in parts:
        return [groups]
    # After a change of parallelism this is done for every handle, and ranges cost much to make.
    return [part for part in parts if part.start < groups.end and groups.start < part.end] if groups else []
