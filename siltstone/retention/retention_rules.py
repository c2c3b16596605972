"""Decide which checkpoints a stream keeps and why, and which retention subsumes: a pure decision.

The rules are those of backup tools (restic `forget`, borg `prune`): a checkpoint is kept if any rule keeps it.

    keep_last N         the newest N
    keep_within D       those committed at most D ago
    keep_hourly N       the newest of each of the newest N hours with a checkpoint; likewise
    keep_daily, keep_weekly, keep_monthly
    keep_all            all

Hours, days, weeks (ISO 8601, beginning on Monday) and months are in UTC. 0 keeps none by that rule. Always kept are the
newest checkpoint, those with a savepoint that has not expired, the newest `min_count`, and those younger than
`min_age`. Without any rule all are kept: minimums alone delete nothing.

Newer means a higher id, since times do not grow with ids after a clock was wrong. A checkpoint with a time in the
future is younger than any age.

A new stream begins with `NEW_STREAM`, recorded with it in the catalog (`siltstone retention` shows and changes it).
Rules in the settings or on the command line replace all recorded rules; a minimum there replaces the one of its name.

[retention]
keep_last = 10
keep_daily = 7
min_age = "1h"
input_log = "30d"

The input log is kept back to the oldest kept checkpoint, so that a replay can begin there; `input_log` keeps more.
What a sink was given is kept until it has it; `outputs` keeps it longer, to be read again (`StreamClient.read_output`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from siltstone.errors import UsageError
from siltstone.times import as_utc, parse_duration

if TYPE_CHECKING:
    from siltstone.catalog.records.savepoints import SavepointRecord

_BUCKETS = {"hourly": "%Y-%m-%dT%H", "daily": "%Y-%m-%d", "weekly": "%G-W%V", "monthly": "%Y-%m"}
"""rule -> format of the bucket of which it keeps one; the reason shows the bucket, too"""


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
Count = Annotated[int, Field(ge=0)]


class RetentionOptions(BaseModel):
    """The retention rules of one stream; None for a rule that is not set. Unknown names are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    keep_last: Count | None = Field(default=None, description="keep the newest N checkpoints")
    keep_within: Duration | None = Field(
        default=None, description="keep those not older than this: 90s, 15m, 12h, 7d or 4w"
    )
    keep_hourly: Count | None = Field(default=None, description="keep the newest of each of the last N hours")
    keep_daily: Count | None = Field(default=None, description="keep the newest of each of the last N days (UTC)")
    keep_weekly: Count | None = Field(default=None, description="keep the newest of each of the last N weeks")
    keep_monthly: Count | None = Field(default=None, description="keep the newest of each of the last N months")
    keep_all: Literal[True] | None = Field(default=None, description="keep every checkpoint")
    min_count: Count = Field(default=0, description="keep the newest N, whatever the rules say")
    min_age: Duration = Field(default=timedelta(0), description="keep those younger than this, whatever the rules say")
    input_log: Duration = Field(
        default=timedelta(0),
        description="keep this much of the input log, even if no checkpoint is left to replay from",
    )
    outputs: Duration = Field(
        default=timedelta(0), description="keep what sinks were given for this long after they have it"
    )

    @property
    def rules(self) -> dict[str, int | timedelta]:
        """The rules that are set, by name."""
        named = {name: getattr(self, name) for name in type(self).model_fields if name.startswith("keep_")}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def described(self) -> str:
        """The rules and minimums that are set, for people."""
        return ", ".join(f"{name} {value}" for name, value in self.to_record().items()) or "keep everything"

    def to_record(self) -> dict[str, Any]:
        """Return JSON that validates to the same options, without those that are not set."""
        set_ = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        return {
            name: f"{int(value.total_seconds())}s" if isinstance(value, timedelta) else value
            for name, value in set_.items()
            if value is not None
        }


NEW_STREAM = RetentionOptions(keep_last=100, keep_hourly=48, keep_daily=30)
"""the rules of a new stream"""


def retention_in_force(recorded: Mapping[str, Any] | None, given: RetentionOptions) -> RetentionOptions:
    """Return the rules in force: the given rules, or else those recorded with the stream (`to_record`)."""
    if given.rules or recorded is None:
        return given
    return RetentionOptions.model_validate({**recorded, **given.to_record()})


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Ids, ascending: the `kept` checkpoints with all their reasons, and the `subsumed` ones."""

    kept: dict[int, tuple[str, ...]]
    subsumed: tuple[int, ...]


def plan_retention(
    committed_at: Mapping[int, datetime],
    savepoints: Iterable["SavepointRecord"],
    options: RetentionOptions,
    now: datetime,
) -> RetentionPlan:
    """Decide which checkpoints are kept.

    The plan is stable: at the same time, a second plan keeps the same checkpoints after the others are deleted.

    Args:
        committed_at: each checkpoint that is not deleted -> when it was committed, by clocks that may have jumped.
        savepoints: those of the stream, expired ones too; those of checkpoints not in `committed_at` are ignored.
        options: the rules.
        now: the current time.

    Raises:
        UsageError: some would be deleted, but no rule or minimum keeps any.
    """
    newest_first = sorted(committed_at, reverse=True)
    reasons: dict[int, list[str]] = {id: [] for id in newest_first}
    if not options.rules:
        return RetentionPlan({id: ("no rule is set",) for id in reversed(newest_first)}, ())
    by_rule = [
        *_by_rules(newest_first, committed_at, options, now),
        *_by_minimums(newest_first, committed_at, options, now),
    ]
    pinned = [
        (s.checkpoint, f"savepoint {s.name}") for s in savepoints if not s.is_expired(now) and s.checkpoint in reasons
    ]
    for id, reason in [*((id, "newest") for id in newest_first[:1]), *pinned, *by_rule]:
        reasons[id].append(reason)
    kept = {id: tuple(why) for id, why in sorted(reasons.items()) if why}
    subsumed = tuple(id for id, why in sorted(reasons.items()) if not why)
    if subsumed and not by_rule:
        rules = ", ".join(f"{name} {value}" for name, value in options.rules.items())
        raise UsageError(
            f"these retention rules keep none of {len(reasons)} checkpoints ({rules}): "
            "keep more, or name the checkpoints to delete (siltstone delete)"
        )
    return RetentionPlan(kept, subsumed)


def _by_rules(
    newest_first: Sequence[int], committed_at: Mapping[int, datetime], options: RetentionOptions, now: datetime
) -> Iterator[tuple[int, str]]:
    """Yield (checkpoint, reason) of what each rule keeps."""
    if options.keep_all:
        yield from ((id, "all") for id in newest_first)
    yield from ((id, "last") for id in newest_first[: options.keep_last or 0])
    if options.keep_within is not None:
        yield from ((id, "within") for id in newest_first if now - committed_at[id] <= options.keep_within)
    for rule, common in _BUCKETS.items():
        wanted, seen = getattr(options, f"keep_{rule}") or 0, set[str]()
        for id in newest_first:
            if len(seen) == wanted:
                break
            bucket = as_utc(committed_at[id]).strftime(common)
            if bucket not in seen:
                yield id, f"{rule} {bucket}"
                seen.add(bucket)


def _by_minimums(
    newest_first: Sequence[int], committed_at: Mapping[int, datetime], options: RetentionOptions, now: datetime
) -> Iterator[tuple[int, str]]:
    """Yield (checkpoint, reason) of what the minimums keep."""
    yield from ((id, "minimum count") for id in newest_first[: options.min_count])
    if options.min_age:  # else a checkpoint with a time in the future would count as younger
        yield from ((id, "minimum age") for id in newest_first if now - committed_at[id] < options.min_age)
