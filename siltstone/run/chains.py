"""The chains of one run: per operator, where its chain begins, what a restore reads, and the state of its policy.

A chain grows with each checkpoint of the run (`preview`, `advance`). It gets shorter when it is materialized, by this
run or by another process, which the run learns from the catalog (`follow`). The policy decides the form of each
operator's part of the next checkpoint from what earlier ones cost (`decide`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from siltstone.catalog.repository import Catalog
from siltstone.chains.costs import StepReports, cost_of, materialized_chain, recorded_chain, written_form
from siltstone.chains.policy_rules import Decision, Policy, PolicyState, RestoreBound, RestoreCost
from siltstone.chains.restore_rules import NEWEST, share_restore
from siltstone.errors import Unreachable
from siltstone.format.manifest import Manifest
from siltstone.log import get_logger
from siltstone.model import Form, StoredObject
from siltstone.restore.restore import read_manifest, schemas_of
from siltstone.run.task import RestorePoint
from siltstone.store.base import Store
from siltstone.store.paths import is_materialization_manifest
from siltstone.stream import Stream

_LOG = get_logger(__name__)


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
        """operator -> the checkpoint that the longest chain of its variables begins with; the next one, for an operator
        that the newest checkpoint does not have"""
        self.manifests: Sequence[StoredObject] = ()
        """what a restore of the newest checkpoint reads (`Chains.list_manifests`)"""
        self._policies = {op.name: policy.start() for op in stream.operators}
        self._restored: dict[int, float | None] = {}
        """checkpoint -> seconds of its measured restore that the policies have learned from"""
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

    def resume(self, store: Store, latest: int) -> Manifest:
        """Continue the chains that end with checkpoint `latest`.

        Returns:
            The manifest of `latest`.

        Raises:
            CorruptObject: the manifest is damaged.
            Unreachable: the store or the catalog failed.
        """
        name, operators = self._stream.name, self._stream.operators
        manifest = read_manifest(store, self._catalog.checkpoints.get(name, latest).manifest)
        self._policies |= {
            op: PolicyState.from_json(saved) for op, saved in manifest.policy.items() if op in self._policies
        }
        self._first = {op.name: manifest.first.get(op.name, latest + 1) for op in operators}
        self._checkpoint, self._step = latest, manifest.step
        self.follow()
        self._learn_restores()
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
        """Look up in the catalog what a restore of the newest checkpoint reads, after materializations."""
        if self._checkpoint:
            self._note(self._catalog.chains.list_manifests(self._stream.name, self._checkpoint))

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
        known = self._first[operator] <= self._checkpoint
        return RestorePoint(self._checkpoint, self._step, tuple(self.manifests) if known else ())

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

    def advance(self, manifest: Manifest, manifests: Sequence[StoredObject]) -> None:
        """Record that the checkpoint exists and a restore of it reads `manifests`; decide the next interval."""
        self._policies = {name: PolicyState.from_json(saved) for name, saved in manifest.policy.items()}
        self._first = dict(manifest.first)
        self._checkpoint, self._step = manifest.checkpoint, manifest.step
        self._note(manifests)
        self._learn_restores()
        self.decide()

    def _learned(self, operator: str, gathered: StepReports) -> PolicyState:
        """What the policy knows after a checkpoint of one operator."""
        state = self._policies[operator]
        restore_s = gathered.restore_s.get(operator)
        if restore_s is not None:
            cost = RestoreCost(base_s=state.base_s, deltas_s=state.deltas_s, restore_s=restore_s)
            state = self._policy.observe_restore(state, cost)
        return self._policy.observe(state, cost_of(gathered.last[operator]))

    def _learn_restores(self) -> None:
        """Learn from restores that others measured since: `restore`, `verify`, backfills (`chains.restore_rules`)."""
        try:
            records = self._catalog.checkpoints.list_restored(self._stream.name, NEWEST)
        except Unreachable:
            return  # they are there at the next checkpoint, too
        for record in records:
            seconds, size = record.restore_s, record.restore_bytes
            if seconds is None or size is None or self._restored.get(record.id) == seconds:
                continue
            self._restored[record.id] = seconds
            budget_s = self._policy.options.restore_budget_s
            if budget_s is not None and seconds > budget_s:
                _LOG.warning(
                    "a restore took longer than restore_budget_s",
                    stream=self._stream.name,
                    checkpoint=record.id,
                    restore_s=seconds,
                    restore_budget_s=budget_s,
                )
            chains = {operator: recorded_chain(record, operator)[1] for operator in record.forms}
            for operator, cost in share_restore(chains, self._policies, seconds, size).items():
                self._policies[operator] = self._policy.observe_restore(self._policies[operator], cost)

    def _note(self, manifests: Sequence[StoredObject]) -> None:
        """Note what a restore reads, and tell the policies whose chains begin with a materialization now."""
        known = {stored.name for stored in self.manifests}
        self.manifests = manifests
        if all(stored.name in known for stored in manifests if is_materialization_manifest(stored.name)):
            return
        name = self._stream.name
        for m in self._catalog.materializations.list_in_chain(name, self._checkpoint):
            if m.checkpoint > self._first.get(m.operator, m.checkpoint):
                self._first[m.operator] = m.checkpoint
                since = self._catalog.checkpoints.list_after(
                    name, m.checkpoint, self._checkpoint - m.checkpoint, marked=True
                )
                self._policies[m.operator] = materialized_chain(
                    self._policies[m.operator], m, since, self._policy.observe_materialization
                )
