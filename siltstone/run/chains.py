"""The chains of one run: per table, where its chain begins, what a restore reads, and the state of its policy.

Each state table has a chain of its own, whether a variable has one table or several: US 9471438 decides base or delta
per data structure. An opaque variable has one as a table does: "table" stands for both here. A chain grows with each
checkpoint of the run that changes the table (`prepare`). It gets shorter when it is materialized, by this run or by
another process, which the run learns from the catalog (`follow`). The policy decides the form of each table in the
next checkpoint from what earlier ones cost (`decide`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from siltstone.catalog.repository import Catalog
from siltstone.chains.chain_rules import (
    Policy,
    add_chains,
    begin_together,
    is_base_only,
    share_budget,
    spends_budget,
)
from siltstone.chains.costs import (
    costs_of,
    of_all_subtasks,
    recorded_cost,
    recorded_states,
    table_statistics,
    written_form,
    written_whole,
)
from siltstone.chains.policy_rules import CheckpointCost, Decision, PolicyState, RestoreBound, RestoreCost
from siltstone.chains.postpone_rules import postpone_bases
from siltstone.chains.restore_rules import NEWEST, share_restore
from siltstone.errors import CorruptObject, Unreachable, UsageError
from siltstone.format.manifest import Manifest
from siltstone.format.manifests import read_manifest, schemas_of
from siltstone.format.versions import Versions, next_versions
from siltstone.log import get_logger
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.restore.file_indexes import file_indexes, read_handles
from siltstone.run.manifests import RunManifests
from siltstone.run.step_reports import StepReports
from siltstone.run.task import RestorePoint
from siltstone.store.base import Store
from siltstone.store.paths import is_files_index, is_materialization_manifest
from siltstone.stream import Stream

_LOG = get_logger(__name__)
_T = TypeVar("_T")
Table = tuple[str, str]
"""operator and table"""


@dataclass(frozen=True)
class NextChains:
    """The chains as they will be once a checkpoint that is prepared exists.

    Attributes:
        checkpoint: its id.
        step: the last step that it holds.
        forms: operator -> the form of its part.
        d: operator -> the largest D of its tables.
        chains: operator -> table -> where its chain begins and the state of its policy (`Manifest.chains`).
        bounds: operator -> the bytes and seconds of a restore of all its tables.
        statistics: operator -> table -> what the catalog keeps of it (`costs.table_statistics`).
        costs: what it writes of each table.
        versions: where the newest version of each variable is then (`format.versions`).
        files: operator -> key groups -> the `.files` object of a subtask.
        reasons: operator -> why its tables have their forms, for people.
    """

    checkpoint: int
    step: int
    forms: Mapping[str, Form]
    d: Mapping[str, int]
    chains: Mapping[str, Mapping[str, Mapping[str, Any]]]
    bounds: Mapping[str, RestoreBound]
    statistics: Mapping[str, Mapping[str, Mapping[str, Any]]]
    costs: Mapping[Table, CheckpointCost]
    versions: Versions
    files: Mapping[str, Mapping[KeyGroupRange, str]]
    reasons: Mapping[str, str]


class RunChains:
    """The chains of one run of a stream; empty before `resume` or the first checkpoint.

    A pending checkpoint holds the chains as they will be after it (`NextChains`).

    Args:
        reader: reads the manifests of materializations.
        postpones: whether the run's background thread makes the bases that end chains, while the bounds leave room for
            more deltas (`postpone_rules`).

    Raises:
        UsageError: the stream has broadcast tables, and the policy makes files.
    """

    def __init__(
        self, stream: Stream, catalog: Catalog, store: Store, reader: RunManifests, policy: Policy, *, postpones: bool
    ) -> None:
        self._stream, self._catalog, self._store, self._policy = stream, catalog, store, policy
        self._reader, self._postpones = reader, postpones
        self._postponed: Mapping[str, str] = {}
        """operator -> why it is to be materialized"""
        self._checkpoint = 0
        """the newest completed checkpoint, where the chains end"""
        self._step = 0
        """the last step that it holds"""
        self._operators: Collection[str] = ()
        """those that it has"""
        self._first: dict[Table, int] = {}
        """the checkpoint that each chain begins with"""
        self.manifests: Sequence[StoredObject] = ()
        """what a restore of the newest checkpoint reads (`Chains.list_manifests`)"""
        self.versions: Versions = {}
        """as of the newest checkpoint that is prepared"""
        self._files: Mapping[str, Mapping[KeyGroupRange, str]] = {}
        """`NextChains.files` of the newest completed checkpoint"""
        self.own_files: dict[int, Collection[str]] = {}
        """that checkpoint and those prepared since, if this run has taken them -> the checksums of their `.files`
        objects"""
        self._opaque = {op.name: op.opaque_variables() for op in stream.operators}
        self._policies = {
            (op.name, table): policy.start()
            for op in stream.operators
            for table in (*op.tables(), *op.opaque_variables())
        }
        _check_broadcasts(stream, policy)
        self._restored: dict[int, float | None] = {}
        """checkpoint -> seconds of its measured restore that the policies have learned from"""
        self._decisions: dict[Table, Decision] = {}
        self._forced: Collection[str] = ()
        """operators whose next checkpoint has each table as a base, whatever their chains are"""
        self.decide()

    @property
    def decisions(self) -> Mapping[str, Mapping[str, Decision]]:
        """Operator -> table -> the policy's decision on it in the next checkpoint."""
        return self._by_operator(self._decisions)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Operator -> why its tables get their forms, for people."""
        return {op: _reason(decisions) for op, decisions in self.decisions.items()}

    @property
    def policies(self) -> Mapping[str, Mapping[str, PolicyState]]:
        """Operator -> table -> the state of its policy, as of the newest checkpoint."""
        return self._by_operator(self._policies)

    def _by_operator(self, of: Mapping[Table, _T]) -> dict[str, dict[str, _T]]:
        found: dict[str, dict[str, _T]] = {op.name: {} for op in self._stream.operators}
        for (operator, table), each in of.items():
            found[operator][table] = each
        return found

    def resume(self, latest: int) -> Manifest:
        """Continue the chains that end with checkpoint `latest`.

        Returns:
            The manifest of `latest`.

        Raises:
            CorruptObject: the manifest is damaged.
            Unreachable: the store or the catalog failed.
        """
        name, operators = self._stream.name, self._stream.operators
        manifest = read_manifest(self._store, self._catalog.checkpoints.get(name, latest).manifest)
        # A table that the last checkpoint does not know has no chain to put a delta on; and where one was dropped,
        # those of an index would not be where the links of the next one say that they are.
        changed = {
            op.name
            for op in operators
            if op.name not in manifest.operators or set(op.tables()) != set(schemas_of(manifest, op.name))
        }
        self._adopt({op.name: manifest.chains.get(op.name, {}) for op in operators}, manifest.versions)
        self._operators = manifest.operators.keys()
        self._checkpoint, self._step = manifest.checkpoint, manifest.step
        self.follow(())
        self._files = file_indexes(read_handles(self._store, manifest, self.manifests))
        self._learn_restores()
        self.decide(changed)
        return manifest

    def _adopt(self, chains: Mapping[str, Mapping[str, Mapping[str, Any]]], versions: Versions) -> None:
        """Take over the chains that a checkpoint records (`Manifest.chains`)."""
        self._first = {}
        for operator, tables in chains.items():
            for table, of in tables.items():
                if (operator, table) in self._policies:  # others were dropped
                    self._first[operator, table] = of["first"]
                    self._policies[operator, table] = PolicyState.from_json(of)
        self.versions = versions

    def follow(self, pending: Collection[NextChains]) -> None:
        """Look up in the catalog what a restore of the newest checkpoint reads, after materializations, and decide anew
        on the next checkpoint if chains begin with them now.

        Args:
            pending: of the checkpoints that are pending, oldest first.
        """
        manifests = self._catalog.chains.list_manifests(self._stream.name, self._checkpoint) if self._checkpoint else ()
        if self._note(manifests, pending):
            self.decide(self._forced)

    def is_current(self) -> bool:
        """Whether a restore of the newest checkpoint still reads what the run knows of: another process may have
        materialized it again."""
        return not self._checkpoint or list(self.manifests) == list(
            self._catalog.chains.list_manifests(self._stream.name, self._checkpoint)
        )

    def decide(self, changed: Collection[str] = ()) -> None:
        """Decide the form of each table in the next checkpoint, and so whether its changes are tracked.

        Args:
            changed: operators whose tables differ from those of their chains.
        """
        self._forced = changed
        forced = Decision(form=Form.BASE, tracking=False, d=0, reason="its operator's tables changed")
        found, postponed = dict[Table, Decision](), dict[str, str]()
        for operator, states in self.policies.items():
            policies = {table: self._policy_of(states, table) for table in states}
            decided = {table: policy.decide(states[table]) for table, policy in policies.items()}
            decided = begin_together(decided, states, self._opaque[operator])
            if operator in changed:
                decided = {table: d if d.form is Form.FILES else forced for table, d in decided.items()}
            elif self._postpones:
                options = {table: policy.options for table, policy in policies.items()}
                decided, reason = postpone_bases(decided, states, options)
                if reason is not None:
                    postponed[operator] = reason
            found |= {(operator, table): decision for table, decision in decided.items()}
        self._decisions, self._postponed = found, postponed

    def find_postponed(self, operator: str, base: str | None) -> str | None:
        """Say why the background is to make an operator's bases now; None if it is not. Any thread may ask.

        Args:
            base: the manifest of the materialization that its chain begins with in the catalog; None if there is none.
                While the run has not noticed it, nothing is to be made.
        """
        noticed = base is None or any(stored.name == base for stored in self.manifests)
        return self._postponed.get(operator) if noticed else None

    def spends_budget(self, logged_bytes: Callable[[str], Mapping[str, int]]) -> bool:
        """Return whether the interval is to end, so that what is lost comes back in time (`chain_rules.spends_budget`).

        Args:
            logged_bytes: returns table or opaque variable -> bytes of an operator's changes in the interval.
        """
        budget_s = self._policy.options.restore_budget_s
        return budget_s is not None and any(
            spends_budget(states, logged_bytes(operator), budget_s) for operator, states in self.policies.items()
        )

    def base_only(self, operator: str) -> frozenset[str]:
        """Return the tables of an operator whose chain is a base and nothing else: one that does not change is not
        written again, as its restore would read as much."""
        if operator in self._forced:
            return frozenset()
        return frozenset(
            table for (op, table), state in self._policies.items() if op == operator and is_base_only(state)
        )

    def find_reusable(
        self, operator: str, pending: Collection[NextChains]
    ) -> tuple[frozenset[str], Mapping[KeyGroupRange, str], frozenset[str]]:
        """Return what a checkpoint may leave as it is: tables that are bases (`base_only`), files that it may refer to
        again, and all those that a run may go back to (`CheckpointOrder`).

        Args:
            pending: of the checkpoints that are pending, oldest first.
        """
        files = [of.get(operator, {}) for of in (self._files, *(each.files for each in pending))]
        named = frozenset(name for of in files for name in of.values())
        return self.base_only(operator), files[-1], named

    def restore_point(self, operator: str) -> RestorePoint:
        """Return what a restore of an operator at the newest completed checkpoint reads."""
        if not self._checkpoint:
            return RestorePoint()
        known = operator in self._operators
        manifests = tuple(self.manifests) if known else ()
        return RestorePoint(self._checkpoint, self._step, manifests, self.own_files.get(self._checkpoint, ()))

    def prepare(self, checkpoint: int, step: int, gathered: StepReports) -> NextChains:
        """Take the chains as the next checkpoint makes them, though it is not complete, and decide on the one after it.

        If it fails, so does the run.

        Args:
            checkpoint: its id.
            step: the last step that it holds.
            gathered: the acknowledgements of its subtasks, with handles of all that it writes.
        """
        handles = [h for received in gathered.last.values() for a in received for h in a.handles]
        made = self._preview(checkpoint, step, gathered, handles)
        self._adopt(made.chains, made.versions)
        self.own_files[checkpoint] = {h.checksum for h in handles if h.form is Form.FILES and is_files_index(h.object)}
        self.decide()
        return made

    def _preview(self, checkpoint: int, step: int, gathered: StepReports, handles: Sequence[Handle]) -> NextChains:
        written: dict[Table, CheckpointCost] = {}
        chains: dict[str, dict[str, dict[str, Any]]] = {}
        statistics: dict[str, dict[str, dict[str, Any]]] = {}
        bounds = {}
        for operator, received in gathered.last.items():
            costs = costs_of(received)
            known = {table: state for (op, table), state in self._policies.items() if op == operator}
            states: Mapping[str, PolicyState] = known
            if (restore_s := gathered.restore_s.get(operator)) is not None and known:
                whole = add_chains(known.values())  # one restore of the operator reads all its tables
                cost = RestoreCost(base_s=whole.base_s, deltas_s=whole.deltas_s, restore_s=restore_s)
                states = self._with_restore(known, cost)
            chains[operator], statistics[operator], total = {}, {}, RestoreBound(bytes=0.0, seconds=0.0)
            for table, before in states.items():
                cost, state = costs.get(table), before
                first = self._first.get((operator, table), checkpoint)
                if cost is not None:
                    written[operator, table] = cost
                    observed = of_all_subtasks(cost, before, table, received)
                    state = self._policy_of(states, table).observe(before, observed)
                    first = first if observed.form is Form.DELTA else checkpoint
                bound = self._policy_of({**states, table: state}, table).restore_bound(state)
                total = RestoreBound(bytes=total.bytes + bound.bytes, seconds=total.seconds + bound.seconds)
                d = self._decisions[operator, table].d
                chains[operator][table] = {**state.to_json(), "first": first}
                whole = written_whole(received, table, self._stream.max_parallelism)
                statistics[operator][table] = table_statistics(cost, first, state, d, bound, whole)
            bounds[operator] = total
        variables = {op.name: (*op.tables(), *op.opaque_variables()) for op in self._stream.operators}
        return NextChains(
            checkpoint=checkpoint,
            step=step,
            forms={op: written_form(received) for op, received in gathered.last.items()},
            d={op: max((of["D"] for of in tables.values()), default=0) for op, tables in statistics.items()},
            chains=chains,
            bounds=bounds,
            statistics=statistics,
            costs=written,
            versions=next_versions(self.versions, handles, checkpoint, variables, self._stream.max_parallelism),
            files=file_indexes(handles),
            reasons=self.reasons,
        )

    def advance(self, made: NextChains, manifests: Sequence[StoredObject], pending: Collection[NextChains]) -> None:
        """Record that a checkpoint is complete, and that a restore of it reads `manifests`.

        Args:
            made: what `prepare` returned for it.
            pending: what `prepare` returned for each pending checkpoint, oldest first.
        """
        self._operators = [op.name for op in self._stream.operators]
        self._checkpoint, self._step, self._files = made.checkpoint, made.step, made.files
        for older in [id for id in self.own_files if id < made.checkpoint]:
            del self.own_files[older]
        self._note(manifests, pending)
        self._learn_restores()
        self.decide()

    def _policy_of(self, states: Mapping[str, PolicyState], table: str) -> Policy:
        """Return the policy of a table, whose operator's tables have these states."""
        options = share_budget(states, self._policy.options)[table]
        return self._policy if options is self._policy.options else replace(self._policy, options=options)

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
            chains = {operator: add_chains(recorded_states(record, operator)) for operator in record.forms}
            now = {operator: add_chains(states.values()) for operator, states in self.policies.items()}
            for operator, cost in share_restore(chains, now, seconds, size).items():
                for table, state in self._with_restore(self.policies[operator], cost).items():
                    self._policies[operator, table] = state

    def _with_restore(self, states: Mapping[str, PolicyState], cost: RestoreCost) -> Mapping[str, PolicyState]:
        """Learn from a restore of an operator: all its tables get the factors that explain it."""
        learned = self._policy.observe_restore(add_chains(states.values()), cost)
        base, delta, count = learned.base_factor, learned.delta_factor, learned.restores
        return {
            table: replace(state, base_factor=base, delta_factor=delta, restores=count)
            for table, state in states.items()
        }

    def _note(self, manifests: Sequence[StoredObject], pending: Collection[NextChains]) -> bool:
        """Note what a restore reads, and tell the policies whose chains begin with a materialization now.

        Returns:
            Whether any does.
        """
        known, found = {stored.name for stored in self.manifests}, False
        for stored in manifests:
            if stored.name in known or not is_materialization_manifest(stored.name):
                continue
            try:
                found |= self._rebase(self._reader.read(stored), pending)
            except CorruptObject:
                continue  # a restore reports it; until then the chains are taken to be as long as they were
        self.manifests = manifests
        return found

    def _rebase(self, materialized: Manifest, pending: Collection[NextChains]) -> bool:
        """Let chains begin with a materialization's bases, if they begin before it; return whether any does."""
        name, checkpoint = self._stream.name, materialized.checkpoint
        [operator] = materialized.operators
        tables = {h.variable for h in materialized.handles if h.kind is not Kind.INDEX}
        older = [table for table in sorted(tables) if self._first.get((operator, table), checkpoint) < checkpoint]
        if not older:
            return False
        # What was wanted is made. Whether more is, the next decision tells.
        self._postponed = {op: reason for op, reason in self._postponed.items() if op != operator}
        after = self._checkpoint - checkpoint
        since = self._catalog.checkpoints.list_after(name, checkpoint, after, marked=True)
        for table in older:
            own = [h for h in materialized.handles if h.variable == table]
            size, rows = sum(h.length for h in own), sum(h.rows for h in own)
            base = CheckpointCost(form=Form.BASE, bytes=size, seconds=0.0, rows=rows)
            deltas = [cost for record in since if (cost := recorded_cost(record, operator, table)).bytes]
            deltas += [each.costs[operator, table] for each in pending if (operator, table) in each.costs]
            policy = self._policy_of(self.policies[operator], table)
            self._policies[operator, table] = policy.observe_materialization(
                self._policies[operator, table], base, deltas
            )
            self._first[operator, table] = checkpoint
        return True


def _check_broadcasts(stream: Stream, policy: Policy) -> None:
    """Check that broadcast tables, of which each subtask stores a part, are not to be files, which have all rows."""
    shared = [f"{op.name}.{table}" for op in stream.operators for table in op.broadcasts]
    if shared and policy.decide(policy.start()).form is Form.FILES:
        raise UsageError(
            f"stream {stream.name} has the broadcast table {shared[0]}, which every subtask has and RocksDB's files "
            "would store as often: use --policy marginal-cost"
        )


def _reason(decisions: Mapping[str, Decision]) -> str:
    said = {decision.reason for decision in decisions.values()}
    if len(said) <= 1:
        return next(iter(said), "")
    return "; ".join(f"{table}: {decision.reason}" for table, decision in sorted(decisions.items()))
