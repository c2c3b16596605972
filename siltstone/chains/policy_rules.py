"""The values that checkpoint policies observe, remember and return.

A policy decides, checkpoint by checkpoint and table by table, whether the next checkpoint is a base or
a delta. It never looks at a clock, a store or the state itself: it observes what each checkpoint cost, folds
that into an immutable `PolicyState` of fixed size (O(1) per checkpoint), and decides from it. The state is
saved with every checkpoint, so that a resumed run continues where the old one was.

Source: US 9471438 (method adjustD; claims on TckptBase, TckptDelta, Tlog, the weighted average and the
worst-case restoration cost), extended by measured restore factors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from siltstone.errors import StateError
from siltstone.model import Form

RESTORE_FACTOR = 1.2
"""seconds of restore per second of writing, until restores have been measured (US 9471438)"""


class PolicyOptions(BaseModel):
    """Options of all policies. A policy ignores those that it does not use; unknown names are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    d0: int = Field(default=4, ge=0, description="deltas after the first base (adjust-d); never more than d_max")
    d_max: int = Field(default=100, ge=0, description="most deltas in one chain; 0 makes every checkpoint a base")
    size_ratio_max: float | None = Field(
        default=2.0, gt=0, description="most bytes of deltas in one chain, per byte of its base; none for no bound"
    )
    restore_budget_s: float | None = Field(
        default=None, gt=0, description="most seconds a restore is predicted to take; none for no bound"
    )
    space_amplification_max: float | None = Field(
        default=3.0,
        gt=1,
        description="most bytes of a chain, including indexes, per byte of the live state (what a base would take "
        "now); none for no bound",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """What one checkpoint of one table cost, or of an opaque variable, which policies take for a table.

    Attributes:
        form: how it was written. If only some subtasks fell back to a base (`Decision.delta_limit_bytes`), it
            counts as a delta of all the bytes written: a restore then reads less than is counted, never more.
        bytes: bytes written; of files, those of all that it refers to, which a restore reads.
        seconds: seconds it took to write (TckptBase or TckptDelta). A delta is made of what each step of the interval
            logged, so this includes the logging of the steps between checkpoints; of a base it does not.
        log_s: seconds spent tracking changes in the interval, beyond writing them (the rest of Tlog); None if not
            measured.
        rows: live rows of the state at the checkpoint; None if not known. It predicts the next base.
        tracked_bytes: the size of all deltas, if some subtasks wrote a base because their delta was too large;
            else None.
        index_bytes: bytes of the indexes written with it.
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
    """One measured restore of one operator, all its tables together.

    `base_s` and `deltas_s` are the seconds it took to write the chain's base and all its deltas; `restore_s` are
    the seconds it took to read and merge them.
    """

    base_s: float
    deltas_s: float
    restore_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next checkpoint of one table, and how its changes are logged until then.

    A delta needs tracking during the whole interval before it, so the decision is made at the previous
    checkpoint.

    Attributes:
        form: how to write it.
        tracking: whether changes are logged in the interval before it.
        d: how many deltas the policy now wants in a chain (D); 0 when tracking does not pay.
        reason: one short sentence for logs and reports.
        delta_limit_bytes: the largest delta that the bounds still allow and that is worth writing, at most a base; a
            writer whose delta is larger writes a base instead and records the delta's size in
            `CheckpointCost.tracked_bytes`. None if the checkpoint is to be a base.
    """

    form: Form
    tracking: bool
    d: int
    reason: str
    delta_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreBound:
    """The most a restore is predicted to read and to take, over all chains that the bounds still allow."""

    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """All that a policy remembers of one table. Make the first with `Policy.start`; JSON holds it exactly."""

    checkpoints: int = 0
    rows: int = 0
    """newest known live rows; 0 if not known"""
    rows_before: int = 0
    """live rows one checkpoint earlier"""
    base_bytes: float = 0.0
    base_s: float = 0.0
    base_rows: int = 0
    """of the current chain's base"""
    deltas: int = 0
    deltas_bytes: float = 0.0
    deltas_s: float = 0.0
    """of the current chain's deltas: their number and totals"""
    index_bytes: float = 0.0
    """of the current chain's indexes"""
    last_index_bytes: float = 0.0
    """of the newest checkpoint's indexes"""
    untracked: int = 0
    """bases in a row whose interval was not tracked, so that no delta was seen"""
    seen: int = 0
    """deltas seen so far"""
    last_bytes: float = 0.0
    last_s: float = 0.0
    """of the last delta seen"""
    mean_bytes: float = 0.0
    mean_s: float = 0.0
    """weighted averages over the deltas seen"""
    log_ratio: float | None = None
    """`log_s` per second of delta, weighted average; None until measured"""
    base_factor: float = RESTORE_FACTOR
    delta_factor: float = RESTORE_FACTOR
    """seconds of restore per second of writing, learned"""
    restores: int = 0
    """restores that they were learned from"""
    d: int = 0
    """adjust-d: D"""
    level: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0
    """marginal-cost: slow mean of the deltas in bytes, and how they vary and persist about it"""
    dear_for: int = 0
    """marginal-cost: checkpoints since deltas were first seen not to pay; 0 while they do"""

    def to_json(self) -> dict[str, Any]:
        """Return a flat object of numbers, without the fields that have their defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def from_json(cls, text: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned. Missing fields take their defaults, unknown ones are ignored.

        Raises:
            StateError: a field is not a finite number, or a count is not whole.
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
                    f"policy state: {field.name} is {value!r}, not a number", advice="run with a fresh policy state"
                )
            values[field.name] = value if whole or value is None else float(value)
        return cls(**values)
