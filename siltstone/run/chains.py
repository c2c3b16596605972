"""The chains of one run: per operator, where its chain begins, what a restore reads, and the state of its policy.

A chain grows with each checkpoint of the run (`preview`, `advance`). It gets shorter when it is materialized, by this
run or by another process, which the run learns from the catalog (`follow`). The policy decides the form of each
operator's part of the next checkpoint from what earlier ones cost (`decide`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from siltstone.catalog.repository import Catalog
from siltstone.chains.costs import StepReports, cost_of, materialized_chain, written_form
from siltstone.chains.policy_rules import Decision, Policy, PolicyState, RestoreBound, RestoreCost
from siltstone.format.manifest import Manifest
from siltstone.model import Form, StoredObject
from siltstone.restore.restore import read_manifest, schemas_of
from siltstone.run.task import RestorePoint
from siltstone.store.base import Store
from siltstone.stream import Stream


@dataclass(frozen=True)
class NextChains:
    """The chains, per operator, as they will be once the next checkpoint exists.

    Attributes:
        forms: the form of each operator's part.
        first: the checkpoint that each chain begins with.
        policies: the state of each policy once the checkpoint exists.
        bounds: what a restore of the checkpoint reads, in bytes and seconds.
    """

    forms: Mapping[str, Form]
    first: Mapping[str, int]
    policies: Mapping[str, PolicyState]
    bounds: Mapping[str, RestoreBound]


class RunChains:
    """The chains of one run of a stream; empty before `resume` or the first checkpoint."""

    def __init__(self, stream: Stream, catalog: Catalog, policy: Policy) -> None:
        self._stream, self._catalog, self._policy = stream, catalog, policy
        self._checkpoint = 0
        """the newest completed checkpoint, where the chains end"""
        self._step = 0
        """the last step that it holds"""
        self._first: dict[str, int] = {}
        self._manifests: dict[int, StoredObject] = {}
        self._materialized: dict[str, StoredObject] = {}
        """operator -> the manifest of the materialization that its chain begins with"""
        self._policies = {op.name: policy.start() for op in stream.operators}
        self._decisions: dict[str, Decision] = {}
        self.decide()

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """Operator -> the policy's decision on its part of the next checkpoint."""
        return dict(self._decisions)

    @property
    def policies(self) -> Mapping[str, PolicyState]:
        """Operator -> the state of its policy, as of the newest checkpoint."""
        return dict(self._policies)

    @property
    def oldest(self) -> int:
        """The earliest checkpoint that a restore of the newest one reads; 0 before the first."""
        return min(self._first.values(), default=0)

    def resume(self, store: Store, latest: int) -> Manifest:
        """Continue the chains that end with checkpoint `latest`.

        Returns:
            The manifest of `latest`.

        Raises:
            CorruptObject: the manifest is damaged.
            Unreachable: the store or the catalog failed.
        """
        name, operators = self._stream.name, self._stream.operators
        self._manifests = {
            c: self._catalog.checkpoints.get(name, c).manifest
            for c in self._catalog.chains.list_checkpoints(name, latest)
        }
        manifest = read_manifest(store, self._manifests[latest])
        self._policies |= {
            op: PolicyState.from_json(saved) for op, saved in manifest.policy.items() if op in self._policies
        }
        self._first = {op.name: manifest.first.get(op.name, latest + 1) for op in operators}
        self._checkpoint, self._step = latest, manifest.step
        self._note_materialized(self._move(self._catalog.chains.get_firsts(name, latest)))
        # A table that the last checkpoint does not know has no chain to put a delta on; and where one was dropped,
        # those of an index would not be where the links of the next one say that they are.
        self.decide(
            {
                op.name
                for op in operators
                if op.name not in manifest.operators or set(op.tables()) != set(schemas_of(manifest, op.name))
            }
        )
        return manifest

    def follow(self) -> None:
        """Look up in the catalog where the chains of the newest checkpoint begin, after materializations."""
        if self._checkpoint and (
            moved := self._move(self._catalog.chains.get_firsts(self._stream.name, self._checkpoint))
        ):
            self._note_materialized(moved)

    def decide(self, changed: Collection[str] = ()) -> None:
        """Decide the form of each operator's part of the next checkpoint, and so whether its changes are tracked.

        Args:
            changed: operators whose tables differ from those of their chain.
        """
        self._decisions = {name: self._policy.decide(state) for name, state in self._policies.items()}
        for name in changed:
            self._decisions[name] = Decision(form=Form.BASE, tracking=False, d=0, reason="its tables changed")

    def restore_point(self, operator: str) -> RestorePoint:
        """Return what a restore of an operator at the newest completed checkpoint reads."""
        if not self._checkpoint:
            return RestorePoint()
        manifests = [m for c, m in self._manifests.items() if c >= self._first[operator]]
        if operator in self._materialized:
            manifests.append(self._materialized[operator])
        return RestorePoint(self._checkpoint, self._step, tuple(manifests))

    def preview(self, checkpoint: int, gathered: StepReports) -> NextChains:
        """Compute what the chains become with the next checkpoint; `advance` changes them.

        Args:
            checkpoint: its id.
            gathered: the acknowledgements of its subtasks.
        """
        forms = {name: written_form(received) for name, received in gathered.last.items()}
        policies = {name: self._learned(name, gathered) for name in forms}
        return NextChains(
            forms=forms,
            first={name: checkpoint if form is Form.BASE else self._first[name] for name, form in forms.items()},
            policies=policies,
            bounds={name: self._policy.restore_bound(state) for name, state in policies.items()},
        )

    def advance(self, manifest: Manifest, stored: StoredObject, first: Mapping[str, int]) -> None:
        """Record that the checkpoint exists and its chains begin at `first`; decide the next interval."""
        self._policies = {name: PolicyState.from_json(saved) for name, saved in manifest.policy.items()}
        self._first = dict(manifest.first)
        self._checkpoint, self._step = manifest.checkpoint, manifest.step
        self._materialized = {op: m for op, m in self._materialized.items() if manifest.forms.get(op) is Form.DELTA}
        if moved := self._move(first):
            self._note_materialized(moved)
        self._manifests = {c: m for c, m in self._manifests.items() if c >= self.oldest}
        self._manifests[manifest.checkpoint] = stored
        self.decide()

    def _learned(self, operator: str, gathered: StepReports) -> PolicyState:
        """What the policy knows after a checkpoint of one operator."""
        state = self._policies[operator]
        restore_s = gathered.restore_s.get(operator)
        if restore_s is not None:
            cost = RestoreCost(base_s=state.base_s, deltas_s=state.deltas_s, restore_s=restore_s)
            state = self._policy.observe_restore(state, cost)
        return self._policy.observe(state, cost_of(gathered.last[operator]))

    def _move(self, first: Mapping[str, int]) -> set[str]:
        """Let chains begin where the catalog says, if that is later: there a materialization has been completed.

        Returns:
            The operators whose chains it moved.
        """
        moved = {op: at for op, at in first.items() if op in self._first and at > self._first[op]}
        self._first |= moved
        return set(moved)

    def _note_materialized(self, moved: Collection[str]) -> None:
        """Note the materializations that chains begin with, and tell the policies of the operators that were moved."""
        name, checkpoint = self._stream.name, self._checkpoint
        for m in self._catalog.materializations.list_in_chain(name, checkpoint):
            if m.manifest is not None and m.operator in self._first:
                self._materialized[m.operator] = m.manifest
            if m.operator in moved:
                since = [self._catalog.checkpoints.get(name, c) for c in range(m.checkpoint + 1, checkpoint + 1)]
                self._policies[m.operator] = materialized_chain(self._policies[m.operator], m, since)
