"""What a checkpoint policy sees, remembers and answers: pure values, one small protocol.

A policy decides, checkpoint by checkpoint and operator by operator, whether the next checkpoint is a base or
a delta. It never looks at a clock, a store or the state itself: it is told what each checkpoint cost, folds
that into an immutable `PolicyState` of fixed size (O(1) a checkpoint), and answers from it. The state is
saved with every checkpoint, so that a resumed run goes on where the old one stood.

Source: US 9471438 (method adjustD; claims on TckptBase, TckptDelta, Tlog, the weighted average and the
worst-case restoration cost), extended by measured restore factors.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

from siltstone.errors import StateError
from siltstone.model import Form

RESTORE_FACTOR = 1.2
"""seconds a restore needs per second it took to write, until restores have been measured (US 9471438)"""


class PolicyOptions(BaseModel):
    """Options of every policy; those that one policy does not use are ignored by it, unknown names are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    d0: int = Field(default=4, ge=0, description="deltas after the first base (adjust-d); at most d_max in any case")
    d_max: int = Field(default=100, ge=0, description="most deltas in one chain; 0 makes every checkpoint a base")
    size_ratio_max: float | None = Field(
        default=2.0, gt=0, description="most bytes of deltas in one chain, per byte of its base; none for no such bound"
    )
    restore_budget_s: float | None = Field(
        default=None, gt=0, description="most seconds a restore is predicted to take; none for no such bound"
    )
    space_amplification_max: float | None = Field(
        default=3.0,
        gt=1,
        description="most bytes of a chain, indexes and all, per byte of the live state (what a base would take now); "
        "none for no such bound",
    )
    logging_ratio: float = Field(
        default=0.10, ge=0, description="what logging a delta's changes costs, per unit of the delta, until measured"
    )
    probe_after: int = Field(
        default=16, ge=1, description="bases in a row before one delta is tried (adjust-d), at most (marginal-cost)"
    )
    restore_weight: float = Field(
        default=0.05, ge=0, description="lambda, the expected number of restores per checkpoint (marginal-cost)"
    )
    measure: Literal["bytes", "seconds"] = Field(
        default="bytes", description="what cost is counted in: bytes written, or seconds taken"
    )
    step: Literal["one", "double"] = Field(default="double", description="how adjust-d moves D: by one, or by doubling")
    weight: float = Field(default=0.3, gt=0, le=1, description="weight of the newest delta in the average delta")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """What one checkpoint of one operator's incremental variables cost.

    Attributes:
        form: how it was written. Where only some subtasks fell back to a base (`Decision.delta_limit_bytes`),
            it is a delta of all the bytes written: a restore then reads less than is counted, never more.
        bytes: bytes written.
        seconds: seconds it took to write (TckptBase or TckptDelta).
        log_s: seconds spent logging changes in the interval before it (Tlog); None where not measured.
        rows: live rows of the state at the checkpoint; None where not known. The next base is predicted from
            it.
        tracked_bytes: where all or some subtasks wrote a base in place of a delta that was too large, what
            the deltas of all would have been; else None.
        index_bytes: bytes of the indexes written beside.
    """

    form: Form
    bytes: int
    seconds: float
    log_s: float | None = None
    rows: int | None = None
    tracked_bytes: int | None = None
    index_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCost:
    """One measured restore of one operator: what its chain took to write, and what the restore took.

    `base_s` and `deltas_s` are the seconds the chain's base and all its deltas took to write; `restore_s` is
    what reading and merging them took.
    """

    base_s: float
    deltas_s: float
    restore_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next checkpoint of one operator, and how its changes are logged until then.

    A delta needs tracking during the whole interval before it, so this is taken when the previous checkpoint
    is.

    Attributes:
        form: how to write it.
        tracking: whether changes are logged in the interval before it.
        d: how many deltas the policy now means a chain to have (D); 0 when tracking does not pay.
        reason: one short sentence for logs and reports.
        delta_limit_bytes: the largest delta that the bounds still allow and that is no larger than a base; a
            writer that finds its delta larger writes a base instead and says so in
            `CheckpointCost.tracked_bytes`. None where the checkpoint is to be a base.
    """

    form: Form
    tracking: bool
    d: int
    reason: str
    delta_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreBound:
    """The most a restore is predicted to read and to take, over the chains the bounds still allow."""

    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """All a policy remembers of one operator. Make the first with `Policy.start`; JSON holds it exactly."""

    checkpoints: int = 0
    rows: int = 0
    """live rows, newest known; 0 while not known"""
    rows_before: int = 0
    """the same a checkpoint earlier"""
    base_bytes: float = 0.0
    base_s: float = 0.0
    base_rows: int = 0
    """of the base of the current chain"""
    deltas: int = 0
    deltas_bytes: float = 0.0
    deltas_s: float = 0.0
    """of the current chain's deltas: how many, and in all"""
    index_bytes: float = 0.0
    """of the current chain's indexes"""
    last_index_bytes: float = 0.0
    """of the newest checkpoint's"""
    untracked: int = 0
    """bases in a row whose interval was not tracked, so that no delta was seen"""
    seen: int = 0
    """deltas seen so far"""
    last_bytes: float = 0.0
    last_s: float = 0.0
    """of the last delta seen"""
    mean_bytes: float = 0.0
    mean_s: float = 0.0
    """weighted averages of the deltas seen"""
    log_ratio: float | None = None
    """Tlog per second of delta, weighted average; None until measured"""
    base_factor: float = RESTORE_FACTOR
    delta_factor: float = RESTORE_FACTOR
    """seconds of restore per second of writing, learned"""
    d: int = 0
    """adjust-d: D"""
    level: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0
    """marginal-cost: slow mean of the deltas in its measure, and how they vary and persist about it"""
    dear_for: int = 0
    """marginal-cost: checkpoints since deltas were first seen not to pay; 0 while they do"""

    def to_json(self) -> dict[str, Any]:
        """A flat object of numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. A field that is missing takes its default, one that is not known is left
        out.

        Raises:
            StateError: a field that is not a finite number (whole where it counts something).
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name not in text:
                continue
            value = text[field.name]
            whole = isinstance(field.default, int)
            good = type(value) is int or (not whole and type(value) is float and math.isfinite(value))
            if not good and not (value is None and field.default is None):
                raise StateError(
                    f"policy state: {field.name} is {value!r}, not a number; run with a fresh policy state"
                )
            values[field.name] = value if whole or value is None else float(value)
        return cls(**values)


class Policy(Protocol):
    """Decides the form of each checkpoint of one operator. Stateless itself, so one serves all operators.

    Promise 7, for every policy, with the base b and the deltas of any one chain:
      1. a chain never has more than `d_max` deltas;
      2. where the writer keeps to `delta_limit_bytes`, deltas never sum to more than `size_ratio_max` x b
         bytes;
      3. a delta is only decided on where the chain with it is predicted to keep every bound, the next delta
         being taken as large as the larger of the average and the last one. Only the very first delta, and a
         probe (the one delta after a row of bases that finds out whether deltas have changed), go without
         this forecast; rules 1 and 2 hold for them too;
      4. once a chain is at or past a bound, the next checkpoint is a base. So a writer that does not keep to
         `delta_limit_bytes` passes a bound by no more than one delta's error of forecast, for one checkpoint.
      5. the same holds of the bound on space: base, deltas and indexes of a chain take at most
         `space_amplification_max` times what a base of the live state would take, the last one scaled by the rows
         there are. Where rows became fewer, as many fewer in proportion are expected at the next checkpoint. Live state
         that shrinks faster than that passes the bound for one checkpoint, and the next is a base.
    The bound in seconds is base_factor x TckptBase + delta_factor x sum of TckptDelta <= `restore_budget_s`,
    where both factors are 1.2 at first and then learned. A base that alone takes longer than the budget cannot
    be helped: every checkpoint is then a base.
    """

    @property
    def options(self) -> PolicyOptions:
        """The options it was made with."""
        ...

    def start(self) -> PolicyState:
        """The state before the first checkpoint, which is a base."""
        ...

    def decide(self, state: PolicyState) -> Decision:
        """The form of the next checkpoint."""
        ...

    def observe(self, state: PolicyState, cost: CheckpointCost) -> PolicyState:
        """Fold in a checkpoint that completed, whatever had been decided (a base may be forced at any time).

        Raises:
            StateError: a delta before any base.
        """
        ...

    def observe_restore(self, state: PolicyState, cost: RestoreCost) -> PolicyState:
        """Learn both restore factors from a measured restore."""
        ...

    def restore_bound(self, state: PolicyState) -> RestoreBound:
        """The most a restore may read and take before the next base."""
        ...
